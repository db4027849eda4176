"""The claims, the runs that test them, and the tests. All were in the repository before the reported runs were made.

A test compares two rules on the same seeds by the mean difference of an outcome. The first test of a claim is its
primary test. Only the primary test decides. It has two p values: the two-sided p of Student's test of the pairs,
adjusted by Holm over the primary tests of all claims, and the p of the exact sign-flip test of these pairs. If both are
at most 5%, the claim is reproduced, or its contrary is found. Otherwise the claim is undecided.

The numbers of seeds and steps are fixed here. All runs are made, no run is added or left out, and a claim with missing
runs is not evaluated. The settings were chosen by pilots, which ran only PG-IS, with the seeds 100 and 101. No reported
run has these seeds (README.md).

Ten seeds leave most claims undecided. A claim ``...-again`` repeats the primary test of an undecided claim with
only ``FURTHER_SEEDS``: the ten seeds that raised the question are not counted a second time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from examples.arena.lab import PROB_ERROR, RATIO_ERROR, Cell
from examples.arena.significance import (
    LEVEL,
    Difference,
    OneSided,
    pairs_to_decide,
    sign_flip_p,
    spread,
    student_p,
)
from megatron_dppo.metrics import table as names

SEEDS = tuple(range(1, 11))
QUICK_SEEDS = SEEDS[:3]
FURTHER_SEEDS = tuple(range(11, 46))
"""35 seeds, registered before any of them was run.

