"""The table of algorithms: DPPO (arXiv 2602.04879) and the algorithms it is compared with. This module does not import
torch.

A row has an algorithm's numbers, the names of its functions, and its needs from engine and trainer. The loss, the
configuration's checks and the planner read the table; ``build_algorithm`` finds a row's functions.
docs/algorithms.md describes the tokens that each row blocks, and the source of each number. A row may also be in a
user's own module (``find_preset``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, get_args

from megatron_dppo.system import plugins

Settings = Literal["stability", "scaling", "lora", "generalization"]
"""The experiment of the paper that a preset's numbers belong to: the stability study (v3, Section 5), the scaling runs
(Section 7.1), the scaling run with LoRA (Appendix E), or the other models and tasks (Section 7.4)."""
AnchorName = Literal["rollout", "recomputed"]
"""The policy that a mask compares pi with: mu of the engine, or pi' of the trainer at the rollout's weights."""
Divergence = Literal["binary_tv", "binary_kl", "binary_kl_both_ways", "topk_tv", "topk_kl"]
"""A function of ``divergence.py``. A mask of the same name bounds this divergence at each token, as in DPPO."""
AggregationName = Literal[
    "token-mean",
    "sequence-mean-with-constant",
    "sequence-mean-token-sum",
    "sequence-mean-token-mean",
]
Tail = Literal["one", "uniform", "proportional"]
"""How PDM treats the ids outside of TopK(mu). ``one``: as one token. ``uniform``: as equally likely tokens.
``proportional``: as tokens with equal mu / pi; this needs the sum of pi^2 over the vocabulary."""
AdvantageName = Literal["group-mean", "leave-one-out", "group-standardized"]
"""The baseline of a response's reward: ``advantages.group_relative``."""
EstimatorName = Literal["k1-on-policy", "k2", "k3", "k3-on-policy", "reverse-k3-on-policy"]
DistillationLoss = Literal["sampled", "reverse", "forward"]
"""The loss that draws the policy to a teacher: ``algorithms/distillation.py``."""
Role = Literal["mask", "weight", "both", "step", "cap", "topk", "penalty", "correction"]


