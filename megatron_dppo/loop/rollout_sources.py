"""What a rollout batch is, and where it comes from: the engine, in the step that trains on it or one step ahead in the
background; or batches that an earlier run saved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from megatron_dppo.config.schema import AlgorithmConfig, RolloutConfig
from megatron_dppo.data.batch_file import BatchFormatError, SavedBatch, batch_path
from megatron_dppo.data.columns import LOSS_COLUMNS
from megatron_dppo.data.sampling import Sampler
from megatron_dppo.data.trajectory import Outline, Problem, Trajectory
from megatron_dppo.fleet.generation import GenerationJob
from megatron_dppo.loop import rollout_figures
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.loop.exchange import announce, own_positions, owner
from megatron_dppo.loop.scoring import GroupQuota, ScoredGeneration, Selection
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.progress import PhaseTimer
from megatron_dppo.rewards.verifier import Verifier
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
    """

    outlines: list[Outline]
    trajectories: dict[int, Trajectory]
    figures: dict[str, float]
    sampler: dict[str, Any]


class RolloutSource(Protocol):
    """Where rollout batches come from. Every method is collective."""

    def collect(self, step: int) -> RolloutBatch:
        """The batch of ``step``; steps are asked for in order."""

    def settle(self, version: int) -> None:
        """Wait until nothing generates any more; the trainer holds weights ``version`` by now."""

    def run_ahead(self) -> None:
        """Have the next batch generated in the background, where the configuration allows it."""


