"""Rollout batches and their sources.

``GeneratedRollouts`` samples batches from the engine, in the step that trains on them or some steps ahead in the
background. ``ReplayedRollouts`` reads batches that an earlier run saved. ``BatchSeals`` verifies each batch before
training.

The bound on staleness decides when a batch may begin. Batch n trains weight version n - 1, so its generation may begin
once the trainer holds version n - 1 - ``max_staleness``, and no token of it can be older. Batches are trained on in the
order in which their prompts were drawn, so no batch is ever dropped for its age, and long responses are trained on as
often as short ones. If the servers keep up, no other order keeps the bound: every batch begins as soon as the bound
allows it, and has the largest allowed staleness when it is trained on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_dppo.config.data_schema import Credit
from megatron_dppo.config.schema import AlgorithmConfig, RolloutConfig
from megatron_dppo.data import seal as seals
from megatron_dppo.data.batch_file import BatchFormatError, SavedBatch, batch_path
from megatron_dppo.data.columns import LOSS_COLUMNS
from megatron_dppo.data.sampling import ReturningSampler, Sampler
from megatron_dppo.data.seal import Origin, Seal, SealError
from megatron_dppo.data.trajectory import Outline, Problem, Stamp, Trajectory, sampled_versions
from megatron_dppo.environments.episodes import Episodes
from megatron_dppo.fleet.generation import GenerationJob
from megatron_dppo.loop import rollout_figures
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.loop.group_quota import GroupQuota, Selection
from megatron_dppo.loop.ownership import announce, own_positions, owner
from megatron_dppo.loop.scorer import Scorer
from megatron_dppo.loop.scoring import ComponentSums, ScoredGeneration
from megatron_dppo.loop.spool import ResponseSpool
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.phase_timer import PhaseTimer
from megatron_dppo.trainer.collectives import all_gather_json, on_every_rank
from megatron_dppo.trainer.topology import Topology

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutBatch:
    """The batch that a step trains on.

    ``outlines``: outlines of all trajectories, groups adjacent, the same on every rank.
    ``trajectories``: by position, the trajectories that this rank holds as a leader; the learner removes them when it
    delivers them.
    ``figures``: metrics of the batch and of its generation.
    ``sampler``: the data sampler's state right after this batch; a run that resumes after this step continues there.
    ``seal``: seal of a saved batch, if its file has one; a generated batch gets its seal from ``BatchSeals``.
    ``environment_faults``: counts of environment faults since the previous batch, by reason, over all ranks.
    """

    outlines: list[Outline]
    trajectories: dict[int, Trajectory]
    figures: dict[str, float]
    sampler: dict[str, Any]
    seal: Seal | None = None
    environment_faults: Counter[str] = field(default_factory=Counter)


def gathered_faults(episodes: Episodes | None) -> Counter[str]:
    """Return the environment faults of all ranks since the last call. Collective where there are ``episodes``."""
    if episodes is None:
        return Counter()
    return sum(map(Counter, all_gather_json(episodes.take_faults())), Counter[str]())


class RolloutSource(Protocol):
    """A source of rollout batches. Every method is collective."""

    def collect(self, step: int) -> RolloutBatch:
        """Return the batch of ``step``; the caller requests steps in order."""

    def settle(self, version: int) -> None:
        """Wait for the generation that a weight update may not interrupt; the trainer holds weights ``version``."""

    def run_ahead(self, version: int) -> None:
        """Start the generation of as many further batches in the background as weights ``version`` allow."""


@dataclass
class _Draft:
    """A batch that is being generated. A group's position is the place of its problem in the order of drawing.

    ``problems``, ``rows``: problems and rows of all leaders, the same on every rank; a group gets its row when its
    rewards are known.
    ``groups``: this rank's groups, by position. ``rounds``: rounds of generation that were started.
    ``generation``: this rank's part of the latest round. ``received``: whether all its responses have arrived.
    ``drawn``: indices of the batch's problems in the data. ``seconds``: duration of all rounds.
    ``waited``: seconds that the trainer waited for responses. ``redrawn``: tokens that were sampled again after an
    update. ``timed_out``: responses that were sampled again after a timeout.
    ``components``: sums of the reward's components.
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
    timed_out: int = 0
    components: ComponentSums = field(default_factory=ComponentSums)

    @property
    def flat(self) -> list[bool]:
        """Whether each judged group has zero variance."""
        return [row.flat for row in self.rows]

    @property
    def unjudged(self) -> range:
        """Positions of the groups that have no row yet."""
        return range(len(self.rows), len(self.problems))


