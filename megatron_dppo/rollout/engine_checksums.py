"""What the engine's checksums must be, from the very Hugging Face tensors that the trainer holds;
bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, dtype

from megatron_dppo.checkpoint_conversion.mapping import hf_tensors
from megatron_dppo.rollout.engine_hash import HASHES, TensorHash
from megatron_dppo.rollout.engine_layout import EngineLayout, EnginePart
from megatron_dppo.rollout.errors import EngineError


class IncompleteWeightsError(EngineError, ValueError):
    """The stream of buckets left out, repeated or misshaped a tensor of the model."""


@dataclass
class _Fused:
    """One engine tensor on every rank: hashes so far, and parts that came before their turn."""

    hashes: list[TensorHash]
    next_part: int = 0
    early: dict[int, tuple[Tensor, EnginePart]] = field(default_factory=dict)


class ExpectedChecksums:
    """Checksums of a complete stream of Hugging Face tensors, as the engine computes them.

    The layout's device decides on the hash. ``weights_dtype``: of every weight. Memory: a tensor
    that comes out of its fused tensor's order is kept until its turn, so at most one fused tensor's
    bytes for each that is under way; nothing where the stream follows the checkpoint's order
    (q, k, v; gate, up, expert by expert).
    """

    def __init__(self, layout: EngineLayout, weights_dtype: dtype) -> None:
        self._layout = layout
        self._new_hash = HASHES[layout.device]
        self._dtype = weights_dtype
        self._missing = dict(hf_tensors(layout.shape))
        self._fused: dict[str, _Fused] = {}
        self._digests: list[dict[str, str]] = [{} for _ in range(layout.ranks)]

    def add(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Hash the next bucket.

        Raises IncompleteWeightsError for an unknown, repeated or misshaped tensor.
        """
        for name, tensor in bucket:
            self._check(name, tensor)
            for part in self._layout.parts(name):
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
        fused = self._fused.get(part.tensor)
        if fused is None:
            fused = self._fused[part.tensor] = _Fused([self._new_hash() for _ in self._digests])
        if part.index != fused.next_part:
            fused.early[part.index] = (tensor.clone(), part)
            return
        self._hash(fused, tensor, part)
        while fused.next_part in fused.early:
            self._hash(fused, *fused.early.pop(fused.next_part))
        if fused.next_part == part.count:
            for digests, ready in zip(self._digests, fused.hashes, strict=True):
                digests[part.tensor] = ready.hexdigest()
            del self._fused[part.tensor]

    def _hash(self, fused: _Fused, tensor: Tensor, part: EnginePart) -> None:
        for rank, rank_hash in enumerate(fused.hashes):
            rank_hash.update(part.cut(tensor, rank, self._layout))
        fused.next_part += 1
