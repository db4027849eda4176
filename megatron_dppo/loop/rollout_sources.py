"""Rollout batches and their sources.

``GeneratedRollouts`` samples batches from the engine, in the step that trains on them or some steps ahead in the
background. ``ReplayedRollouts`` reads batches that an earlier run saved. ``BatchSeals`` verifies each batch before
training against its seal, a record of its origin (``data/seal.py``).

The bound on staleness decides when a batch may begin. The batch of step n trains weight version n - 1, so its
generation may begin once the trainer holds version n - 1 - ``max_staleness``. No older version can then sample a token
of the batch. Batches are trained on in the order of their prompts' draws. So no batch is ever dropped for its age, and
long responses are trained on as often as short responses. Every batch begins as soon as the bound allows it. If the
servers keep up, every batch thus has the largest allowed staleness at its turn. A batch would become too stale if a
later batch were trained on first. So no other order keeps the bound.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
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
from megatron_dppo.loop.teachers import Teachers
from megatron_dppo.metrics import table as metric_names
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
    ``sampler``: the data sampler's state right after the problems of this batch were drawn; a run that resumes after
    this step continues with that state.
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
    """Return the environment faults of all ranks since the last call. Collective if ``episodes`` is not None."""
    faults = Counter[str]()
    if episodes is not None:
        for rank_faults in all_gather_json(episodes.take_faults()):
            faults.update(rank_faults)
    return faults


def gathered_unread_calls(episodes: Episodes) -> int:
    """Return the number of turns with unread tool calls, of all ranks since the last call. Collective."""
    return sum(all_gather_json(episodes.take_unread_calls()))


class RolloutSource(Protocol):
    """A source of rollout batches. Every method is collective."""

    def collect(self, step: int) -> RolloutBatch:
        """Return the batch of ``step``; the caller requests steps in order."""

    def wait_before_update(self, version: int) -> None:
        """Wait for the responses that a weight update must not interrupt. ``version``: the trainer's weights."""

    def run_ahead(self, version: int) -> None:
        """Start to generate, in the background, every further batch that the trainer's weight ``version`` allows."""


