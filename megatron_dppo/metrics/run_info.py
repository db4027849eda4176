"""Identification of a run for titles: algorithm, layout, model, dtype and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from megatron_dppo.metrics.normal_ranges import Dtype

CONFIG_FILE = "config.yaml"
"""The resolved configuration in a run's folder."""


@dataclass(frozen=True)
class RunInfo:
    """Identification of a run.

    ``layout``: as in ``TP2 EP2 SP, 2 ranks``; ``model``: name of the checkpoint's folder.
    """

    algorithm: str
    layout: str
    model: str
    dtype: Dtype
    seed: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """Build from a resolved configuration as plain values, e.g. ``TrainConfig.model_dump()``."""
        return cls(
            algorithm=config["algorithm"]["name"],
            layout=describe_layout(config["parallel"]),
            model=Path(config["model"]["hf_checkpoint"]).name,
            dtype=config["model"]["dtype"],
            seed=config["run"]["seed"],
        )

    @classmethod
    def of_run(cls, directory: str | Path) -> Self | None:
        """Build from the ``config.yaml`` in a run's folder; None if there is no such file.

        Raises ValueError if the file is not a resolved configuration.
        """
        path = Path(directory) / CONFIG_FILE
        if not path.is_file():
            return None
        try:
            return cls.of_config(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (KeyError, TypeError, yaml.YAMLError) as error:
            raise ValueError(
                f"{path}: expected the resolved configuration of a run ({error!r})"
            ) from error

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """Algorithm, layout with precision, model and seed, as text."""
        dtype = {"float32": "fp32", "bfloat16": "bf16"}[self.dtype]
        return (self.algorithm, f"{self.layout}, {dtype}", self.model, f"seed {self.seed}")


def describe_layout(parallel: Mapping[str, Any]) -> str:
    """The parallel sizes above 1 with Megatron's short names: ``TP2 PP2 SP, 4 ranks``; ``1 rank``."""
    world, tensor, pipeline = (parallel[key] for key in ("world_size", "tensor", "pipeline"))
    sizes = {
        "TP": tensor,
        "PP": pipeline,
        "VPP": parallel["virtual_pipeline"],
        "EP": parallel["expert"],
        "ETP": parallel["expert_tensor"],
        "DP": world // (tensor * pipeline),
    }
    names = [f"{name}{size}" for name, size in sizes.items() if size is not None and size > 1]
    if parallel["sequence"]:
        names.append("SP")
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    return f"{' '.join(names)}, {ranks}" if names else ranks