With 35 pairs, a difference of half of the spread between pairs is found at the 5% level with a power of 80%.
"""

Record = Mapping[str, Sequence[float]]
"""The result of ``lab.run``: metric -> a value for each step."""


# --- settings


@dataclass(frozen=True)
class Setting:
    """A task under a mismatch.

    Attributes:
        task, mismatch: keys of ``TASKS`` and ``MISMATCHES``.
        changes: overrides of the lab's configuration.
        reason: why rules are compared in this setting.
        caution: a warning against a wrong conclusion from the rewards of this setting; empty: none is needed.
    """

    task: str
    mismatch: str
    changes: tuple[str, ...]
    reason: str
    caution: str = ""

    def cell(self, rule: str, seed: int) -> Cell:
        """Return the run of ``rule``: an algorithm and its options, such as ``dppo-binary-tv tv_threshold=0.1``."""
        algorithm, *options = rule.split()
        changes = (*self.changes, *(f"algorithm.options.{option}" for option in options))
        return Cell(self.task, self.mismatch, algorithm, seed, changes)


STEPS = "run.steps=80"
FEW_STEPS = "run.steps=24"
SETTINGS = {
    "drift": Setting(
        "moe", "stale-8", (STEPS, "optimizer.lr=2e-4"),
        "likely tokens move far between sampling and training: PG-IS learns, and loses some of it again",
    ),
    "coarse": Setting(
        "rare", "int4", (STEPS, "optimizer.lr=1e-3"),
        "rare tokens and an engine of coarse weights: PG-IS learns more slowly than without",
    ),
    "late": Setting("rare", "stale-8", (STEPS, "optimizer.lr=1e-3"), "rare tokens of old weights"),
    "exact": Setting("rare", "none", (STEPS, "optimizer.lr=1e-3"), "rare tokens alone"),
    "prefix": Setting(
        "long", "stale-8", (STEPS, "optimizer.lr=2e-4"),
        "96 tokens, along which what differs adds up: PG-IS forgets what the start policy knew",
    ),
    "flips": Setting(
        "moe", "flips", (STEPS, "optimizer.lr=3e-4"), "half of the tokens routed to another last expert in each layer",
    ),
    "replayed": Setting("moe", "flips-r3", (STEPS, "optimizer.lr=3e-4"), "the same, replayed by the trainer (R3)"),
    "rounded": Setting("moe", "int4", (STEPS, "optimizer.lr=2e-4"), "likely tokens, coarse weights"),
    "few-flips": Setting("moe", "few-flips", (STEPS, "optimizer.lr=3e-4"), "as `flips`, at the paper's rate: 3%"),
    "few-replayed": Setting("moe", "few-flips-r3", (STEPS, "optimizer.lr=3e-4"), "the same, replayed by the trainer"),
    "slow": Setting("moe", "stale-8", (STEPS, "optimizer.lr=1e-4"), "as `drift`, at half of its rate"),
    "far": Setting("longer", "stale-8", (STEPS, "optimizer.lr=2e-4"), "256 tokens, as `prefix` in all else; no pilot"),
    **{
        mismatch: Setting("moe", mismatch, (STEPS, "optimizer.lr=2e-4"), "beside the others, at the rate of `drift`")
        for mismatch in ("bf16", "fp8", "decode", "stale-1")
    },
    "stale-64": Setting(
        "moe", "stale-64", (STEPS, "optimizer.lr=2e-4"), "beside the others, at the rate of `drift`",
        "the start policy samples the first 64 of the 80 steps, so the final reward shows how fast a rule leaves the "
        "start, not how it copes with old weights",
    ),
    **{
        name: Setting("moe-wide", mismatch, (FEW_STEPS, "optimizer.lr=3e-4"), reason)
        for name, mismatch, reason in (
            ("w8a8", "w8a8", "linear layers and experts in block FP8, weights and activations"),
            ("w8a8-r3", "w8a8-r3", "the same, replayed by the trainer"),
            ("w8a8-unquantised", "none", "beside the two others, without FP8"),
        )
    },
    **{
        name: Setting(task, mismatch, (steps, f"optimizer.lr={rate}", "distillation.rewards=false", *changes), reason)
        for name, task, mismatch, steps, rate, changes, reason in (
            ("taught-stale", "moe-taught", "stale-8", "run.steps=40", "2e-4", (),
             "a teacher's log p_T - log pi is the advantage; old weights sample"),
            ("taught-flips", "moe-taught", "flips", "run.steps=40", "3e-4", (),
             "the same, half of the tokens routed to another last expert in each layer"),
            ("taught-fp8", "moe-wide-taught", "w8a8", FEW_STEPS, "3e-4", (),
             "the same, linear layers and experts in block FP8"),
            ("taught-reverse", "moe-taught", "stale-8", "run.steps=40", "2e-4",
             ("distillation.loss=reverse", "distillation.top_k=8"),
             "KL(pi || p_T) at each token in place of an advantage; old weights sample"),
        )
    },
}  # fmt: skip


# --- outcomes

Outcome = Callable[[Record], float]


def final(record: Record) -> float:
    """Return the mean reward of the last quarter of the steps."""
    return float(np.mean(_last_quarter(record[names.REWARD])))


def area(record: Record) -> float:
    """Return the mean reward of all steps. It is higher for a rule that learns sooner."""
    return float(np.mean(record[names.REWARD]))


def loss_of_best(record: Record) -> float:
    """Return the best mean reward of ten steps in a row, minus ``final``: the reward that was learnt and lost again."""
    best = np.convolve(record[names.REWARD], np.full(10, 0.1), "valid").max()
    return float(best) - final(record)


def entropy(record: Record) -> float:
    """Return the mean entropy of the last quarter of the steps, in nats."""
    return float(np.nanmean(_last_quarter(record[names.ENTROPY])))


def _last_quarter(values: Sequence[float]) -> Sequence[float]:
    count = math.ceil(len(values) / 4)
    return values[len(values) - count :]


def blocked(record: Record) -> float:
    """Return the share of tokens that the mask blocks: the mean over the steps, and over A > 0 and A < 0."""
    shares = (record[names.MASKED_POSITIVE], record[names.MASKED_NEGATIVE])
    return float(np.nanmean(shares))


def first_gap(record: Record) -> float:
    """Return the mean |pi - mu| of the steps' first mini-batches; NaN if the value of a step was not kept."""
    fresh_gaps = record[names.GAP_ON_POLICY]
    stale_gaps = record.get(names.GAP_STALE, [math.nan] * len(fresh_gaps))
    # A step has the stale gap if its batch is stale, else the gap at equal weights.
    gaps = []
    for fresh, stale in zip(fresh_gaps, stale_gaps, strict=True):
        gaps.append(fresh if math.isnan(stale) else stale)
    return float(np.mean(gaps))


def _of_bins(metric: str, bins: slice, name: str) -> Outcome:
    """Return the outcome ``name``: the mean of a metric by ``MU_BOUNDS`` over ``bins``."""

    def outcome(record: Record) -> float:
        return float(np.nanmean(record[metric][bins]))

    outcome.__name__ = name
    return outcome


