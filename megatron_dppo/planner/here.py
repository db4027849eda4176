"""The planner's verdict on the machine that a run would be started on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.config.machine import Machine
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import ModelError
from megatron_dppo.model.reader import load_model_shape
from megatron_dppo.planner.activations import activation_bytes
from megatron_dppo.planner.devices import Cluster, Device, device_named
from megatron_dppo.planner.engine import weight_bytes
from megatron_dppo.planner.job import Job, job_of
from megatron_dppo.planner.optimizer import state_bytes
from megatron_dppo.planner.units import gib
from megatron_dppo.planner.verdict import verdict

NVIDIA = Path("/proc/driver/nvidia/gpus")


def memory_problems(config: TrainConfig, machine: Machine) -> Iterator[str]:
    """What does not fit the memory of ``machine``, a line each; nothing where its GPUs are of an unknown kind, and
    where the checkpoint's config.json can't be read, which other checks tell."""
    if machine.gpus:
        device = device_here()
        if device is not None and (job := _job(config, gpu=True)) is not None:
            cluster = Cluster(device, 1, machine.gpus, machine.memory_bytes)
            yield from verdict(job, cluster).too_large
        return
    job = _job(config, gpu=False)
    if job is None:
        return
    needed = _state(job) + _engines(job)
    if needed > machine.memory_bytes:
        yield (
            f"memory: weights, gradients and optimizer of {job.trainer.layout.world_size} ranks and the weights of "
            f"{job.engine.servers} servers take {gib(needed)}, this machine has {gib(machine.memory_bytes)}"
        )


def memory_here(config: TrainConfig, machine: Machine) -> str:
    """What the run takes of this machine's memory, in a line."""
    gpu = machine.gpus > 0
    job = _job(config, gpu=gpu)
    if job is None:
        return "memory: unknown"
    layout = job.trainer.layout
    first, live = state_bytes(job.trainer, 0), activation_bytes(job.trainer, 0)
    return (
        f"memory: {layout.world_size} ranks, each of weights {gib(first.weights)}, gradients {gib(first.gradients)}, "
        f"optimizer {gib(first.optimizer)}, activations up to {gib(live.saved)}; {job.engine.servers} servers with "
        f"weights of {gib(_engines(job) / max(1, job.engine.servers))}{_judged() if gpu else ''}"
    )


def _judged() -> str:
    device = device_here()
    if device is None:
        return "; whether that fits is not judged: the GPUs are of a kind that the planner does not know"
    return f"; judged as {device.name} of {gib(device.memory)}"


def device_here(folder: Path = NVIDIA) -> Device | None:
    """The kind of this machine's first GPU, by the name that its driver gives it; None for an unknown one."""
    for entry in sorted(folder.glob("*/information")):
        return device_named(entry.read_text(encoding="utf-8"))
    return None


def _job(config: TrainConfig, *, gpu: bool) -> Job | None:
    try:
        return job_of(config, load_model_shape(config.model.hf_checkpoint), gpu=gpu)
    except ModelError:
        return None


def _state(job: Job) -> int:
    """Weights, gradients and optimizer of all ranks."""
    layout = job.trainer.layout
    return sum(
        state_bytes(job.trainer, s).total * layout.stage_ranks for s in range(layout.pipeline)
    )


def _engines(job: Job) -> int:
    engine = job.engine
    try:
        layout = EngineLayout(engine.tensor, engine.expert)
        return engine.servers * engine.tensor * weight_bytes(job.trainer.shape, layout)
    except ModelError:
        return 0
