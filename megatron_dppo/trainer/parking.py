"""Parking: move the trainer's long-lived tensors from the device to the host, so that the engine can use the memory,
and move them back.

    weights     the parameters, including frozen parameters
    reference   the frozen copies of a reference policy
    gradients   the gradient buffers: not copied, zero after unparking
    optimizer   Adam's moments, and the fp32 main parameters of bfloat16 parameters

``park`` copies each storage into a flat host buffer: there is one buffer per part, and later calls reuse it. ``park``
then frees the storage's bytes (``resize_(0)``). ``unpark`` allocates the bytes again and copies them back. Tensors and
views stay the same objects and see the new bytes, so that Megatron-Core's maps between parameters, gradient buckets and
shards stay valid. Frozen weights and reference copies never change, so they are copied to the host only once.

Parking drops the FP8 copies of weights that Transformer Engine keeps, without copying them. An offloaded optimizer's
state is on the host already, so parking leaves it there.

Modules' buffers (a rotary embedding's frequencies), Adam's step counts and NCCL's communicators stay on the device.

bfloat16 weights are copied, although rounding the fp32 main parameters could restore them. That would save 2 of the 14
bytes copied for a parameter (weight 2, main parameter 4, moments 8). But with the distributed optimizer a rank has only
a slice of the main parameters, so restoring weights would need a collective. It would also need the optimizer's part on
the device, while an update of the engines needs only the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor, UntypedStorage
from torch.nn import Module
from torch.optim import Optimizer

from megatron_dppo.model.shape import COPIED_PARTS, TRAINER_PARTS, TrainerPart
from megatron_dppo.system.scratch import aligned_offsets
from megatron_dppo.trainer import platform

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer.optimizer import ChainedOptimizer


class ParkedError(RuntimeError):
    """The caller used a parked part, or parked and unparked in the wrong order. Nothing was changed."""


@dataclass(frozen=True)
class ParkingResult:
    """The result of one call of ``park`` or ``unpark``.

    ``bytes``: device memory that was freed or allocated, by part. ``copied``: bytes that were copied.
    """

    bytes: Mapping[TrainerPart, int]
    copied: int
    seconds: float


def held_tensors(
    chunks: Iterable[GPTModel],
    ddp_chunks: Iterable[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    reference: Sequence[Tensor],
) -> dict[TrainerPart, list[Tensor]]:
    """Return the long-lived tensors of this rank, by part; a storage is in one part only.

    Args:
        chunks: the GPTModels of this rank.
        ddp_chunks: these GPTModels in Megatron's DDP wrappers. The wrappers own the gradient buffers.
        optimizer: the optimizer with its state and main parameters.
        reference: the copies of a reference policy.
    """
    weights: list[Tensor] = []
    for chunk in chunks:
        weights += chunk.parameters()
    gradients: list[Tensor] = []
    for ddp_chunk in ddp_chunks:
        for buffer in (*ddp_chunk.buffers, *ddp_chunk.expert_parallel_buffers):
            gradients.append(buffer.grad_data)
    # An fp32 parameter is its own main parameter: leave it out of the optimizer's part.
    weight_keys = {_key(p) for p in weights}
    return {
        "weights": weights,
        "reference": list(reference),
        "gradients": gradients,
        "optimizer": [t for t in _optimizer_tensors(optimizer) if _key(t) not in weight_keys],
    }


def drop_quantised_weights(chunks: Iterable[Module]) -> None:
    """Free the FP8 copies of weights that Transformer Engine's modules keep between the micro-batches of a step.

    The first micro-batch of a step quantises the weights again. This function has not yet run on a GPU.
    """
    for chunk in chunks:
        for module in chunk.modules():
            getattr(module, "_fp8_workspaces", {}).clear()


def check_no_transfer(chunks: Iterable[DistributedDataParallel]) -> None:
    """Raise ParkedError while weights are gathered, or gradients reduced, in the background."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.param_gather_handle is not None or group.grad_reduce_handle is not None:
                raise ParkedError("can't park: weights or gradients are on their way between ranks")


