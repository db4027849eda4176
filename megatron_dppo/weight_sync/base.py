"""What a weight update is made of: the source of tensors, their way, and the report.

A transaction on global trainer rank 0 goes ``prepare -> begin -> (send, expect)* -> finish ->
verify -> commit``; on any failure ``abort``. From ``begin`` until ``commit`` the engine's
``weight_version`` says ``unverified-<version>`` and its generation is paused; an aborted engine
stays so, which is its quarantine, until a later complete update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Bucket = Sequence[tuple[str, Tensor]]
"""Full tensors with their Hugging Face names."""

Agree = Callable[[str | None], str | None]
"""A collective: each trainer rank hands in its failure or None, all get the first by rank, or None.

For one rank the identity.
"""


class WeightSource(Protocol):
    """The trainer, as this package sees it."""

    def hf_buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Collective: equally many buckets on every rank; tensors on rank 0, nothing elsewhere.

        A bucket's tensors must stay unchanged until the next one is asked for.
        """


class WeightTransport(Protocol):
    """A way into one engine, on global trainer rank 0.

    Every step but ``abort`` may raise RuntimeError, ValueError or OSError.
    """

    def prepare(self) -> bool:
        """Wait until no request runs and pause generation.

        False where requests kept running; the engine is as it was, then.
        """

    def begin(self, version: int) -> None:
        """Take back the engine's version and open the update."""

    def send(self, bucket: Bucket) -> int:
        """Start sending a bucket, when the one before has arrived; returns its bytes.

        The bucket may change as soon as this returns.
        """

    def expect(self, bucket: Bucket) -> None:
        """Take the bucket into the checksums that the engine must have."""

    def finish(self) -> None:
        """Wait for the last bucket and close the update."""

    def verify(self) -> VerifiedTensors:
        """Compare every tensor's checksum on every engine rank. Raises ChecksumMismatchError."""

    def commit(self, version: int) -> None:
        """Give the engine its new version and let generation go on."""

    def abort(self) -> None:
        """Give up what is under way, quickly and without raising; the engine stays paused."""

    def close(self) -> None:
        """Leave the engine for good."""


@dataclass(frozen=True)
class VerifiedTensors:
    """How much was compared: engine tensors over all engine ranks."""

    tensors: int


@dataclass(frozen=True)
class ChecksumMismatch:
    """One engine tensor whose bytes aren't the trainer's.

    ``expected`` or ``got`` None: that side has no such tensor.
    """

    tensor: str
    rank: int
    expected: str | None
    got: str | None

    def __str__(self) -> str:
        return f"{self.tensor} on engine rank {self.rank}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True)
class UpdateReport:
    """One committed update.

    ``seconds`` by phase, in time that the caller waited: drain, begin, gather (the trainer's
    collective), transfer (for the engine), hash, finish, verify, commit. ``bytes`` and ``tensors``
    (compared, over engine ranks) are known on global rank 0 only, and 0 elsewhere. ``verified``:
    every tensor was compared.
    """

    version: int
    bytes: int
    seconds: Mapping[str, float]
    verified: bool
    tensors: int


class WeightUpdateError(RuntimeError):
    """An update failed, on all trainer ranks alike.

    The engine is quarantined (paused, its version unverified) until a complete update succeeds.
    """


class WeightUpdateRefusedError(WeightUpdateError):
    """Requests kept the engine busy; it goes on with the weights and the version that it had."""


class ChecksumMismatchError(RuntimeError):
    """Weights arrived wrong. ``mismatches``: each tensor and engine rank."""

    def __init__(self, mismatches: Sequence[ChecksumMismatch]) -> None:
        shown = "; ".join(str(m) for m in mismatches[:5])
        more = f"; and {len(mismatches) - 5} more" if len(mismatches) > 5 else ""
        super().__init__(
            f"{len(mismatches)} engine tensors differ from the trainer's: {shown}{more}"
        )
        self.mismatches = tuple(mismatches)


def compare_checksums(
    expected: Sequence[Mapping[str, str]], got: Sequence[Mapping[str, str]]
) -> list[ChecksumMismatch]:
    """Differences by engine rank and tensor name; a tensor that only one side has is one, too."""
    if len(expected) != len(got):
        raise ValueError(f"checksums of {len(got)} engine ranks, expected {len(expected)}")
    return [
        ChecksumMismatch(name, rank, e.get(name), g.get(name))
        for rank, (e, g) in enumerate(zip(expected, got, strict=True))
        for name in sorted(e.keys() | g.keys())
        if e.get(name) != g.get(name)
    ]
