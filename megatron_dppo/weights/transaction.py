"""The weight update as a transaction: either every tensor has arrived and is verified, or every rank raises."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import UNBOUNDED, EngineMismatchError
from megatron_dppo.engine.protocol import UNVERIFIED_VERSION
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.errors import AlteredMemoryError, RunError
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.system.lease import FencedError
from megatron_dppo.weights import canary, verification
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.engines import (
    ENGINE_FAULTS,
    Digests,
    EngineFaultError,
    Engines,
    OpenEngine,
)
from megatron_dppo.weights.phases import Phases
from megatron_dppo.weights.server.held_tensors import HeldTensors
from megatron_dppo.weights.server.server_state import MemoryTag
from megatron_dppo.weights.source import WeightSource
from megatron_dppo.weights.strategies import STRATEGIES
from megatron_dppo.weights.strategy import Strategy, Streamed

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
_GB = 10**9
_BUSY = "requests kept the engine busy beyond weight_sync.timeout_s"
_GENERATING_PHASES = ("canary", "commit")
"""Phases in which the engines generate. In all earlier phases they are paused."""


Agree = Callable[[str | None], str | None]
"""A collective: each trainer rank passes its failure or None; every rank gets the first failure by rank, or None.

With one rank it is the identity.
"""


class WeightUpdateError(RunError):
    """An update failed, or engines could not be attached. Every trainer rank raises it.

    After a failed update every attached engine is quarantined (paused, with an unverified version) until a complete
    update succeeds. There are two exceptions. If the failure comes before the unverified version is set, an engine
    keeps its version, and may still generate. With ``weight_sync.changes_only`` or ``engine.atomic_updates``, an engine
    that still holds the weights of the version before serves that version again.

    Attributes:
        engines: URLs of the engines known to be at fault; empty if unknown.
        attempts: number of failures in a row with the same message after which a retry is pointless.
    """

    def __init__(
        self, message: str, engines: Sequence[str] = (), attempts: int = UNBOUNDED
    ) -> None:
        super().__init__(message)
        self.engines = tuple(engines)
        self.attempts = attempts


class WeightUpdateRefusedError(WeightUpdateError):
    """Requests kept ``engines`` busy. All engines continue with their present weights and version."""


class AlteredEngineError(AlteredMemoryError):
    """An engine's weights have changed since they were verified."""