def _optimizer_tensors(optimizer: ChainedOptimizer) -> Iterable[Tensor]:
    """Yield the main parameters and the state tensors on the device; step counts (0-D) are omitted."""
    device = platform.current().device
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for adam in _adams_on_device(part.optimizer):
            # The Adam in a HybridDeviceOptimizer has fp32 copies of parameters that are not fp32.
            for group in adam.param_groups:
                yield from group["params"]
            for state in adam.state.values():
                for value in state.values():
                    if isinstance(value, Tensor) and value.dim() and value.device == device:
                        yield value


def _adams_on_device(adam: Optimizer) -> list[Optimizer]:
    """Return the optimizers whose state is on the device: offloaded state is in the host's memory already."""
    if not isinstance(adam, HybridDeviceOptimizer):
        return [adam]
    if adam.gpu_optimizer is None:
        return []
    return [adam.gpu_optimizer]


class Parker:
    """Moves parts to the host and back; not collective.

    ``tensors_by_part`` returns the trainer's current tensors; every ``park`` calls it. ``parked``: the parts that are
    on the host.
    """

    def __init__(
        self, tensors_by_part: Callable[[], Mapping[TrainerPart, Sequence[Tensor]]]
    ) -> None:
        self._tensors_by_part = tensors_by_part
        self._copies = {part: _ParkedCopy() for part in COPIED_PARTS}
        self._parked_storages: dict[TrainerPart, list[_Storage]] = {}

    @property
    def parked(self) -> frozenset[TrainerPart]:
        """The parts that are on the host."""
        return frozenset(self._parked_storages)

    def check(self, action: str, *parts: TrainerPart) -> None:
        """Raise ParkedError if one of ``parts`` is parked; without ``parts``, if any part is parked.

        ``action`` goes into the message.
        """
        required_parts = parts or TRAINER_PARTS
        parked_parts = [part for part in required_parts if part in self._parked_storages]
        if parked_parts:
            raise ParkedError(
                f"can't {action}: {', '.join(parked_parts)} of the trainer are parked"
            )

    def park(self, parts: Collection[TrainerPart] = TRAINER_PARTS) -> ParkingResult:
        """Copy ``parts`` to the host and free their bytes on the device.

        If the host has no room, all ``parts`` stay on the device.

        Raises:
            ParkedError: one of ``parts`` is already parked.
            OSError, RuntimeError: the host has not enough memory.
        """
        self.check("park", *parts)
        start_time = time.perf_counter()
        tensors = self._tensors_by_part()
        storages: dict[TrainerPart, list[_Storage]] = {}
        for part in TRAINER_PARTS:
            if part in parts:
                storages[part] = _storages(part, tensors[part])
        copied = 0
        for part, part_storages in storages.items():
            if part in COPIED_PARTS:
                copied += self._copies[part].save(part_storages)
        platform.wait_for_copies()
        for part_storages in storages.values():
            for storage in part_storages:
                storage.untyped.resize_(0)
        self._parked_storages |= storages
        self._release_memory(storages)
        return _result(storages, copied, start_time)

    def unpark(self, parts: Collection[TrainerPart] | None = None) -> ParkingResult:
        """Move ``parts`` (None: all parked parts) back to the device; gradients become 0.

        If the device has no room, all ``parts`` stay parked.

        Raises:
            ParkedError: one of ``parts`` is not parked, or no part is.
            torch.OutOfMemoryError: the device has not enough memory.
        """
        requested_parts = self._parked_storages.keys() if parts is None else parts
        resident_parts = [part for part in requested_parts if part not in self._parked_storages]
        if resident_parts:
            raise ParkedError(f"can't unpark {', '.join(resident_parts)}: not parked")
        if not requested_parts:
            raise ParkedError("can't unpark a trainer: not parked")
        start_time = time.perf_counter()
        storages: dict[TrainerPart, list[_Storage]] = {}
        all_storages: list[_Storage] = []
        for part in TRAINER_PARTS:
            if part in requested_parts:
                storages[part] = self._parked_storages[part]
                all_storages += storages[part]
        _allocate(all_storages)
        copied = 0
        for part, part_storages in storages.items():
            if part in COPIED_PARTS:
                copied += self._copies[part].restore(part_storages)
            else:
                for storage in part_storages:
                    storage.flat().zero_()
        platform.wait_for_copies()
        for part in storages:
            del self._parked_storages[part]
        self._release_memory(storages)
        return _result(storages, copied, start_time)

    def _release_memory(self, parts: Iterable[TrainerPart]) -> None:
        """Release memory that nothing uses after ``parts`` were moved: cached files of host copies, freed blocks."""
        for part in parts:
            if part in self._copies:
                self._copies[part].release_cache()
        platform.return_unused_memory()


