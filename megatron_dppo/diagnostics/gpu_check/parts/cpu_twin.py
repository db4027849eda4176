"""Compare the trainer on this machine's device with the same trainer on the CPU, each in a process of its own.

The trainer's state is also compared before and after parking, and before and after a checkpoint.
``python -m megatron_dppo.diagnostics.gpu_check.parts.cpu_twin CASE CHECKPOINT FOLDER`` is the process of one trainer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.diagnostics.gpu_check import (
    Bench,
    CheckRow,
    at_most,
    part,
    policy_config,
    random_batch,
    tiny_model,
)
from megatron_dppo.diagnostics.gpu_check.parts.trainer import take_step

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.data.packing import PackedBatch
    from megatron_dppo.trainer.trainer import Trainer

LENGTHS = [5, 17, 40, 64, 3, 31]
STEPS = 3
LEARNING_RATE = 1e-4
LOG_PROB_LIMIT = 1e-4
"""Nats, in float32: the kernels of GPU and CPU sum in different orders, and each step adds rounding."""
GRADIENT_LIMIT = 1e-4
"""Relative error of the unclipped norm of the gradient."""
REPLAY = "router replay"
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "all weights": {},
    "LoRA": {"lora": {"rank": 4}},
    REPLAY: {},
}
"""Case -> sections of its configuration."""


@part("three steps in float32 on a GPU and on the CPU; parking, a checkpoint and hashes", 300.0)
def cpu_twin(bench: Bench) -> Iterator[CheckRow]:
    """Yield for each case the differences of the two trainers, and whether states were restored bit for bit."""
    checkpoint = tiny_model(bench.folder / "model")
    for case in CASES:
        folders = [bench.folder / f"{case} {side}" for side in ("here", "twin")]
        processes = [
            _start(case, checkpoint, folders[0], on_gpu=bench.gpus > 0),
            _start(case, checkpoint, folders[1], on_gpu=False),
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"{case}: the trainers ended with exit codes {codes}, expected 0")
        here, twin = (json.loads((folder / "report.json").read_bytes()) for folder in folders)
        yield from _compared(case, here, twin)
        for name, is_equal in here["equal"].items():
            text = "equal" if is_equal else "different"
            yield CheckRow(f"{case}: {name}", text, "equal", is_equal)
        if case == REPLAY:
            is_used = here["uses_recording"]
            text = f"{'other' if is_used else 'the same'} log-probabilities"
            yield CheckRow(f"{case}: another recording", text, "other log-probabilities", is_used)


def _start(case: str, checkpoint: Path, folder: Path, *, on_gpu: bool) -> subprocess.Popen[bytes]:
    """Start a process that trains and writes its report into ``folder``."""
    folder.mkdir()
    environment = dict(os.environ)
    if not on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", __name__, case, str(checkpoint), str(folder)]
    return subprocess.Popen(command, env=environment)


def _compared(case: str, here: dict[str, Any], twin: dict[str, Any]) -> Iterator[CheckRow]:
    devices = f"{here['device']} against {twin['device']}"
    log_prob_error = 0.0
    for values, expected in zip(here["log_probs"], twin["log_probs"], strict=True):
        differences = [abs(a - b) for a, b in zip(values, expected, strict=True)]
        log_prob_error = max(log_prob_error, *differences)
    yield at_most(
        f"{case}, {devices}: log-probabilities of {STEPS} steps",
        log_prob_error,
        LOG_PROB_LIMIT,
        " nats",
    )
    pairs = zip(here["gradient_norms"], twin["gradient_norms"], strict=True)
    norm_error = max(abs(a / b - 1) for a, b in pairs)
    yield at_most(f"{case}, {devices}: gradient norms", norm_error, GRADIENT_LIMIT)


def report(case: str, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Train on this process's device; return log-probabilities, gradient norms and the comparisons of the state."""
    from megatron_dppo.trainer.trainer import Trainer

    optimizer = {"lr": LEARNING_RATE, "warmup_steps": 0}
    config = policy_config(checkpoint, "float32", optimizer=optimizer, **CASES[case])
    if case == REPLAY:
        config = _replay_config(config)
    trainer = Trainer.read(config)
    batch = _batch(trainer)
    uses_recording = None
    if case == REPLAY:
        other_recording = _log_probs(trainer, _batch(trainer, seed=4))
        uses_recording = other_recording != _log_probs(trainer, batch)
    log_probs, norms = [], []
    for _ in range(STEPS):
        log_probs.append(_log_probs(trainer, batch))
        norms.append(_step(trainer, batch))
    log_probs.append(_log_probs(trainer, batch))
    equal = {
        "the weights' hash and torch's own": _has_torch_hash(trainer),
        "weights and optimizer after parking": _is_equal_after_parking(trainer),
        "weights and optimizer of a loaded checkpoint": _is_equal_after_loading(trainer, folder),
    }
    device = str(trainer.device)
    trainer.close()
    return {
        "device": device,
        "log_probs": log_probs,
        "gradient_norms": norms,
        "equal": equal,
        "uses_recording": uses_recording,
    }