@dataclass(frozen=True)
class Option:
    """A number of an algorithm.

    Attributes:
        meaning: The meaning, for documentation and messages.
        role: The part of the algorithm that takes the number. ``both``: mask and weight. ``step``: the function that
            reads all tokens of a step. ``correction``: the additive term that belongs to this algorithm alone.
        low: Lower end of the range, excluded unless ``includes_low``.
        high: Upper end of the range, included.
        includes_low: Whether ``low`` itself is allowed.
        whole: Whether the number must be an int.
        bound: Writes the number as a bound in words: (value, whether A > 0) -> text such as ``TV > 0.15``, or None if
            the number bounds nothing for this sign of A. None for a number that ``explain`` does not show.
    """

    meaning: str
    role: Role
    low: float = 0.0
    high: float = math.inf
    includes_low: bool = False
    whole: bool = False
    bound: Callable[[float, bool], str | None] | None = None

    def fault(self, value: Any) -> str | None:
        """Describe the error in ``value``; None for a valid one. A bool is not a number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"expected a number, got {value!r}"
        if self.whole and not isinstance(value, int):
            return f"expected a whole number, got {value!r}"
        is_allowed_low = self.includes_low and value == self.low
        is_within = self.low < value <= self.high
        if not (is_allowed_low or is_within):
            bracket = "[" if self.includes_low else "("
            return f"{value!r} is outside its range, {bracket}{self.low:g}, {self.high:g}]"
        return None


OPTIONS: dict[str, Option] = {
    "tv_threshold": Option(
        "largest total variation at which a diverging token still trains",
        "mask",
        high=1,
        includes_low=True,
        bound=lambda value, positive: f"TV > {value:g}",
    ),
    "tv_threshold_negative": Option(
        "tv_threshold where A < 0, if given", "mask", high=1, includes_low=True
    ),
    "kl_threshold": Option(
        "largest KL(mu || pi), nats, at which a diverging token still trains",
        "mask",
        includes_low=True,
        bound=lambda value, positive: f"KL > {value:g}",
    ),
    "kl_threshold_negative": Option(
        "kl_threshold where A < 0, if given", "mask", includes_low=True
    ),
    "clip_low": Option(
        "r below 1 - this is blocked where A < 0",
        "mask",
        high=1,
        includes_low=True,
        bound=lambda value, positive: None if positive else f"r < {1 - value:g}",
    ),
    "clip_high": Option(
        "r above 1 + this is blocked where A > 0",
        "mask",
        includes_low=True,
        bound=lambda value, positive: f"r > {1 + value:g}" if positive else None,
    ),
    "max_drop": Option(
        "drop of probability from which a token with A < 0 is blocked",
        "mask",
        high=1,
        bound=lambda value, positive: None if positive else f"drop >= {value:g}",
    ),
    "rare_below": Option(
        "rollout probability below which the clip is relaxed",
        "mask",
        high=1,
        includes_low=True,
        bound=lambda value, positive: f"relaxed where mu < {value:g}",
    ),
    "mismatch_low": Option(
        "smallest pi' / mu that trains",
        "mask",
        includes_low=True,
        bound=lambda value, positive: f"pi'/mu < {value:g}",
    ),
    "mismatch_high": Option(
        "largest pi' / mu that trains", "mask", bound=lambda value, positive: f"pi'/mu > {value:g}"
    ),
    "penalty_threshold": Option("delta of DRPO's quadratic penalty, in probability", "weight"),
    "smoothing": Option("e of the weight (1 + e - mu) / (1 + e - pi)", "both"),
    "tau_positive": Option("temperature of the soft gate where A > 0", "weight"),
    "tau_negative": Option("temperature of the soft gate elsewhere", "weight"),
    "log_clip": Option(
        "largest |log r| that counts in the sequence's ratio",
        "both",
        bound=lambda value, positive: f"log r > {value:g}" if positive else f"log r < -{value:g}",
    ),
    "sequence_low": Option(
        "smallest geometric mean of pi' / mu of a response that trains",
        "mask",
        high=1,
        includes_low=True,
        bound=lambda value, positive: f"response's mean ratio < {value:g}",
    ),
    "sequence_high": Option(
        "largest such mean",
        "mask",
        low=1,
        includes_low=True,
        bound=lambda value, positive: f"response's mean ratio > {value:g}",
    ),
    "drift_threshold": Option(
        "largest mean of log(mu / pi), nats, at which a response with A < 0 trains",
        "mask",
        bound=lambda value, positive: (
            None if positive else f"response's mean log(mu/pi) > {value:g}"
        ),
    ),
    "largest_k2": Option(
        "largest (log r)^2 / 2 of a token of a response that trains",
        "mask",
        bound=lambda value, positive: f"(log r)^2/2 in the response > {value:g}",
    ),
    "mean_k3": Option(
        "largest mean of r - 1 - log r of a response that trains",
        "mask",
        bound=lambda value, positive: f"response's mean r - 1 - log r > {value:g}",
    ),
    "second_moment": Option("largest mean of (log r)^2 over tokens of the optimiser step", "step"),
    "largest_shift": Option(
        "largest mean of |pi' / mu - 1| over a response; above it tokens are blocked", "mask"
    ),
    "gate_segment": Option(
        "tokens of a segment that is judged by its gap of log pi' and log mu", "weight", whole=True
    ),
    "repair_segment": Option(
        "tokens of a segment whose gap of log pi and log mu is repaired", "correction", whole=True
    ),
    "repair": Option("coefficient of the repair term", "correction", includes_low=True),
    "kl_bound": Option("largest KL(p || mu), nats, of the projected policy p", "weight"),
    "regression": Option("coefficient of KL(pi || p)", "correction", includes_low=True),
    "weight_min": Option("w_min: what a response's last token counts", "mask", high=1),
    "budget_low": Option(
        "least mean divergence of a prefix that is allowed", "mask", high=1, includes_low=True
    ),
    "budget_high": Option(
        "largest mean divergence of a prefix that is allowed",
        "mask",
        high=1,
        bound=lambda value, positive: f"prefix's mean TV > {value:g}",
    ),
    "ratio_cap": Option("C: the weight of a token is cut to this", "cap"),
    "topk": Option("K: ids of TopK(mu) that the engine returns for each token", "topk", whole=True),
    "kl_coefficient": Option(
        "factor of r - 1 - log r, an estimate of KL(mu || pi) that is added to a token's loss",
        "penalty",
        includes_low=True,
    ),
    "log_ratio_coefficient": Option(
        "factor of (log r)^2 / 2 that is added to a token's loss", "penalty", includes_low=True
    ),
}

NEGATIVE_THRESHOLDS = {
    "tv_threshold": "tv_threshold_negative",
    "kl_threshold": "kl_threshold_negative",
}
"""Threshold -> the option that replaces it where A < 0."""
COEFFICIENTS = tuple(name for name, option in OPTIONS.items() if option.role == "penalty")
"""Options for coefficients of additive terms. Every algorithm accepts them; no preset sets them."""


RuleFunction = str | Callable[..., Any]
"""A function of a row: the name of a function of this package, or a function of the row's own module."""