_RARE, _LIKELY = slice(0, 2), slice(3, 5)
"""Bins of ``MU_BOUNDS`` with mu < 0.1, and with mu >= 0.5."""
rare_ratio_error = _of_bins(RATIO_ERROR, _RARE, "|pi / mu - 1| where mu < 0.1")
likely_ratio_error = _of_bins(RATIO_ERROR, _LIKELY, "|pi / mu - 1| where mu >= 0.5")
rare_prob_error = _of_bins(PROB_ERROR, _RARE, "|pi - mu| where mu < 0.1")
likely_prob_error = _of_bins(PROB_ERROR, _LIKELY, "|pi - mu| where mu >= 0.5")


# --- claims

ALIKE = 0.05
"""Rules are alike if the mean difference of their outcomes is between -ALIKE and ALIKE."""
TV, KL, CLIP = "dppo-binary-tv", "dppo-binary-kl", "grpo-clip-higher"
DPPO = (TV, KL)


class Finding(Enum):
    """Whether a test supports the claim, the contrary, or neither."""

    AS_CLAIMED = "as claimed"
    CONTRARY = "contrary"
    OPEN = "open"


@dataclass(frozen=True)
class Side:
    """One side of a comparison: the outcome of a rule in a setting."""

    setting: str
    rule: str
    outcome: Outcome = final

    def key(self, seed: int) -> str:
        """Return the key of the run with ``seed``."""
        return SETTINGS[self.setting].cell(self.rule, seed).key

    def __str__(self) -> str:
        return f"{self.outcome.__name__}, {self.rule} ({self.setting})"


@dataclass(frozen=True)
class ComparisonResult:
    """The result of a comparison.

    Attributes:
        difference: mean difference of the pairs, with its interval.
        deviation: standard deviation of the pairs' differences.
        p: two-sided p of Student's test, for the hypothesis ``leans_to``.
        sign_flip_p: two-sided p of the sign-flip test, for the hypothesis ``leans_to``.
        leans_to: the claim or its contrary, whichever has the smaller p.
    """

    difference: Difference
    deviation: float
    p: float
    sign_flip_p: float
    leans_to: Finding

    @property
    def finding(self) -> Finding:
        """The finding by only Student's test, at the level of a single test."""
        return self.leans_to if self.p <= LEVEL else Finding.OPEN


@dataclass(frozen=True)
class Comparison:
    """The difference ``first`` minus ``second``, seed by seed.

    The claim is that the mean difference is above 0 or, with ``margin``, between -margin and margin.
    """

    first: Side
    second: Side
    margin: float | None = None

    def differences(
        self, records: Mapping[str, Record], seeds: Sequence[int]
    ) -> list[float] | None:
        """Return the difference for each seed; None if a run is missing. ``records``: by ``Cell.key``."""
        found = []
        for seed in seeds:
            first = records.get(self.first.key(seed))
            second = records.get(self.second.key(seed))
            if first is None or second is None:
                return None
            found.append(self.first.outcome(first) - self.second.outcome(second))
        return found

    def result(self, differences: Sequence[float]) -> ComparisonResult:
        """Test ``differences``. Raises ValueError for fewer than two differences."""
        claimed_p, contrary_p = self._p_values(differences, student_p)
        claimed_flip_p, contrary_flip_p = self._p_values(differences, sign_flip_p)
        supports_claim = claimed_p <= contrary_p
        return ComparisonResult(
            difference=Difference.of(differences),
            deviation=spread(differences),
            p=claimed_p if supports_claim else contrary_p,
            sign_flip_p=claimed_flip_p if supports_claim else contrary_flip_p,
            leans_to=Finding.AS_CLAIMED if supports_claim else Finding.CONTRARY,
        )

    def _p_values(self, differences: Sequence[float], one_sided: OneSided) -> tuple[float, float]:
        """Return the two-sided p, twice the one-sided p, of the claim and of the contrary."""
        values = np.asarray(differences)
        if self.margin is None:
            claimed, contrary = one_sided(values), one_sided(-values)
        else:
            # For the claim, the mean must be inside both bounds. For the contrary, the mean must be outside one bound.
            claimed = max(one_sided(values + self.margin), one_sided(self.margin - values))
            contrary = min(one_sided(values - self.margin), one_sided(-values - self.margin))
        return min(1.0, 2 * claimed), min(1.0, 2 * contrary)

    def pairs_to_decide(self, mean: float, deviation: float, level: float = LEVEL) -> int | None:
        """Return the number of pairs that would decide with a power of 80%; None if it is above ``MOST_PAIRS``.

        The method assumes that ``mean`` and ``deviation`` are the true values of the differences.
        """
        if self.margin is None:
            distances = [abs(mean)]
        elif abs(mean) < self.margin:
            distances = [self.margin - mean, self.margin + mean]
        else:
            distances = [abs(mean) - self.margin]
        return pairs_to_decide(distances, deviation, level)