@dataclass
class GeneratedRollouts:
    """Generates batches with ``engine``. At most ``rollout.max_staleness`` batches run beside the requested one.

    ``job``: a template with every field of a generation job except the problems and the purpose and positions of their
    seeds. ``steps``: number of steps of the run. ``episodes``: the episodes that ``job`` plays, or None.
    ``credit``: ``environment.credit``. ``spool``: keeps the scored responses; None: none is kept.
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
    spool: ResponseSpool | None = None
    _drafts: deque[_Draft] = field(default_factory=deque)
    _begun: int = 0
    _waited_s: float = 0.0
    _clock: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._quota = GroupQuota.of(self.rollout)
        self._clock = self._clocks()

    def collect(self, step: int) -> RolloutBatch:
        """Return the batch of ``step``, scored and with advantages, while further batches are generated.

        Raises StalenessError, RunStoppedError and the error of an engine that cannot be restarted.
        """
        if not self._drafts:
            self._begin(step)
        draft = self._drafts[0]
        assert draft.step == step
        if not self._drains:
            self.run_ahead(step - 1)
        self._complete(draft, step - 1)
        self._drafts.popleft()
        # A resumed run draws the problems of later batches again, so the state is the one before them.
        indices_ahead: list[int] = []
        for later_draft in self._drafts:
            indices_ahead += later_draft.drawn
        sampler_state = self.sampler.state_dict(indices_ahead)
        # Start further batches before waiting for this batch's last rewards, so that the servers stay busy.
        self.run_ahead(step - 1)
        if draft.unjudged:
            self._judge(draft, step - 1)
        return self._hand_over(draft, sampler_state)

    def settle(self, version: int) -> None:
        """Wait for all running batches if weight updates do not interrupt them."""
        if self._drains:
            for draft in self._drafts:
                self._complete(draft, version)

    def run_ahead(self, version: int) -> None:
        """Begin every batch that ``version`` allows, up to the run's last step."""
        if not self.rollout.max_staleness:
            return
        newest_step = max(self._begun, version)
        last_step = min(version + 1 + self.rollout.max_staleness, self.steps)
        if self.spool is not None and version < self.spool.last_trained:
            # Whether kept responses of later batches may be used is known when these steps have been repeated.
            last_step = min(last_step, self.spool.last_trained)
        for step in range(newest_step + 1, last_step + 1):
            self._begin(step)

    @property
    def _drains(self) -> bool:
        """Whether weight updates wait for the running requests."""
        return self.rollout.interrupt == "drain"

    def _begin(self, step: int) -> None:
        draft = _Draft(step)
        self._begun = step
        self._drafts.append(draft)
        self._ask(draft, self._quota.ask((), 0))

    def _complete(self, draft: _Draft, version: int) -> None:
        """Wait for the draft's responses. If a filter needs further rounds, which depend on rewards, run them here."""
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
        """Start a round of generation in the background, with ``count`` further problems."""
        draft.rounds += 1
        indices = self._draw(draft.step, draft.rounds, count)
        draft.drawn += indices
        draft.problems += [self.problems[i] for i in indices]
        draft.received = False
        positions = own_positions(draft.unjudged, self.topology)
        seeds = self.job.seeds
        if seeds is not None:
            seeds = replace(seeds, purpose=f"step {draft.step}", positions=positions)
        problems = [draft.problems[p] for p in positions]
        job = replace(self.job, problems=problems, seeds=seeds)
        round_text = ""
        if draft.rounds > 1:
            round_text = f", round {draft.rounds}"
        draft.generation = ScoredGeneration(
            *(
                self.engine,
                self.scorer,
                job,
                f"step {draft.step}: generate{round_text}",
                draft.step,
            ),
            part=None if self.spool is None else self.spool.part(draft.step, positions),
        )

    def _draw(self, step: int, round_: int, count: int) -> list[int]:
        """Return the next problems, or those that earlier ranks drew for this round."""
        if self.spool is None:
            return self.sampler.next(count)
        indices = self.spool.draws(step, round_, count)
        if indices is not None and all(0 <= i < len(self.problems) for i in indices):
            self.sampler.take(indices)
        else:
            indices = self.sampler.next(count)
        self.spool.note_draws(step, round_, indices)
        return indices

    def _receive(self, draft: _Draft, version: int) -> None:
        """Wait for the round's responses. ``version``: the weight version that the trainer holds."""
        assert draft.generation is not None
        start_time = time.monotonic()
        with self.timer("generate"):
            draft.generation.wait(version)
        waited_s = time.monotonic() - start_time
        draft.waited += waited_s
        self._waited_s += waited_s
        draft.received = True

    def _judge(self, draft: _Draft, version: int) -> None:
        """Score this rank's new groups, and gather the rows of all new groups. ``version``: as in ``_receive``."""
        assert draft.generation is not None
        new_positions = own_positions(draft.unjudged, self.topology)
        with self.timer("reward"):
            responses = draft.generation.scored(self.algorithm, self.credit, version=version)
            draft.components.add(draft.generation.components.to_json())
            draft.groups |= dict(zip(new_positions, self._groups(responses), strict=True))
            rows_by_rank = all_gather_json(
                [
                    [rollout_figures.GroupRow.of(draft.groups[p]) for p in new_positions],
                    draft.generation.seconds,
                    draft.generation.redrawn,
                    draft.generation.timed_out,
                ]
            )
        leader_rows = [iter(rows_by_rank[leader][0]) for leader in self.topology.leaders]
        # Copy the range first: ``unjudged`` depends on ``rows``, which grows here.
        for position in list(draft.unjudged):
            leader = owner(position, self.topology)
            draft.rows.append(rollout_figures.GroupRow(*next(leader_rows[leader])))
        # A round takes as long as the part of its slowest leader.
        draft.seconds += max(seconds for _, seconds, _, _ in rows_by_rank)
        draft.redrawn += sum(redrawn for _, _, redrawn, _ in rows_by_rank)
        draft.timed_out += sum(timed_out for *_, timed_out in rows_by_rank)

    def _hand_over(self, draft: _Draft, position: dict[str, Any]) -> RolloutBatch:
        """Announce the batch to every rank and return it with its figures. ``position``: the sampler's state."""
        selection = self._quota.choose(draft.flat)
        own_trajectories: list[Trajectory] = []
        for group_position in selection.positions:
            own_trajectories += draft.groups.get(group_position, [])
        with self.timer("exchange"):
            outlines, trajectories = announce(
                own_trajectories, self.topology, self.job.group_size, selection.positions
            )
        rollout_figures.check_staleness(outlines, draft.step, self.rollout.max_staleness)
        figures = rollout_figures.generated_figures(draft.rows)
        figures |= draft.components.means()
        figures |= rollout_figures.trained_figures(outlines)
        figures |= rollout_figures.staleness_figures(outlines, draft.step)
        figures |= rollout_figures.interruption_figures(outlines)
        if draft.redrawn:
            figures[names.REDRAWN] = draft.redrawn
        if draft.timed_out:
            figures[names.TIMED_OUT] = draft.timed_out
        faults = gathered_faults(self.episodes)
        if self.episodes is not None:
            figures[names.ENVIRONMENT_FAULTS] = faults.total()
        figures |= rollout_figures.speed_figures(figures[names.TOKENS], draft.seconds, draft.waited)
        figures |= self._waiting()
        if self._quota.filtering:
            figures |= rollout_figures.selection_figures(draft.rows, selection, draft.rounds)
            self._warn_of_filling(draft, selection)
        return RolloutBatch(outlines, trajectories, figures, position, environment_faults=faults)

    def _clocks(self) -> tuple[float, ...]:
        """Return in seconds: the current time, the trainers' wait for responses, and this rank's busy slot time."""
        return time.monotonic(), self._waited_s, self.engine.busy_s

    def _waiting(self) -> dict[str, float]:
        """Return the shares of the time since the previous batch in which trainers waited, and in which servers idled.

        Trainers wait for responses; a leader's servers idle when it has nothing to generate. Both are means over the
        leaders.
        """
        previous_clock = self._clock
        self._clock = self._clocks()
        elapsed_s, waited_s, busy_s = np.subtract(self._clock, previous_clock).tolist()
        elapsed_s = max(elapsed_s, 1e-9)
        idle_share = max(0.0, 1 - busy_s / elapsed_s)
        shares = all_gather_json([waited_s / elapsed_s, idle_share])
        leader_shares = [shares[leader] for leader in self.topology.leaders]
        mean_waited, mean_idle = np.mean(leader_shares, axis=0).tolist()
        return {names.TRAINERS_WAITED: mean_waited, names.SERVERS_IDLE: mean_idle}

    def _warn_of_filling(self, draft: _Draft, selection: Selection) -> None:
        """Log a warning if groups of zero variance fill the batch because too few other groups were generated."""
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
        """Split adjacent ``trajectories`` into their groups."""
        size = self.job.group_size
        return [list(trajectories[i : i + size]) for i in range(0, len(trajectories), size)]