@dataclass(frozen=True)
class Preset:
    """A row of the table.

    Attributes:
        mask: The mask: the name of a function in ``rules.py`` or ``step_rules.py``, or a function. If ``sequences``,
            ``build_algorithm`` looks for the name first in ``sequence_rules.py`` and ``triage.py``.
        stability: The numbers of the stability study: the numbers of mask and weight, ``ratio_cap`` (infinite if it is
            missing), and ``topk``.
        scaling: Those numbers of the scaling runs that differ from ``stability``.
        lora: Those numbers of the scaling run with LoRA that differ from ``scaling``.
        generalization: Those numbers of the other models and tasks that differ from ``stability``.
        anchor: The policy that the mask compares pi with.
        weight: The weight: the name of a function in one of these modules or in ``projection.py``, or a function.
        fixed: Arguments of the mask that users cannot set.
        divergence: The divergence that the mask compares with its threshold. Saved batches contain the divergence.
            None if the mask measures no divergence.
        whole_vocabulary: Whether the divergence is over the anchor's whole distribution instead of TopK(mu).
        sequences: Whether mask or weight read whole responses.
        centers: Whether the loss centers the score (``rules.centering``), with a gradient through TopK(mu).
        projects: Whether the loss projects pi (``projection.py``), also with a gradient through TopK(mu).
        correction: Name of a function in ``triage.py``, or a function: an additive term of the loss that only this row
            has.
        step_bound: Name of a function in ``step_rules.py``, or a function: it computes a number from all tokens of an
            optimiser step, in a pass without gradient. The mask reads the number.
        options: Options that no other row has, by name.
    """

    mask: RuleFunction = "train_all"
    stability: Mapping[str, float] = field(default_factory=dict)
    scaling: Mapping[str, float] = field(default_factory=dict)
    lora: Mapping[str, float] = field(default_factory=dict)
    generalization: Mapping[str, float] = field(default_factory=dict)
    anchor: AnchorName = "rollout"
    weight: RuleFunction = "importance_ratio"
    fixed: Mapping[str, bool | str] = field(default_factory=dict)
    divergence: Divergence | None = None
    whole_vocabulary: bool = False
    sequences: bool = False
    centers: bool = False
    projects: bool = False
    correction: RuleFunction | None = None
    step_bound: RuleFunction | None = None
    options: Mapping[str, Option] = field(default_factory=dict)

    def numbers(self, settings: Settings) -> dict[str, float]:
        """Return the preset's numbers in a setting, by option."""
        further: dict[Settings, tuple[Mapping[str, float], ...]] = {
            "stability": (),
            "scaling": (self.scaling,),
            "lora": (self.scaling, self.lora),
            "generalization": (self.generalization,),
        }
        numbers = {"ratio_cap": math.inf, **self.stability}
        for differing_numbers in further[settings]:
            numbers |= differing_numbers
        return numbers

    def option(self, name: str) -> Option:
        """Return the option ``name`` of this row or of the table. Raises KeyError."""
        return self.options[name] if name in self.options else OPTIONS[name]


CAP = {"ratio_cap": 5.0}
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
CLIP_HIGHER_SCALING = {"clip_high": 0.27, **CAP}
TV = {"tv_threshold": 0.15}
TV_SCALING = {"tv_threshold": 0.2, **CAP}
TV_LORA = {"tv_threshold": 0.15}
TV_GENERALIZATION = {"tv_threshold": 0.2}
KL = {"kl_threshold": 0.05}
TOPK = {"topk": 20}
TIS = {"ratio_cap": 3.0}
RELAXED = {**CLIP_HIGHER, "rare_below": 0.1}
DROP = {"max_drop": 0.5}
ICEPOP = {"mismatch_low": 0.5, "mismatch_high": 5.0, **CLIP}
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
BPO = {**CLIP_HIGHER, "smoothing": 0.1, "ratio_cap": 3.0}
CPPO = {**TV, "weight_min": 0.8, "budget_low": 0.02, "budget_high": 0.04}
CPPO_KL = {**KL, "weight_min": 0.8, "budget_low": 0.0008, "budget_high": 0.0032}
"""CPPO's paper has no numbers for its KL forms. The numbers here are DPPO's threshold, and Pinsker's bound 2 TV^2 at
the budgets of ``CPPO``."""
PDM = {"kl_threshold": 0.15, "ratio_cap": 5.0}