@dataclass(frozen=True)
class Claim:
    """A claim about rules.

    Attributes:
        name: unique name.
        source: figure or paper that makes the claim.
        text: the claim in words.
        tests: comparisons that test the claim, the primary test first.
        unreachable: reason why the claim has no tests; None if the claim has tests.
        seeds: seeds of the runs.
        repeats: name of the claim whose primary test this claim repeats; None for a claim of its own.
    """

    name: str
    source: str
    text: str
    tests: tuple[Comparison, ...] = ()
    unreachable: str | None = None
    seeds: tuple[int, ...] = SEEDS
    repeats: str | None = None

    @property
    def sides(self) -> list[Side]:
        """The sides of all tests, each once."""
        sides: dict[Side, None] = {}
        for test in self.tests:
            sides[test.first] = None
            sides[test.second] = None
        return list(sides)


def above(
    settings: Sequence[str], firsts: Sequence[str], seconds: Sequence[str], outcome: Outcome = final
) -> tuple[Comparison, ...]:
    """Return the tests that, in each setting, each rule of ``firsts`` is above each rule of ``seconds``."""
    return tuple(
        Comparison(Side(setting, first, outcome), Side(setting, second, outcome))
        for setting, first, second in itertools.product(settings, firsts, seconds)
    )


def alike(
    settings: Sequence[str], firsts: Sequence[str], seconds: Sequence[str], outcome: Outcome = final
) -> tuple[Comparison, ...]:
    """Return the tests that, in each setting, ``firsts`` and ``seconds`` differ by less than ``ALIKE``."""
    tests = above(settings, firsts, seconds, outcome)
    return tuple(replace(test, margin=ALIKE) for test in tests)


def _again(name: str, primary: Comparison) -> Claim:
    """Return the claim that repeats the primary test of the claim ``name`` with only ``FURTHER_SEEDS``."""
    first, second = primary.first, primary.second
    text = (
        f"the primary test of {name} alone ({first.rule} against {second.rule} in {first.setting}), with "
        f"{len(FURTHER_SEEDS)} further seeds"
    )
    source = f"registered after {name} was seen"
    return Claim(f"{name}-again", source, text, (primary,), seeds=FURTHER_SEEDS, repeats=name)


def _mismatch_tests(setting: str) -> tuple[Comparison, Comparison]:
    """Return the tests that the ratio's error is larger at rare tokens, the probability's error at likely tokens."""
    rare_ratio, likely_ratio = (
        Side(setting, CLIP, rare_ratio_error),
        Side(setting, CLIP, likely_ratio_error),
    )
    rare_prob, likely_prob = (
        Side(setting, CLIP, rare_prob_error),
        Side(setting, CLIP, likely_prob_error),
    )
    return Comparison(rare_ratio, likely_ratio), Comparison(likely_prob, rare_prob)