@dataclass(frozen=True)
class UpdateReport:
    """One committed update.

    Every rank reports the same byte counts. Every rank measures its own ``seconds``, ``update_s`` and ``stall_s``. Only
    rank 0 has ``tensors`` and ``canary``; other ranks have 0 and None.

    Attributes:
        version: the committed version.
        bytes: bytes of the weights as the engines load them.
        bytes_moved: bytes that trainer ranks exchanged to make tensors whole, plus the bytes sent to engines, once for
            each engine rank that receives them.
        bytes_bound: the fewest bytes that any plan moves into the engines: those that each engine rank keeps. With
            ``disk`` and adapters, all weights once.
        seconds: time that the caller waited, by phase: drain, begin, memory (comparison before the update), gather (the
            trainer's collectives, and packing), transfer (waiting for the engines), hash, arrive, end, verify, canary,
            commit.
        verified: whether every tensor was compared.
        tensors: number of compared tensors over all engine ranks.
        bytes_between_nodes: the part of ``bytes_moved`` that travels from one node to another: each hop of a message to
            another host. With ``disk`` and adapters, the gathers between nodes, and the bytes once for each engine host
            other than rank 0's.
        bytes_between_nodes_bound: the bytes of all weights, once for each engine host that has no sender.
        bytes_into_node_bound: the part of ``bytes_between_nodes_bound`` that must enter one node: all weights, or
            nothing if every engine host has a sender.
        update_s: seconds of the whole update.
        stall_s: seconds from the pause of the engines to the commit.
        canary: comparison of log-probabilities; None if this update had none.
        network: bytes/s that can enter a node; None if the configuration does not state it.
        sent_fraction: bytes sent over the bytes of all weights; None if every update sends all weights.
        busiest_over_mean: bytes of whole weights that the busiest trainer rank sends, over the mean, and that the
            busiest engine rank receives, over the mean. None without a plan of shards.
        held_update: the part of the merged adapters' change of the frozen model that the engines' weights hold, as its
            projection sum(h d) / sum(d^2). d is an element's exact change, h its change after rounding. None without
            merged adapters, and while they are zero.
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
    canary: canary.CanaryReport | None = None
    network: float | None = None
    sent_fraction: float | None = None
    held_update: float | None = None
    busiest_over_mean: tuple[float, float] | None = None

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {
            metric_names.UPDATE_BYTES: self.bytes,
            metric_names.UPDATE_BYTES_MOVED: self.bytes_moved,
            metric_names.UPDATE_BYTES_BOUND: self.bytes_bound,
            metric_names.UPDATE_BYTES_OVER_BOUND: self.bytes_moved / max(self.bytes_bound, 1),
            metric_names.UPDATE_BYTES_BETWEEN_NODES: self.bytes_between_nodes,
            metric_names.UPDATE_BYTES_BETWEEN_NODES_BOUND: self.bytes_between_nodes_bound,
            metric_names.UPDATE_BYTES_INTO_NODE_BOUND: self.bytes_into_node_bound,
            metric_names.UPDATE_SECONDS: self.update_s,
            metric_names.UPDATE_STALL: self.stall_s,
            metric_names.UPDATE_RATE: self.bytes / max(self.stall_s, 1e-9) / _GB,
        }
        if self.network is not None:
            values[metric_names.UPDATE_BOUND] = self.bytes_into_node_bound / self.network
        if self.sent_fraction is not None:
            values[metric_names.UPDATE_SENT_FRACTION] = self.sent_fraction
        if self.busiest_over_mean is not None:
            sender, receiver = self.busiest_over_mean
            values[metric_names.UPDATE_BUSIEST_SENDER] = sender
            values[metric_names.UPDATE_BUSIEST_RECEIVER] = receiver
        if self.held_update is not None:
            values[metric_names.UPDATE_HELD] = self.held_update
        if self.canary is not None:
            values[metric_names.CANARY_MAX] = self.canary.max_abs_diff
            values[metric_names.CANARY_MEAN] = self.canary.mean_abs_diff
            values[metric_names.CANARY_DECODE_MAX] = self.canary.decode_max_abs_diff
        for phase, seconds in self.seconds.items():
            values[f"weights/{phase}_s"] = seconds
        return values


def _mismatches_of(error: Exception | None) -> str | None:
    """Return the checksum mismatches of the engines at fault as one text; None if ``error`` has any other cause."""
    if not isinstance(error, EngineFaultError) or not error.faults:
        return None
    texts = []
    for url, fault in error.faults.items():
        if not isinstance(fault, verification.ChecksumMismatchError):
            return None
        texts.append(f"{url}: {fault}")
    return "; ".join(texts)


class RankFacts(NamedTuple):
    """One rank's part in an update, as all ranks share it.

    Attributes:
        sent_bytes: bytes sent to engines.
        moved_bytes: bytes that moved otherwise; see Streamed.
        between_nodes: the part of both that travelled to another node.
        partials: the rank's partial checksums; None if the rank hashed no tensor.
        foreign_hosts: engine hosts other than the rank's own; empty if the rank sends nothing.
        whole_bytes: bytes of all weights in the form that engines receive. Only rank 0's value is used.
        fewest_bytes: the fewest bytes that any plan moves into the engines. Only rank 0's value is used.
        held: the result of ``WeightSource.held_update``.
    """

    sent_bytes: int
    moved_bytes: int
    between_nodes: int
    partials: list[Any] | None
    foreign_hosts: list[str]
    whole_bytes: int
    fewest_bytes: int
    held: Sequence[float] = (0.0, 0.0)


def held_update(facts: Sequence[RankFacts]) -> float | None:
    """Compute UpdateReport's ``held_update`` from the sums of all ranks."""
    along = sum(rank_facts.held[0] for rank_facts in facts)
    size = sum(rank_facts.held[1] for rank_facts in facts)
    return along / size if size > 0 else None