def _bounded(
    divergence: Divergence, anchor: AnchorName = "rollout", *, whole_vocabulary: bool = False
) -> Preset:
    """Return a row of DPPO's form: a mask that bounds ``divergence`` and has its name."""
    bounds_tv = divergence.endswith("tv")
    stability, scaling = KL, CAP
    if bounds_tv:
        stability, scaling = TV, TV_SCALING
    if divergence.startswith("topk") and not whole_vocabulary:
        stability = {**stability, **TOPK}
    return Preset(
        divergence,
        stability,
        scaling,
        lora=TV_LORA if bounds_tv else {},
        generalization=TV_GENERALIZATION if bounds_tv else {},
        anchor=anchor,
        divergence=divergence,
        whole_vocabulary=whole_vocabulary,
    )


def _cumulative(divergence: Divergence, numbers: Mapping[str, float]) -> Preset:
    """Return a row of CPPO, whose mask bounds the sums of ``divergence`` over prefixes."""
    stability: Mapping[str, float] = CPPO_KL
    scaling: Mapping[str, float] = {}
    if divergence.endswith("tv"):
        stability = CPPO
        scaling = {"tv_threshold": 0.2}
    return Preset(
        "prefix_budget",
        {**stability, **numbers},
        scaling,
        fixed={"measure": divergence},
        divergence=divergence,
        sequences=True,
    )


def _predictive(tail: Tail, *, whole_vocabulary: bool = False) -> Preset:
    """Return a row of the predictive divergence mask (PDM)."""
    return Preset(
        "pdm",
        PDM if whole_vocabulary else {**PDM, **TOPK},
        fixed={"tail": tail},
        divergence="topk_kl",
        whole_vocabulary=whole_vocabulary,
    )


def _of_sequences(
    mask: str, numbers: Mapping[str, float], weight: str = "importance_ratio"
) -> Preset:
    """Return a row whose mask or weight reads whole responses."""
    return Preset(mask, numbers, weight=weight, sequences=True)


_clip_higher = partial(Preset, "ratio_clip", scaling=CLIP_HIGHER_SCALING)


def _relaxed(low: bool, high: bool) -> Preset:
    """Return a row of PPO's clip without its lower or upper bound at rare tokens."""
    fixed = {"relax_low": low, "relax_high": high}
    return Preset("relaxed_clip", RELAXED, CLIP_HIGHER_SCALING, fixed=fixed)