class ReplayedRollouts:
    """Reads the batches in the folder ``rollout.replay_from`` (``rollout.save`` of the run that generated them).

    Each leader reads exactly the trajectories that it would have generated. The batches are compared with the training
    ``problems`` that ``sampler`` draws, and with the prompts of ``origin``.
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
        """Return the saved batch of ``step``.

        Raises BatchFormatError, on all ranks, if the batch is missing or was saved with other data.
        """
        indices = self._sampler.next(self._rollout.prompts_per_step)
        size = self._rollout.group_size
        problems = [self._problems[i] for i in indices]
        read_own = partial(self._read, step, problems)
        trajectories, seal = on_every_rank(read_own, error=BatchFormatError)
        outlines, by_position = announce(trajectories, self._topology, size, range(len(problems)))
        figures = rollout_figures.generated_figures(
            rollout_figures.rows_of(outlines, size)
        ) | rollout_figures.staleness_figures(outlines, step)
        return RolloutBatch(outlines, by_position, figures, self._sampler.state_dict(), seal)

    def _read(
        self, step: int, wanted_problems: Sequence[Problem]
    ) -> tuple[list[Trajectory], Seal | None]:
        """Check that the batch answers ``wanted_problems``, and read this rank's trajectories and the seal."""
        try:
            saved = SavedBatch(self._folder, step)
        except FileNotFoundError as error:
            raise BatchFormatError(
                f"rollout.replay_from: no batch of step {step} in {self._folder} ({batch_path(self._folder, step)})"
            ) from error
        size = self._rollout.group_size
        if len(saved.problems) != len(wanted_problems) * size:
            raise BatchFormatError(
                f"rollout.replay_from: the batch of step {step} in {self._folder} has {len(saved.problems)} "
                f"responses, expected {len(wanted_problems)} prompts x group_size {size}"
            )
        if not self._rollout.drop_zero_variance_groups:
            # With a filter, the problems depend on the rewards of dropped responses, which are not in the file.
            self._check_order(step, saved.problems, wanted_problems)
        groups = own_positions(range(len(wanted_problems)), self._topology)
        positions: list[int] = []
        for group in groups:
            positions += range(group * size, (group + 1) * size)
        # The loss columns belong to the run that saved the batch, so they are not read.
        trajectories = saved.read(positions, without=LOSS_COLUMNS)
        self._check_prompts(step, trajectories)
        return trajectories, saved.seal

    def settle(self, version: int) -> None:
        """Return at once: no request is running."""

    def run_ahead(self, version: int) -> None:
        """Return at once: saved batches need no generation."""

    def _check_order(
        self, step: int, problems: Sequence[int], wanted_problems: Sequence[Problem]
    ) -> None:
        saved_ids = list(dict.fromkeys(problems))
        expected_ids = list(dict.fromkeys(p.problem_id for p in wanted_problems))
        if saved_ids != expected_ids:
            raise BatchFormatError(
                f"rollout.replay_from: the batch of step {step} in {self._folder} answers problems "
                f"{saved_ids[:5]}..., expected {expected_ids[:5]}...: it was saved with other data or another seed, "
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
    """Makes the seal of each batch, and compares the batch with it before training. Runs on every rank.

    ``origin``: the properties that the run's configuration requires of every batch. ``keeps``: whether seals hold the
    stamps of all responses, for a batch's file. ``replays``: whether batches come from files; files of early releases
    have no seal, and such batches are trained on unchecked.
    """

    origin: Origin
    max_staleness: int
    _: KW_ONLY
    keeps: bool
    replays: bool
    _weights: dict[int, str] = field(default_factory=dict, init=False)
    _before: list[str] = field(default_factory=list, init=False)

    def remember(self, version: int, digest: str) -> None:
        """Store ``digest``, the hash of the trainer's weights ``version``.

        The hashes of versions too old to sample the next batch are deleted.
        """
        oldest = version - self.max_staleness
        for old_version in [v for v in self._weights if v < oldest]:
            del self._weights[old_version]
        self._weights[version] = digest

    def check(self, step: int, batch: RolloutBatch) -> Seal | None:
        """Verify the batch of ``step`` and return its seal, the same on every rank. Collective.

        Returns None, without a check, for a saved batch whose file has no seal. Raises SealError, on every rank, with
        every property of the batch that differs from its seal or from ``origin``.
        """
        saved_seal = batch.seal
        size = self.origin.group_size
        if self.replays and saved_seal is None:
            return None
        versions = self._weights if saved_seal is None else saved_seal.weights
        own_responses = sorted(batch.trajectories.items())
        faults: list[str] = []
        for _, trajectory in own_responses:
            faults += seals.response_faults(trajectory, self.origin, versions)
        faults += seals.credit_faults([t for _, t in own_responses], self.origin)
        own_stamps: list[Stamp] = []
        kept_stamps: list[tuple[int, dict[str, Any]]] = []
        for position, trajectory in own_responses:
            if trajectory.stamp is None:
                continue
            own_stamps.append(trajectory.stamp)
            if self.keeps:
                kept_stamps.append((position, asdict(trajectory.stamp)))
        if saved_seal is None:
            faults += seals.sampling_faults(own_stamps, self.origin.sampling)
        digests = seals.text_digest([dict(stamp.digests) for stamp in own_stamps])
        own_seeds = [stamp.seed for stamp in own_stamps]
        by_rank = all_gather_json([faults, digests, own_seeds, kept_stamps])
        faults = []
        seeds: list[int | None] = []
        stamp_by_position: dict[int, dict[str, Any]] = {}
        for rank_faults, _, rank_seeds, rank_stamps in by_rank:
            faults += rank_faults
            seeds += rank_seeds
            stamp_by_position.update(rank_stamps)
        faults += seals.group_faults(batch.outlines, size)
        faults += seals.advantage_faults(batch.outlines, self.origin)
        faults += seals.seed_faults(seeds)
        faults += [] if saved_seal is None else seals.file_faults(saved_seal, step, self.origin)
        previous_digests = self._before
        self._before = [digest for _, digest, *_ in by_rank]
        if self._before == previous_digests:
            faults.append("batch: all responses are those of the batch before")
        if faults:
            raise SealError.of(step, faults)
        if saved_seal is not None:
            return saved_seal
        needed_versions = sampled_versions(batch.outlines) | {step - 1}
        weights = {version: self._weights[version] for version in sorted(needed_versions)}
        row_digests: dict[int, str] = {}
        for outline in batch.outlines:
            problem_id = outline.problem_id
            if problem_id not in row_digests:
                row_digests[problem_id] = seals.row_digest(self.origin.problems[problem_id])
        stamps = [Stamp(**stamp_by_position[p]) for p in sorted(stamp_by_position)]
        return Seal(step, self.origin.template, weights, row_digests, stamps)
