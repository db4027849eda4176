"""What to call a run: algorithm, layout and model, taken from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from megatron_dppo.metrics.expectations import Dtype

CONFIG_FILE = "config.yaml"
"""The resolved configuration in a run's folder."""


@dataclass(frozen=True)
class RunInfo:
    """The words of a report's title.

    ``layout`` as in ``TP2 EP2 SP, 2 ranks``; ``model`` is the name of the checkpoint's folder.
    """

    algorithm: str
    layout: str
    model: str
    dtype: Dtype
    seed: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """From a resolved configuration as plain values, such as ``TrainConfig.model_dump()``."""
        return cls(
            algorithm=config["algorithm"]["name"],
            layout=describe_layout(config["parallel"]),
            model=Path(config["model"]["hf_checkpoint"]).name,
            dtype=config["model"]["dtype"],
            seed=config["run"]["seed"],
        )

    @classmethod
    def of_run(cls, directory: str | Path) -> Self | None:
        """From the ``config.yaml`` that a run left in its folder; None where there is none.

        Raises ValueError where the file lacks what every resolved configuration has.
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
        """Algorithm, layout with precision, model and seed, as a person would write them."""
        dtype = {"float32": "fp32", "bfloat16": "bf16"}[self.dtype]
        return (self.algorithm, f"{self.layout}, {dtype}", self.model, f"seed {self.seed}")


def describe_layout(parallel: Mapping[str, Any]) -> str:
    """Megatron's short names of what is above 1: ``TP2 PP2 SP, 4 ranks``; ``1 rank``."""
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
