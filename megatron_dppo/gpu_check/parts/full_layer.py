"""One layer of Qwen3-30B-A3B in full size with its vocabulary: memory and time of optimiser steps against the plan."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_dppo import EXAMPLES
from megatron_dppo.gpu_check import Bench, LackingError, Row, part
from megatron_dppo.gpu_check.models import policy_config, random_batch, random_model
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.planner.activations import activation_bytes
from megatron_dppo.planner.devices import CONTEXT, gib
from megatron_dppo.planner.facts import TrainerFacts, trainer_facts
from megatron_dppo.planner.memory import state_bytes
from megatron_dppo.planner.step_time import MOE_UTILISATION

if TYPE_CHECKING:
    from megatron_dppo.data.packing import PackedBatch
    from megatron_dppo.trainer.trainer import Trainer

MODEL = EXAMPLES / "model_configs" / "qwen3-30b-a3b" / "config.json"
LENGTHS = [16_384, 1_024]
SMALL = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "moe_intermediate_size": 96, "num_experts": 16, "vocab_size": 4096,
}  # fmt: skip
SMALL_LENGTHS = [192, 64]
STATE_TOLERANCE, SAVED_TOLERANCE = 0.01, 0.10
STEPS = 3


@dataclass(frozen=True)
class HeldBytes:
    """Bytes in the trainer; ``saved``: what autograd kept at most; ``peak``: of the allocator's, None on a CPU."""

    weights: int
    gradients: int
    optimizer: int
    saved: int
    peak: int | None


@part("one layer of Qwen3-30B-A3B in full size: time and memory against the plan", 400.0)
def full_layer(bench: Bench) -> Iterator[Row]:
    """A row of each kind of memory and one of the time."""
    config = json.loads(MODEL.read_text()) | {"num_hidden_layers": 1}
    lengths = LENGTHS
    if not bench.gpus:
        config |= SMALL
        lengths = SMALL_LENGTHS
        yield Row("size", f"scaled down without a GPU: hidden 256, {sum(lengths)} tokens")
    from megatron_dppo.trainer.trainer import Trainer

    checkpoint = random_model(bench.folder / "checkpoint", config)
    policy = policy_config(checkpoint, "bfloat16", training={"micro_batch_tokens": sum(lengths)})
    shape = load_model_shape(checkpoint)
    job = trainer_facts(policy, shape, 1, max(lengths), gpu=bench.gpus > 0)
    if bench.gpus:
        _require_memory(job)
    trainer = Trainer(policy)
    batch = random_batch(trainer.shape.vocab_size, lengths)
    held_bytes = _held(trainer, batch, bench.gpus)
    yield from _memory(held_bytes, job)
    yield _time(trainer, batch, lengths)
    for file in checkpoint.glob("*.safetensors"):
        # Gigabytes that nobody needs any more.
        file.unlink()


def _require_memory(job: TrainerFacts) -> None:
    import torch

    free, _ = torch.cuda.mem_get_info()
    needed = CONTEXT + round(1.1 * (activation_bytes(job, 0).total + state_bytes(job, 0).total))
    if free < needed:
        raise LackingError(f"GPU memory: {gib(free)} free, {gib(needed)} needed by the plan")


def _step(trainer: Trainer, batch: PackedBatch) -> None:
    from megatron_dppo.algorithms.policy_loss import build_algorithm
    from megatron_dppo.trainer.token_loss import make_token_loss

    loss = make_token_loss(build_algorithm("dppo-binary-tv"))
    trainer.train_mini_batch([batch], loss, float(batch.num_tokens))


def _held(trainer: Trainer, batch: PackedBatch, gpus: int) -> HeldBytes:
    import torch

    from megatron_dppo.gpu_check import held_memory

    with held_memory.saved_for_backward(trainer.held_tensors()["weights"]) as saved:
        # Also the warm-up: Adam's state is made here.
        _step(trainer, batch)
    peak = None
    if gpus:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        steady = torch.cuda.memory_allocated()
        _step(trainer, batch)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - steady
    held = trainer.held_tensors()
    sizes = {part: held_memory.storage_bytes(tensors) for part, tensors in held.items()}
    return HeldBytes(sizes["weights"], sizes["gradients"], sizes["optimizer"], saved.peak, peak)


def _memory(held_bytes: HeldBytes, job: TrainerFacts) -> Iterator[Row]:
    state, live = state_bytes(job, 0), activation_bytes(job, 0, busiest=1.0)
    yield compared("weights", held_bytes.weights, state.weights, STATE_TOLERANCE)
    yield compared("gradients", held_bytes.gradients, state.gradients, STATE_TOLERANCE)
    yield compared("optimizer", held_bytes.optimizer, state.optimizer, STATE_TOLERANCE)
    yield compared("kept for backward", held_bytes.saved, live.saved, SAVED_TOLERANCE)
    if held_bytes.peak is not None:
        yield compared(
            "peak of a step above its start", held_bytes.peak, live.total, SAVED_TOLERANCE
        )


def compared(label: str, measured: int, planned: int, tolerance: float) -> Row:
    """Bytes against the plan's, which may differ by the share ``tolerance`` of the measured."""
    off = planned / measured - 1
    return Row(
        label,
        gib(measured),
        f"{gib(planned)} by the plan ({off:+.1%}), within {tolerance:.0%}",
        abs(off) <= tolerance,
        {"measured": measured, "planned": planned},
    )


def _time(trainer: Trainer, batch: PackedBatch, lengths: list[int]) -> Row:
    from megatron_dppo.model.shape import BACKWARD_FORWARDS, forward_flops
    from megatron_dppo.trainer import platform

    cost = forward_flops(trainer.shape)
    flops = (1 + BACKWARD_FORWARDS) * sum(cost(length) for length in lengths)
    began = time.perf_counter()
    for _ in range(STEPS):
        # Reads the gradient's norm back: it ends when the GPU has ended.
        _step(trainer, batch)
    seconds = (time.perf_counter() - began) / STEPS
    rate, peak = flops / seconds, platform.peak_flops()
    figures: dict[str, Any] = {"seconds": seconds, "flops_per_second": rate}
    text = f"{seconds:.3g} s, {rate / 1e12:.3g} TFLOP/s"
    if peak is None:
        return Row("an optimiser step", text, figures=figures)
    text += f", MFU {rate / peak:.0%}"
    return Row("an optimiser step", text, f"the plan assumes {MOE_UTILISATION:.0%}", None, figures)