PRESETS: dict[str, Preset] = {
    "pg-is": Preset(),
    "pg-tis": Preset(stability=TIS, scaling=CAP),
    "cispo": Preset(stability=TIS, scaling=CAP),
    "ppo": Preset("ratio_clip", CLIP, CAP),
    "grpo": Preset("ratio_clip", CLIP, CAP),
    "grpo-clip-higher": _clip_higher(CLIP_HIGHER),
    "minirl": _clip_higher(CLIP_HIGHER, anchor="recomputed"),
    "minirl-tis": _clip_higher({**CLIP_HIGHER, **TIS}, anchor="recomputed"),
    "dppo-binary-tv": _bounded("binary_tv"),
    "dppo-binary-kl": _bounded("binary_kl"),
    "dppo-topk-tv": _bounded("topk_tv"),
    "dppo-topk-kl": _bounded("topk_kl"),
    "dppo-exact-tv": _bounded("topk_tv", whole_vocabulary=True),
    "dppo-exact-kl": _bounded("topk_kl", whole_vocabulary=True),
    "recomputed-exact-tv": _bounded("topk_tv", "recomputed", whole_vocabulary=True),
    "recomputed-exact-kl": _bounded("topk_kl", "recomputed", whole_vocabulary=True),
    "dppo-decoupled-binary-tv": _bounded("binary_tv", "recomputed"),
    "dppo-decoupled-binary-kl": _bounded("binary_kl", "recomputed"),
    "mask-0.5": Preset("large_drop", DROP, CAP),
    "mask-0.8": Preset("large_drop", {"max_drop": 0.8}, CAP),
    "mask-0.5-recompute": Preset("large_drop", DROP, CAP, anchor="recomputed"),
    "relax-high": _relaxed(low=False, high=True),
    "relax-low": _relaxed(low=True, high=False),
    "relax-both": _relaxed(low=True, high=True),
    "icepop": Preset("icepop", ICEPOP, anchor="recomputed"),
    "gspo": _of_sequences("sequence_clip", GSPO, "sequence_importance_ratio"),
    "drpo": Preset(stability={"penalty_threshold": 12.5}, weight="drpo"),
    "bpo": Preset("complementary_clip", BPO, weight="complementary_ratio"),
    "cppo-binary-tv": _cumulative("binary_tv", {}),
    "cppo-topk-tv": _cumulative("topk_tv", TOPK),
    "cppo-binary-kl": _cumulative("binary_kl", {}),
    "cppo-topk-kl": _cumulative("topk_kl", TOPK),
    "pdm-aggregated": _predictive("one"),
    "pdm-uniform": _predictive("uniform"),
    "pdm-tail": _predictive("proportional"),
    "pdm-exact": _predictive("one", whole_vocabulary=True),
    "dppo-symmetric": Preset("symmetric_binary_tv", {"tv_threshold": 0.3}, divergence="binary_tv"),
    "kpop": Preset("kpop", {"kl_threshold": 0.1}, divergence="binary_kl_both_ways"),
    "sapo": Preset(stability={"tau_positive": 1.0, "tau_negative": 1.05}, weight="soft_gate"),
    "gmpo": _of_sequences("log_ratio_clip", {"log_clip": 0.4}, "clipped_geometric_mean"),
    "minpro": _of_sequences("train_all", {"ratio_cap": 5.0}, "minimum_prefix_ratio"),
    "trm-max": _of_sequences("largest_token", {"largest_k2": 2.0}),
    "trm-mean": _of_sequences("mean_token", {"mean_k3": 0.05}),
    "geometric-mask": Preset(
        "geometric_band",
        {"sequence_low": 0.99, "sequence_high": 1.01, **CLIP, "ratio_cap": 2.0},
        anchor="recomputed",
        sequences=True,
    ),
    "m2po": Preset("outward_moment", {"second_moment": 0.04}, step_bound="outward_moment_cut"),
    "m2po-areal": Preset("second_moment", {"second_moment": 0.04}, step_bound="second_moment_cut"),
    "vaco": Preset(
        "mean_shift",
        {"largest_shift": 2.0, **CLIP, "ratio_cap": 2.0},
        anchor="recomputed",
        sequences=True,
    ),
    "score-centering": Preset(stability={"ratio_cap": 2.0, "topk": 32}, centers=True),
    "off-policy-sequence-mask": _of_sequences("drifted_sequence", {"drift_threshold": 0.1}),
    "triage": Preset(
        "ratio_clip",
        {
            **CLIP_HIGHER,
            "ratio_cap": 2.0,
            "gate_segment": 64,
            "repair_segment": 128,
            "repair": 0.015,
        },
        anchor="recomputed",
        weight="gated_ratio",
        correction="repair",
        sequences=True,
    ),
    "troll": Preset(
        stability={"kl_bound": 0.05, "regression": 1.0, **TOPK},
        weight="projected_ratio",
        projects=True,
    ),
}
"""``algorithm.name`` -> its row.

``recomputed-exact-...`` are diagnostics, not DPPO. Their masks compare pi with pi', the trainer's own policy at the
rollout's weights. So these masks do not measure a gap between mu and pi'.
"""


def find_preset(name: str) -> Preset:
    """Find a row by its name in ``PRESETS``, its entry point's name, or ``package.module:ROW``.

    Raises ValueError for an unknown name, and for an object that is no usable row.
    """
    if name in PRESETS:
        return PRESETS[name]
    return _own_preset(name)