@dataclass(frozen=True)
class _Storage:
    """A storage of the trainer: torch's ``untyped`` storage, and its ``size`` in bytes while it is not parked.

    ``is_constant``: whether its content never changes.
    """

    untyped: UntypedStorage
    size: int
    is_constant: bool

    def flat(self) -> Tensor:
        """Return a view of the whole storage, uint8 [size]."""
        return torch.empty(0, dtype=torch.uint8, device=self.untyped.device).set_(self.untyped)


class _ParkedCopy:
    """A copy of one part's storages in one host buffer. The buffer is allocated again only if the sizes change."""

    def __init__(self) -> None:
        self._memory: platform.HostMemory | None = None
        self._sizes: list[int] = []
        self._starts: list[int] = []

    def save(self, storages: Sequence[_Storage]) -> int:
        """Copy ``storages`` to the host, constant storages only the first time. Return the copied bytes."""
        sizes = [s.size for s in storages]
        is_new_buffer = self._memory is None or sizes != self._sizes
        if is_new_buffer:
            # Free the old buffer first: holding both would double the memory.
            self._memory = None
            self._starts, end = aligned_offsets(sizes)
            self._memory = platform.HostMemory(end)
            self._sizes = sizes
        needs_copy = [is_new_buffer or not s.is_constant for s in storages]
        return self._copy(storages, needs_copy, to_host=True)

    def restore(self, storages: Sequence[_Storage]) -> int:
        """Copy all ``storages`` back to the device. Return the copied bytes."""
        return self._copy(storages, [True] * len(storages), to_host=False)

    def release_cache(self) -> None:
        """Release the memory that caches the buffer's file. (Without a GPU, ``HostMemory`` is a file.)"""
        if self._memory is not None:
            self._memory.release_cache()

    def _copy(
        self, storages: Sequence[_Storage], needs_copy: Sequence[bool], *, to_host: bool
    ) -> int:
        """Copy the storages whose entry in ``needs_copy`` is true, to or from their places in the host buffer."""
        assert self._memory is not None
        copied = 0
        for storage, start, is_copied in zip(storages, self._starts, needs_copy, strict=True):
            if is_copied:
                host_bytes = self._memory.bytes[start : start + storage.size]
                if to_host:
                    host_bytes.copy_(storage.flat(), non_blocking=True)
                else:
                    storage.flat().copy_(host_bytes, non_blocking=True)
                copied += storage.size
        return copied


def _key(tensor: Tensor) -> int:
    """Return the identity of the tensor's storage."""
    return tensor.untyped_storage()._cdata


def _storages(part: TrainerPart, tensors: Sequence[Tensor]) -> list[_Storage]:
    """Return the storages of ``tensors``, each once."""
    # Gradients and optimizer state change; weights change unless they are frozen; reference copies are constant.
    always_changes = part not in ("weights", "reference")
    changing_keys = {_key(t) for t in tensors if t.requires_grad or always_changes}
    storage_by_key = {_key(t): t.untyped_storage() for t in tensors}
    storages = []
    for key, storage in storage_by_key.items():
        is_constant = key not in changing_keys
        storages.append(_Storage(storage, storage.nbytes(), is_constant))
    assert all(s.untyped.resizable() for s in storages), "a storage that torch did not allocate"
    return storages


def _allocate(storages: Sequence[_Storage]) -> None:
    """Allocate the bytes of all ``storages``; if one allocation fails, free them all again and raise its error."""
    try:
        for storage in storages:
            storage.untyped.resize_(storage.size)
    except RuntimeError:
        for storage in storages:
            storage.untyped.resize_(0)
        platform.return_unused_memory()
        raise


def _result(
    storages: Mapping[TrainerPart, Sequence[_Storage]], copied: int, start_time: float
) -> ParkingResult:
    sizes: dict[TrainerPart, int] = {}
    for part, part_storages in storages.items():
        sizes[part] = sum(storage.size for storage in part_storages)
    return ParkingResult(sizes, copied, time.perf_counter() - start_time)
