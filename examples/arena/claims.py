"""What is claimed, the runs that test it, and the test: fixed, and in the repository, before the reported runs.

A test compares two rules on the same seeds: the mean difference of an outcome over the seeds. The first test of a claim
is its primary test, which alone decides: the claim is reproduced, or the contrary is found, where the two-sided p of
Student's test of the pairs, adjusted by Holm over the primary tests of all claims, and the p of the exact sign-flip
test of the same pairs are both at most 5%; else it is undecided. Numbers of seeds and steps are fixed here; all runs
are made, none is added or left out, and a set of which runs are missing is not evaluated. The settings were chosen by
pilots of PG-IS alone, with the seeds 100 and 101, which are not among the reported ones (README.md).

Ten seeds leave most claims undecided. The claims ``...-again`` repeat the primary test of such a claim with
``FURTHER_SEEDS`` alone: the ten seeds that raised the question are not counted a second time.
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
"""35: enough for a test in ``drift`` whose difference is half of the spread between pairs of seeds to be decided at the
5% level with a power of 80%, registered before any of these seeds was run."""

Record = Mapping[str, Sequence[float]]
"""What ``lab.run`` keeps: a value for each step, by metric."""


# --- where


@dataclass(frozen=True)
class Setting:
    """A task under a mismatch. ``changes``: to the lab's recipe. ``reason``: why rules are compared here. ``caution``:
    what its rewards can't tell, if there is such a thing."""

    task: str
    mismatch: str
    changes: tuple[str, ...]
    reason: str
    caution: str = ""

    def cell(self, rule: str, seed: int) -> Cell:
        """``rule``: an algorithm and options, ``dppo-binary-tv tv_threshold=0.1``."""
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
}  # fmt: skip


# --- what is measured

Outcome = Callable[[Record], float]


