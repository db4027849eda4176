"""What a weight update is made of: the source of tensors, a strategy that moves them, report, errors.

The protocols are seen from one trainer rank. Rank 0 conducts: it alone gives the engines orders.
Ranks that a plan names as receivers gather buckets from the others and send them to the engines.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_dppo.checkpoint_conversion.gathering import Gathered
from megatron_dppo.engine.errors import UNBOUNDED
from megatron_dppo.model.gather_plan import Bucket as PlannedBucket
from megatron_dppo.system.errors import RunError

if TYPE_CHECKING:
    from megatron_dppo.weight_sync.engines import Engines

T = TypeVar("T")

Bucket = Sequence[tuple[str, Tensor]]
"""Full tensors with their Hugging Face names."""

Plan = Sequence[PlannedBucket]
"""The same on every rank: which tensors, in which buckets, on which rank."""

Agree = Callable[[str | None], str | None]
"""A collective: each trainer rank hands in its failure or None, all get the first by rank, or None.

For one rank the identity.
"""


class WeightSource(Protocol):
    """The trainer's weights, for updates. ``gather``, ``all_gather`` and ``score`` are collective."""

    @property
    def rank(self) -> int:
        """This process's global rank."""

    def plan(self, bucket_bytes: int, *, spread: bool) -> Plan:
        """All weights in buckets; with ``spread`` on the ranks that hold most of them, else on 0."""

    def gather(self, plan: Plan) -> Iterator[Gathered]:
        """The plan's buckets, one after another, each on its receiver.

        A bucket's tensors must stay unchanged until the second one after it is asked for.
        """

    def gather_bound(self) -> int:
        """The fewest bytes that ranks must exchange so that every tensor is whole somewhere."""

    def bytes_between_nodes(self, plan: Plan) -> int:
        """Bytes of the plan's gathers that travel from one node to another."""

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, by rank."""

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token | tokens before it) of all but the first, by prompt, at temperature 1."""

    @property
    def vocab_size(self) -> int:
        """Of the model; token ids are below it."""

    @property
    def num_layers(self) -> int:
        """Of the model."""

    @property
    def dtype_name(self) -> str:
        """The weights' type, "float32" or "bfloat16"."""


@dataclass(frozen=True)
class Transfer:
    """What a strategy is given: from trainer rank ``rank`` to ``engines``.

    ``plan``: all buckets, each of ``dtype``. ``timeout_s`` bounds each request to an engine.
    ``directory``: the configured folder, of strategy ``disk``.
    """

    rank: int
    engines: Engines
    plan: Plan
    dtype: torch.dtype
    timeout_s: float
    directory: str | None = None

    @property
    def conducts(self) -> bool:
        """Whether this rank gives the engines their orders."""
        return self.rank == 0

    @property
    def sends(self) -> bool:
        """Whether this rank gathers buckets, and sends them."""
        return any(bucket.receiver == self.rank for bucket in self.plan)


class Strategy(Protocol):
    """How buckets get into the attached engines; one object on every rank that takes part.

    Every step but ``abort`` and ``close`` may raise RuntimeError, ValueError or OSError; an
    EngineFaultError names the engines at fault. ``spread``: several ranks send, each the buckets that it
    holds most of; otherwise rank 0 sends all. ``copies``: how often a bucket's bytes move.
    """

    spread: bool
    copies: int

    def __init__(self, transfer: Transfer) -> None: ...

    def meeting_point(self) -> Any:
        """What the other ranks must know of this one before ``begin``; JSON."""

    def begin(self, meeting_points: Sequence[Any]) -> None:
        """Connect, given every rank's meeting point; rank 0 opens the update in the engines."""

    def send(self, bucket: Bucket) -> int:
        """Start to send a bucket that this rank gathered; returns its bytes.

        The bucket may change when two more have been sent.
        """

    def arrive(self) -> None:
        """Wait until the engines have this rank's buckets; on rank 0, all buckets."""

    def end(self) -> None:
        """On rank 0, when every rank's buckets have arrived: close the update in the engines."""

    def abort(self) -> None:
        """Break off what is under way, without waiting for it."""

    def close(self) -> None:
        """Release what is held in the engines; the strategy is not used again."""


class Phases:
    """Runs one rank's steps of an update, timed, until the first that fails.

    ``error``: of the step that failed; later ones are not run. ``seconds``: by phase.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, phase: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """``call``'s answer; None where it fails (RuntimeError, ValueError, OSError) or one has."""
        if self.error is not None:
            return None
        with self.timed(phase):
            try:
                return call(*arguments)
            except (OSError, RunError, RuntimeError, ValueError) as error:
                self.error = error
                return None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's duration to ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start


class WeightUpdateError(RunError):
    """An update failed, or engines could not be attached: on all trainer ranks alike.

    ``engines``: URLs of those known to be at fault; empty where that is unknown. After a failed
    update every attached engine is quarantined (paused, its version unverified) until a complete
    update succeeds. ``attempts``: after so many failures in a row with this very message the next one
    would end alike.
    """

    def __init__(
        self, message: str, engines: Sequence[str] = (), attempts: int = UNBOUNDED
    ) -> None:
        super().__init__(message)
        self.engines = tuple(engines)
        self.attempts = attempts


class WeightUpdateRefusedError(WeightUpdateError):
    """Requests kept ``engines`` busy. All engines go on with the weights and version that they had."""


class TransferTimeoutError(RunError):
    """A broadcast, or its group, was not complete in time."""


class EngineFaultError(RunError):
    """What went wrong, by the URL of the engine at fault; ``reason`` where none is. ``attempts``: as of
    EngineError, the least of all of them."""

    def __init__(
        self, faults: Mapping[str, BaseException], reason: BaseException | None = None
    ) -> None:
        errors = list(dict.fromkeys(faults.values())) or ([reason] if reason else [])
        super().__init__("; ".join(f"{type(e).__name__}: {e}" for e in errors))
        self.faults = dict(faults)
        self.attempts = min((getattr(e, "attempts", UNBOUNDED) for e in errors), default=UNBOUNDED)

    @property
    def engines(self) -> tuple[str, ...]:
        """URLs."""
        return tuple(self.faults)
