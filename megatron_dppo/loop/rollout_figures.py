"""A rollout batch in figures, from a row for each generated group, and what a batch may not exceed: its staleness, and
the gap between trainer and servers at equal weights.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_dppo.algorithms.policy_loss import LONGEST_SURPRISE
from megatron_dppo.config.schema import AlgorithmConfig, RolloutConfig
from megatron_dppo.data.columns import Form
from megatron_dppo.data.sampling import TrainingFiles
from megatron_dppo.data.trajectory import Trajectory, TrajectoryFacts
from megatron_dppo.loop.scoring import Selection
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.sums import FREQUENCY_SUMS
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.system.errors import RunError

log = logging.getLogger(__name__)

LARGEST_GAP = {"float32": 0.01, "bfloat16": 0.1}
"""``rollout.largest_gap`` where it is not set, by the weights' type: 100 and 20 times the normal range's end. Where
trainer and servers mean different models, sampled tokens of probability p differ by about p."""
STALE_ANCHOR = (
    "algorithm.name: %s anchors on log-probabilities recomputed by the trainer, which with "
    "rollout.max_staleness above 0 are no longer those of the weights that sampled; see docs/staleness.md"
)
"""A warning: such a mask does not see the distance that lies between mu and the recomputed policy."""


class GroupRow(NamedTuple):
    """Sums over a group's responses. ``flat``: all of them, and their turns, earned the same. ``distinct``: different
    ones. ``twins``: ordered pairs of equal rare ones, less those that independent draws are expected to have.
    ``concentration``: of the group (``concentration_of``)."""

    responses: int
    reward: float
    flat: bool
    tokens: int
    truncated: int
    distinct: int
    twins: float
    turns: int = 0
    branches: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    concentration: float | None = None

    @classmethod
    def of(cls, group: Sequence[TrajectoryFacts]) -> GroupRow:
        return cls(
            responses=len(group),
            reward=sum(t.reward for t in group),
            flat=all(t.reward == group[0].reward and not t.has_advantage for t in group),
            tokens=sum(t.sampled for t in group),
            truncated=sum(t.truncated for t in group),
            distinct=len({t.response_digest for t in group}),
            twins=twins_beyond_chance(group),
            turns=sum(t.turns for t in group),
            branches=sum(len(t.branch_lengths) for t in group),
            prompt_tokens=sum(t.prompt_tokens for t in group),
            cached_tokens=sum(t.cached_tokens for t in group),
            concentration=concentration_of(group),
        )


def concentration_of(group: Sequence[TrajectoryFacts]) -> float | None:
    """|sum_i v_i|^2 / sum_i |v_i|^2 over a group's responses, v_i the sum over its tokens of e_y - mu: the gradient of
    its log-probability by a bias of the logits. None where no response has TopK(mu), or all v_i are 0.

    Responses that are drawn apart and differ have a value near 1, n equal ones n. What TopK(mu) and the sampled token
    leave out counts as 0.

    The Mirrored Entanglement Index of Mesh Learning (arXiv 2610.02835): read in its authors' code
    (Ayanami-0123/Open-Mesh-Learning, ``_compute_mei_mean_for_batch``), which takes pi of the trainer over the whole
    vocabulary. Not read: the paper's text.
    """
    responses = [t for t in group if isinstance(t, Trajectory) and "topk_ids" in t.columns]
    if len(responses) < len(group) or not group:
        return None
    size = 1 + max(
        max(t.response_ids.max(initial=0), t.column("topk_ids").max(initial=0)) for t in responses
    )
    directions = np.stack([_direction(t, int(size)) for t in responses])
    together, apart = np.square(directions.sum(0)).sum(), np.square(directions).sum()
    return float(together / apart) if apart > 0 else None


def _direction(t: Trajectory, size: int) -> np.ndarray:
    """v of a response, float64 [``size``]."""
    ids, sampled = t.column("topk_ids"), t.response_ids
    valid = ids >= 0
    expected = np.bincount(ids[valid], np.exp(t.column("topk_log_probs")[valid]), minlength=size)
    is_new = ~((ids == sampled[:, None]) & valid).any(1)
    own = np.exp(t.column("rollout_log_probs")[is_new])
    expected += np.bincount(sampled[is_new], own, minlength=size)
    return np.bincount(sampled, minlength=size) - expected


RARE = 0.01
"""Probability of a response below which its repetition in a group tells anything: short answers repeat by chance."""


def twins_beyond_chance(group: Sequence[TrajectoryFacts]) -> float:
    """Ordered pairs of equal responses y with mu(y) < RARE in a group of n, less sum_i (n - 1) mu(y_i) over such y_i.

    Whatever the policy, independent draws have the mean 0: both terms have the mean n (n - 1) sum_y mu(y)^2. Each of
    n rare responses that were drawn with the seed of another one adds 1.
    """
    rare = [t for t in group if t.log_prob < math.log(RARE)]
    counts = Counter(t.response_digest for t in rare)
    equal = sum(count * (count - 1) for count in counts.values())
    return equal - (len(group) - 1) * sum(math.exp(t.log_prob) for t in rare)


def rows_of(batch: Sequence[TrajectoryFacts], group_size: int) -> list[GroupRow]:
    """A row for each group of a batch, groups adjacent."""
    return [GroupRow.of(batch[i : i + group_size]) for i in range(0, len(batch), group_size)]


def generated_figures(rows: Sequence[GroupRow]) -> dict[str, float]:
    """The policy as all generated groups show it: what is dropped later would bias the curves."""
    responses = sum(row.responses for row in rows)
    return (
        {
            names.REWARD: sum(row.reward for row in rows) / responses,
            names.ZERO_VARIANCE_GROUPS: sum(row.flat for row in rows) / len(rows),
            names.RESPONSE_LENGTH: sum(row.tokens for row in rows) / responses,
            names.TRUNCATED: sum(row.truncated for row in rows) / responses,
            names.DISTINCT: sum(row.distinct for row in rows) / responses,
            names.TWINS: sum(row.twins for row in rows) / responses,
            names.TOKENS: sum(row.tokens for row in rows),
            names.TURNS: sum(row.turns for row in rows) / responses,
        }
        | _cache_figures(rows)
        | _branch_figures(rows, responses)
        | _concentration_figures(rows)
    )


def _concentration_figures(rows: Sequence[GroupRow]) -> dict[str, float]:
    """Nothing where no response has TopK(mu)."""
    known = [row.concentration for row in rows if row.concentration is not None]
    return {names.CONCENTRATION: sum(known) / len(known)} if known else {}


def _branch_figures(rows: Sequence[GroupRow], responses: int) -> dict[str, float]:
    """Nothing where every response has one."""
    branches = sum(row.branches for row in rows)
    return {names.BRANCHES: branches / responses} if branches > responses else {}


def _cache_figures(rows: Sequence[GroupRow]) -> dict[str, float]:
    """Nothing of a batch that comes from a file."""
    prompt_tokens = sum(row.prompt_tokens for row in rows)
    if not prompt_tokens:
        return {}
    return {names.PREFIX_CACHED: sum(row.cached_tokens for row in rows) / prompt_tokens}


def trained_figures(batch: Sequence[TrajectoryFacts]) -> dict[str, float]:
    """Of the responses that are trained on."""
    return {names.RESPONSE_LENGTH_TRAINED: sum(t.sampled for t in batch) / len(batch)}


def file_figures(
    batch: Sequence[TrajectoryFacts], files: TrainingFiles, group_size: int
) -> dict[str, float]:
    """The trained prompts of each training file and what they earned; nothing where there is one file.

    A file that no prompt of the batch is from has 0 prompts and no reward.
    """
    if len(files.names) == 1:
        return {}
    rewards: dict[str, list[float]] = {name: [] for name in files.names}
    for trajectory in batch:
        rewards[files.of(trajectory.problem_id)].append(trajectory.reward)
    figures = {names.file_prompts(name): len(of) / group_size for name, of in rewards.items()}
    means = {names.file_reward(name): sum(of) / len(of) for name, of in rewards.items() if of}
    return figures | means


def selection_figures(
    rows: Sequence[GroupRow], selection: Selection, rounds: int
) -> dict[str, float]:
    """What the filter did, and the mean reward of what it left to train on."""
    chosen = [rows[i] for i in selection.positions]
    return {
        names.REWARD_TRAINED: sum(r.reward for r in chosen) / sum(r.responses for r in chosen),
        names.GENERATION_ROUNDS: rounds,
        names.GROUPS_GENERATED: len(rows),
        names.GROUPS_DROPPED: selection.dropped,
        names.GROUPS_SURPLUS: selection.surplus,
        names.GROUPS_FILLED: selection.filled,
    }


def speed_figures(tokens: float, seconds: float, waited: float) -> dict[str, float]:
    """``seconds`` that the generation took, of which the trainer ``waited`` for it and did nothing else."""
    figures = {names.GENERATION_SECONDS: seconds, names.GENERATION_WAITED: waited}
    if seconds > 0:
        figures[names.TOKENS_PER_SECOND] = tokens / seconds
        figures[names.GENERATION_OVERLAPPED] = max(0.0, 1 - waited / seconds)
    return figures


def routing_figures(
    batch: Sequence[TrajectoryFacts], recorded: Collection[int], form: Form
) -> dict[str, float]:
    """The recorded routing of a batch. ``recorded``: positions with a recording, wherever it lies."""
    with_routing = [batch[position] for position in recorded]
    rows = sum(t.length - 1 for t in batch)
    recorded_rows = sum(t.length - 1 for t in with_routing)
    usable = recorded_rows - sum(t.discarded_rows for t in with_routing)
    tokens = sum(t.length for t in with_routing)
    return {
        names.ROUTING_BYTES_PER_TOKEN: recorded_rows * form.row_bytes / tokens,
        names.ROUTING_UNRECORDED: 1 - usable / rows,
        names.ROUTING_DISCARDED: recorded_rows - usable,
    }


# --- how far behind the trainer the weights were that sampled a batch, token by token, and its bound
#
# A batch of step n is trained on from weight version n - 1. The staleness of a token is n - 1 less the version that
# sampled it: 0 in synchronous runs, up to 1 where generation runs one step ahead. Without any, trainer and servers
# must agree about the tokens; the guard here looks after that.


class StalenessError(RunError):
    """A response was sampled by weights that a batch of this step may not come from."""


def staleness_figures(batch: Sequence[TrajectoryFacts], step: int) -> dict[str, float]:
    """Mean and largest staleness over the response tokens of the batch of ``step``, in weight versions."""
    spans = [span for t in batch for span in t.version_spans]
    staleness = np.array([step - 1 - span.weight_version for span in spans])
    tokens = np.array([span.end - span.start for span in spans])
    mean = float((staleness * tokens).sum() / tokens.sum())
    return {names.STALENESS: mean, names.STALENESS_MAX: int(staleness.max())}


def interruption_figures(batch: Sequence[TrajectoryFacts]) -> dict[str, float]:
    """Responses that a weight update interrupted, as a share, and the tokens that were computed again for it: at each
    change of version in the middle of a turn, all tokens before it. Nothing where no response was interrupted."""
    interrupted = [t for t in batch if t.interruptions]
    if not interrupted:
        return {}
    again = sum(sum(t.interruptions) for t in interrupted)
    return {names.INTERRUPTED: len(interrupted) / len(batch), names.RECOMPUTED_TOKENS: again}


def check_staleness(batch: Sequence[TrajectoryFacts], step: int, max_staleness: int) -> None:
    """Raise StalenessError unless every token's staleness is from 0 to ``max_staleness``."""
    for trajectory in batch:
        for span in trajectory.version_spans:
            if not 0 <= step - 1 - span.weight_version <= max_staleness:
                raise StalenessError(
                    f"step {step} trains weight version {step - 1}, but {trajectory} has tokens {span.start} to "
                    f"{span.end - 1} of version {span.weight_version}, expected {step - 1 - max_staleness} to "
                    f"{step - 1} (rollout.max_staleness: {max_staleness})"
                )


