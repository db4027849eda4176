"""Collectives of plain values between ranks (JSON in byte tensors, no pickle); errors of one rank that all raise."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_dppo.system.errors import RunError
from megatron_dppo.trainer import platform

log = logging.getLogger(__name__)

T = TypeVar("T")


class RankError(RunError):
    """The error of one rank, raised on every rank; the message names the rank and the error."""


def broadcast_json(value: Any, src: int, group: ProcessGroup | None = None) -> Any:
    """Broadcast ``value`` of global rank ``src`` to every rank of ``group`` (None: all ranks).

    The ``value`` of other ranks is ignored. Every rank, ``src`` included, returns what JSON makes of the value: tuples
    become lists, keys become strings.
    """
    return json.loads(broadcast_bytes(json.dumps(value).encode(), src, group))


def broadcast_bytes(data: bytes, src: int, group: ProcessGroup | None = None) -> bytes:
    """Broadcast ``data`` of global rank ``src`` to every rank of ``group``; the ``data`` of other ranks is ignored."""
    device = _device(group)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src, group)
    if int(size) == 0:
        return b""
    if dist.get_rank() == src:
        # Copy to a bytearray: a tensor's memory must be writable, and the memory of bytes is read-only.
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src, group)
    return buffer.cpu().numpy().tobytes()


def all_gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Gather the ``value`` of every rank of ``group``, through JSON, in the order of the ranks in the group."""
    padded, lengths = _padded(value, group)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group)
    return [_decode(part[:n]) for part, n in zip(parts, lengths, strict=True)]


def gather_json(value: Any, group: ProcessGroup) -> list[Any] | None:
    """Gather like ``all_gather_json``, but only on the first rank of ``group``; return None on all other ranks."""
    padded, lengths = _padded(value, group)
    parts = None
    if group.rank() == 0:
        parts = [torch.empty_like(padded) for _ in lengths]
    dist.gather(padded, parts, dist.get_global_rank(group, 0), group)
    if parts is None:
        return None
    return [_decode(part[:n]) for part, n in zip(parts, lengths, strict=True)]


def agree(value: Any, name: str) -> None:
    """Raise ValueError on every rank unless ``value`` is the same on all ranks.

    The function does one all-reduce of a digest, and gathers the values only for the error message.
    """
    # Use seven bytes of the hash, so that the number and its negative fit into int64.
    digest = hashlib.sha256(json.dumps(value).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    # The maximum of the negatives is minus the minimum, so one all-reduce finds both the maximum and the minimum.
    bounds = torch.tensor([number, -number], device=platform.current().device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    if int(bounds[0]) != -int(bounds[1]):
        values = all_gather_json(value)
        raise ValueError(f"ranks disagree on {name}: {values}, expected the same on all")


def any_rank(flag: bool, group: ProcessGroup | None = None) -> bool:
    """Return whether ``flag`` is true on at least one rank of ``group``. Collective."""
    value = torch.tensor([int(flag)], device=platform.current().device)
    dist.all_reduce(value, dist.ReduceOp.MAX, group)
    return bool(value)


def barrier(group: ProcessGroup | None = None) -> None:
    """Return once every rank of ``group`` has called this function."""
    # torch's own barrier guesses a device under NCCL, and under gloo makes many sends and receives.
    any_rank(False, group)


def first_failure(failure: str | None, group: ProcessGroup | None = None) -> str | None:
    """Return on every rank the ``failure`` of the first rank that has one; None if all are None. Collective.

    Without process groups, return this process's own ``failure``.
    """
    if not dist.is_initialized():
        return failure
    return next((text for text in all_gather_json(failure, group) if text is not None), None)


def on_every_rank(
    action: Callable[[], T],
    group: ProcessGroup | None = None,
    *,
    error: type[Exception] = RankError,
) -> T:
    """Return ``action()``, and raise ``error`` on every rank if ``action`` failed on one rank. Collective.

    ``action`` itself must not be collective. The message of ``error`` has the failure of the first rank that failed:
    the rank, the exception's class (unless the class is ``error`` or OSError) and the exception's text. Any other rank
    that failed logs its own failure. Exceptions of other classes than ``error``, OSError and RunError are logged on
    every rank, the first included, with their tracebacks.
    ``group``: a group of all ranks, in the order of global ranks (None: the default group).
    """
    own_error: Exception | None = None
    text = None
    is_foreseen = True
    try:
        result = action()
    except Exception as failure:
        # Catch every exception: the other ranks wait for this rank in the collective below.
        own_error = failure
        is_foreseen = isinstance(failure, (error, OSError, RunError))
        # The text of an OSError says what failed without the name of its class.
        class_prefix = ""
        if not isinstance(failure, (error, OSError)):
            class_prefix = f"{type(failure).__name__}: "
        text = f"rank {dist.get_rank()}: {class_prefix}{failure}"
    first_error = first_failure(text, group)
    if first_error is None:
        return result
    has_failed = own_error is not None
    is_named = text == first_error
    if has_failed and not is_foreseen:
        log.error("%s", text, exc_info=own_error)
    elif has_failed and not is_named:
        log.error("%s", text)
    raise error(first_error) from own_error


def on_rank_0(
    action: Callable[[], Any],
    group: ProcessGroup | None = None,
    *,
    error: type[Exception] = RankError,
) -> Any:
    """Call ``action`` on global rank 0 and return its result, a JSON value, on every rank. Collective.

    ``group`` and ``error`` are as in ``on_every_rank``.
    """

    def result_on_rank_0() -> Any:
        return action() if dist.get_rank() == 0 else None

    result = on_every_rank(result_on_rank_0, group, error=error)
    return broadcast_json(result, src=0, group=group)


def _device(group: ProcessGroup | None) -> torch.device:
    """Return the device that the group's tensors must be on: host memory for gloo."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return platform.current().device


def _padded(value: Any, group: ProcessGroup | None) -> tuple[torch.Tensor, list[int]]:
    """Return ``value`` as JSON bytes, padded to the longest value in the group, and the length of each rank's value.

    Collective. The padding is needed because a gather takes tensors of equal length.
    """
    device = _device(group)
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    ranks = dist.get_world_size(group)
    sizes = list(torch.zeros(ranks, 1, dtype=torch.int64, device=device))
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device), group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    return padded, lengths


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())