@cache
def _own_preset(name: str) -> Preset:
    """Import and check a row of a user's module. Raises ValueError."""
    registered = plugins.targets(plugins.ALGORITHMS)
    if ":" not in name and name not in registered:
        rows = [row for row in PRESETS if name and row.startswith(name)]
        hint = ""
        if rows:
            hint = f"did you mean {', '.join(rows)}? "
        known = ", ".join([*PRESETS, *registered])
        raise ValueError(f"unknown algorithm {name!r}; {hint}known: {known}, or package.module:ROW")
    row = plugins.import_part("algorithm", name, plugins.ALGORITHMS, PRESETS, "package.module:ROW")
    if not isinstance(row, Preset):
        raise ValueError(
            f"algorithm {name!r}: got a {type(row).__name__}, expected a row: "
            "megatron_dppo.algorithms.table.Preset(mask, numbers, ...)"
        )
    for fault in _row_faults(row):
        raise ValueError(f"algorithm {name!r}: {fault}")
    return row


def _row_faults(row: Preset) -> Iterator[str]:
    """Yield what makes a row of a user's module unusable."""
    for kind, function in (
        ("mask", row.mask),
        ("weight", row.weight),
        ("correction", row.correction),
        ("step_bound", row.step_bound),
    ):
        known = sorted({str(getattr(preset, kind)) for preset in PRESETS.values()} - {"None"})
        if function is not None and not callable(function) and function not in known:
            yield f"{kind}: got {function!r}, expected a function, or one of {', '.join(known)}"
    if row.anchor not in get_args(AnchorName):
        yield f"anchor: got {row.anchor!r}, expected one of {', '.join(get_args(AnchorName))}"
    if row.divergence not in (None, *get_args(Divergence)):
        names = ", ".join(get_args(Divergence))
        yield f"divergence: got {row.divergence!r}, expected None or one of {names}"
    for option in row.options:
        if option in OPTIONS:
            yield f"options: {option!r} is an option of every row ({OPTIONS[option].meaning}); expected another name"
    for setting in get_args(Settings):
        for option, value in row.numbers(setting).items():
            if option not in OPTIONS and option not in row.options:
                yield f"{setting}: the number {option!r} has no Option in options={{...}}"
            elif math.isfinite(value) and (fault := row.option(option).fault(value)) is not None:
                yield f"{setting}: {option!r} ({row.option(option).meaning}): {fault}"


@dataclass(frozen=True)
class AlgorithmFacts:
    """A row with its numbers, for engine, trainer and planner."""

    name: str
    preset: Preset
    numbers: Mapping[str, float]

    @property
    def ratio_cap(self) -> float:
        """C of min(w, C)."""
        return self.numbers["ratio_cap"]

    @property
    def topk(self) -> int:
        """K of the engine's TopK(mu); 0 without TopK(mu)."""
        return int(self.numbers.get("topk", 0))

    @property
    def reads_topk(self) -> bool:
        """Whether the algorithm reads the Top-K tensors, of mu or of another anchor."""
        return self.needs_topk_gradient or self.preset.divergence in ("topk_tv", "topk_kl")

    @property
    def needs_topk_gradient(self) -> bool:
        """Whether the loss has a gradient through log pi at TopK(mu)."""
        return self.preset.centers or self.preset.projects

    @property
    def needs_sum_squares(self) -> bool:
        """Whether the statistics must return the sum over the vocabulary of pi^2."""
        return self.preset.fixed.get("tail") == "proportional"

    @property
    def needs_recomputed(self) -> bool:
        """Whether the trainer must recompute the log-probabilities at the rollout's weights."""
        return self.preset.anchor == "recomputed"

    @property
    def extra_pass(self) -> bool:
        """Whether the trainer runs one more forward pass without gradient: before the batch, or before each step."""
        recomputes = self.needs_recomputed or self.needs_recomputed_distribution
        return recomputes or self.preset.step_bound is not None

    @property
    def needs_full_distribution(self) -> bool:
        """Whether K of the engine's TopK(mu) must be the size of the whole vocabulary."""
        return self.preset.whole_vocabulary and self.preset.anchor == "rollout"

    @property
    def needs_recomputed_distribution(self) -> bool:
        """Whether the trainer must recompute pi' over the whole vocabulary. pi' then replaces TopK(mu)."""
        return self.preset.whole_vocabulary and self.preset.anchor == "recomputed"


