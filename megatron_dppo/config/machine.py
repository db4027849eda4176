"""Whether the machine that a run would be started on has its GPUs, cores and open files; memory is the planner's."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig

LEAST_OPEN_FILES = 128
"""Files and sockets that the processes of a small run hold open, and some to spare."""


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
