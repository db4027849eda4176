"""What a run needs of each node, as numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from megatron_dppo.config.machine import LEAST_OPEN_FILES
from megatron_dppo.config.schema import TrainConfig

_GIB = 2**30
_SHM_BYTES = _GIB // 4
"""Rings and queues of NCCL, gloo and SGLang; a container's default of 64 MiB is too small."""
_STATE_BYTES = 12
"""Bytes of a parameter's master weight and Adam's moments in a checkpoint."""
_SPARE_BYTES = _GIB
_DISTRIBUTION = "megatron-dppo"


@dataclass(frozen=True)
class Needs:
    """Lower bounds for one node, so that no node that could work is left out.

    Attributes:
        gpus: GPUs that the run uses on each node; 0: it runs without.
        run_directory: folder that all nodes share.
        disk_bytes: free space there.
        temporary_bytes: free space in the node's own folder for temporary files.
        shm_bytes: free space in ``/dev/shm``.
        memory_bytes: free memory of the host.
        open_files: files that one process may open.
        ports: TCP ports that must be free.
        pythons: interpreter by role, ``trainer`` and ``engine``.
        requirements: pinned packages by role, as ``pip`` writes them.
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
    """Needs of a configured run whose nodes have ``gpus`` GPUs each, 0 for a run without."""
    weights = sum(f.stat().st_size for f in Path(config.model.hf_checkpoint).glob("*.safetensors"))
    parameters = weights // (2 if config.model.dtype == "bfloat16" else 4)
    pythons = pythons_of(config)
    through_shm = config.weight_sync.strategy == "disk" and config.weight_sync.directory is None
    return Needs(
        gpus=gpus,
        run_directory=Path(config.run.directory),
        disk_bytes=_SPARE_BYTES + (config.checkpoint.keep + 1) * parameters * _STATE_BYTES,
        temporary_bytes=_SPARE_BYTES,
        shm_bytes=_SHM_BYTES + (weights if through_shm else 0),
        memory_bytes=_SPARE_BYTES + weights,
        open_files=LEAST_OPEN_FILES + config.rollout.max_concurrent_requests,
        ports=tuple(ports),
        pythons=pythons,
        requirements=_requirements(pythons, gpu=gpus > 0),
    )


def pythons_of(config: TrainConfig) -> dict[str, str]:
    """Interpreter by role; no engine where the run starts no servers."""
    pythons = {"trainer": sys.executable}
    if config.engine.started and config.rollout.replay_from is None:
        pythons["engine"] = config.engine.python or sys.executable
    return pythons


def _requirements(roles: Iterable[str], *, gpu: bool) -> dict[str, tuple[str, ...]]:
    """This distribution's pins by role, from its own metadata."""
    extras = {"trainer": "gpu" if gpu else "cpu", "engine": "gpu-engine"}
    return {role: _pins(extras[role]) for role in roles}


def _pins(extra: str) -> tuple[str, ...]:
    """Requirements of an extra that fix or bound a version."""
    found = []
    for line in requires(_DISTRIBUTION) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        wanted = marker is not None and marker.evaluate({"extra": extra})
        if wanted and requirement.specifier:
            found.append(f"{requirement.name}{requirement.specifier}")
    return tuple(found)
