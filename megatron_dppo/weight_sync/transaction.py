"""The weight update as a transaction: every tensor has arrived, verified, or all ranks raise."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, Protocol, TypeVar

import torch

from megatron_dppo.checkpoint_conversion.gathering import Gathered
from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import UNBOUNDED
from megatron_dppo.engine.protocol import UNVERIFIED_VERSION
from megatron_dppo.engine.weights import MemoryTag
from megatron_dppo.metrics import table as names
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.errors import RunError
from megatron_dppo.weight_sync import verification
from megatron_dppo.weight_sync.engines import (
    ENGINE_FAULTS,
    EngineFaultError,
    Engines,
    OpenEngine,
    Plan,
    Strategy,
    Transfer,
    let_go,
)
from megatron_dppo.weight_sync.strategies import STRATEGIES

log = logging.getLogger(__name__)

T = TypeVar("T")
MIB = 1 << 20
_GB = 10**9
_BUSY = "requests kept the engine busy beyond weight_sync.timeout_s"
_RESUMED = ("canary", "commit")


Agree = Callable[[str | None], str | None]
"""A collective: each trainer rank hands in its failure or None, all get the first by rank, or None.

For one rank the identity.
"""


class WeightSource(Protocol):
    """The trainer's weights, for updates. ``gather``, ``all_gather`` and ``score`` are collective.

    ``rank``: this process's global rank. ``dtype_name``: the weights' type, "float32" or "bfloat16".
    """

    @property
    def rank(self) -> int: ...

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
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def dtype_name(self) -> str: ...


class Phases:
    """Runs one rank's steps of an update, timed, until the first that fails by an engine's fault (ENGINE_FAULTS).

    ``error``: of the step that failed; later ones are not run. ``seconds``: by phase.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, phase: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """``call``'s answer; None where it fails or one has."""
        if self.error is not None:
            return None
        with self.timed(phase):
            try:
                return call(*arguments)
            except ENGINE_FAULTS as error:
                self.error = error
                return None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start


class WeightUpdateError(RunError):
    """An update failed, or engines could not be attached: on all trainer ranks alike.

    ``engines``: URLs of those known to be at fault; empty where that is unknown. After a failed update every attached
    engine is quarantined (paused, its version unverified) until a complete update succeeds. ``attempts``: after so many
    failures in a row with this very message the next one would end alike.
    """

    def __init__(
        self, message: str, engines: Sequence[str] = (), attempts: int = UNBOUNDED
    ) -> None:
        super().__init__(message)
        self.engines = tuple(engines)
        self.attempts = attempts


class WeightUpdateRefusedError(WeightUpdateError):
    """Requests kept ``engines`` busy. All engines go on with the weights and version that they had."""


@dataclass(frozen=True)
class UpdateReport:
    """One committed update; known on every rank but for ``seconds`` and ``canary``, rank 0's own.

    ``bytes``: of the weights as the engines load them. ``bytes_moved``: what trainer ranks exchanged to make tensors
    whole, and what went to the engines. ``bytes_bound``: its static lower bound: over all tensors what the best holder
    lacks, and the weights once for each engine rank (SGLang takes whole tensors). ``seconds`` by phase, in time that
    the caller waited: drain, begin, gather (the trainer's collective), transfer (for the engines), hash, arrive, end,
    verify, canary, commit. ``verified``: every tensor was compared; ``tensors``: how many, over all engine ranks.
    ``bytes_between_nodes``: of ``bytes_moved``, what the plan sends from one node to another: gathers, and each
    sender's bytes once to each engine host but its own. ``bytes_between_nodes_bound``: all weights once to each host of
    engines without a sender. ``bytes_into_node_bound``: of it, what must enter one node: all weights, or nothing where
    every host of engines has a sender. ``update_s``: of the whole update; ``stall_s``: of it, from the engines' pause
    to the commit. ``network``: bytes/s that can enter a node; None: not stated.
    """

    version: int
    bytes: int
    bytes_moved: int
    bytes_bound: int
    seconds: Mapping[str, float]
    verified: bool
    tensors: int
    bytes_between_nodes: int
    bytes_between_nodes_bound: int
    bytes_into_node_bound: int
    update_s: float
    stall_s: float
    canary: verification.CanaryReport | None = None
    network: float | None = None

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {
            names.UPDATE_BYTES: self.bytes,
            names.UPDATE_BYTES_MOVED: self.bytes_moved,
            names.UPDATE_BYTES_BOUND: self.bytes_bound,
            names.UPDATE_BYTES_OVER_BOUND: self.bytes_moved / max(self.bytes_bound, 1),
            names.UPDATE_BYTES_BETWEEN_NODES: self.bytes_between_nodes,
            names.UPDATE_BYTES_BETWEEN_NODES_BOUND: self.bytes_between_nodes_bound,
            names.UPDATE_BYTES_INTO_NODE_BOUND: self.bytes_into_node_bound,
            names.UPDATE_SECONDS: self.update_s,
            names.UPDATE_STALL: self.stall_s,
            names.UPDATE_RATE: self.bytes / max(self.stall_s, 1e-9) / 1e9,
        }
        if self.network is not None:
            values[names.UPDATE_BOUND] = self.bytes_into_node_bound / self.network
        if self.canary is not None:
            values[names.CANARY_MAX] = self.canary.max_abs_diff
            values[names.CANARY_MEAN] = self.canary.mean_abs_diff
        return values | {f"weights/{phase}_s": s for phase, s in self.seconds.items()}