def final(record: Record) -> float:
    """Mean reward of the last quarter of the steps."""
    rewards = record[names.REWARD]
    return float(np.mean(rewards[-len(rewards) // 4 :]))


def area(record: Record) -> float:
    """Mean reward of all steps: who learns sooner has more."""
    return float(np.mean(record[names.REWARD]))


def loss_of_best(record: Record) -> float:
    """The best mean reward of ten steps in a row, less ``final``: what was learnt and lost again."""
    best = np.convolve(record[names.REWARD], np.full(10, 0.1), "valid").max()
    return float(best) - final(record)


def entropy(record: Record) -> float:
    """Mean entropy of the last quarter of the steps, nats."""
    values = record[names.ENTROPY]
    return float(np.nanmean(values[-len(values) // 4 :]))


def blocked(record: Record) -> float:
    """Mean over the steps of the shares of tokens that the mask blocks, where A > 0 and where A < 0."""
    shares = (record[names.MASKED_POSITIVE], record[names.MASKED_NEGATIVE])
    return float(np.nanmean(shares))


def first_gap(record: Record) -> float:
    """mean |pi - mu| of the steps' first mini-batches, at equal weights or not; NaN where some were not kept."""
    fresh = record[names.GAP_ON_POLICY]
    stale = record.get(names.GAP_STALE, [math.nan] * len(fresh))
    return float(np.mean([x if math.isnan(y) else y for x, y in zip(fresh, stale, strict=True)]))


def _of_bins(metric: str, bins: slice, name: str) -> Outcome:
    def outcome(record: Record) -> float:
        return float(np.nanmean(record[metric][bins]))

    outcome.__name__ = name
    return outcome


_RARE, _LIKELY = slice(0, 2), slice(3, 5)  # of MU_BOUNDS: mu < 0.1, mu >= 0.5
rare_ratio_error = _of_bins(RATIO_ERROR, _RARE, "|pi / mu - 1| where mu < 0.1")
likely_ratio_error = _of_bins(RATIO_ERROR, _LIKELY, "|pi / mu - 1| where mu >= 0.5")
rare_prob_error = _of_bins(PROB_ERROR, _RARE, "|pi - mu| where mu < 0.1")
likely_prob_error = _of_bins(PROB_ERROR, _LIKELY, "|pi - mu| where mu >= 0.5")


# --- what is claimed of it


class Finding(Enum):
    """Whether a test says what is claimed, the contrary, or neither."""

    AS_CLAIMED = "as claimed"
    CONTRARY = "contrary"
    OPEN = "open"


@dataclass(frozen=True)
class Side:
    """``outcome`` of a rule in a setting."""

    setting: str
    rule: str
    outcome: Outcome = final

    def key(self, seed: int) -> str:
        """Of its run."""
        return SETTINGS[self.setting].cell(self.rule, seed).key

    def __str__(self) -> str:
        return f"{self.outcome.__name__}, {self.rule} ({self.setting})"


@dataclass(frozen=True)
class ComparisonResult:
    """What the pairs of runs say of a comparison.

    ``p``, ``sign_flip_p``: two-sided, of Student's test and of the sign-flip test, of the nearer one of what is claimed
    and its contrary, which is ``leans_to``. ``deviation``: of the differences between pairs.
    """

    difference: Difference
    deviation: float
    p: float
    sign_flip_p: float
    leans_to: Finding

    @property
    def finding(self) -> Finding:
        """By Student's test alone, at the level of a single test."""
        return self.leans_to if self.p <= LEVEL else Finding.OPEN


@dataclass(frozen=True)
class Comparison:
    """``first`` less ``second``, seed by seed. Claimed is that it is above 0, or, with ``margin``, within +-margin."""

    first: Side
    second: Side
    margin: float | None = None

    def differences(
        self, records: Mapping[str, Record], seeds: Sequence[int]
    ) -> list[float] | None:
        """One for each seed; None where a run is missing. ``records``: by ``Cell.key``."""
        pairs = [(self.first.key(seed), self.second.key(seed)) for seed in seeds]
        if not all(key in records for pair in pairs for key in pair):
            return None
        first, second = self.first.outcome, self.second.outcome
        return [first(records[a]) - second(records[b]) for a, b in pairs]

    def result(self, differences: Sequence[float]) -> ComparisonResult:
        """What ``differences`` say; ValueError for fewer than two."""
        claimed, contrary = self._p_values(differences, student_p)
        leans_to = Finding.AS_CLAIMED if claimed <= contrary else Finding.CONTRARY
        flipped = self._p_values(differences, sign_flip_p)
        return ComparisonResult(
            difference=Difference.of(differences),
            deviation=spread(differences),
            p=min(claimed, contrary),
            sign_flip_p=flipped[0 if leans_to is Finding.AS_CLAIMED else 1],
            leans_to=leans_to,
        )

    def _p_values(self, differences: Sequence[float], one_sided: OneSided) -> tuple[float, float]:
        """Two-sided p of what is claimed, and of the contrary."""
        values = np.asarray(differences)
        if self.margin is None:
            claimed, contrary = one_sided(values), one_sided(-values)
        else:
            # Alike is on the right side of both bounds; the contrary is beyond either.
            claimed = max(one_sided(values + self.margin), one_sided(self.margin - values))
            contrary = min(one_sided(values - self.margin), one_sided(-values - self.margin))
        return min(1.0, 2 * claimed), min(1.0, 2 * contrary)

    def pairs_to_decide(self, mean: float, deviation: float, level: float = LEVEL) -> int | None:
        """Pairs of runs that would decide with a power of 80% if ``mean`` and ``deviation`` were the true ones; None:
        more than ``MOST_PAIRS``."""
        if self.margin is None:
            distances = [abs(mean)]
        elif abs(mean) < self.margin:
            distances = [self.margin - mean, self.margin + mean]
        else:
            distances = [abs(mean) - self.margin]
        return pairs_to_decide(distances, deviation, level)


@dataclass(frozen=True)
class Claim:
    """``source``: who claims it. ``tests``: the first is the primary one. ``unreachable``: why there are none."""

    name: str
    source: str
    text: str
    tests: tuple[Comparison, ...] = ()
    unreachable: str | None = None
    seeds: tuple[int, ...] = SEEDS

    @property
    def sides(self) -> list[Side]:
        """Of all tests, each once."""
        return list(
            dict.fromkeys(side for test in self.tests for side in (test.first, test.second))
        )


def above(
    settings: Sequence[str], firsts: Sequence[str], seconds: Sequence[str], outcome: Outcome = final
) -> tuple[Comparison, ...]:
    """In each setting each of ``firsts`` is above each of ``seconds``."""
    return tuple(
        Comparison(Side(setting, first, outcome), Side(setting, second, outcome))
        for setting, first, second in itertools.product(settings, firsts, seconds)
    )


def alike(
    settings: Sequence[str], firsts: Sequence[str], seconds: Sequence[str], outcome: Outcome = final
) -> tuple[Comparison, ...]:
    """In each setting they are within ``ALIKE`` of each other."""
    tests = above(settings, firsts, seconds, outcome)
    return tuple(replace(test, margin=ALIKE) for test in tests)


def _again(name: str, primary: Comparison) -> Claim:
    """The primary test of the claim ``name``, repeated with ``FURTHER_SEEDS`` alone."""
    count = len(FURTHER_SEEDS)
    text = f"the primary test of {name}, with {count} further seeds"
    source = f"registered after {name} was seen"
    return Claim(f"{name}-again", source, text, (primary,), seeds=FURTHER_SEEDS)


ALIKE = 0.05
TV, KL, CLIP = "dppo-binary-tv", "dppo-binary-kl", "grpo-clip-higher"
DPPO = (TV, KL)
KL_AS_PDM = f"{KL} kl_threshold=0.15 ratio_cap=5"
BPO_UNMASKED = "bpo clip_low=1 clip_high=10"
"""Its weight lies between 0 and 11, the bounds: (1 + .1 - mu) / (1 + .1 - pi)."""
CLAIMS = (
    Claim(
        "mask-needed", "Figure 3", "training without a trust region loses what it learnt, with DPPO it loses less",
        # Greater is the loss of the first.
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
        tuple(
            test
            for setting in ("flips", "rounded")
            for test in (
                Comparison(Side(setting, CLIP, rare_ratio_error), Side(setting, CLIP, likely_ratio_error)),
                Comparison(Side(setting, CLIP, likely_prob_error), Side(setting, CLIP, rare_prob_error)),
            )
        ),
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
    # The cheapest decision comes first: each of these claims adds one rule to the runs of those before it.
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
"""Algorithms whose paper's own text was not read, or not all that the rule is made of: the docstring of each function
says what was read."""

OTHERS = (
    "dppo-symmetric", "kpop", "sapo", "gmpo", "minpro", "trm-max", "trm-mean", "geometric-mask", "m2po", "vaco",
    "off-policy-sequence-mask", "drpo", "gspo", "icepop", "m2po-areal",
)  # fmt: skip
"""Rules that no claim is about."""


@dataclass(frozen=True)
class Survey:
    """Runs that no claim needs, shown beside the others: each of ``rules`` in each of ``settings``."""

    settings: tuple[str, ...]
    rules: tuple[str, ...]
    seeds: tuple[int, ...]


SHOWN = {"prefix": ("pg-is", CLIP, TV), "late": ("pg-is", CLIP, TV)}
"""README's figure, of runs that were seen before it was chosen: where a mask is needed, and where a ratio's bound is in
the way. By setting: the rules."""

SURVEYS = (
    *(Survey((setting,), rules, SEEDS) for setting, rules in SHOWN.items()),
    Survey(("drift",), OTHERS, QUICK_SEEDS),
    Survey(("bf16", "fp8", "stale-1", "stale-64", "decode"), ("pg-is", CLIP, *DPPO), QUICK_SEEDS),
    Survey(("drift",), OTHERS, SEEDS[3:]),
)
"""In the order in which they are made."""
