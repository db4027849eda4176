"""What a rollout batch is, and where it comes from: the engine, in the step that trains on it or some steps ahead in
the background; or batches that an earlier run saved.

The bound on staleness is a gate on the beginning of batches. Batch n is trained on from version n - 1, so it may begin
once the trainer holds version n - 1 - ``max_staleness``, and no token of it can be older. Batches are trained on in the
order in which their prompts were drawn, so nothing is ever dropped for its age, and long responses are trained on as
often as short ones. With servers that keep up there is no other order that keeps the bound: every batch begins as soon
as the gate opens, and is as old as it may be when its turn comes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from megatron_dppo.config.data_schema import Credit
from megatron_dppo.config.schema import AlgorithmConfig, RolloutConfig
from megatron_dppo.data import seal as seals
from megatron_dppo.data.batch_file import BatchFormatError, SavedBatch, batch_path
from megatron_dppo.data.columns import LOSS_COLUMNS
from megatron_dppo.data.sampling import ReturningSampler, Sampler
from megatron_dppo.data.seal import AlteredWeightsError, Origin, Seal, SealError
from megatron_dppo.data.trajectory import Outline, Problem, Stamp, Trajectory
from megatron_dppo.environments.episodes import Episodes
from megatron_dppo.fleet.generation import GenerationJob
from megatron_dppo.loop import rollout_figures
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.loop.exchange import announce, own_positions, owner
from megatron_dppo.loop.scoring import (
    ComponentSums,
    GroupQuota,
    ScoredGeneration,
    Scorer,
    Selection,
)
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.progress import PhaseTimer
from megatron_dppo.trainer.collectives import all_gather_json, on_every_rank
from megatron_dppo.trainer.topology import Topology

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutBatch:
    """What a step trains on.

    ``outlines``: of all trajectories, groups adjacent, the same on every rank. ``trajectories``: by position, those
    that this rank holds as a leader; a learner takes them out as it delivers them.
    ``figures``: metrics of the batch and of how it came about.
    ``sampler``: the data's position right after this batch, where a run resumed after this step goes on.
    ``seal``: of a saved batch, if its file has one; a generated batch gets its seal from ``BatchSeals``.
    ``environment_faults``: what went wrong with environments since the batch before, on all ranks.
    """

    outlines: list[Outline]
    trajectories: dict[int, Trajectory]
    figures: dict[str, float]
    sampler: dict[str, Any]
    seal: Seal | None = None
    environment_faults: Counter[str] = field(default_factory=Counter)


def gathered_faults(episodes: Episodes | None) -> Counter[str]:
    """Of all ranks, since this was asked last. Collective where there are ``episodes``."""
    if episodes is None:
        return Counter()
    return sum(map(Counter, all_gather_json(episodes.take_faults())), Counter[str]())


class RolloutSource(Protocol):
    """Where rollout batches come from. Every method is collective."""

    def collect(self, step: int) -> RolloutBatch:
        """The batch of ``step``; steps are asked for in order."""

    def settle(self, version: int) -> None:
        """Wait for what an update may not interrupt; the trainer holds weights ``version`` by now."""

    def run_ahead(self, version: int) -> None:
        """Have further batches generated in the background, as many as weights ``version`` allow."""


@dataclass
class _Draft:
    """A batch in the making. Groups are counted in the order in which their problems were drawn.

    ``problems``, ``rows``: of all leaders, the same on every rank; a row follows when its group is judged.
    ``groups``: this rank's by position. ``generation``: this rank's part of the latest round, which is
    over once ``received``. ``drawn``: indices of its problems.
    """

    step: int
    problems: list[Problem] = field(default_factory=list)
    rows: list[rollout_figures.GroupRow] = field(default_factory=list)
    groups: dict[int, list[Trajectory]] = field(default_factory=dict)
    rounds: int = 0
    generation: ScoredGeneration | None = None
    received: bool = False
    drawn: list[int] = field(default_factory=list)
    seconds: float = 0.0
    waited: float = 0.0
    redrawn: int = 0
    components: ComponentSums = field(default_factory=ComponentSums)

    @property
    def flat(self) -> list[bool]:
        """Whether each judged group has zero variance."""
        return [row.flat for row in self.rows]

    @property
    def unjudged(self) -> range:
        """Positions of the groups that no row tells of yet."""
        return range(len(self.rows), len(self.problems))


@dataclass
class GeneratedRollouts:
    """Batches from ``engine``. ``job``: a template that carries all but the problems and what their seeds are for.

    At most ``rollout.max_staleness`` batches are under way beside the one that is asked for. ``steps``: of the run.
    ``episodes``: what ``job`` plays, if it does; ``credit``: as ``environment.credit``.
    """

    rollout: RolloutConfig
    algorithm: AlgorithmConfig
    topology: Topology
    engine: EngineSession
    scorer: Scorer
    job: GenerationJob
    problems: Sequence[Problem]
    sampler: ReturningSampler
    timer: PhaseTimer
    steps: int
    episodes: Episodes | None = None
    credit: Credit = "trajectory"
    _drafts: deque[_Draft] = field(default_factory=deque)
    _waited_s: float = 0.0
    _clock: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._quota = GroupQuota.of(self.rollout)
        self._clock = self._clocks()

    def collect(self, step: int) -> RolloutBatch:
        """The batch of ``step``, verified and with advantages; meanwhile further ones are generated.

        Raises StalenessError, RunStoppedError and what an engine that can't be brought back raises.
        """
        if not self._drafts:
            self._begin(step)
        draft = self._drafts[0]
        assert draft.step == step
        if not self._drains:
            self.run_ahead(step - 1)
        self._complete(draft, step - 1)
        self._drafts.popleft()
        # What later batches have drawn by now, a resumed run draws for them anew.
        ahead = [index for later in self._drafts for index in later.drawn]
        position = self.sampler.state_dict(ahead)
        # Before this batch's last rewards are waited for: the servers go on meanwhile.
        self.run_ahead(step - 1)
        if draft.unjudged:
            self._judge(draft, step - 1)
        return self._hand_over(draft, position)

    def settle(self, version: int) -> None:
        """Where updates don't interrupt, wait for all batches under way."""
        if self._drains:
            for draft in self._drafts:
                self._complete(draft, version)

    def run_ahead(self, version: int) -> None:
        """Begin every batch that ``version`` allows, unless the run ends before it."""
        begun = self._drafts[-1].step if self._drafts else version + 1
        last = min(version + 1 + self.rollout.max_staleness, self.steps)
        for step in range(begun + 1, last + 1):
            self._begin(step)

    # --- a batch's parts

    @property
    def _drains(self) -> bool:
        """Whether updates wait for what is under way."""
        return self.rollout.interrupt == "drain"

    def _begin(self, step: int) -> None:
        draft = _Draft(step)
        self._drafts.append(draft)
        self._ask(draft, self._quota.ask((), 0))

    def _complete(self, draft: _Draft, version: int) -> None:
        """Wait for its responses. Further rounds of a filter, which rewards decide on, run here."""
        if draft.received:
            return
        self._receive(draft, version)
        if self._quota.filtering:
            self._judge(draft, version)
            while count := self._quota.ask(draft.flat, draft.rounds):
                self._ask(draft, count)
                self._receive(draft, version)
                self._judge(draft, version)

    def _ask(self, draft: _Draft, count: int) -> None:
        """Start a round: ``count`` further problems, answered in the background."""
        drawn = self.sampler.next(count)
        draft.drawn += drawn
        draft.problems += [self.problems[i] for i in drawn]
        draft.rounds += 1
        draft.received = False
        positions = own_positions(draft.unjudged, self.topology)
        seeds = self.job.seeds
        if seeds is not None:
            seeds = replace(seeds, purpose=f"step {draft.step}", positions=positions)
        problems = [draft.problems[p] for p in positions]
        job = replace(self.job, problems=problems, seeds=seeds)
        again = f", round {draft.rounds}" if draft.rounds > 1 else ""
        draft.generation = ScoredGeneration(
            self.engine, self.scorer, job, f"step {draft.step}: generate{again}", draft.step
        )

    def _receive(self, draft: _Draft, version: int) -> None:
        """Wait for the round's responses. ``version``: of the weights that the trainer holds."""
        assert draft.generation is not None
        began = time.monotonic()
        with self.timer("generate"):
            draft.generation.wait(version)
        waited = time.monotonic() - began
        draft.waited += waited
        self._waited_s += waited
        draft.received = True

    def _judge(self, draft: _Draft, version: int) -> None:
        """Verify this rank's new groups, and tell every rank how all of them did. ``version``: as of ``_receive``."""
        assert draft.generation is not None
        new = own_positions(draft.unjudged, self.topology)
        with self.timer("reward"):
            scored = draft.generation.scored(self.algorithm, self.credit, version=version)
            draft.components.add(draft.generation.components.to_json())
            draft.groups |= dict(zip(new, self._groups(scored), strict=True))
            rows_by_rank = all_gather_json(
                [
                    [rollout_figures.GroupRow.of(draft.groups[p]) for p in new],
                    draft.generation.seconds,
                    draft.generation.redrawn,
                ]
            )
        shares = [iter(rows_by_rank[leader][0]) for leader in self.topology.leaders]
        draft.rows += [
            rollout_figures.GroupRow(*next(shares[owner(p, self.topology)]))
            for p in list(draft.unjudged)
        ]
        # A round lasts as long as its slowest leader's part.
        draft.seconds += max(seconds for _, seconds, _ in rows_by_rank)
        draft.redrawn += sum(redrawn for *_, redrawn in rows_by_rank)

    def _hand_over(self, draft: _Draft, position: dict[str, Any]) -> RolloutBatch:
        """The batch on every rank, and its figures."""
        selection = self._quota.choose(draft.flat)
        chosen = [t for p in selection.positions if p in draft.groups for t in draft.groups[p]]
        with self.timer("exchange"):
            batch, trajectories = announce(
                chosen, self.topology, self.job.group_size, selection.positions
            )
        rollout_figures.check_staleness(batch, draft.step, self.rollout.max_staleness)
        figures = rollout_figures.generated_figures(draft.rows)
        figures |= draft.components.means()
        figures |= rollout_figures.trained_figures(batch)
        figures |= rollout_figures.staleness_figures(batch, draft.step)
        figures |= rollout_figures.interruption_figures(batch)
        if draft.redrawn:
            figures[names.REDRAWN] = draft.redrawn
        faults = gathered_faults(self.episodes)
        if self.episodes is not None:
            figures[names.ENVIRONMENT_FAULTS] = faults.total()
        figures |= rollout_figures.speed_figures(figures[names.TOKENS], draft.seconds, draft.waited)
        figures |= self._waiting()
        if self._quota.filtering:
            figures |= rollout_figures.selection_figures(draft.rows, selection, draft.rounds)
            self._warn_of_filling(draft, selection)
        return RolloutBatch(batch, trajectories, figures, position, environment_faults=faults)

    def _clocks(self) -> tuple[float, ...]:
        """In seconds: now, how long trainers have waited for responses, and how long this rank's slots were
        busy."""
        return time.monotonic(), self._waited_s, self.engine.busy_s

    def _waiting(self) -> dict[str, float]:
        """Shares of the time since the batch before: when trainers waited for responses, and when a leader had nothing
        to generate; means over the leaders."""
        before, self._clock = self._clock, self._clocks()
        elapsed, waited, busy = (now - then for now, then in zip(self._clock, before, strict=True))
        elapsed = max(elapsed, 1e-9)
        shares = all_gather_json([waited / elapsed, max(0.0, 1 - busy / elapsed)])
        of_leaders = [shares[leader] for leader in self.topology.leaders]
        means = [sum(column) / len(of_leaders) for column in zip(*of_leaders, strict=True)]
        return {names.TRAINERS_WAITED: means[0], names.SERVERS_IDLE: means[1]}

    def _warn_of_filling(self, draft: _Draft, selection: Selection) -> None:
        if selection.filled:
            log.warning(
                "step %d: %d of %d groups have zero variance: %d rounds of generation (%d groups) found no more",
                draft.step,
                selection.filled,
                self._quota.wanted,
                draft.rounds,
                len(draft.rows),
            )

    def _groups(self, trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
        size = self.job.group_size
        return [list(trajectories[i : i + size]) for i in range(0, len(trajectories), size)]


class ReplayedRollouts:
    """The batches in the folder ``rollout.replay_from`` (``rollout.save`` of the run that generated them).

    Each leader reads the trajectories that it would have generated, and no others. The batches are checked against
    the training ``problems`` that ``sampler`` draws, and the prompts of ``origin``.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        topology: Topology,
        problems: Sequence[Problem],
        sampler: Sampler,
        origin: Origin,
    ) -> None:
        assert rollout.replay_from is not None
        self._folder = Path(rollout.replay_from)
        self._rollout = rollout
        self._topology = topology
        self._problems = problems
        self._sampler = sampler
        self._origin = origin

    def collect(self, step: int) -> RolloutBatch:
        """The saved batch of ``step``. Raises BatchFormatError, on all ranks, where it is not there or another's."""
        drawn, size = self._sampler.next(self._rollout.prompts_per_step), self._rollout.group_size
        wanted = [self._problems[i] for i in drawn]
        trajectories, seal = on_every_rank(lambda: self._read(step, wanted), error=BatchFormatError)
        outlines, by_position = announce(trajectories, self._topology, size, range(len(wanted)))
        figures = rollout_figures.generated_figures(
            rollout_figures.rows_of(outlines, size)
        ) | rollout_figures.staleness_figures(outlines, step)
        return RolloutBatch(outlines, by_position, figures, self._sampler.state_dict(), seal)

    def _read(self, step: int, wanted: Sequence[Problem]) -> tuple[list[Trajectory], Seal | None]:
        """This rank's trajectories, of the checked batch, and its seal."""
        try:
            saved = SavedBatch(self._folder, step)
        except FileNotFoundError as error:
            raise BatchFormatError(
                f"rollout.replay_from: no batch of step {step} in {self._folder} ({batch_path(self._folder, step)})"
            ) from error
        size = self._rollout.group_size
        if len(saved.problems) != len(wanted) * size:
            raise BatchFormatError(
                f"rollout.replay_from: the batch of step {step} in {self._folder} has {len(saved.problems)} "
                f"responses, expected {len(wanted)} prompts x group_size {size}"
            )
        if not self._rollout.drop_zero_variance_groups:
            # What a filter replaced depends on rewards of responses that are not in the file.
            self._check_order(step, saved.problems, wanted)
        groups = own_positions(range(len(wanted)), self._topology)
        positions = (p * size + sample for p in groups for sample in range(size))
        # What the loss saw is of the run that saved them.
        trajectories = saved.read(positions, without=LOSS_COLUMNS)
        self._check_prompts(step, trajectories)
        return trajectories, saved.seal

    def settle(self, version: int) -> None:
        """Nothing generates."""

    def run_ahead(self, version: int) -> None:
        """Nothing is to be generated."""

    def _check_order(self, step: int, problems: Sequence[int], wanted: Sequence[Problem]) -> None:
        answered = list(dict.fromkeys(problems))
        expected = list(dict.fromkeys(p.problem_id for p in wanted))
        if answered != expected:
            raise BatchFormatError(
                f"rollout.replay_from: the batch of step {step} in {self._folder} answers problems "
                f"{answered[:5]}..., expected {expected[:5]}...: it was saved with other data or another seed, "
                "or with rollout.drop_zero_variance_groups"
            )

    def _check_prompts(self, step: int, batch: Sequence[Trajectory]) -> None:
        for trajectory in batch:
            if not self._origin.has_prompt(trajectory):
                raise BatchFormatError(
                    f"rollout.replay_from: problem {trajectory.problem_id} in the batch of step {step} in "
                    f"{self._folder} has another prompt in data.train, or none: it was saved with other data"
                )


@dataclass(eq=False)
class BatchSeals:
    """Makes the seal of each batch and holds the batch against it, before it is trained on. On every rank.

    ``origin``: what the run's configuration says of every batch. ``keeps``: seals have the stamps of all responses,
    for a batch's file; else none. ``replays``: batches come from files, of which early ones have no seal and are
    trained on unchecked.
    """

    origin: Origin
    max_staleness: int
    _: KW_ONLY
    keeps: bool
    replays: bool
    _weights: dict[int, str] = field(default_factory=dict, init=False)
    _before: list[str] = field(default_factory=list, init=False)

    def remember(self, version: int, digest: str) -> None:
        """The trainer's weights ``version`` have this hash. Versions too old to sample the next batch are forgotten."""
        oldest = version - self.max_staleness
        self._weights = {v: d for v, d in self._weights.items() if v >= oldest} | {version: digest}

    def check_weights(self, version: int, digest: str) -> None:
        """Raise AlteredWeightsError unless the weights ``version`` had this hash when they were made or loaded."""
        expected = self._weights[version]
        if digest != expected:
            raise AlteredWeightsError(
                f"the trainer's weights of step {version} have the hash {digest}, expected {expected}, the hash "
                "that they had when they were made: memory was overwritten or is faulty. Nothing is trained on, "
                "saved or exported from them; the same command goes on from the newest checkpoint"
            )

    def check(self, step: int, batch: RolloutBatch) -> Seal | None:
        """The seal of the batch of ``step``, the same on every rank; None where its file has none. Collective.

        Raises SealError, on every rank, naming what is not as it was made.
        """
        saved, size = batch.seal, self.origin.group_size
        if self.replays and saved is None:
            return None
        versions = self._weights if saved is None else saved.weights
        own_responses = sorted(batch.trajectories.items())
        faults = [
            f for _, t in own_responses for f in seals.response_faults(t, self.origin, versions)
        ]
        faults += seals.credit_faults([t for _, t in own_responses], self.origin)
        stamps = {position: t.stamp for position, t in own_responses if t.stamp is not None}
        if saved is None:
            faults += seals.sampling_faults(list(stamps.values()), self.origin.sampling)
        report: list[Any] = [
            faults,
            seals.text_digest([dict(s.digests) for s in stamps.values()]),
            [s.seed for s in stamps.values()],
            [[p, asdict(s)] for p, s in stamps.items()] if self.keeps else [],
        ]
        by_rank = all_gather_json(report)
        faults = [fault for of_rank, *_ in by_rank for fault in of_rank]
        faults += seals.group_faults(batch.outlines, size)
        faults += seals.advantage_faults(batch.outlines, self.origin)
        faults += seals.seed_faults([seed for _, _, of_rank, _ in by_rank for seed in of_rank])
        faults += [] if saved is None else seals.file_faults(saved, step, self.origin)
        before, self._before = self._before, [whole for _, whole, *_ in by_rank]
        if self._before == before:
            faults.append("batch: all responses are those of the batch before")
        if faults:
            raise SealError.of(step, faults)
        if saved is not None:
            return saved
        stamp_by_position = dict(pair for *_, of_rank in by_rank for pair in of_rank)
        sampled = {s.weight_version for t in batch.outlines for s in t.version_spans}
        rows = {t.problem_id: self.origin.problems[t.problem_id] for t in batch.outlines}
        return Seal(
            step,
            self.origin.template,
            {v: self._weights[v] for v in sorted(sampled | {step - 1})},
            {problem_id: seals.row_digest(problem) for problem_id, problem in rows.items()},
            [Stamp(**stamp_by_position[position]) for position in sorted(stamp_by_position)],
        )