def count_bytes(facts: Sequence[Sequence[Any]], bound: int, between_nodes: int) -> dict[str, int]:
    """An UpdateReport's counts of bytes.

    ``facts`` of each rank, 0 first: bytes sent to engines, bytes received from ranks, parts of checksums, the engines'
    hosts that are not its own, and, of rank 0, how often bytes move to engines and the bytes of all weights there.
    ``bound``: the fewest bytes that ranks must exchange. ``between_nodes``: those that they exchange between nodes.
    """
    copies, whole = facts[0][4:]
    sent = sum(fact[0] for fact in facts)
    foreign_to_all = set.intersection(*(set(fact[3]) for fact in facts if fact[0]))
    return {
        "bytes": sent,
        "bytes_moved": sum(fact[1] for fact in facts) + copies * sent,
        "bytes_bound": bound + copies * whole,
        "bytes_between_nodes": between_nodes + sum(fact[0] * len(fact[3]) for fact in facts),
        "bytes_between_nodes_bound": whole * len(foreign_to_all),
        "bytes_into_node_bound": whole if foreign_to_all else 0,
    }


@dataclass(eq=False)
class WeightUpdater:
    """Pushes the trainer's weights; every method is collective over all trainer ranks.

    ``open_engine``: called on rank 0 and on every rank that sends. ``fence``: collective; raises on every rank where
    this trainer may no longer change the engines. ``interrupts``: an update comes in the middle of responses, which go
    on after it; else it waits for them. ``leave_devices``: the trainer's weights have been read, so that engines on the
    same devices may take all of their memory again; None: they have devices of their own.
    ``committed_version``: what the engines run, on every rank; None before the first update and while they are
    quarantined.
    """

    source: WeightSource
    config: WeightSyncConfig
    agree: Agree
    open_engine: OpenEngine
    runner: AsyncRunner
    fence: Callable[[], None] = lambda: None
    interrupts: bool = field(default=False, kw_only=True)
    leave_devices: Callable[[], None] | None = field(default=None, kw_only=True)
    committed_version: int | None = field(default=None, init=False)
    _plan: Plan | None = field(default=None, init=False)
    _strategy: Strategy | None = field(default=None, init=False)
    _engines: Engines | None = field(default=None, init=False)
    _since: dict[str, int] = field(default_factory=lambda: {"verify": 0, "canary": 0}, init=False)

    def attach(self, urls: Sequence[str]) -> None:
        """Connect to these engines (at least one, each once), whose weights are unknown until ``update``.

        Raises WeightUpdateError on every rank where one doesn't answer, is not what the run expects,
        or can't be reached by the strategy.
        """
        self.close()
        self.committed_version = None
        error: Exception | None = None
        try:
            self._open(urls)
        except ENGINE_FAULTS as fault:
            error = fault
        self._share(error, "no engine for weight updates")

    def update(self, version: int) -> UpdateReport:
        """Send all weights and commit them as ``version``, checked as often as configured.

        The first update after ``attach``, and the first after a failure, is always checked. Waits for running requests.
        Raises on every rank: WeightUpdateRefusedError where requests kept running, WeightUpdateError where the update
        failed. What the source itself raises passes through, after an abort.
        """
        verify = self._is_due("verify", self.config.verify_every)
        score = self._is_due("canary", self.config.canary_every)
        previous, self.committed_version = self.committed_version, None
        title = f"weight update to version {version}"
        phases, started = Phases(), time.perf_counter()
        self.fence()
        try:
            paused = self._begin(phases, version, title)
            sent, received, partials = self._stream(phases, verify)
            # Failures are told from here on: up to the last bucket every rank is in the gathers, which none may leave.
            self._local(phases, "arrive", lambda s: s.arrive())
            self._share(phases.error, title)
            facts = self.source.all_gather(
                [sent, received, partials, self._foreign_hosts(), *self._static()]
            )
            self._conduct(phases, "end", self._end)
            tensors = self._verify(phases, [f[2] for f in facts if f[2]]) if verify else 0
            self._share(phases.error, title)
            ours = self._own_scores(phases) if score else None
            self._hand_back(phases, title)
            canary = self._canary(phases, ours) if ours is not None else None
            self.fence()
            # Fenced once more: the stream took its time, and another start may have the run by now.
            self._conduct(phases, "commit", partial(self._commit, version))
            self._share(phases.error, title)
        except WeightUpdateRefusedError:
            # Nothing was changed: whoever had paused already goes on generating.
            self.committed_version = previous
            raise
        except BaseException:
            self._abort(phases, version)
            raise
        self.committed_version = version
        self._count(verify=verify, canary=score)
        now, between = time.perf_counter(), self.source.bytes_between_nodes(self._plan or ())
        return UpdateReport(
            version=version,
            **count_bytes(facts, self.source.gather_bound(), between),
            seconds=dict(phases.seconds),
            verified=verify,
            tensors=tensors,
            update_s=now - started,
            stall_s=now - paused,
            canary=canary,
            network=rate * _GB if (rate := self.config.network_gb_per_s) else None,
        )

    def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """Until the next update the engines stop in the middle of their responses and let go of what they still have of
        the memory of ``tags``.

        Raises WeightUpdateError on every rank.
        """
        phases = Phases()
        self._conduct(phases, "drain", lambda e: e.each(lambda engine: let_go(engine, tags)))
        self._share(phases.error, "the engines' memory is not released")

    def close(self, *, at_once: bool = False) -> None:
        """Close the connections; the engines keep running, with the weights that they have.

        ``at_once``: don't wait for the engines to leave their broadcast groups.
        """
        if self._strategy is not None and not at_once:
            self._strategy.close()
        if self._engines is not None:
            self._engines.close()
        self._strategy = self._engines = None

    # --- the transaction's parts

    def _begin(self, phases: Phases, version: int, title: str) -> float:
        """Up to the open session; when the engines paused."""
        busy = self._conduct(phases, "drain", self._pause)
        self._share(phases.error, title)
        if (refused := self.agree(json.dumps(busy) if busy else None)) is not None:
            raise WeightUpdateRefusedError(f"{title}: {_BUSY}", json.loads(refused))
        paused = time.perf_counter()
        if self.leave_devices is not None:
            self._conduct(phases, "begin", lambda e: e.restore_released(["weights"]))
        label = f"{UNVERIFIED_VERSION}{version}"
        # Whoever asks an engine from here to the commit learns that its weights are no version's.
        self._conduct(phases, "begin", lambda e: e.each(lambda engine: engine.set_version(label)))
        mine = self._local(phases, "begin", lambda s: s.meeting_point())
        self._share(phases.error, title)
        points = self.source.all_gather(mine)
        self._local(phases, "begin", lambda s: s.begin(points))
        self._share(phases.error, title)
        return paused

    def _pause(self, engines: Engines) -> list[str]:
        """Stop generation everywhere; the URLs of engines that are too busy for it."""
        return engines.interrupt() if self.interrupts else engines.drain(self.config.timeout_s)

    def _stream(self, phases: Phases, verify: bool) -> tuple[int, int, list[Any] | None]:
        """Send this rank's buckets: their bytes, the bytes that came for them, parts of checksums."""
        assert self._plan is not None
        expected = None
        if verify and self._engines is not None and self._sends():
            expected = verification.ExpectedByLayout(self._engines)
        sent = received = 0
        buckets = self.source.gather(self._plan)
        while True:
            with phases.timed("gather"):
                bucket = next(buckets, None)
            if bucket is None:
                break
            received += bucket.received
            # After a failure the rest is gathered all the same: the other ranks are in that collective.
            if phases.error is not None:
                continue
            if bucket.tensors:
                sent += self._local(phases, "transfer", methodcaller("send", bucket.tensors)) or 0
            if bucket.tensors and expected is not None:
                phases.run("hash", expected.add, bucket.tensors)
            # At once: engines may be waiting for this rank's next bucket.
            if phases.error is not None and self._strategy is not None:
                self._strategy.abort()
        return sent, received, None if expected is None else expected.partials()

    def _end(self, engines: Engines) -> None:
        assert self._strategy is not None
        self._strategy.end()
        engines.each(lambda engine: engine.flush())

    def _verify(self, phases: Phases, partials: list[Any]) -> int:
        return (
            self._conduct(phases, "verify", lambda e: verification.compare_tensors(e, partials))
            or 0
        )

    def _own_scores(self, phases: Phases) -> list[list[float]]:
        """The trainer's log-probabilities of the canary's prompts, a collective of their own."""
        with phases.timed("canary"):
            return self.source.score(verification.canary_prompts(self.source.vocab_size))

    def _hand_back(self, phases: Phases, title: str) -> None:
        """Where they share devices, the trainer leaves them, and the engines take their memory again."""
        if self.leave_devices is not None:
            self.leave_devices()
            # Every rank has left.
            self._share(phases.error, title)
            self._conduct(phases, "end", lambda e: e.restore_released())

    def _canary(self, phases: Phases, ours: list[list[float]]) -> verification.CanaryReport | None:
        """Compare the engines' log-probabilities with the trainer's."""
        source = self.source
        prompts = verification.canary_prompts(source.vocab_size)
        tolerance = verification.canary_tolerance(self.config, source.dtype_name, source.num_layers)
        return self._conduct(
            phases,
            "canary",
            lambda e: verification.compare_scores(e, prompts, ours, tolerance, self._adapter),
        )

    def _commit(self, version: int, engines: Engines) -> None:
        engines.commit(version)

    def _abort(self, phases: Phases, version: int) -> None:
        if self._strategy is not None:
            self._strategy.abort()
        # Up to the canary they are paused under an unverified version; the canary and the commit let them generate.
        if self._conducts and self._engines is not None and phases.seconds.keys() & set(_RESUMED):
            self._engines.quarantine(f"{UNVERIFIED_VERSION}{version}")

    # --- who does what

    @property
    def _conducts(self) -> bool:
        return self.source.rank == 0

    def _sends(self) -> bool:
        return any(bucket.receiver == self.source.rank for bucket in self._plan or ())

    @property
    def _adapter(self) -> str | None:
        """Name of the engines' adapters that the update is scored with."""
        return None

    def _strategy_of(self, transfer: Transfer) -> Strategy:
        return STRATEGIES[self.config.strategy](transfer)

    def _open(self, urls: Sequence[str]) -> None:
        if self._plan is None:
            size = self.config.bucket_mib * MIB
            self._plan = self.source.plan(size, spread=STRATEGIES[self.config.strategy].spread)
        if not (self._conducts or self._sends()):
            return
        engines = Engines.connect(urls, self.open_engine, self.runner)
        dtype = getattr(torch, self.source.dtype_name)
        limit, folder = self.config.timeout_s, self.config.directory
        try:
            self._strategy = self._strategy_of(
                Transfer(self.source.rank, engines, self._plan, dtype, limit, folder)
            )
        except BaseException:
            engines.close()
            raise
        self._engines = engines

    def _conduct(self, phases: Phases, phase: str, call: Callable[[Engines], Any]) -> Any:
        if not self._conducts:
            return None
        if self._engines is None:
            raise ValueError("weight update: no engine is attached")
        return phases.run(phase, call, self._engines)

    def _local(self, phases: Phases, phase: str, call: Callable[[Strategy], Any]) -> Any:
        """A step of every rank that has a part in the transfer."""
        return None if self._strategy is None else phases.run(phase, call, self._strategy)

    def _static(self) -> tuple[int, int]:
        """On rank 0: how often bytes move to engines, and the bytes of all weights there."""
        if self._strategy is None or self._engines is None or self._plan is None:
            return 0, 0
        first = self._engines.first
        headers = (first.header([(t.name, t.shape) for t in b.tensors]) for b in self._plan)
        return self._strategy.copies, sum(header.bytes for header in headers)

    def _foreign_hosts(self) -> list[str]:
        """Hosts of engines that a sender's bytes must travel to."""
        if self._engines is None or self._strategy is None or not self._sends():
            return []
        return self._engines.foreign_hosts

    def _is_due(self, check: str, every: int) -> bool:
        if every == 0:
            return False
        return self.committed_version is None or self._since[check] + 1 >= every

    def _count(self, **done: bool) -> None:
        for check, was_done in done.items():
            self._since[check] = 0 if was_done else self._since[check] + 1

    def _share(self, error: Exception | None, title: str) -> None:
        ours = None
        if error is not None:
            name = "" if isinstance(error, EngineFaultError) else f"{type(error).__name__}: "
            engines = list(getattr(error, "engines", ()))
            ours = json.dumps([f"{name}{error}", engines, getattr(error, "attempts", UNBOUNDED)])
        if (first := self.agree(ours)) is not None:
            if ours is not None and ours != first:
                log.warning("%s: on trainer rank %d: %s", title, self.source.rank, error)
            reason, engines, attempts = json.loads(first)
            raise WeightUpdateError(f"{title}: {reason}", engines, attempts) from error
