"""Collective gathering of ``gather_plan``'s buckets: packing, sending between ranks, and assembling full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.model.gather_plan import Bucket, ParameterKey


@dataclass(frozen=True)
class Gathered:
    """A rank's result for a bucket. ``tensors``: (name, full tensor) on the bucket's receiver, none on other ranks.

    ``received`` is the number of bytes that came from other ranks.
    """

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    received: int = 0


KEPT_BYTES = 64 << 20
"""Largest buffer that is kept from one gathering to the next."""


class Buffers:
    """Two flat buffers that alternate: the content of one buffer stays valid while the other buffer is filled."""

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None, None]

    def next(self, elements: int, like: Tensor) -> Tensor:
        """The next buffer: 1-D with ``elements``, with the type and device of ``like``."""
        # Buffer 0 was used by the last call. Move it to position 1, so that its content stays valid.
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer is None or buffer.numel() < elements or buffer.dtype != like.dtype:
            buffer = like.new_empty(elements)
            self._buffers[0] = buffer
        return buffer[:elements]

    def shrink(self) -> None:
        """Free buffers larger than KEPT_BYTES."""
        # Keep small buffers: on a CPU, allocating memory takes longer than the copy into it.
        for i, buffer in enumerate(self._buffers):
            if buffer is not None and buffer.nbytes > KEPT_BYTES:
                self._buffers[i] = None


def gather(
    plan: Sequence[Bucket],
    rank: int,
    values: Mapping[ParameterKey, Tensor],
    buffers: Buffers | None = None,
) -> Iterator[Gathered]:
    """Gather each bucket of ``plan``, one after another. All ranks must call the function.

    A rank sends its pieces of a bucket as one flat message.

    Args:
        plan: The buckets.
        rank: This rank.
        values: This rank's tensors by (chunk, name), in the shape of its parameters (the weights, or their gradients).
            All have one dtype, except tensors with a dtype of their own (``TensorSources.dtype``).
        buffers: Memory for the buckets' tensors. One flat buffer holds the tensors of a bucket end to end. The tensors
            of a bucket stay valid while the next bucket is gathered, not longer. None: a new buffer for each bucket.
    """
    first_value = next(iter(values.values()))
    for bucket in plan:
        like = _empty(bucket, first_value)
        counts = bucket.elements_by_rank
        if rank != bucket.receiver:
            if rank in counts:
                message = pack(bucket, rank, values)
                wait = _exchange([dist.P2POp(dist.isend, message, bucket.receiver)])
                wait()
            yield Gathered()
            continue
        messages: dict[int, Tensor] = {}
        operations: list[dist.P2POp] = []
        for source, count in counts.items():
            if source != rank:
                messages[source] = like.new_empty(count)
                operations.append(dist.P2POp(dist.irecv, messages[source], source))
        wait = _exchange(operations)
        elements = bucket.elements
        out = like.new_empty(elements) if buffers is None else buffers.next(elements, like)
        wait()
        received = sum(message.nbytes for message in messages.values())
        yield Gathered(assemble(bucket, out, messages, rank, values), received)
    if buffers is not None:
        buffers.shrink()


def _exchange(operations: list[dist.P2POp]) -> Callable[[], None]:
    """Start sends or receives. Returns a function that waits for their end."""
    # A batch uses the group's communicator (ProcessGroupNCCL::pointToPoint). For single sends and receives, torch
    # creates an NCCL communicator for every pair of ranks, with some 300 MiB on both GPUs.
    requests = []
    if operations:
        requests = dist.batch_isend_irecv(operations)

    def wait() -> None:
        for request in requests:
            request.wait()

    return wait


def _empty(bucket: Bucket, like: Tensor) -> Tensor:
    """Return a tensor without elements, on the device of ``like``. It has the dtype of the bucket; if the bucket has no
    dtype, it has the dtype of ``like``."""
    dtype = like.dtype if bucket.dtype is None else getattr(torch, bucket.dtype)
    return like.new_empty(0, dtype=dtype)


def pack(bucket: Bucket, rank: int, parameters: Mapping[ParameterKey, Tensor]) -> Tensor:
    """Pack the pieces of a bucket that ``rank`` sends: 1-D, of the parameters' dtype, detached from any graph."""
    parts = []
    for tensor in bucket.tensors:
        for piece in tensor.pieces:
            if piece.rank == rank:
                local = piece.segment.of_local(parameters[piece.key])
                parts.append(local.detach().reshape(-1))
    if parts:
        return torch.cat(parts)
    return next(iter(parameters.values())).detach().new_empty(0)


def assemble(
    bucket: Bucket,
    out: Tensor,
    flat_by_rank: Mapping[int, Tensor],
    rank: int | None,
    parameters: Mapping[ParameterKey, Tensor],
) -> list[tuple[str, Tensor]]:
    """Assemble a bucket's full tensors end to end in ``out`` (1-D). Returns views of ``out``, by name.

    The pieces of ``rank`` come from ``parameters``, all other pieces from ``flat_by_rank``.
    """
    # The pieces in a rank's message are in the order of this loop.
    consumed = dict.fromkeys(flat_by_rank, 0)
    full_tensors = []
    end = 0
    for tensor in bucket.tensors:
        start = end
        end = end + tensor.elements
        full = out[start:end].view(tensor.shape)
        for piece in tensor.pieces:
            target = piece.segment.of_hf(full)
            if piece.rank == rank:
                target.copy_(piece.segment.of_local(parameters[piece.key]).detach())
                continue
            block_start = consumed[piece.rank]
            consumed[piece.rank] = block_start + piece.elements
            block = flat_by_rank[piece.rank][block_start : consumed[piece.rank]]
            target.copy_(block.view(piece.shape))
        full_tensors.append((tensor.name, full))
    return full_tensors