def with_gap_named(
    learned: Mapping[str, float], batch_figures: Mapping[str, float]
) -> dict[str, float]:
    """``learned`` with the first mini-batch's gap under the name that it deserves.

    It compares trainer and engine at equal weights only where the batch is not stale; else it shows what the
    updates in between moved.
    """
    named = dict(learned)
    if batch_figures[names.STALENESS_MAX] > 0 and names.GAP_ON_POLICY in named:
        named[names.GAP_STALE] = named.pop(names.GAP_ON_POLICY)
    return named


class GapError(RunError):
    """Trainer and servers hold the same weights and disagree about the tokens beyond what rounding explains."""


class GapGuard:
    """Looks at mean |pi - mu| of a batch's first mini-batch before it is trained on: warns outside the normal
    range, and again where it has doubled; beyond ``rollout.largest_gap`` it stops the run.

    Where the weights may differ (a stale batch, a replayed one), or the pass has dropout, it only warns.
    """

    def __init__(
        self,
        dtype: Literal["float32", "bfloat16"],
        rollout: RolloutConfig,
        *,
        is_coarse: bool,
        has_dropout: bool,
    ) -> None:
        self._dtype = dtype
        self._limit = rollout.largest_gap or LARGEST_GAP["bfloat16" if is_coarse else dtype]
        self._stops = rollout.replay_from is None and not has_dropout
        self._warned = BY_METRIC[names.GAP_ON_POLICY].upper(self._dtype) / 2

    def check(self, gap: float, *, is_stale: bool) -> None:
        """Raise GapError, on every rank alike where ``gap`` is the same on all of them. NaN: no token was trained."""
        if is_stale or math.isnan(gap):
            return
        message = (
            f"mean |pi - mu| of the first mini-batch is {gap:.3g} at equal weights in {self._dtype}"
        )
        if self._stops and gap > self._limit:
            raise GapError(
                f"{message}, expected at most {self._limit:g} (rollout.largest_gap); it was not trained on. "
                f"{BY_METRIC[names.GAP_ON_POLICY].why} With rollout.save=true the batch is kept, and "
                "megatron-dppo doctor RUN names the cause"
            )
        if gap > 2 * self._warned:
            self._warned = gap
            log.warning("%s; %s", message, BY_METRIC[names.GAP_ON_POLICY].why)