def count_bytes(facts: Sequence[RankFacts]) -> dict[str, int]:
    """Compute the byte counts of an UpdateReport from the facts of all ranks."""
    sent_bytes = sum(rank_facts.sent_bytes for rank_facts in facts)
    moved_bytes = sum(rank_facts.moved_bytes for rank_facts in facts)
    hosts_by_sender = [set(f.foreign_hosts) for f in facts if f.sent_bytes]
    # The engine hosts without a sender: every sender reaches them through the network.
    foreign_to_all = set.intersection(*hosts_by_sender)
    whole_bytes = facts[0].whole_bytes
    return {
        "bytes": sent_bytes,
        "bytes_moved": moved_bytes + sent_bytes,
        "bytes_bound": facts[0].fewest_bytes,
        "bytes_between_nodes": sum(rank_facts.between_nodes for rank_facts in facts),
        "bytes_between_nodes_bound": whole_bytes * len(foreign_to_all),
        "bytes_into_node_bound": whole_bytes if foreign_to_all else 0,
    }


def no_fence() -> None:
    """Allow every change of the engines."""


@dataclass(eq=False)
class WeightUpdater:
    """Sends the trainer's weights to the engines. Every method but ``held_tensors`` is collective over all trainer
    ranks.

    Attributes:
        source: the trainer's weights.
        config: the section ``weight_sync`` of the run's configuration.
        agree: collective that shares the first failure.
        open_engine: connects to an engine; called on each rank whose strategy has ``calls_engines``.
        runner: runs the calls to engines.
        fence: collective; raises on every rank if this trainer may no longer change the engines.
        interrupts: whether an update interrupts running responses. They continue after the update. If False, an update
            waits until running responses have ended.
        leave_devices: called after the trainer's weights have been read. It frees the trainer's memory, so that engines
            on the same devices can restore all of their memory. None if trainer and engines use different devices.
        compare_before_every: before every n-th update, compare the engines' weights with the checksums of the served
            version, if it was verified; otherwise before the first update after a verified version. 0: never.
        quantization: "fp8" if the engines' weights are quantised, else None. It selects the canary's scores and bounds.
        is_atomic: whether the engines keep whole messages until the end of an update (``engine.atomic_updates``).
        committed_version: the version that the engines run, known on every rank; None before the first update and
            while the engines are quarantined.
    """

    source: WeightSource
    config: WeightSyncConfig
    agree: Agree
    open_engine: OpenEngine
    runner: AsyncRunner
    fence: Callable[[], None] = no_fence
    interrupts: bool = field(default=False, kw_only=True)
    leave_devices: Callable[[], None] | None = field(default=None, kw_only=True)
    compare_before_every: int = field(default=0, kw_only=True)
    quantization: str | None = field(default=None, kw_only=True)
    is_atomic: bool = field(default=False, kw_only=True)
    committed_version: int | None = field(default=None, init=False)
    _strategy: Strategy | None = field(default=None, init=False)
    _engines: Engines | None = field(default=None, init=False)
    _updates_since: dict[str, int] = field(
        default_factory=lambda: {"verify": 0, "canary": 0, "memory": 0}, init=False
    )
    _engines_take_changes: bool = field(default=False, init=False)
    _digests: Digests | None = field(default=None, init=False)
    _has_digests: bool = field(default=False, init=False)

    def attach(self, urls: Sequence[str]) -> None:
        """Connect to the engines at ``urls`` (at least one, each once). Their weights are unknown until ``update``.

        Raises:
            WeightUpdateError: on every rank, if an engine does not answer, does not match the run's configuration, or
                cannot be reached by the strategy.
        """
        self.close()
        self.committed_version = None
        self._keep_digests(None, exist=False)
        error: Exception | None = None
        try:
            failpoint("update/attach")
            self._open(urls)
        except ENGINE_FAULTS as fault:
            error = fault
        self._share(error, "no engine for weight updates")
        try:
            self._transfer.plan(self.source)
        except EngineMismatchError as mismatch:
            error = mismatch
        self._share(error, "no engine for weight updates")
        if self.config.changes_only:
            own_answer = self._engines is None or self._engines.take_changes
            self._engines_take_changes = all(self.source.all_gather(own_answer))

    def update(self, version: int) -> UpdateReport:
        """Send all weights and commit them as ``version``.

        The checks run as often as configured (0: never). A configured check also runs in the first update after
        ``attach`` or a failure.

        Raises:
            WeightUpdateRefusedError: on every rank, if requests kept running.
            WeightUpdateError: on every rank, if the update failed.
            AlteredEngineError: on every rank, if an engine's weights changed since they were verified.
            Exception: an exception of ``source`` is raised again after the update is aborted.
        """
        verify = self._is_due("verify", self.config.verify_every)
        score = self._is_due("canary", self.config.canary_every)
        previous_version = self.committed_version
        self.committed_version = None
        title = f"weight update to version {version}"
        phases = Phases()
        started_at = time.perf_counter()
        self.fence()
        with self._undone_on_failure(phases, version, previous_version):
            compared_version = self._compared_version(phases, previous_version)
            sends_changes = self._sends_changes(compared_version)
            paused_at = self._begin(phases, version, title, compared_version)
            if not verify:
                # The present digests are of the previous version, and this update computes no new ones.
                self._keep_digests(None, exist=False)
            streamed = self._stream(phases, verify, sends_changes=sends_changes)
            # Share failures only now: while whole tensors are gathered, no rank may leave the others.
            phases.run("arrive", self._transfer.arrive)
            self._share(phases.error, title)
            facts = self._gather_facts(streamed)
            self._on_rank_0(phases, "end", self._end)
            compared_tensors = 0
            if verify:
                all_partials = [rank.partials for rank in facts if rank.partials]
                compared_tensors = self._verify(phases, all_partials)
            self._share(phases.error, title)
            trainer_scores = self._trainer_scores(phases) if score else None
            self._hand_over_devices(phases, title)
            canary_report = None
            if trainer_scores is not None:
                canary_report = self._canary(phases, trainer_scores)
            # Check the fence again: the stream took time, and another start may have taken over the run.
            self.fence()
            self._on_rank_0(phases, "commit", self._commit, version)
            self._share(phases.error, title)
            failpoint("update/committed")
        self.committed_version = version
        # A comparison that is due while the served version has no digests stays due until a version has digests.
        self._count(verify=verify, canary=score, memory=compared_version is not None)
        committed_at = time.perf_counter()
        counts = count_bytes(facts)
        return UpdateReport(
            version=version,
            **counts,
            sent_fraction=self._sent_fraction(counts["bytes"], facts[0].whole_bytes),
            held_update=held_update(facts),
            busiest_over_mean=self._transfer.busiest_over_mean,
            seconds=dict(phases.seconds),
            verified=verify,
            tensors=compared_tensors,
            update_s=committed_at - started_at,
            stall_s=committed_at - paused_at,
            canary=canary_report,
            network=self._network_rate(),
        )

    @contextmanager
    def _undone_on_failure(
        self, phases: Phases, version: int, previous_version: int | None
    ) -> Iterator[None]:
        """Enclose the update to ``version``. If the update fails, make sure that no engine serves this version."""
        previous_digests = self._digests
        try:
            yield
        except WeightUpdateRefusedError:
            # No engine has changed, and the engines that had paused generate again.
            self.committed_version = previous_version
            raise
        except AlteredEngineError:
            # The engines are paused with an unverified version, and stay so.
            self._transfer.abort()
            raise
        except BaseException as error:
            self._abort(phases, version)
            # If another start has taken over the run, the engines belong to that start.
            if not isinstance(error, FencedError):
                suspects = getattr(error, "engines", ())
                self._return_to(previous_version, previous_digests, suspects)
            raise

    def held_tensors(self) -> list[HeldTensors]:
        """Return the tensors that each engine holds. Only rank 0 calls this method; it is not collective.

        Raises EngineFaultError that names the engines that do not answer.
        """
        assert self._engines is not None
        return list(self._engines.each(EngineWeights.held_tensors).values())

    def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """Interrupt the engines' responses until the next update, and release their memory of ``tags``.

        Raises WeightUpdateError on every rank.
        """
        if "weights" in tags:
            self._keep_digests(None, exist=False)
        phases = Phases()
        self._on_rank_0(phases, "drain", Engines.interrupt_and_release, tags)
        self._share(phases.error, "the engines' memory is not released")

    def close(self, *, at_once: bool = False) -> None:
        """Close the connections. The engines keep running with their present weights.

        ``at_once``: abort the group of updates, and do not wait for the engines to leave it.
        """
        if self._strategy is not None and at_once:
            self._strategy.abort()
        elif self._strategy is not None:
            self._strategy.close()
        if self._engines is not None:
            self._engines.close()
        self._engines = None

    def _begin(
        self, phases: Phases, version: int, title: str, compared_version: int | None
    ) -> float:
        """Pause the engines and open the transfer on every rank. Returns the time when all engines were paused.

        Before the transfer opens, the engines' weights are compared with the checksums of ``compared_version``. If it
        is None, nothing is compared.
        """
        busy_urls = self._on_rank_0(phases, "drain", self._pause)
        self._share(phases.error, title)
        own_refusal = json.dumps(busy_urls) if busy_urls else None
        refusal = self.agree(own_refusal)
        if refusal is not None:
            raise WeightUpdateRefusedError(f"{title}: {_BUSY}", json.loads(refusal))
        paused_at = time.perf_counter()
        if self.leave_devices is not None:
            self._on_rank_0(phases, "begin", Engines.restore_released, ["weights"])
        # Until the commit, engines report the version ``unverified-N``, so that no response counts as a response of a
        # committed version.
        self._on_rank_0(phases, "begin", Engines.set_version, f"{UNVERIFIED_VERSION}{version}")
        if compared_version is not None:
            # Compare before the session opens: an engine with an open session answers no request for checksums.
            self._compare_memory(phases, compared_version)
        meeting_point = phases.run("begin", self._transfer.meeting_point)
        self._share(phases.error, title)
        meeting_points = self.source.all_gather(meeting_point)
        phases.run("begin", self._transfer.begin, meeting_points)
        self._share(phases.error, title)
        return paused_at

    def _pause(self, engines: Engines) -> list[str]:
        """Stop generation on every engine. Returns the URLs of engines that stayed busy."""
        if self.interrupts:
            return engines.interrupt()
        return engines.drain(self.config.timeout_s)

    def _stream(self, phases: Phases, verify: bool, *, sends_changes: bool) -> Streamed:
        """Send all weights. With ``sends_changes``, send only the changes since the last update. Collective."""
        return self._transfer.stream(
            self.source, phases, verify=verify, sends_changes=sends_changes
        )

    def _end(self, engines: Engines) -> None:
        """Close the transfer, and drop the engines' cached keys and values of the old weights."""
        self._transfer.end()
        engines.flush()

    def _verify(self, phases: Phases, partials: list[Any]) -> int:
        """Compare the engines' checksums with all senders' ``partials``. Returns the number of tensors."""
        transfer = self._transfer
        digests = self._on_rank_0(phases, "verify", lambda _: transfer.digests(partials))
        self._keep_digests(digests, exist=True)
        if digests is None:
            return 0
        return self._on_rank_0(phases, "verify", verification.compare_tensors, digests) or 0

    def _keep_digests(self, digests: Digests | None, *, exist: bool) -> None:
        """Replace the kept checksums of the engines' weights.

        ``digests``: the new checksums on rank 0; None on other ranks. ``exist``: whether rank 0 has checksums, the same
        on every rank.
        """
        self._digests = digests
        self._has_digests = exist

    def _sent_fraction(self, sent_bytes: int, whole_bytes: int) -> float | None:
        """Return ``sent_bytes`` over the bytes of all weights; None if every update sends all weights."""
        if not self.config.changes_only:
            return None
        return sent_bytes / max(whole_bytes, 1)

    def _network_rate(self) -> float | None:
        """Return the bytes/s that can enter a node; None if the configuration does not state them."""
        if not self.config.network_gb_per_s:
            return None
        return self.config.network_gb_per_s * _GB

    def _compared_version(self, phases: Phases, previous_version: int | None) -> int | None:
        """Return the version whose checksums the engines must have before the update; None: no comparison. Collective.

        If an engine was started again, it does not hold ``previous_version``. Then nothing is compared, and all engines
        receive all weights.
        """
        is_due = self._sends_changes(previous_version) or self._is_memory_due(previous_version)
        if not is_due:
            return None
        own_notice = None
        restarted_urls = self._on_rank_0(phases, "drain", Engines.restarted)
        if restarted_urls:
            own_notice = json.dumps(restarted_urls)
        # Only rank 0 can have a notice; ``agree`` gives it to every rank.
        notice = self.agree(own_notice)
        if notice is None:
            return previous_version
        log.warning(
            "engines at %s were started again after weight version %s: all weights are sent",
            ", ".join(json.loads(notice)),
            previous_version,
        )
        return None

    def _sends_changes(self, previous_version: int | None) -> bool:
        """Return whether the update sends only the changes since ``previous_version``. All ranks return the same value.

        The engines must hold ``previous_version``: the update first compares their weights with its checksums.
        """
        if previous_version is None or not self._has_digests or self.leave_devices is not None:
            return False
        return self._engines_take_changes

    def _is_memory_due(self, previous_version: int | None) -> bool:
        """Whether ``compare_before_every`` asks for a comparison of the engines' weights before this update.

        A version that was not verified as it arrived has no checksums. So with ``verify_every`` above 1 the comparison
        may come up to ``verify_every`` - 1 updates later.
        """
        if not self.compare_before_every:
            return False
        if previous_version is None or not self._has_digests:
            # There are no checksums to compare with.
            return False
        if self.leave_devices is not None:
            # Engines on shared devices have released their weights.
            return False
        return self._updates_since["memory"] + 1 >= self.compare_before_every

    def _compare_memory(self, phases: Phases, version: int) -> None:
        """Compare the paused engines' weights with the verified checksums of ``version``. Collective.

        Raises AlteredEngineError on every rank. A server that does not answer fails the update as in any other phase.
        """
        if self._digests is not None:
            self._on_rank_0(phases, "memory", verification.compare_tensors, self._digests)
        own_mismatch = _mismatches_of(phases.error)
        if own_mismatch is not None:
            # AlteredEngineError reports the mismatch, not the failure of this update.
            phases.error = None
        mismatch = self.agree(own_mismatch)
        if mismatch is not None:
            raise AlteredEngineError(
                f"engines' weights changed after they were verified as version {version}: {mismatch}; "
                f"{AlteredMemoryError.CONSEQUENCE}"
            )

    def _prompts(self) -> list[list[int]]:
        count = canary.PROMPTS if self.quantization is None else canary.FP8_PROMPTS
        return canary.canary_prompts(self.source.vocab_size, count)

    def _trainer_scores(self, phases: Phases) -> canary.TrainerScores:
        """Compute the trainer's log-probabilities of the canary's prompts, by prompt and token. Collective."""
        prompts = self._prompts()
        source = self.source
        with phases.timed("canary"):
            if self.quantization is None:
                return canary.TrainerScores(source.score(prompts))
            return canary.TrainerScores(
                source.score(prompts, rounding="fp8"),
                canary.Fp8Noise(
                    source.score(prompts, rounding="fp8_twice"),
                    source.score(prompts, rounding="fp8_scaled"),
                    is_exact=source.rounds_as_engines,
                ),
            )

    def _hand_over_devices(self, phases: Phases, title: str) -> None:
        """On shared devices: free the trainer's memory, then restore the engines' memory. Elsewhere do nothing."""
        if self.leave_devices is not None:
            self.leave_devices()
            # This collective makes sure that every rank has left the devices.
            self._share(phases.error, title)
            self._on_rank_0(phases, "end", Engines.restore_released)

    def _canary(
        self, phases: Phases, trainer_scores: canary.TrainerScores
    ) -> canary.CanaryReport | None:
        """Compare the engines' log-probabilities with ``trainer_scores``."""
        source = self.source
        prompts = self._prompts()
        precision = self.quantization or source.dtype_name
        tolerance = canary.canary_tolerance(self.config, precision, source.num_layers)
        # A configured bound replaces the bound by the model's noise.
        noise = trainer_scores.noise if self.config.canary_mean is None else None
        return self._on_rank_0(
            phases,
            "canary",
            canary.compare_scores,
            prompts,
            trainer_scores.values,
            tolerance,
            source.vocab_size,
            self._adapter,
            is_routed=source.is_routed,
            noise=noise,
        )

    def _commit(self, engines: Engines, version: int) -> None:
        """Make the engines report ``version`` and resume generation."""
        engines.commit(version)

    def _abort(self, phases: Phases, version: int) -> None:
        failpoint("update/abort")
        self._transfer.abort()
        if not self._is_rank_0 or self._engines is None:
            return
        # Before the canary, the engines need no quarantine: they are paused with an unverified version already, unless
        # ``_begin`` failed before it set this version. From the canary on, the engines generate.
        if any(phase in phases.seconds for phase in _GENERATING_PHASES):
            self._engines.quarantine(f"{UNVERIFIED_VERSION}{version}")

    def _return_to(
        self, version: int | None, digests: Digests | None, suspects: Sequence[str]
    ) -> None:
        """After an interrupted update, make the engines serve ``version`` again if they still hold it.

        An engine loads kept messages at the end of an update. Before that, its weights have the checksums ``digests``,
        which only rank 0 has.
        """
        if self._engines_keep_version and version is not None and digests is not None:
            assert self._engines is not None
            self._engines.return_to(version, digests, suspects)

    @property
    def _engines_keep_version(self) -> bool:
        """Whether engines may still hold the previous version when an update is interrupted.

        Engines apply received changes (``changes_only``) only at the update's end, and with ``is_atomic`` also whole
        messages.
        """
        return self.config.changes_only or self.is_atomic

    @property
    def _is_rank_0(self) -> bool:
        return self.source.rank == 0

    @property
    def _adapter(self) -> str | None:
        """The name of the adapters that the engines use to score the canary's prompts; None without adapters."""
        return None

    def _new_strategy(self) -> Strategy:
        return STRATEGIES[self.config.strategy](self.source, self.config)

    @property
    def _transfer(self) -> Strategy:
        """The strategy. It is made once, and used for all updates."""
        if self._strategy is None:
            self._strategy = self._new_strategy()
        return self._strategy

    def _open(self, urls: Sequence[str]) -> None:
        """Connect to the engines if this rank calls them."""
        if not self._transfer.calls_engines:
            return
        engines = Engines.connect(urls, self.open_engine, self.runner)
        try:
            self._transfer.attach(engines)
        except BaseException:
            engines.close()
            raise
        self._engines = engines

    def _on_rank_0(
        self,
        phases: Phases,
        phase: str,
        call: Callable[Concatenate[Engines, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T | None:
        """Run ``call(engines, *arguments, **options)`` on rank 0 alone."""
        if not self._is_rank_0:
            return None
        if self._engines is None:
            raise ValueError("weight update: no engine is attached")
        return phases.run(phase, call, self._engines, *arguments, **options)

    def _gather_facts(self, streamed: Streamed) -> list[RankFacts]:
        """Return the RankFacts of all ranks, by rank. Collective."""
        transfer = self._transfer
        own_facts = RankFacts(
            streamed.sent,
            streamed.moved,
            streamed.between_nodes,
            streamed.partials,
            transfer.foreign_hosts,
            transfer.whole_bytes,
            transfer.fewest_bytes,
            self.source.held_update(),
        )
        return [RankFacts(*values) for values in self.source.all_gather(list(own_facts))]

    def _is_due(self, check: str, period: int) -> bool:
        """Whether this update makes ``check``. Every ``period``-th update makes the check; 0: no update makes it."""
        if check == "verify" and self._engines_keep_version:
            # The next update may send only changes, and changes may be applied only to verified weights. After an
            # interrupted update, engines serve only verified weights again.
            return True
        if period == 0:
            return False
        return self.committed_version is None or self._updates_since[check] + 1 >= period

    def _count(self, **checks: bool) -> None:
        """Count the updates since each check. ``checks``: whether this update made the check, by its name."""
        for check, was_made in checks.items():
            self._updates_since[check] = 0 if was_made else self._updates_since[check] + 1

    def _share(self, error: Exception | None, title: str) -> None:
        """Raise WeightUpdateError on every rank if any rank has an ``error``. Collective."""
        own_failure = None
        if error is not None:
            name = ""
            if not isinstance(error, EngineFaultError):
                name = f"{type(error).__name__}: "
            engines = list(getattr(error, "engines", ()))
            attempts = getattr(error, "attempts", UNBOUNDED)
            own_failure = json.dumps([f"{name}{error}", engines, attempts])
        first_failure = self.agree(own_failure)
        if first_failure is not None:
            if own_failure is not None and own_failure != first_failure:
                log.warning("%s: on trainer rank %d: %s", title, self.source.rank, error)
            reason, engines, attempts = json.loads(first_failure)
            raise WeightUpdateError(f"{title}: {reason}", engines, attempts) from error
