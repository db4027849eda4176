"""What a run needs of each node, as numbers: lower bounds, so that no node that could work is left out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from megatron_dppo.config.lora import adapters_of, updates_adapters
from megatron_dppo.config.machine import LEAST_OPEN_FILES
from megatron_dppo.config.schema import EngineConfig, LoraConfig, TrainConfig
from megatron_dppo.model.adapters import trained_elements
from megatron_dppo.model.errors import ModelError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.mapping import parameters
from megatron_dppo.model.shape import ITEM_BYTES, checkpoint_bytes

_GIB = 2**30
_SHM_BYTES = _GIB // 4
"""Rings and queues of NCCL, gloo and SGLang; a container's default of 64 MiB is too small."""
_SPARE_BYTES = _GIB
_DISTRIBUTION = "megatron-dppo"


@dataclass(frozen=True)
class Needs:
    """Of one node. ``gpus``: 0 for a run without.

    ``disk_bytes``: free in ``run_directory``, which all nodes share; ``temporary_bytes``: in the node's own folder for
    temporary files; ``shm_bytes``: in ``/dev/shm``; ``memory_bytes``: of the host. ``open_files``: of one process.
    ``ports``: TCP, must be free. ``pythons``: interpreter by role, ``trainer`` and ``engine``; ``requirements``: pinned
    packages by role, as ``pip`` writes them.
    """

    gpus: int
    run_directory: Path
    disk_bytes: int
    temporary_bytes: int
    shm_bytes: int
    memory_bytes: int
    open_files: int
    ports: tuple[int, ...]
    pythons: Mapping[str, str]
    requirements: Mapping[str, tuple[str, ...]]


def needs_of(config: TrainConfig, *, gpus: int, ports: Iterable[int] = ()) -> Needs:
    """Needs of a configured run whose nodes have ``gpus`` GPUs each, 0 for a run without.

    On disk: the checkpoints to keep, and one in the making.
    """
    sync = config.weight_sync
    weights, update, checkpoint = _model_bytes(
        config.model.hf_checkpoint, config.model.dtype, config.lora
    )
    pythons = pythons_of(config.engine, generates=config.rollout.replay_from is None)
    through_shm = sync.strategy == "disk" and sync.directory is None
    return Needs(
        gpus=gpus,
        run_directory=Path(config.run.directory),
        disk_bytes=_SPARE_BYTES + (config.checkpoint.keep + 1) * checkpoint,
        temporary_bytes=_SPARE_BYTES,
        shm_bytes=_SHM_BYTES + (update if through_shm else 0),
        memory_bytes=_SPARE_BYTES + weights,
        open_files=LEAST_OPEN_FILES + config.rollout.max_concurrent_requests,
        ports=tuple(ports),
        pythons=pythons,
        requirements={role: _pins(_extra(role, gpu=gpus > 0)) for role in pythons},
    )


def _model_bytes(folder: str, dtype: str, lora: LoraConfig) -> tuple[int, int, int]:
    try:
        shape = load_model_shape(folder)
        trained = trained_elements(shape, adapters_of(lora, shape), routers=lora.train_router)
    except ModelError:
        # No node is at fault where the model can't be read, and the check of the configuration refuses it.
        return 0, 0, 0
    weights = parameters(shape) * ITEM_BYTES[dtype]
    update = trained * ITEM_BYTES[dtype] if updates_adapters(lora) else weights
    return weights, update, checkpoint_bytes(trained, dtype)


def pythons_of(engine: EngineConfig, *, generates: bool) -> dict[str, str]:
    pythons = {"trainer": sys.executable}
    if engine.started and generates:
        pythons["engine"] = engine.python or sys.executable
    return pythons


def _extra(role: str, *, gpu: bool) -> str:
    if role == "engine":
        return "gpu-engine"
    return "gpu" if gpu else "cpu"


def _pins(extra: str) -> tuple[str, ...]:
    """Requirements of an extra of this distribution that fix or bound a version, from its own metadata."""
    requirements = map(Requirement, requires(_DISTRIBUTION) or [])
    return tuple(
        f"{requirement.name}{requirement.specifier}"
        for requirement in requirements
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        and requirement.specifier
    )
