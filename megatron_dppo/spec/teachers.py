"""The teachers of a run: models that score the tokens that the policy samples, on servers of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatron_dppo.config.distillation import longest_sequence, serving_config
from megatron_dppo.config.machine import Device
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.families import missing_engine_keys
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.spec.model import ModelSpec
from megatron_dppo.spec.servers import ServersSpec


@dataclass(frozen=True)
class TeacherSpec:
    """A teacher.

    Attributes:
        name: its name in ``distillation.teachers``.
        model: the teacher's model, as its servers hold it.
        servers: its servers, started and attached.
    """

    name: str
    model: ModelSpec
    servers: ServersSpec

    @classmethod
    def of(
        cls, config: TrainConfig, name: str, shape: ModelShape, device: Device | None = None
    ) -> Self:
        """Return the teacher ``name``, of the given shape, in a checked configuration. Raises LayoutError.

        ``device``: as in ``ServersSpec.of``.
        """
        teacher = config.distillation.teachers[name]
        folder = teacher.hf_checkpoint
        serving = serving_config(config, name, shape)
        engine_keys = missing_engine_keys(folder) if Path(folder).exists() else {}
        model = ModelSpec.of(serving, shape, engine_keys)
        longest = longest_sequence(config, teacher)
        return cls(name, model, ServersSpec.of(serving, model, longest, device))

    def serving_config(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration of the teacher's servers in the run of ``config``."""
        return serving_config(config, self.name, self.model.shape)
