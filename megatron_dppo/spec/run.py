"""A run's facts, in their parts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace

from megatron_dppo.algorithms.table import AlgorithmFacts
from megatron_dppo.config import ConfigError, check_config
from megatron_dppo.config.machine import Device
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.spec.model import ModelSpec
from megatron_dppo.spec.placement import Roles
from megatron_dppo.spec.rollout import RolloutSpec
from megatron_dppo.spec.servers import ServersSpec
from megatron_dppo.spec.teachers import TeacherSpec
from megatron_dppo.spec.trainer import TrainerSpec


@dataclass(frozen=True)
class RunSpec:
    """The facts of a run of reinforcement learning.

    Attributes:
        model: the model, as trainer and servers hold it.
        trainer: the trainer's layout, and what follows from it.
        servers: the SGLang servers.
        rollout: size and columns of a rollout batch.
        algorithm: the preset with its numbers.
        roles: the processes that the run places on hosts.
        teachers: the teachers; empty without distillation.
    """

    model: ModelSpec
    trainer: TrainerSpec
    servers: ServersSpec
    rollout: RolloutSpec
    algorithm: AlgorithmFacts
    roles: Roles
    teachers: tuple[TeacherSpec, ...] = ()

    @classmethod
    def of(
        cls, config: TrainConfig, source: str = "configuration", *, weights: bool = True
    ) -> RunSpec:
        """Check a configuration and return its facts. Raises ConfigError as ``check_config``."""
        shape = check_config(config, source, weights=weights)
        return cls._of(config, ModelSpec.of_folder(config, shape))

    @classmethod
    def of_checked(cls, config: TrainConfig) -> RunSpec:
        """Return the facts of a configuration that has passed its checks. Raises the errors of ``load_model_shape``."""
        return cls._of(config, ModelSpec.read(config))

    @classmethod
    def _of(cls, config: TrainConfig, model: ModelSpec) -> RunSpec:
        spec = cls.of_model(config, model)
        teachers = [
            TeacherSpec.of(config, name, teacher.read_shape())
            for name, teacher in config.distillation.teachers.items()
        ]
        return replace(spec, teachers=tuple(teachers))

    @classmethod
    def of_model(
        cls, config: TrainConfig, model: ModelSpec, device: Device | None = None
    ) -> RunSpec:
        """Return the facts of a configuration for ``model``, without teachers. The function reads no file.

        ``device``: device of the servers; None: ``engine.device``, or this machine's. Raises ConfigError for an unknown
        algorithm, and LayoutError for sizes that do not fit each other.
        """
        try:
            algorithm = config.algorithm.facts()
        except ValueError as error:
            raise ConfigError([f"algorithm: {error}"]) from error
        rollout = RolloutSpec.of(config, algorithm, model.shape)
        servers = ServersSpec.of(config, model, rollout.sequence_tokens, device)
        trainer = TrainerSpec.of(config, model.shape)
        return cls(model, trainer, servers, rollout, algorithm, Roles.of(config))

    def text(self) -> str:
        """Return the facts as JSON, for people and programs that look at a run."""
        algorithm = self.algorithm
        facts = asdict(self)
        facts["algorithm"] = {
            "name": algorithm.name,
            # JSON has no infinity, which stands for a bound that is off.
            "numbers": {name: n for name, n in algorithm.numbers.items() if math.isfinite(n)},
            "anchor": algorithm.preset.anchor,
            "divergence": algorithm.preset.divergence,
            "recomputes": algorithm.extra_pass,
        }
        return json.dumps(facts, indent=2) + "\n"