@dataclass
class _Draft:
    """A batch that is being generated. The position of a group is the position of its problem in ``problems``.

    ``problems``: problems of all leaders in the order of drawing, the same on every rank.
    ``rows``: one row for each judged group, the same on every rank. Groups are judged in the order of their positions.
    ``groups``: this rank's groups, by position. ``rounds``: rounds of generation that were started.
    ``generation``: this rank's part of the latest round. ``is_received``: whether all its responses have arrived.
    ``drawn_indices``: indices of ``problems`` in the data. ``seconds``: duration of all rounds.
    ``waited_s``: seconds that the trainer waited for responses. ``redrawn``: number of tokens that were discarded and
    sampled again, because a weight update ended their responses. ``timed_out``: number of responses that were sampled
    again after a timeout.
    ``components``: sums of the reward's components.
    """

    step: int
    problems: list[Problem] = field(default_factory=list)
    rows: list[rollout_figures.GroupRow] = field(default_factory=list)
    groups: dict[int, list[Trajectory]] = field(default_factory=dict)
    rounds: int = 0
    generation: ScoredGeneration | None = None
    is_received: bool = False
    drawn_indices: list[int] = field(default_factory=list)
    seconds: float = 0.0
    waited_s: float = 0.0
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
    """Generates batches with ``engine``, at most ``rollout.max_staleness`` batches ahead of the requested batch.

    ``job``: a template of generation jobs. Each round sets its own problems, and purpose and positions of the seeds.
    ``steps``: number of steps of the run. ``episodes``: the episodes that ``job`` plays, or None.
    ``credit``: ``environment.credit``. ``spool``: stores the scored responses for restarted ranks, or None.
    ``teachers``: score every response, or None.
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
    teachers: Teachers | None = None
    _drafts: deque[_Draft] = field(default_factory=deque)
    _newest_step: int = 0
    """The newest step whose generation has begun."""
    _waited_s: float = 0.0
    _previous_clocks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._quota = GroupQuota.of(self.rollout)
        self._previous_clocks = self._clocks()

    def collect(self, step: int) -> RolloutBatch:
        """Return the batch of ``step``, scored and with advantages, while further batches are generated.

        Raises StalenessError, RunStoppedError, and EngineUnavailableError if no server is available.
        """
        if not self._drafts:
            self._begin(step)
        draft = self._drafts[0]
        assert draft.step == step
        version = step - 1
        # If weight updates wait for running requests, begin further batches only after this batch has its responses.
        if not self._drains:
            self.run_ahead(version)
        self._complete(draft, version)
        self._drafts.popleft()
        # A resumed run draws the problems of later batches again, so return their indices to the saved state.
        indices_ahead: list[int] = []
        for later_draft in self._drafts:
            indices_ahead += later_draft.drawn_indices
        sampler_state = self.sampler.state_dict(indices_ahead)
        # Start further batches before waiting for this batch's last rewards, so that the servers stay busy.
        self.run_ahead(version)
        if draft.unjudged:
            self._judge(draft, version)
        return self._batch(draft, sampler_state)

    def wait_before_update(self, version: int) -> None:
        """Wait for all running batches if weight updates do not interrupt them."""
        if self._drains:
            for draft in self._drafts:
                self._complete(draft, version)

    def run_ahead(self, version: int) -> None:
        """Begin every batch that ``version`` allows, up to the run's last step."""
        if not self.rollout.max_staleness:
            return
        newest_step = max(self._newest_step, version)
        last_step = min(version + 1 + self.rollout.max_staleness, self.steps)
        if self.spool is not None and version < self.spool.last_trained:
            # Restarted ranks repeat the steps that were trained on before the restart. Stored responses of later
            # batches may be used only if the repeated steps make equal weights. So begin later batches only after the
            # repeated steps.
            last_step = min(last_step, self.spool.last_trained)
        for step in range(newest_step + 1, last_step + 1):
            self._begin(step)

    @property
    def _drains(self) -> bool:
        """Whether weight updates wait for the running requests."""
        return self.rollout.interrupt == "drain"

    def _begin(self, step: int) -> None:
        """Start to generate the batch of ``step``."""
        draft = _Draft(step)
        self._newest_step = step
        self._drafts.append(draft)
        self._start_round(draft, self._quota.next_count((), 0))

    def _complete(self, draft: _Draft, version: int) -> None:
        """Wait for the draft's responses. With a filter, also run all further rounds that the batch needs."""
        if draft.is_received:
            return
        self._receive(draft, version)
        if self._quota.filtering:
            self._judge(draft, version)
            while count := self._quota.next_count(draft.flat, draft.rounds):
                self._start_round(draft, count)
                self._receive(draft, version)
                self._judge(draft, version)

    def _start_round(self, draft: _Draft, count: int) -> None:
        """Start a round of generation in the background, with ``count`` further problems."""
        draft.rounds += 1
        indices = self._draw(draft.step, draft.rounds, count)
        draft.drawn_indices += indices
        draft.problems += [self.problems[i] for i in indices]
        draft.is_received = False
        positions = own_positions(draft.unjudged, self.topology)
        problems = [draft.problems[p] for p in positions]
        job = self.job.for_problems(problems, f"step {draft.step}", positions)
        description = f"step {draft.step}: generate"
        if draft.rounds > 1:
            description += f", round {draft.rounds}"
        spool_part = None
        if self.spool is not None:
            spool_part = self.spool.part(draft.step, positions)
        draft.generation = ScoredGeneration(
            self.engine,
            self.scorer,
            job,
            description,
            order=draft.step,
            part=spool_part,
            teachers=self.teachers,
        )

    def _draw(self, step: int, round_: int, count: int) -> list[int]:
        """Return the indices of ``count`` problems: the stored draws of this round, or else new draws."""
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
        draft.waited_s += waited_s
        self._waited_s += waited_s
        draft.is_received = True

    def _judge(self, draft: _Draft, version: int) -> None:
        """Score this rank's new groups, and gather the rows of all new groups. ``version``: as in ``_receive``."""
        assert draft.generation is not None
        new_positions = own_positions(draft.unjudged, self.topology)
        with self.timer("reward"):
            responses = draft.generation.scored(self.algorithm, self.credit, version=version)
            draft.components.add(draft.generation.components.to_json())
            draft.groups |= dict(zip(new_positions, self._groups(responses), strict=True))
            own_rows = [rollout_figures.GroupRow.of(draft.groups[p]) for p in new_positions]
            generation = draft.generation
            results_by_rank = all_gather_json(
                [own_rows, generation.seconds, generation.redrawn, generation.timed_out]
            )
        # Each leader sends its rows in the order of positions: take the next row of the leader that owns the position.
        rows_of_leader: list[Iterator[list[Any]]] = []
        for leader in self.topology.leaders:
            leader_rows, *_ = results_by_rank[leader]
            rows_of_leader.append(iter(leader_rows))
        # Copy the range first: ``unjudged`` depends on ``rows``, and the loop extends ``rows``.
        for position in list(draft.unjudged):
            row = next(rows_of_leader[owner(position, self.topology)])
            draft.rows.append(rollout_figures.GroupRow(*row))
        slowest_s = 0.0
        for _, seconds, redrawn, timed_out in results_by_rank:
            slowest_s = max(slowest_s, seconds)
            draft.redrawn += redrawn
            draft.timed_out += timed_out
        # A round takes as long as the part of its slowest leader.
        draft.seconds += slowest_s

    def _batch(self, draft: _Draft, sampler_state: dict[str, Any]) -> RolloutBatch:
        """Announce the batch to every rank and return it with its figures. Collective."""
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
            figures[metric_names.REDRAWN] = draft.redrawn
        if draft.timed_out:
            figures[metric_names.TIMED_OUT] = draft.timed_out
        faults = gathered_faults(self.episodes)
        if self.episodes is not None:
            figures[metric_names.ENVIRONMENT_FAULTS] = faults.total()
            figures[metric_names.UNREAD_CALLS] = gathered_unread_calls(self.episodes)
        figures |= rollout_figures.speed_figures(
            figures[metric_names.TOKENS], draft.seconds, draft.waited_s
        )
        figures |= self._clock_figures()
        if self._quota.filtering:
            figures |= rollout_figures.selection_figures(draft.rows, selection, draft.rounds)
            self._warn_of_filling(draft, selection)
        return RolloutBatch(
            outlines, trajectories, figures, sampler_state, environment_faults=faults
        )

    def _clocks(self) -> tuple[float, ...]:
        """Return the clocks of this rank, in seconds, and the tokens that teachers have read for it.

        The clocks are the time, the total time of its waits for responses, the total time in which it had requests
        to generate and, after the tokens, the total time in which teachers had its responses to score.
        """
        teacher_clocks = (0.0, 0.0) if self.teachers is None else self.teachers.clocks
        return time.monotonic(), self._waited_s, self.engine.busy_s, *teacher_clocks

    def _clock_figures(self) -> dict[str, float]:
        """Return the trainers' waits and the servers' idle time since the previous batch, and the speed of teachers.

        Trainers wait for responses. The servers count as idle while a leader has nothing to generate. Both are shares
        of the time, as means over the leaders. Teachers are as fast as those of the slowest leader.
        """
        clocks = self._clocks()
        elapsed_s, waited_s, busy_s, *teacher_clocks = np.subtract(
            clocks, self._previous_clocks
        ).tolist()
        self._previous_clocks = clocks
        # Avoid a division by 0: two reads of the clock may be equal.
        elapsed_s = max(elapsed_s, 1e-9)
        idle_share = max(0.0, 1 - busy_s / elapsed_s)
        rows = all_gather_json([waited_s / elapsed_s, idle_share, *teacher_clocks])
        leader_rows = np.array([rows[leader] for leader in self.topology.leaders])
        mean_waited, mean_idle, *_ = leader_rows.mean(axis=0).tolist()
        figures = {metric_names.TRAINERS_WAITED: mean_waited, metric_names.SERVERS_IDLE: mean_idle}
        tokens, longest_s = leader_rows[:, 2].sum(), max(leader_rows[:, 3].max(), 1e-9)
        if tokens:
            figures[metric_names.TEACHER_SECONDS] = float(longest_s)
            figures[metric_names.TEACHER_SPEED] = float(tokens / longest_s)
        return figures

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
    """Reads the batches that an earlier run saved (``rollout.save``) in the folder ``rollout.replay_from``.

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
        group_size = self._rollout.group_size
        problems = [self._problems[i] for i in indices]
        read_own = partial(self._read, step, problems)
        own_trajectories, seal = on_every_rank(read_own, error=BatchFormatError)
        group_positions = range(len(problems))
        outlines, trajectory_at = announce(
            own_trajectories, self._topology, group_size, group_positions
        )
        rows = rollout_figures.rows_of(outlines, group_size)
        figures = rollout_figures.generated_figures(rows)
        figures |= rollout_figures.staleness_figures(outlines, step)
        return RolloutBatch(outlines, trajectory_at, figures, self._sampler.state_dict(), seal)

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
            # With a filter, the expected problems would depend on dropped responses, which the file lacks.
            self._check_order(step, saved.problems, wanted_problems)
        groups = own_positions(range(len(wanted_problems)), self._topology)
        positions: list[int] = []
        for group in groups:
            positions += range(group * size, (group + 1) * size)
        # The loss columns belong to the run that saved the batch, so they are not read.
        trajectories = saved.read(positions, without=LOSS_COLUMNS)
        self._check_prompts(step, trajectories)
        return trajectories, saved.seal

    def wait_before_update(self, version: int) -> None:
        """Return at once: no request is running."""

    def run_ahead(self, version: int) -> None:
        """Return at once: saved batches need no generation."""

    def _check_order(
        self, step: int, problems: Sequence[int], wanted_problems: Sequence[Problem]
    ) -> None:
        """Check that the saved responses answer ``wanted_problems`` in their order.

        ``problems``: the problem id of each saved response.
        """
        # Compare one id for each group.
        saved_ids = list(dict.fromkeys(problems))
        expected_ids = list(dict.fromkeys(p.problem_id for p in wanted_problems))
        if saved_ids != expected_ids:
            raise BatchFormatError(
                f"rollout.replay_from: the batch of step {step} in {self._folder} answers problems "
                f"{saved_ids[:5]}..., expected {expected_ids[:5]}...: it was saved with other data or another seed, "
                "or with rollout.drop_zero_variance_groups"
            )

    def _check_prompts(self, step: int, batch: Sequence[Trajectory]) -> None:
        """Check that each response's prompt is the prompt of its problem in the training data."""
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
    stamps (origin and hashes) of all responses, because batches are saved. ``replays``: whether batches come from
    files. Files of early releases have no seal, and their batches are trained on unchecked.
    """

    origin: Origin
    max_staleness: int
    _: KW_ONLY
    keeps: bool
    replays: bool
    _weights: dict[int, str] = field(default_factory=dict, init=False)
    """Weight version -> hash of the weights, for versions that may sample the next batch."""
    _previous_digests: list[str] = field(default_factory=list, init=False)
    """For each rank, the digest of its responses of the previous batch."""

    def remember(self, version: int, digest: str) -> None:
        """Store ``digest``, the hash of the trainer's weights ``version``.

        The hashes of versions that are too old to sample the next batch are deleted.
        """
        oldest = version - self.max_staleness
        for stored_version in list(self._weights):
            if stored_version < oldest:
                del self._weights[stored_version]
        self._weights[version] = digest

    def check(self, step: int, batch: RolloutBatch) -> Seal | None:
        """Verify the batch of ``step`` and return its seal, the same on every rank. Collective.

        Returns None, without a check, for a saved batch whose file has no seal. Raises SealError, on every rank, with
        every property of the batch that differs from its seal or from ``origin``.
        """
        saved_seal = batch.seal
        if self.replays and saved_seal is None:
            return None
        positions = sorted(batch.trajectories)
        own_responses = [batch.trajectories[position] for position in positions]
        own_faults = self._response_faults(own_responses, saved_seal)
        own_stamps: list[Stamp] = []
        kept_stamps: list[tuple[int, dict[str, Any]]] = []
        for position, trajectory in zip(positions, own_responses, strict=True):
            if trajectory.stamp is None:
                continue
            own_stamps.append(trajectory.stamp)
            if self.keeps:
                kept_stamps.append((position, asdict(trajectory.stamp)))
        if saved_seal is None:
            own_faults += seals.sampling_faults(own_stamps, self.origin.sampling)
        own_digest = seals.text_digest([dict(stamp.digests) for stamp in own_stamps])
        own_seeds = [stamp.seed for stamp in own_stamps]
        faults: list[str] = []
        digests: list[str] = []
        seeds: list[int | None] = []
        stamp_by_position: dict[int, dict[str, Any]] = {}
        for rank_faults, rank_digest, rank_seeds, rank_stamps in all_gather_json(
            [own_faults, own_digest, own_seeds, kept_stamps]
        ):
            faults += rank_faults
            digests.append(rank_digest)
            seeds += rank_seeds
            stamp_by_position.update(rank_stamps)
        faults += seals.group_faults(batch.outlines, self.origin.group_size)
        faults += seals.advantage_faults(batch.outlines, self.origin)
        faults += seals.seed_faults(seeds)
        if saved_seal is not None:
            faults += seals.file_faults(saved_seal, step, self.origin)
        if digests == self._previous_digests:
            # This fault comes first: each response of an old batch has faults too, and the message names only a few.
            faults.insert(0, "batch: all responses are those of the batch before")
        self._previous_digests = digests
        if faults:
            raise SealError.of(step, faults)
        if saved_seal is not None:
            return saved_seal
        # The seal has the hashes of the versions that sampled the batch, and of the version that the step trains.
        needed_versions = sampled_versions(batch.outlines) | {step - 1}
        weights = {version: self._weights[version] for version in sorted(needed_versions)}
        row_digests: dict[int, str] = {}
        for outline in batch.outlines:
            problem_id = outline.problem_id
            if problem_id not in row_digests:
                row_digests[problem_id] = seals.row_digest(self.origin.problems[problem_id])
        stamps = [Stamp(**stamp_by_position[p]) for p in sorted(stamp_by_position)]
        return Seal(step, self.origin.template, weights, row_digests, stamps)

    def _response_faults(
        self, responses: Sequence[Trajectory], saved_seal: Seal | None
    ) -> list[str]:
        """Return the faults of this rank's responses, each on its own and within its group."""
        weights_of_versions = self._weights if saved_seal is None else saved_seal.weights
        faults: list[str] = []
        for trajectory in responses:
            faults += seals.response_faults(trajectory, self.origin, weights_of_versions)
        faults += seals.credit_faults(responses, self.origin)
        return faults
