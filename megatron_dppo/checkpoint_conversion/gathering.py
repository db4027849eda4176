"""``gather_plan``'s buckets of tensors: packed, sent between the ranks of a process group's world, and put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.model.gather_plan import Bucket, ParameterKey


@dataclass(frozen=True)
class Gathered:
    """What a rank has of a bucket: on its receiver the full tensors by name, elsewhere nothing.

    ``received``: bytes that came from other ranks.
    """

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    received: int = 0


KEPT_BYTES = 64 << 20


class Buffers:
    """Two flat buffers that take turns, so that what lies in one holds while the other is filled."""

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None, None]

    def next(self, elements: int, like: Tensor) -> Tensor:
        """1-D of ``elements``, of ``like``'s type and device."""
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer is None or buffer.numel() < elements:
            buffer = self._buffers[0] = like.new_empty(elements)
        return buffer[:elements]

    def shrink(self) -> None:
        """Let go of large buffers."""
        # Small ones are kept: fresh memory costs a CPU more than the copy into it.
        self._buffers = [
            b if b is not None and b.nbytes <= KEPT_BYTES else None for b in self._buffers
        ]


def gather(
    plan: Sequence[Bucket],
    rank: int,
    values: Mapping[ParameterKey, Tensor],
    buffers: Buffers | None = None,
) -> Iterator[Gathered]:
    """Collective: each bucket of ``plan`` in turn.

    ``values``: this rank's tensors by (chunk, name), in the shape of its parameters (the weights, or their gradients),
    all of one dtype. A rank sends its pieces of a bucket as one flat message. A bucket's tensors lie one after another
    in one flat buffer: one of ``buffers``, in which it holds until the second one after, or its own.
    """
    like = next(iter(values.values()))
    for bucket in plan:
        counts = bucket.elements_by_rank
        if rank != bucket.receiver:
            if rank in counts:
                sent = pack(bucket, rank, values)
                _exchange([dist.P2POp(dist.isend, sent, bucket.receiver)])()
            yield Gathered()
            continue
        flat = {source: like.new_empty(n) for source, n in counts.items() if source != rank}
        arrived = _exchange([dist.P2POp(dist.irecv, part, source) for source, part in flat.items()])
        elements = bucket.elements
        out = like.new_empty(elements) if buffers is None else buffers.next(elements, like)
        arrived()
        received = sum(buffer.nbytes for buffer in flat.values())
        yield Gathered(assemble(bucket, out, flat, rank, values), received)
    if buffers is not None:
        buffers.shrink()


def _exchange(operations: list[dist.P2POp]) -> Callable[[], None]:
    """Start sends or receives; what is returned waits for them."""
    # As a batch: NCCL makes a communicator of its own, some 300 MiB on both GPUs, for every pair of ranks that sends
    # or receives outside of one, and sends a batch through the group's (ProcessGroupNCCL::pointToPoint).
    requests = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> None:
        for request in requests:
            request.wait()

    return wait


def pack(bucket: Bucket, rank: int, parameters: Mapping[ParameterKey, Tensor]) -> Tensor:
    """What ``rank`` sends of a bucket: 1-D, of the parameters' dtype; detached from any graph."""
    parts = [
        piece.segment.of_local(parameters[piece.key]).detach().reshape(-1)
        for tensor in bucket.tensors
        for piece in tensor.pieces
        if piece.rank == rank
    ]
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
    """A bucket's full tensors, one after another in ``out`` (1-D): views of it, by name.

    ``rank``'s own pieces come straight from its ``parameters``, the others' from what they sent.
    """
    consumed = dict.fromkeys(flat_by_rank, 0)
    named, end = [], 0
    for tensor in bucket.tensors:
        start, end = end, end + tensor.elements
        full = out[start:end].view(tensor.shape)
        for piece in tensor.pieces:
            target = piece.segment.of_hf(full)
            if piece.rank == rank:
                target.copy_(piece.segment.of_local(parameters[piece.key]).detach())
                continue
            first = consumed[piece.rank]
            consumed[piece.rank] = first + piece.elements
            block = flat_by_rank[piece.rank][first : consumed[piece.rank]]
            target.copy_(block.view(piece.shape))
        named.append((tensor.name, full))
    return named