def algorithm_facts(
    name: str, options: Mapping[str, Any] | None = None, settings: Settings = "stability"
) -> AlgorithmFacts:
    """Return the preset ``name`` in ``settings``, with its numbers overridden by ``options``.

    Raises:
        ValueError: An unknown name, setting or option; a value of the wrong type (a bool is not a number; ``topk`` is
            a whole number); a value outside its range; or a lower bound above its upper bound. The message lists the
            accepted values.
    """
    preset = find_preset(name)
    if settings not in get_args(Settings):
        accepted = ", ".join(get_args(Settings))
        raise ValueError(f"unknown settings {settings!r} of an algorithm; known: {accepted}")
    # Only DPPO's masks have the name of their divergence. Only these masks have a separate threshold for A < 0.
    takes_negative = preset.mask == preset.divergence
    numbers = _override(name, preset, preset.numbers(settings), options or {}, takes_negative)
    return AlgorithmFacts(name, preset, numbers)


def _override(
    name: str,
    preset: Preset,
    numbers: Mapping[str, float],
    options: Mapping[str, Any],
    takes_negative: bool,
) -> dict[str, float]:
    """Return ``numbers`` with the values of ``options``. Raises ValueError as ``algorithm_facts``."""
    negative_thresholds: list[str] = []
    if takes_negative:
        for threshold, negative_threshold in NEGATIVE_THRESHOLDS.items():
            if threshold in numbers:
                negative_thresholds.append(negative_threshold)
    accepted = sorted([*numbers, *negative_thresholds, *COEFFICIENTS])
    result = dict(numbers)
    for option, value in options.items():
        if option not in accepted:
            raise ValueError(
                f"algorithm {name!r} has no option {option!r}; it has {', '.join(accepted)}"
            )
        fault = preset.option(option).fault(value)
        if fault is not None:
            meaning = preset.option(option).meaning
            raise ValueError(f"algorithm {name!r}, option {option!r} ({meaning}): {fault}")
        result[option] = value
    for bound in ("mismatch", "budget"):
        low = result.get(f"{bound}_low", 0.0)
        high = result.get(f"{bound}_high", math.inf)
        if low > high:
            raise ValueError(
                f"algorithm {name!r}: {bound}_low {low:g} lies above {bound}_high {high:g}, "
                "expected at most that"
            )
    return result


ENGINE_WHOLE_VOCABULARY = 4096
"""Largest vocabulary, in tokens, for which the engine may return its whole distribution. The distribution has 8 bytes
for each vocabulary entry, at every token of a response.
"""


def carried_topk(algorithm: AlgorithmFacts, configured: int, vocab_size: int) -> int:
    """Return K of the TopK(mu) that the engine must return for each token; 0 if it need not return TopK(mu).

    Args:
        algorithm: The algorithm.
        configured: ``rollout.topk_log_probs``; 0 stands for the algorithm's K.
        vocab_size: Tokens of the model's vocabulary.
    """
    if algorithm.needs_full_distribution:
        return vocab_size
    return configured or algorithm.topk


def check_topk(algorithm: AlgorithmFacts, configured: int, vocab_size: int) -> None:
    """Raise ValueError if the engine cannot return the TopK(mu) that the algorithm needs. Arguments: ``carried_topk``.

    ``configured`` may differ from the algorithm's K, or the algorithm may need the whole distribution of a vocabulary
    above ``ENGINE_WHOLE_VOCABULARY``.
    """
    if not algorithm.needs_full_distribution:
        if configured and algorithm.topk and configured != algorithm.topk:
            raise ValueError(
                f"{algorithm.name} looks at the engine's top {algorithm.topk} log-probabilities, but "
                f"rollout.topk_log_probs is {configured}; expected 0, or {algorithm.topk}: algorithm.options.topk "
                "sets how many"
            )
        return
    if vocab_size > ENGINE_WHOLE_VOCABULARY:
        alternative = "pdm-aggregated, pdm-uniform and pdm-tail estimate it from fewer"
        if algorithm.preset.mask == algorithm.preset.divergence:
            alternative = (
                f"dppo-topk-tv and dppo-topk-kl bound it from below; {algorithm.name.replace('dppo', 'recomputed')} "
                "measures another distance, from the trainer's own recomputed policy"
            )
        raise ValueError(
            f"{algorithm.name} needs mu of the whole vocabulary from the engine, and this model's "
            f"has {vocab_size} tokens, {8 * vocab_size} bytes for each response token; expected at "
            f"most {ENGINE_WHOLE_VOCABULARY}. {alternative}"
        )
    if configured not in (0, vocab_size):
        raise ValueError(
            f"{algorithm.name} needs mu of the whole vocabulary, but rollout.topk_log_probs is "
            f"{configured}; expected 0 or {vocab_size}"
        )
