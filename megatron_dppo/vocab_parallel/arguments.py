"""What can be wrong with the arguments of ``policy_stats``, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

FAULTS = (
    "target ids outside the vocabulary",
    "Top-K ids outside the vocabulary",
    "rows of logits that hold NaN or +inf, or nothing but -inf",
)
"""What depends on values: counted on the device, in this order."""


def first_problem(
    logits: Tensor,
    target_ids: Tensor,
    topk_ids: Tensor | None,
    *,
    vocab_size: int,
    temperature: float,
    ranks: int,
) -> str | None:
    """The first thing that is wrong with shapes, dtypes and numbers; None where nothing is."""
    found = _problems(logits, target_ids, topk_ids, vocab_size, temperature, ranks)
    message = next(found, None)
    return None if message is None else f"policy_stats: {message}"


def _problems(
    logits: Tensor,
    target_ids: Tensor,
    topk_ids: Tensor | None,
    vocab_size: int,
    temperature: float,
    ranks: int,
) -> Iterator[str]:
    # Each check relies on those before it: the caller stops at the first.
    if logits.ndim != 2 or not logits.is_floating_point():
        yield f"logits are {_described(logits)}, expected floating point [T, C]"
    rows, columns = logits.shape
    if not logits.is_contiguous():
        yield f"logits have strides {logits.stride()}, expected contiguous {tuple(logits.shape)}"
    if isinstance(vocab_size, bool) or not 0 < vocab_size <= ranks * columns:
        yield (
            f"vocab_size is {vocab_size!r}, expected 1 .. {ranks * columns} "
            f"({ranks} rank(s) x {columns} columns)"
        )
    if isinstance(temperature, bool) or not 0 < temperature < float("inf"):
        yield f"temperature is {temperature!r}, expected a positive number"
    if target_ids.dtype != torch.int64 or target_ids.shape != (rows,):
        yield (
            f"target_ids are {_described(target_ids)}, expected torch.int64 ({rows},) to match "
            f"logits {tuple(logits.shape)}"
        )
    if topk_ids is not None and (topk_ids.dtype != torch.int64 or topk_ids.ndim != 2):
        yield f"topk_ids are {_described(topk_ids)}, expected torch.int64 ({rows}, K)"
    if topk_ids is not None and (len(topk_ids) != rows or topk_ids.shape[1] < 1):
        yield f"topk_ids have shape {tuple(topk_ids.shape)}, expected ({rows}, K) with K >= 1"


def id_faults(target_ids: Tensor, topk_ids: Tensor | None, vocab_size: int) -> list[Tensor]:
    """Float32 counts of the first two ``FAULTS``. A Top-K id of -1 means "none" and is no fault."""
    none = torch.zeros((), device=target_ids.device)
    topk = none if topk_ids is None else _outside(topk_ids, -1, vocab_size)
    return [_outside(target_ids, 0, vocab_size), topk]


def _outside(ids: Tensor, low: int, high: int) -> Tensor:
    if ids.is_cpu and ids.numel():
        smallest, largest = ids.aminmax()
        if smallest >= low and largest < high:  # one pass where all is well
            return torch.zeros(())
    return ((ids < low) | (ids >= high)).sum().float()


def describe(faults: Sequence[Tensor] | Tensor) -> str | None:
    """An error message for counts in the order of ``FAULTS``; None where all are 0. Reads them."""
    found = [f"{int(n)} {what}" for n, what in zip(faults, FAULTS, strict=False) if n]
    return f"policy_stats: {'; '.join(found)}" if found else None


def _described(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"
