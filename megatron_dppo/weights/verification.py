"""The checks before a commit: a checksum of every tensor, and log-probabilities of fixed prompts (the canary).

Checksums show that the bytes arrived. They cannot show that engine and trainer interpret them in the same way: a
conversion that swaps two tensors gives both sides the same wrong bytes, and a kernel may keep a stale copy of a tensor
that arrived. The canary detects both: engine and trainer compute the log-probabilities of the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_dppo.engine.errors import EngineError
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.system.text import first_of
from megatron_dppo.weights.checksums import ExpectedChecksums
from megatron_dppo.weights.engines import Bucket, Digests, EngineFaultError, Engines


@dataclass(frozen=True)
class ChecksumMismatch:
    """One engine tensor whose bytes differ from the bytes on the trainer's side.

    Attributes:
        tensor: name of the engine tensor.
        rank: the engine rank that holds the tensor.
        expected: checksum on the trainer's side; None if the trainer has no tensor of this name.
        actual: checksum on the engine's side; None if the engine has no tensor of this name.
    """

    tensor: str
    rank: int
    expected: str | None
    actual: str | None

    def __str__(self) -> str:
        sides = f"expected {self.expected}, got {self.actual}"
        return f"{self.tensor} on engine rank {self.rank}: {sides}"


_SHOWN_MISMATCHES = 5


class ChecksumMismatchError(EngineError):
    """The tensors that an engine holds differ from the tensors that the trainer sent."""

    def __init__(self, mismatches: Sequence[ChecksumMismatch]) -> None:
        first_mismatches = first_of([str(m) for m in mismatches], _SHOWN_MISMATCHES)
        super().__init__(
            f"{len(mismatches)} engine tensors differ from the trainer's: {first_mismatches}"
        )
        self.mismatches = tuple(mismatches)
        # If names differ, the models differ, and a retry cannot help. If only bytes differ, a retry may succeed.
        has_different_names = any(m.expected is None or m.actual is None for m in mismatches)
        self.attempts = 1 if has_different_names else 2


def compare_checksums(
    expected_checksums: Sequence[Mapping[str, str]], actual_checksums: Sequence[Mapping[str, str]]
) -> list[ChecksumMismatch]:
    """Return the mismatches, ordered by engine rank and tensor name. A tensor that only one side has is a mismatch too.

    Both arguments have the checksums of each engine rank, by tensor name.
    """
    mismatches = []
    for rank, (trainer_sums, engine_sums) in enumerate(
        zip(expected_checksums, actual_checksums, strict=True)
    ):
        for name in sorted(trainer_sums.keys() | engine_sums.keys()):
            trainer_sum = trainer_sums.get(name)
            engine_sum = engine_sums.get(name)
            if trainer_sum != engine_sum:
                mismatches.append(ChecksumMismatch(name, rank, trainer_sum, engine_sum))
    return mismatches


class ExpectedByLayout:
    """Expected checksums of the buckets that this rank sends, for each layout among the engines.

    An engine's ``layout`` is a pair: its EngineLayout, and the kind of its device ("cpu" or "cuda").
    """

    def __init__(self, engines: Engines) -> None:
        self._by_layout: dict[tuple[EngineLayout, str], ExpectedChecksums] = {}
        for engine in engines.members:
            if engine.layout not in self._by_layout:
                self._by_layout[engine.layout] = engine.expected()

    def add(self, bucket: Bucket) -> None:
        for layout_checksums in self._by_layout.values():
            layout_checksums.add(bucket)

    def partials(self) -> list[Any]:
        """Return this rank's partial checksums for each layout, as JSON.

        The layouts are in the order in which they first occur among the engines.
        """
        return [layout_checksums.partial() for layout_checksums in self._by_layout.values()]


def expected_digests(engines: Engines, partials: Sequence[Sequence[Any]]) -> Digests:
    """Combine the partial checksums of all senders. Raises IncompleteWeightsError.

    ``partials``: for each sender, the result of its ``ExpectedByLayout.partials``.
    """
    digests: dict[tuple[EngineLayout, str], Sequence[Mapping[str, str]]] = {}
    for engine in engines.members:
        if engine.layout not in digests:
            # ExpectedByLayout.partials has the layouts in the order in which this loop finds them.
            index = len(digests)
            layout_partials = [sender_partials[index] for sender_partials in partials]
            digests[engine.layout] = engine.expected().digests(layout_partials)
    return digests


def compare_tensors(engines: Engines, digests: Digests) -> int:
    """Compare every engine tensor with its expected checksum. Returns the number of tensors.

    Raises EngineFaultError, with one ChecksumMismatchError for each engine that differs.
    """
    actual_checksums = engines.each(lambda engine: engine.checksums())
    faults = {}
    for engine in engines.members:
        mismatches = compare_checksums(digests[engine.layout], actual_checksums[engine.url])
        if mismatches:
            faults[engine.url] = ChecksumMismatchError(mismatches)
    if faults:
        raise EngineFaultError(faults)
    return sum(map(len, chain.from_iterable(actual_checksums.values())))