KL_AS_PDM = f"{KL} kl_threshold=0.15 ratio_cap=5"
"""DPPO-KL with the threshold and the cap of PDM."""
BPO_UNMASKED = "bpo clip_low=1 clip_high=10"
"""Bellman PO without a mask: with these options the mask's bounds are 0 and 11, and the weight
(1 + .1 - mu) / (1 + .1 - pi) is always between these bounds."""
CLAIMS = (
    Claim(
        "mask-needed", "Figure 3", "training without a trust region loses what it learnt, with DPPO it loses less",
        # The first rule loses more.
        above(("drift", "prefix"), ("pg-is", "pg-tis"), DPPO, loss_of_best),
    ),
    Claim(
        "stability", "Figure 3", "after 80 steps DPPO stands above PG-TIS (CISPO), MiniRL-TIS and Clip-Higher",
        above(("drift",), DPPO, ("pg-tis", "minirl-tis", CLIP)),
    ),
    Claim(
        "prefix-order",
        "registered after mask-needed was seen",
        "along a long prefix, too, DPPO ends above MiniRL-TIS, Clip-Higher and Mask-0.5",
        above(("prefix",), DPPO, ("minirl-tis", CLIP, "mask-0.5")),
    ),
    Claim(
        "prefix-far",
        "registered after prefix-order was seen",
        "along 256 tokens in place of 96, too, training without a trust region loses what it learnt, with DPPO it "
        "loses less",
        above(("far",), ("pg-is",), (TV,), loss_of_best),
    ),
    Claim(
        "anchor", "Figure 4", "a trust region around mu ends above one around the recomputed policy",
        (
            *above(("drift",), (TV,), ("dppo-decoupled-binary-tv",)),
            *above(("drift",), (KL,), ("dppo-decoupled-binary-kl",)),
            *above(("drift",), (CLIP,), ("minirl",)),
        ),
    ),
    Claim(
        "minimal-mask", "Figure 5",
        "to block A < 0 where mu - pi >= 0.5 is enough to be stable, and around mu alone",
        (
            *above(("drift",), ("pg-is",), ("mask-0.5",), loss_of_best),
            *above(("drift",), ("mask-0.5",), ("mask-0.5-recompute",)),
        ),
    ),
    Claim(
        "relaxation", "Figures 6 and 7", "Clip-Higher learns sooner where it no longer clips rare tokens",
        above(("exact", "coarse"), ("relax-both",), (CLIP,), area),
    ),
    Claim(
        "efficiency", "Figures 6 to 9", "DPPO learns sooner than Clip-Higher where good tokens are rare",
        above(("exact", "coarse", "late"), DPPO, (CLIP,), area),
    ),
    Claim(
        "mismatch", "ours, after Figure 2",
        "one mismatch moves the ratio more where mu < .1 than where mu >= .5, the probability the other way round",
        (*_mismatch_tests("flips"), *_mismatch_tests("rounded")),
    ),
    Claim(
        "r3", "Figure 8", "router replay lifts Clip-Higher where routing differs",
        (Comparison(Side("replayed", CLIP), Side("flips", CLIP)),),
    ),
    Claim(
        "without-r3", "Figure 8", "DPPO without router replay ends above Clip-Higher with it",
        (Comparison(Side("flips", TV), Side("replayed", CLIP)),),
    ),
    Claim(
        "without-r3-few",
        "registered after without-r3 was seen",
        "with 3% of the routing flipped in place of half, DPPO without router replay ends above Clip-Higher with it",
        (Comparison(Side("few-flips", TV), Side("few-replayed", CLIP)),),
    ),
    Claim(
        "without-r3-alike",
        "registered after without-r3 was seen",
        "with 3% of the routing flipped, both rules do without router replay as well as Clip-Higher with it",
        tuple(
            Comparison(Side("few-flips", rule), Side("few-replayed", CLIP), margin=ALIKE)
            for rule in (TV, CLIP)
        ),
    ),
    Claim(
        "topk", "Figures 10 and 11", "Binary, Top-K and exact divergence do alike",
        alike(("drift", "coarse"), (TV,), ("dppo-topk-tv", "dppo-exact-tv")),
    ),
    Claim(
        "thresholds", "Sensitivity study", "delta .10, .15, .20 (TV) and .05, .10, .15 (KL) do alike",
        (
            *alike(("drift",), (TV,), (f"{TV} tv_threshold=0.1", f"{TV} tv_threshold=0.2")),
            *alike(("drift",), (KL,), (f"{KL} kl_threshold=0.1", f"{KL} kl_threshold=0.15")),
        ),
    ),
    Claim(
        "cppo", "2606.10968", "CPPO ends above DPPO",
        above(("drift", "prefix"), ("cppo-binary-tv",), (TV,)),
    ),
    Claim("bellman", "2609.15987", "Bellman PO ends above DPPO", above(("drift", "coarse"), ("bpo",), (TV,))),
    Claim(
        "bellman-mask", "registered after bellman was seen",
        "without its clip mask Bellman PO ends above itself with it",
        above(("drift",), (BPO_UNMASKED,), ("bpo",)),
    ),
    Claim(
        "bellman-smoothing", "registered after bellman was seen", "with e = .3 Bellman PO ends above itself with .1",
        above(("drift",), ("bpo smoothing=0.3",), ("bpo",)),
    ),
    Claim(
        "bellman-rate", "registered after bellman was seen", "at half of the rate Bellman PO ends above DPPO",
        above(("slow",), ("bpo",), (TV,)),
    ),
    Claim("pdm", "2607.10848", "PDM ends above DPPO", above(("drift", "coarse"), ("pdm-aggregated",), (KL,))),
    Claim(
        "pdm-alike", "registered after pdm was seen",
        "with its threshold of .15 and cap of 5 DPPO-KL learns as soon as PDM, and ends where it ends",
        (
            *alike(("drift",), ("pdm-aggregated",), (KL_AS_PDM,)),
            *alike(("drift",), ("pdm-aggregated",), (KL_AS_PDM,), area),
        ),
    ),
    Claim(
        "pdm-entropy", "2607.10848", "PDM keeps more entropy than DPPO",
        above(("drift", "coarse"), ("pdm-aggregated",), (KL,), entropy),
    ),
    Claim(
        "centering", "2609.20807",
        "score centering ends above PG-TIS, which has the same weights up to a cap of 3 in place of 2",
        above(("drift", "coarse"), ("score-centering",), ("pg-tis",)),
    ),
    Claim(
        "centering-alike", "registered after centering was seen",
        "score centering ends above PG-TIS with its cap of 2, the same weights without it",
        above(("drift", "coarse"), ("score-centering",), ("pg-tis ratio_cap=2",)),
    ),
    # The cheapest decision comes first: each of these claims adds one rule to the runs of earlier claims.
    _again("mask-needed", Comparison(Side("drift", "pg-is", loss_of_best), Side("drift", TV, loss_of_best))),
    _again(
        "minimal-mask",
        Comparison(Side("drift", "pg-is", loss_of_best), Side("drift", "mask-0.5", loss_of_best)),
    ),
    _again("thresholds", *alike(("drift",), (TV,), (f"{TV} tv_threshold=0.1",))),
    _again("topk", *alike(("drift",), (TV,), ("dppo-topk-tv",))),
    _again("anchor", *above(("drift",), (TV,), ("dppo-decoupled-binary-tv",))),
    Claim(
        "scale", "Tables and scaling runs", "DPPO's scores on AIME24 and AIME25",
        unreachable="models of 8 and 30 billion parameters, 16,384 tokens a response",
    ),
    Claim(
        "rlhf", "Appendix F.1", "DPPO above GRPO in AlpacaEval after RLHF",
        unreachable="a reward model of 8 billion parameters and a judge",
    ),
)  # fmt: skip

