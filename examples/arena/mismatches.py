"""The arena's mismatches, by name: the ways in which an engine's policy can differ from the trainer's policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_dppo.diagnostics.doctor.rounding import bfloat16, float8

Rounding = Callable[[Tensor], Tensor]


def int4(matrix: Tensor, group: int = 16) -> Tensor:
    """Round each value to the nearest of 15 levels, -7 to 7 times a scale.

    Each ``group`` neighbouring values of a row have one scale.
    """
    groups = matrix.reshape(*matrix.shape[:-1], -1, group)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7
    levels = (groups / scale).round().clamp(-7, 7)
    return (levels * scale).reshape(matrix.shape)


@dataclass(frozen=True)
class Mismatch:
    """How the engine differs from the trainer. In the lab, a copy of the policy takes the engine's place.

    Attributes:
        rounding: rounds the engine's matrices.
        age: age of the engine's weights, in batches.
        activations: whether the outputs of linear layers and of the embedding are rounded to bfloat16. Norms, router
            and experts compute in float32.
        flips: share of the (token, layer) pairs whose last expert is replaced by the next best expert.
        replays: whether the trainer uses the engine's routing (R3).
        cache: rounds the keys and values that decoding reads again, token by token. The trainer computes a whole
            response in one pass, without a cache of keys and values.
        blocks: whether linear layers and experts are block FP8, like under ``engine.quantization: fp8``: matrices in
            blocks of 128 x 128, and their inputs in blocks of 1 x 128. All else is in float32.
    """

    rounding: Rounding | None = None
    age: int = 0
    activations: bool = False
    flips: float = 0.0
    replays: bool = False
    cache: Rounding | None = None
    blocks: bool = False


MISMATCHES: dict[str, Mismatch] = {
    "none": Mismatch(),
    "bf16": Mismatch(bfloat16, activations=True),
    "fp8": Mismatch(float8),
    "int4": Mismatch(int4),
    "stale-1": Mismatch(age=1),
    "stale-8": Mismatch(age=8),
    "stale-64": Mismatch(age=64),
    "flips": Mismatch(flips=0.5),
    "flips-r3": Mismatch(flips=0.5, replays=True),
    "few-flips": Mismatch(flips=0.03),
    "few-flips-r3": Mismatch(flips=0.03, replays=True),
    "bf16-stale-1": Mismatch(bfloat16, age=1, activations=True),
    "int4-r3": Mismatch(int4, replays=True),
    "decode": Mismatch(cache=bfloat16),
    "w8a8": Mismatch(blocks=True),
    "w8a8-r3": Mismatch(blocks=True, replays=True),
}