class FrequencyError(RunError):
    """Tokens are not drawn from the distribution that trainer and engine agree on."""


LARGEST_EVIDENCE = 6.0
"""log10. Beyond it a run stops: 1 of a million healthy runs at most, of whatever length."""
_FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
_SIDES = {"more": FREQUENCY_SUMS[:2], "less": FREQUENCY_SUMS[2:]}


class FrequencyCanary:
    """Whether sampled tokens are as frequent as mu says: a test martingale over all tokens since the start.

    ``policy_loss._surprise`` gives numbers xi >= -c of each token, whose mean is at most 0 where it is drawn from mu.
    For 0 <= a < 1, exp(a xi / c - psi(a) xi^2 / c^2) <= 1 + a xi / c with psi(a) = -log(1 - a) - a (Fan, Grama and Liu,
    2015). So the product over tokens, exp(a sum xi / c - psi(a) sum xi^2 / c^2), is a nonnegative supermartingale that
    begins at 1, and so is the mean over both signs and eight a. It ever reaches 10^6 with a probability of 10^-6 at
    most (Ville): no assumption on lengths, on the spread of surprises or on how often one looks.

    It looks at no batch that is chosen by its rewards or lengths (``rollout.drop_zero_variance_groups``,
    ``algorithm.truncated_responses: drop``), whose tokens are not drawn from mu. Of a replayed batch it only warns, and
    of tokens that other weights sampled (``at_equal_weights`` False): where pi is many times mu at a rare token the cut
    takes away what keeps the mean at 0, and nothing is proved.
    """

    def __init__(
        self, rollout: RolloutConfig, algorithm: AlgorithmConfig, *, at_equal_weights: bool = True
    ) -> None:
        chosen = rollout.drop_zero_variance_groups or algorithm.truncated_responses == "drop"
        self._looks = not chosen
        self._stops = rollout.replay_from is None and at_equal_weights
        self._sums = dict.fromkeys(FREQUENCY_SUMS, 0.0)
        self._tokens = 0.0
        self._warned = False

    def check(self, sums: Mapping[str, float]) -> None:
        """Add a mini-batch's sums, before it is trained on. Raises FrequencyError, on every rank alike."""
        if not self._looks or not self._sums.keys() <= sums.keys():
            return
        self._sums = {name: value + float(sums[name]) for name, value in self._sums.items()}
        self._tokens += float(sums[names.TRAINED_TOKENS])
        if self.evidence < LARGEST_EVIDENCE:
            return
        side = max(_SIDES, key=lambda side: self._sums[_SIDES[side][0]])
        mean = self._sums[_SIDES[side][0]] / self._tokens
        message = (
            f"sampled tokens are {mean:.3g} nats {side} surprising than the distribution that trainer and engine agree "
            f"on lets expect, mean of {self._tokens:.0f} tokens; the evidence is 10^{self.evidence:.1f}, expected "
            f"below 10^{LARGEST_EVIDENCE:g}"
        )
        if self._stops:
            raise FrequencyError(
                f"{message}; the last mini-batch was not trained on. A temperature that is missing in both, top-p or "
                "top-k in the sampler: see docs/replay.md"
            )
        if not self._warned:
            self._warned = True
            log.warning("%s", message)

    @property
    def evidence(self) -> float:
        """log10 of the martingale."""
        c = LONGEST_SURPRISE
        exponents = [
            a * self._sums[mean] / c + (math.log1p(-a) + a) * self._sums[square] / c**2
            for mean, square in _SIDES.values()
            for a in _FRACTIONS
        ]
        # Of the largest first: the others' exponentials are then at most 1.
        top = max(exponents)
        mixed = sum(math.exp(e - top) for e in exponents) / len(exponents)
        return (top + math.log(mixed)) / math.log(10)

    def figures(self) -> dict[str, float]:
        return {names.FREQUENCY_EVIDENCE: self.evidence} if self._tokens else {}


def is_coarse(sglang: Mapping[str, Any], megatron: Mapping[str, Any]) -> bool:
    """Whether engine or trainer computes with fewer bits than the weights' type has."""
    narrow_cache = sglang.get("kv_cache_dtype", "auto") != "auto"
    return bool(sglang.get("quantization")) or narrow_cache or megatron.get("fp8") is not None
