"""Parking: what a trainer holds through a run leaves the device, for the engine to use it, and comes back.

    weights     the parameters, frozen ones too
    reference   the frozen copies of a reference policy
    gradients   the gradient buffers: not copied, zero when they come back
    optimizer   Adam's moments, and the fp32 main parameters of bfloat16 ones

A storage is copied into one flat host buffer of its part, which is kept for the next time, and its bytes are let go of
(``resize_(0)``); back, it takes bytes again and the copy. Tensors and views stay the same objects and see the new
bytes, so that Megatron-Core's map of parameters, gradient buckets and shards to each other holds. What never changes
is copied once: frozen weights and reference copies.

What stays on the device: modules' buffers (a rotary embedding's frequencies), Adam's step counts, NCCL's communicators.

bfloat16 weights are copied, not rounded anew from the fp32 parameters, though these 2 of 14 bytes could be spared: with
the distributed optimizer a rank has a slice of these only, so that weights could come back neither alone, for an update
of the engines, nor without a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage

from megatron_dppo.model.shape import COPIED_PARTS, TRAINER_PARTS, TrainerPart
from megatron_dppo.system.scratch import aligned
from megatron_dppo.trainer import platform

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer.optimizer import ChainedOptimizer


class ParkedError(RuntimeError):
    """A use of what is parked, or parking and unparking in a wrong order: a fault of the caller. Nothing was done."""


@dataclass(frozen=True)
class Moved:
    """What one call did. ``bytes``: by part, that the device has fewer or more; ``copied``: that were copied."""

    bytes: Mapping[TrainerPart, int]
    copied: int
    seconds: float


def held_tensors(
    chunks: Iterable[GPTModel],
    ddp_chunks: Iterable[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    reference: Sequence[Tensor],
) -> dict[TrainerPart, list[Tensor]]:
    """All that lives through a run on this rank's device, by part; a storage is in one part only."""
    weights = [p for chunk in chunks for p in chunk.parameters()]
    buffers = [b for c in ddp_chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    # An fp32 parameter is its own main parameter.
    weight_keys = {_key(p) for p in weights}
    return {
        "weights": weights,
        "reference": list(reference),
        "gradients": [buffer.grad_data for buffer in buffers],
        "optimizer": [t for t in _optimizer_tensors(optimizer) if _key(t) not in weight_keys],
    }


def check_no_transfer(chunks: Iterable[DistributedDataParallel]) -> None:
    """Raise ParkedError where weights are still being gathered, or gradients reduced, in the background."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.param_gather_handle is not None or group.grad_reduce_handle is not None:
                raise ParkedError("can't park: weights or gradients are on their way between ranks")


def _optimizer_tensors(optimizer: ChainedOptimizer) -> Iterable[Tensor]:
    device = platform.current().device
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            values = (x for x in state.values() if isinstance(x, Tensor))
            yield from (x for x in values if x.dim() and x.device == device)


class Parker:
    """Moves parts to the host and back; not collective.

    ``tensors_by_part``: of the time of the call. ``parked``: the parts that are away.
    """

    def __init__(
        self, tensors_by_part: Callable[[], Mapping[TrainerPart, Sequence[Tensor]]]
    ) -> None:
        self._tensors_by_part = tensors_by_part
        self._copies = {part: _HostCopy() for part in COPIED_PARTS}
        self._away: dict[TrainerPart, list[_Storage]] = {}

    @property
    def parked(self) -> frozenset[TrainerPart]:
        return frozenset(self._away)

    def check(self, action: str, *parts: TrainerPart) -> None:
        """Raise ParkedError where one of ``parts`` (none: of all) is parked. ``action``: what needs it."""
        if missing := [part for part in parts or TRAINER_PARTS if part in self._away]:
            raise ParkedError(f"can't {action}: {', '.join(missing)} of the trainer are parked")

    def park(self, parts: Collection[TrainerPart] = TRAINER_PARTS) -> Moved:
        """Let go of the bytes of ``parts``.

        Raises ParkedError where one is parked already, and what the host's memory raises where it has no room (OSError,
        RuntimeError); nothing is parked then.
        """
        self.check("park", *parts)
        began, tensors = time.perf_counter(), self._tensors_by_part()
        storages = {part: _storages(part, tensors[part]) for part in TRAINER_PARTS if part in parts}
        copied = sum(self._copies[p].take(storages[p]) for p in storages if p in COPIED_PARTS)
        platform.wait_for_copies()
        for storage in (s for part in storages.values() for s in part):
            storage.bytes.resize_(0)
        self._away |= storages
        self._settle(storages)
        return _moved(storages, copied, began)

    def unpark(self, parts: Collection[TrainerPart] | None = None) -> Moved:
        """Take the bytes of ``parts`` again (None: of all that are parked), with what was in them; gradients are zero.

        Raises ParkedError where one is not parked, and torch.OutOfMemoryError where the device has no room: all stay
        parked then.
        """
        wanted = self._away.keys() if parts is None else parts
        resident = [part for part in wanted if part not in self._away]
        if resident or not wanted:
            raise ParkedError(f"can't unpark {', '.join(resident) or 'a trainer'}: not parked")
        began = time.perf_counter()
        storages = {part: self._away[part] for part in TRAINER_PARTS if part in wanted}
        _take_bytes([s for part in storages.values() for s in part])
        copied = 0
        for part, ours in storages.items():
            if part in COPIED_PARTS:
                copied += self._copies[part].give(ours)
            else:
                for storage in ours:
                    storage.flat().zero_()
        platform.wait_for_copies()
        for part in storages:
            del self._away[part]
        self._settle(storages)
        return _moved(storages, copied, began)

    def _settle(self, parts: Iterable[TrainerPart]) -> None:
        for part in parts:
            if part in self._copies:
                self._copies[part].settle()
        platform.return_unused_memory()


@dataclass(frozen=True)
class _Storage:
    """``size``: its bytes when it is not parked. ``constant``: nothing changes what is in it."""

    bytes: UntypedStorage
    size: int
    constant: bool

    def flat(self) -> Tensor:
        """All of it, uint8 [size]."""
        return torch.empty(0, dtype=torch.uint8, device=self.bytes.device).set_(self.bytes)


class _HostCopy:
    """The host's copy of one part's storages, in one buffer that is made anew only where their sizes change."""

    def __init__(self) -> None:
        self._memory: platform.HostMemory | None = None
        self._sizes: list[int] = []
        self._starts: list[int] = []

    def take(self, storages: Sequence[_Storage]) -> int:
        """Copy ``storages`` into it, constant ones the first time; the bytes that were copied."""
        sizes = [s.size for s in storages]
        is_first = self._memory is None or sizes != self._sizes
        if is_first:
            # The old one is let go of first: two would double the memory.
            self._memory = None
            self._starts, end = aligned(sizes)
            self._memory, self._sizes = platform.HostMemory(end), sizes
        changed = [is_first or not s.constant for s in storages]
        return self._copy(storages, changed, to_host=True)

    def give(self, storages: Sequence[_Storage]) -> int:
        """Copy it back; the bytes that were copied."""
        return self._copy(storages, [True] * len(storages), to_host=False)

    def settle(self) -> None:
        if self._memory is not None:
            self._memory.settle()

    def _copy(self, storages: Sequence[_Storage], chosen: Sequence[bool], *, to_host: bool) -> int:
        assert self._memory is not None
        copied = 0
        for storage, start, is_chosen in zip(storages, self._starts, chosen, strict=True):
            if is_chosen:
                host, device = self._memory.bytes[start : start + storage.size], storage.flat()
                target, source = (host, device) if to_host else (device, host)
                target.copy_(source, non_blocking=True)
                copied += storage.size
        return copied


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(part: TrainerPart, tensors: Sequence[Tensor]) -> list[_Storage]:
    """The storages behind ``tensors``, each once."""
    changing = {_key(t) for t in tensors if t.requires_grad or part not in ("weights", "reference")}
    unique = {_key(t): t.untyped_storage() for t in tensors}
    storages = [_Storage(s, s.nbytes(), key not in changing) for key, s in unique.items()]
    assert all(s.bytes.resizable() for s in storages), "a storage that is not torch's own"
    return storages


def _take_bytes(storages: Sequence[_Storage]) -> None:
    """Allocate for all of ``storages`` or, where one fails, for none."""
    try:
        for storage in storages:
            storage.bytes.resize_(storage.size)
    except RuntimeError:
        for storage in storages:
            storage.bytes.resize_(0)
        platform.return_unused_memory()
        raise


def _moved(storages: Mapping[TrainerPart, Sequence[_Storage]], copied: int, began: float) -> Moved:
    sizes = {part: sum(s.size for s in ours) for part, ours in storages.items()}
    return Moved(sizes, copied, time.perf_counter() - began)