def _replay_config(config: PolicyConfig) -> PolicyConfig:
    """Return ``config`` with router replay: override the property, because PolicyConfig has no option for it."""

    class ReplayConfig(PolicyConfig):
        @property
        def router_replay(self) -> bool:
            return True

    return ReplayConfig.model_validate(config.model_dump())


def _batch(trainer: Trainer, seed: int = 3) -> PackedBatch:
    """Make a micro-batch of random tokens; with router replay, each token has recorded experts, drawn with ``seed``."""
    import torch

    batch = random_batch(trainer.shape.vocab_size, LENGTHS)
    if not trainer.config.router_replay:
        return batch
    shape = trainer.shape
    sizes = (batch.num_tokens, shape.num_layers, shape.num_experts)
    order = torch.rand(sizes, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    experts = order[..., : shape.experts_per_token].to(torch.uint8)
    recorded = torch.ones(batch.num_tokens, dtype=torch.bool)
    return replace(batch.with_columns(routed_experts=experts), valid={"routed_experts": recorded})


def _step(trainer: Trainer, batch: PackedBatch) -> float:
    """Do an optimiser step without a trust region, and return the unclipped norm of its gradient."""
    return take_step(trainer, batch, float(batch.loss_mask.sum()), "pg-is")


def _log_probs(trainer: Trainer, batch: PackedBatch) -> list[float]:
    (log_probs,) = trainer.log_probs([batch])
    return log_probs.cpu()[batch.loss_mask].tolist()


def _state(trainer: Trainer) -> list[Tensor]:
    """Copy the weights and the optimizer's tensors to host memory."""
    held_tensors = trainer.held_tensors()
    copies: list[Tensor] = []
    for name in ("weights", "optimizer"):
        copies += [tensor.detach().cpu().clone() for tensor in held_tensors[name]]
    return copies


def _are_equal(state: list[Tensor], other: list[Tensor]) -> bool:
    import torch

    return all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


def _has_torch_hash(trainer: Trainer) -> bool:
    """Return whether the device's hash kernel computes the same sums as plain torch on the CPU."""
    from megatron_dppo.tensor_hash import run_of, start_sums, sums_by_torch

    for tensor in trainer.held_tensors()["weights"]:
        data = tensor.detach()
        run = run_of(data, 0, data.numel() * data.element_size())
        on_cpu = run_of(data.cpu(), 0, data.numel() * data.element_size())
        read_sums = start_sums([run])
        if read_sums() != [sums_by_torch(on_cpu)]:
            return False
    return True


def _is_equal_after_parking(trainer: Trainer) -> bool:
    state_before = _state(trainer)
    digest = trainer.weights_digest()
    trainer.park()
    trainer.unpark()
    return _are_equal(state_before, _state(trainer)) and trainer.weights_digest() == digest


def _is_equal_after_loading(trainer: Trainer, folder: Path) -> bool:
    """Return whether loading a checkpoint undoes a step that followed its saving."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    store = CheckpointStore(folder / "checkpoints", keep=1, background=True)
    state_before = _state(trainer)
    store.save(trainer, STEPS, {})
    _step(trainer, _batch(trainer))
    store.finish()
    is_changed = not _are_equal(state_before, _state(trainer))
    (stored,) = store.survey().complete
    store.load(trainer, stored)
    store.close()
    return is_changed and _are_equal(state_before, _state(trainer))


if __name__ == "__main__":
    case_name, checkpoint_folder, report_folder = sys.argv[1:]
    case_report = report(case_name, Path(checkpoint_folder), Path(report_folder))
    Path(report_folder, "report.json").write_text(json.dumps(case_report))