SECOND_HAND = frozenset(
    (
        "bpo", "pdm-aggregated", "score-centering", "dppo-symmetric", "kpop", "sapo", "gmpo", "minpro", "trm-max",
        "trm-mean", "geometric-mask", "m2po", "m2po-areal", "vaco", "off-policy-sequence-mask",
    )
)  # fmt: skip
"""Algorithms whose paper was not read, or not completely. The docstring of each function says what was read."""

OTHERS = (
    "dppo-symmetric", "kpop", "sapo", "gmpo", "minpro", "trm-max", "trm-mean", "geometric-mask", "m2po", "vaco",
    "off-policy-sequence-mask", "drpo", "gspo", "icepop", "m2po-areal",
)  # fmt: skip
"""Rules that no claim is about."""


@dataclass(frozen=True)
class Survey:
    """Runs that no claim needs and that the page shows too: each of ``rules`` in each of ``settings``."""

    settings: tuple[str, ...]
    rules: tuple[str, ...]
    seeds: tuple[int, ...]


SHOWN = {"prefix": ("pg-is", CLIP, TV), "late": ("pg-is", CLIP, TV)}
"""Setting -> rules of README's figure. ``prefix`` needs a mask; in ``late``, a bound on the ratio does harm.

The figure was chosen after its runs were seen.
"""

SURVEYS = (
    *(Survey((setting,), rules, SEEDS) for setting, rules in SHOWN.items()),
    Survey(("drift",), OTHERS, QUICK_SEEDS),
    Survey(("bf16", "fp8", "stale-1", "stale-64", "decode"), ("pg-is", CLIP, *DPPO), QUICK_SEEDS),
    Survey(("drift",), OTHERS, SEEDS[3:]),
)
"""Surveys, in the order of their runs."""