@dataclass
class _Draft:
    """A batch in the making. Groups are counted in the order in which their problems were drawn.

    ``problems``, ``rows``: of all leaders, the same on every rank; a row follows when its group is judged.
    ``groups``: this rank's by position. ``generation``: this rank's part of the round that runs.
    """

    step: int
    problems: list[Problem] = field(default_factory=list)
    rows: list[rollout_figures.GroupRow] = field(default_factory=list)
    groups: dict[int, list[Trajectory]] = field(default_factory=dict)
    rounds: int = 0
    generation: ScoredGeneration | None = None
    sampler: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    waited: float = 0.0

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

    With ``rollout.max_staleness: 1`` at most two batches are alive: one in hand, and the next on its way. ``steps``:
    of the run.
    """

    rollout: RolloutConfig
    algorithm: AlgorithmConfig
    topology: Topology
    engine: EngineSession
    verifier: Verifier
    job: GenerationJob
    problems: Sequence[Problem]
    sampler: Sampler
    timer: PhaseTimer
    steps: int
    _in_hand: _Draft | None = None
    _on_its_way: _Draft | None = None
    _begun: int = 0

    def __post_init__(self) -> None:
        self._quota = GroupQuota.of(self.rollout)

    def collect(self, step: int) -> RolloutBatch:
        """The batch of ``step``, verified and with advantages; meanwhile the next one is generated.

        Raises StalenessError, RunStoppedError and what an engine that can't be brought back raises.
        """
        if self._in_hand is None:
            if self._on_its_way is None:
                self._begin(step)
            self.settle(step - 1)
        draft, self._in_hand = self._in_hand, None
        assert draft is not None
        assert draft.step == step
        # Before this batch's last rewards are waited for: the servers go on meanwhile.
        self.run_ahead()
        if draft.unjudged:
            self._judge(draft)
        return self._hand_over(draft)

    def settle(self, version: int) -> None:
        """Take the batch on its way in hand. Further rounds of a filter, which rewards decide on, run here."""
        draft = self._on_its_way
        if draft is None:
            return
        self._receive(draft, version)
        if self._quota.filtering:
            self._judge(draft)
            while count := self._quota.ask(draft.flat, draft.rounds):
                self._ask(draft, count)
                self._receive(draft, version)
                self._judge(draft)
        self._in_hand, self._on_its_way = draft, None

    def run_ahead(self) -> None:
        """Begin the next batch, unless it runs already, the run is synchronous, or was the last step's."""
        ahead = self.rollout.max_staleness > 0 and self._begun < self.steps
        if ahead and self._on_its_way is None:
            self._begin(self._begun + 1)

    # --- a batch's parts

    def _begin(self, step: int) -> None:
        self._begun = step
        self._on_its_way = draft = _Draft(step)
        self._ask(draft, self._quota.ask((), 0))

    def _ask(self, draft: _Draft, count: int) -> None:
        """Start a round: ``count`` further problems, answered in the background."""
        draft.problems += [self.problems[i] for i in self.sampler.next(count)]
        # As of this batch: when it trains, the next one's problems have been drawn already.
        draft.sampler = self.sampler.state_dict()
        draft.rounds += 1
        positions = own_positions(draft.unjudged, self.topology)
        seeds = self.job.seeds
        if seeds is not None:
            seeds = replace(seeds, purpose=f"step {draft.step}", positions=positions)
        problems = [draft.problems[p] for p in positions]
        job = replace(self.job, problems=problems, seeds=seeds)
        again = f", round {draft.rounds}" if draft.rounds > 1 else ""
        draft.generation = ScoredGeneration(
            self.engine, self.verifier, job, f"step {draft.step}: generate{again}"
        )

    def _receive(self, draft: _Draft, version: int) -> None:
        """Wait for the round's responses. ``version``: of the weights that the trainer holds."""
        assert draft.generation is not None
        began = time.monotonic()
        with self.timer("generate"):
            draft.generation.wait(version)
        draft.waited += time.monotonic() - began

    def _judge(self, draft: _Draft) -> None:
        """Verify this rank's new groups, and tell every rank how all of them did."""
        assert draft.generation is not None
        new = own_positions(draft.unjudged, self.topology)
        with self.timer("reward"):
            scored = draft.generation.scored(self.algorithm)
            draft.groups |= dict(zip(new, self._groups(scored), strict=True))
            rows_by_rank = all_gather_json(
                [
                    [rollout_figures.GroupRow.of(draft.groups[p]) for p in new],
                    draft.generation.seconds,
                ]
            )
        shares = [iter(rows_by_rank[leader][0]) for leader in self.topology.leaders]
        draft.rows += [
            rollout_figures.GroupRow(*next(shares[owner(p, self.topology)]))
            for p in list(draft.unjudged)
        ]
        # A round lasts as long as its slowest leader's part.
        draft.seconds += max(seconds for _, seconds in rows_by_rank)

    def _hand_over(self, draft: _Draft) -> RolloutBatch:
        """The batch on every rank, and its figures."""
        selection = self._quota.choose(draft.flat)
        chosen = [t for p in selection.positions if p in draft.groups for t in draft.groups[p]]
        with self.timer("exchange"):
            batch, trajectories = announce(
                chosen, self.topology, self.job.group_size, selection.positions
            )
        rollout_figures.check_staleness(batch, draft.step, self.rollout.max_staleness)
        figures = rollout_figures.generated_figures(draft.rows) | rollout_figures.staleness_figures(
            batch, draft.step
        )
        figures |= rollout_figures.speed_figures(figures[names.TOKENS], draft.seconds, draft.waited)
        if self._quota.filtering:
            figures |= rollout_figures.selection_figures(draft.rows, selection, draft.rounds)
            self._warn_of_filling(draft, selection)
        return RolloutBatch(batch, trajectories, figures, draft.sampler)

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
    the training ``problems`` that ``sampler`` draws.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        topology: Topology,
        problems: Sequence[Problem],
        sampler: Sampler,
    ) -> None:
        assert rollout.replay_from is not None
        self._folder = Path(rollout.replay_from)
        self._rollout = rollout
        self._topology = topology
        self._problems = problems
        self._sampler = sampler
        self._prompts = {p.problem_id: list(p.prompt_ids) for p in problems}

    def collect(self, step: int) -> RolloutBatch:
        """The saved batch of ``step``. Raises BatchFormatError, on all ranks, where it is not there or another's."""
        drawn, size = self._sampler.next(self._rollout.prompts_per_step), self._rollout.group_size
        wanted = [self._problems[i] for i in drawn]
        trajectories = on_every_rank(lambda: self._read(step, wanted), error=BatchFormatError)
        outlines, by_position = announce(trajectories, self._topology, size, range(len(wanted)))
        figures = rollout_figures.generated_figures(
            rollout_figures.rows_of(outlines, size)
        ) | rollout_figures.staleness_figures(outlines, step)
        return RolloutBatch(outlines, by_position, figures, self._sampler.state_dict())

    def _read(self, step: int, wanted: Sequence[Problem]) -> list[Trajectory]:
        """This rank's trajectories, of the checked batch."""
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
        return trajectories

    def settle(self, version: int) -> None:
        """Nothing generates."""

    def run_ahead(self) -> None:
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
            if self._prompts.get(trajectory.problem_id) != trajectory.prompt_ids.tolist():
                raise BatchFormatError(
                    f"rollout.replay_from: problem {trajectory.problem_id} in the batch of step {step} in "
                    f"{self._folder} has another prompt in data.train, or none: it was saved with other data"
                )
