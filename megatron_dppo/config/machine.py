"""Whether a run fits on the machine that it would be started on."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.errors import ModelError
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.reader import load_model_shape

LEAST_OPEN_FILES = 128
"""Files and sockets that the processes of a small run hold open, and some to spare."""
_GIB = 2**30
_SERVED_BYTES = 2
"""Bytes of a served parameter, at least; what a run needs is estimated from below, so that nothing is
refused in vain."""
_TRAINED_BYTES = 16
"""Bytes of a trained parameter, however it is sharded: gradient, Adam's two moments, master weight."""


@dataclass(frozen=True)
class Machine:
    """What a run may use here. ``open_files``: of one process. ``memory_bytes``: of the host."""

    cores: int
    gpus: int
    memory_bytes: int
    open_files: int


def this_machine() -> Machine:
    """The machine that this process runs on, as far as the process may use it."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        gpus=_visible_gpus(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def machine_problems(config: TrainConfig, machine: Machine) -> Iterator[str]:
    """Why a run with all its ranks and servers can't work on ``machine``: one line for each reason."""
    ranks = config.parallel.world_size
    servers = config.engine.started if config.rollout.replay_from is None else 0
    if machine.open_files < LEAST_OPEN_FILES:
        yield (
            f"open files: this process may have {machine.open_files}, expected at least "
            f"{LEAST_OPEN_FILES} (ulimit -n)"
        )
    if machine.gpus:
        if ranks > machine.gpus:
            yield f"GPUs: {ranks} ranks need one each, this machine has {machine.gpus}"
        return
    processes = ranks + servers * _per_server(config)
    if processes > 8 * machine.cores:
        yield (
            f"cores: {processes} processes of ranks and servers on {machine.cores} cores, expected at "
            "most 8 on each"
        )
    memory = _parameters(config.model.hf_checkpoint) * (_TRAINED_BYTES + _SERVED_BYTES * servers)
    if memory > machine.memory_bytes:
        yield (
            f"memory: weights, gradients and optimizer take {memory / _GIB:.0f} GiB or more, this "
            f"machine has {machine.memory_bytes / _GIB:.0f} GiB"
        )


def _per_server(config: TrainConfig) -> int:
    """Ranks of one server."""
    sizes = (config.sglang.get("tp_size") or 1, config.sglang.get("pp_size") or 1)
    return int(sizes[0]) * int(sizes[1])


def _visible_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _parameters(folder: str) -> int:
    """Parameters of the model, as its config.json tells; 0 where that can't be read, which others say."""
    try:
        shape = load_model_shape(folder)
    except ModelError:
        return 0
    return sum(math.prod(dims) for dims in hf_tensors(shape).values())
