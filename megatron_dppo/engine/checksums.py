"""What the engine's checksums must be, from the very Hugging Face tensors that the trainer holds;
bucket by bucket, in any order, by as many ranks as send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, dtype, zeros

from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.tensors import EnginePart, EngineTensors
from megatron_dppo.engine.tile_sums import WORD
from megatron_dppo.engine.tiled_hash import Part, TiledHash, add_parts
from megatron_dppo.model.mapping import hf_tensors


class IncompleteWeightsError(EngineError, ValueError):
    """The streams of buckets left out, repeated or misshaped a tensor of the model."""


class ExpectedChecksums:
    """Checksums of the Hugging Face tensors that one rank sends, as the engine will compute them.

    An engine tensor that several ranks fill (experts of several expert-parallel ranks) is hashed in
    parts: ``partial`` goes to the rank that compares, and ``digests`` puts all together.
    ``weights_dtype``: of every weight. Raises IncompleteWeightsError where a part of the model does
    not begin at a whole 32-bit word.
    """

    def __init__(self, tensors: EngineTensors, weights_dtype: dtype) -> None:
        self._tensors = tensors
        self._dtype = weights_dtype
        self._shapes = hf_tensors(tensors.shape)
        self._seen: set[str] = set()
        self._hashes: dict[tuple[int, str], TiledHash] = {}
        self._unfinished: list[Callable[[], None]] = []
        odd = [n for n, ps in tensors.parts.items() if any(self._byte(p) % WORD for p in ps)]
        if odd:
            raise IncompleteWeightsError(
                f"weight update: {odd[0]} lies at an odd place in the engine's memory; checksums "
                f"need parts that begin at multiples of {WORD} bytes"
            )

    def add(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Start to hash the next bucket, all its parts by one kernel; on a GPU nobody waits for it before ``partial``.

        Raises IncompleteWeightsError for an unknown, repeated or misshaped tensor.
        """
        parts: list[Part] = []
        for name, tensor in bucket:
            self._check(name, tensor)
            for part in self._tensors.parts[name]:
                whole = self._hash(part.rank, part.tensor)
                parts.append((whole, part.cut(tensor), self._byte(part)))
        self._unfinished.append(add_parts(parts))

    def partial(self) -> Any:
        """What ``add`` took so far, as plain JSON values."""
        for finish in self._unfinished:
            finish()
        self._unfinished.clear()
        sums = [[rank, name, h.state()] for (rank, name), h in self._hashes.items()]
        return [sorted(self._seen), sums]

    def digests(self, partials: Sequence[Any]) -> list[dict[str, str]]:
        """Checksum by engine tensor, for each engine rank, of what all ranks together took.

        Raises IncompleteWeightsError naming what never came, or came from two ranks.
        """
        self._check_complete([name for names, _ in partials for name in names])
        whole = {
            (rank, name): TiledHash(elements * self._dtype.itemsize)
            for rank, sizes in enumerate(self._tensors.sizes)
            for name, elements in sizes.items()
        }
        for _, sums in partials:
            for rank, name, state in sums:
                whole[rank, name].merge(state)
        for rank, name in whole.keys() - {(r, n) for _, sums in partials for r, n, _ in sums}:
            elements = self._tensors.sizes[rank][name]
            whole[rank, name].add(zeros(elements, dtype=self._dtype), 0)
        return [
            {name: whole[rank, name].hexdigest() for name in sizes}
            for rank, sizes in enumerate(self._tensors.sizes)
        ]

    def _check_complete(self, names: list[str]) -> None:
        missing = sorted(self._shapes.keys() - set(names))
        if missing:
            raise IncompleteWeightsError(
                f"weight update: {len(missing)} tensors were never sent: {', '.join(missing[:5])}"
                f"{', ...' if len(missing) > 5 else ''}"
            )
        if len(names) > len(self._shapes):
            twice = next(name for name in names if names.count(name) > 1)
            raise IncompleteWeightsError(f"weight update: {twice} came from two ranks")

    def _check(self, name: str, tensor: Tensor) -> None:
        shape = self._shapes.get(name)
        if shape is None or name in self._seen:
            raise IncompleteWeightsError(
                f"weight update: {name} came twice or is no tensor of this model"
            )
        self._seen.add(name)
        if tensor.shape != shape or tensor.dtype != self._dtype:
            raise IncompleteWeightsError(
                f"weight update: {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"expected {tuple(shape)} {self._dtype}"
            )

    def _hash(self, rank: int, tensor: str) -> TiledHash:
        key = (rank, tensor)
        if key not in self._hashes:
            size = self._tensors.sizes[rank][tensor] * self._dtype.itemsize
            self._hashes[key] = TiledHash(size)
        return self._hashes[key]

    def _byte(self, part: EnginePart) -> int:
        return part.start * self._dtype.itemsize
