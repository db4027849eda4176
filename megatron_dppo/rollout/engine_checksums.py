"""What the engine's checksums must be, from the very Hugging Face tensors that the trainer holds;
bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, dtype, zeros

from megatron_dppo.checkpoint_conversion.mapping import hf_tensors
from megatron_dppo.rollout.engine_hash import HASHES, TensorHash
from megatron_dppo.rollout.engine_tensors import EnginePart, EngineTensors
from megatron_dppo.rollout.errors import EngineError


class IncompleteWeightsError(EngineError, ValueError):
    """The stream of buckets left out, repeated or misshaped a tensor of the model."""


@dataclass
class _Hashing:
    """One engine tensor on one rank: the hash so far, and parts that came before their turn."""

    hash: TensorHash
    next_part: int = 0
    early: dict[int, Tensor] = field(default_factory=dict)


class ExpectedChecksums:
    """Checksums of a complete stream of Hugging Face tensors, as the engine computes them.

    The engine's device decides on the hash. ``weights_dtype``: of every weight. Memory: a tensor
    that comes out of its fused tensor's order is kept until its turn, so at most one fused tensor's
    bytes for each that is under way; nothing where the stream follows the checkpoint's order
    (q, k, v; gate, up, expert by expert).
    """

    def __init__(self, tensors: EngineTensors, weights_dtype: dtype) -> None:
        self._tensors = tensors
        self._new_hash = HASHES[tensors.device]
        self._dtype = weights_dtype
        self._missing = dict(hf_tensors(tensors.shape))
        self._under_way: dict[tuple[int, str], _Hashing] = {}
        self._digests: list[dict[str, str]] = [{} for _ in range(tensors.ranks)]
        for rank, name, size in tensors.padding:
            padding = self._new_hash()
            padding.update(zeros(size, dtype=weights_dtype))
            self._digests[rank][name] = padding.hexdigest()

    def add(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Hash the next bucket.

        Raises IncompleteWeightsError for an unknown, repeated or misshaped tensor.
        """
        for name, tensor in bucket:
            self._check(name, tensor)
            for part in self._tensors.parts[name]:
                self._place(tensor, part)

    def digests(self) -> list[dict[str, str]]:
        """Checksum by engine tensor, for each engine rank.

        Raises IncompleteWeightsError naming what never came.
        """
        if self._missing:
            names = sorted(self._missing)
            raise IncompleteWeightsError(
                f"weight update: {len(names)} tensors were never sent: {', '.join(names[:5])}"
                f"{', ...' if len(names) > 5 else ''}"
            )
        return self._digests

    def _check(self, name: str, tensor: Tensor) -> None:
        shape = self._missing.pop(name, None)
        if shape is None:
            raise IncompleteWeightsError(
                f"weight update: {name} came twice or is no tensor of this model"
            )
        if tensor.shape != shape or tensor.dtype != self._dtype:
            raise IncompleteWeightsError(
                f"weight update: {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"expected {tuple(shape)} {self._dtype}"
            )

    def _place(self, tensor: Tensor, part: EnginePart) -> None:
        key = (part.rank, part.tensor)
        state = self._under_way.get(key)
        if state is None:
            state = self._under_way[key] = _Hashing(self._new_hash())
        held = part.cut(tensor)
        if part.index != state.next_part:
            state.early[part.index] = held.clone()
            return
        state.hash.update(held)
        state.next_part += 1
        while state.next_part in state.early:
            state.hash.update(state.early.pop(state.next_part))
            state.next_part += 1
        if state.next_part == self._tensors.counts[part.rank][part.tensor]:
            self._digests[part.rank][part.tensor] = state.hash.hexdigest()
            del self._under_way[key]
