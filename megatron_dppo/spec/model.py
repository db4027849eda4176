"""The model of a run, as trainer and servers hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dppo.config.lora import adapters_of, updates_adapters
from megatron_dppo.config.schema import PolicyConfig, TrainConfig
from megatron_dppo.model.adapters import Adapters
from megatron_dppo.model.families import Family, family_of, missing_engine_keys
from megatron_dppo.model.shape import ModelShape


@dataclass(frozen=True)
class ModelSpec:
    """The model of a run.

    Attributes:
        shape: dimensions of the model.
        dtype: dtype of the trainer's weights.
        quantization: precision of the servers' linear layers and experts; None: ``dtype``.
        adapters: the trained LoRA adapters; None if the run trains the whole model.
        sends_adapters: whether weight updates send only adapters.
        engine_keys: keys that SGLang's model needs and that config.json lacks, with their values.
    """

    shape: ModelShape
    dtype: str
    quantization: str | None
    adapters: Adapters | None
    sends_adapters: bool
    engine_keys: Mapping[str, Any]

    @classmethod
    def of(
        cls, config: PolicyConfig, shape: ModelShape, engine_keys: Mapping[str, Any]
    ) -> ModelSpec:
        """Return the model of a checked configuration. Raises AdapterError for an unknown target module."""
        quantization = config.engine.quantization if isinstance(config, TrainConfig) else None
        return cls(
            shape,
            config.model.dtype,
            quantization,
            adapters_of(config.lora, shape),
            updates_adapters(config.lora),
            engine_keys,
        )

    @classmethod
    def read(cls, config: PolicyConfig) -> ModelSpec:
        """Return the model in ``model.hf_checkpoint``. Raises the errors of ``load_model_shape``."""
        return cls.of_folder(config, config.model.read_shape())

    @classmethod
    def of_folder(cls, config: PolicyConfig, shape: ModelShape) -> ModelSpec:
        """Return the model in ``model.hf_checkpoint``, which has ``shape``."""
        return cls.of(config, shape, missing_engine_keys(config.model.hf_checkpoint))

    @property
    def family(self) -> Family:
        """The tables of the model's family."""
        return family_of(self.shape)
