"""The table of presets: every algorithm of the paper is there, with its numbers, and options are
checked.
"""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from megatron_dppo.algorithms import rules
from megatron_dppo.algorithms.aggregation import AGGREGATIONS
from megatron_dppo.algorithms.algorithm import Algorithm, build_algorithm
from megatron_dppo.algorithms.inputs import rollout
from megatron_dppo.algorithms.reference_penalty import ESTIMATORS
from megatron_dppo.algorithms.table import (
    COEFFICIENTS,
    NEGATIVE_THRESHOLDS,
    OPTIONS,
    PRESETS,
    AggregationName,
    EstimatorName,
    Settings,
    carried_topk,
    check_topk,
)
from megatron_dppo.config.schema import AlgorithmConfig
from tests.messages import mentioning
from tests.unit.golden_presets import GOLDEN

DOCS = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
PACKAGE = Path(rules.__file__).parents[1]


@pytest.mark.parametrize(
    ("settings", "column", "tv_threshold"),
    [("stability", 0, None), ("scaling", 1, None), ("lora", 1, 0.15), ("generalization", 0, 0.2)],
)
def test_every_number_is_the_published_one(settings, column, tv_threshold):
    """``tv_threshold``: the threshold of DPPO's TV masks, if it differs from the column's."""
    expected = {name: dict(row[column]) for name, row in GOLDEN.items()}
    for name, numbers in expected.items():
        is_dppo = re.match(r"(dppo|recomputed)-.*-tv$", name)
        if tv_threshold is not None and is_dppo:
            numbers["tv_threshold"] = tv_threshold
    assert {name: build_algorithm(name, settings=settings).numbers for name in PRESETS} == expected


def test_the_table_in_the_docs_is_the_golden_copy():
    """A row has the numbers of both settings and their sources. Numbers that do not differ are written once."""

    def describe(numbers):
        named = (item for item in sorted(numbers.items()) if item != ("ratio_cap", math.inf))
        return ", ".join(f"`{name}` {value:g}" for name, value in named) or "none"

    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    found = {row[0].strip("`"): row[2:] for row in cells if len(row) == 6}
    found.pop("algorithm.name")
    expected = {
        name: [
            describe(stability),
            "the same" if scaling == stability else describe(scaling),
            *sources,
        ]
        for name, (stability, scaling, *sources) in GOLDEN.items()
    }
    assert list(found) == list(PRESETS)
    assert found == expected


def test_every_algorithm_that_a_help_or_a_page_has_somebody_ask_for_is_a_row():
    texts = [p.read_text() for p in (*DOCS.parent.rglob("*.md"), *PACKAGE.rglob("*.py"))]
    mentioned_names = {name for t in texts for name in re.findall(r"--algorithm ([a-z][\w.-]*)", t)}
    assert "cppo-binary-tv" in mentioned_names
    assert mentioned_names <= set(PRESETS)


def test_every_name_that_the_configuration_takes_is_implemented():
    assert set(get_args(AggregationName)) == set(AGGREGATIONS)
    assert set(get_args(EstimatorName)) == set(ESTIMATORS)
    assert AlgorithmConfig().settings == "stability"


def test_a_row_measures_what_its_mask_compares():
    """Otherwise a step's records contain another divergence than the one that the mask bounds."""
    divergences = {name: row.divergence for name, row in PRESETS.items() if row.divergence}
    thresholds = {"tv_threshold", "kl_threshold"}
    assert set(divergences) == {n for n, row in PRESETS.items() if thresholds & set(row.stability)}
    masks = {name: PRESETS[name].mask for name in divergences}
    exceptions = {n: (masks[n], divergences[n]) for n in divergences if masks[n] != divergences[n]}
    assert exceptions == {
        "cppo-binary-tv": ("prefix_budget", "binary_tv"),
        "cppo-topk-tv": ("prefix_budget", "topk_tv"),
        "cppo-binary-kl": ("prefix_budget", "binary_kl"),
        "cppo-topk-kl": ("prefix_budget", "topk_kl"),
        **dict.fromkeys(
            ["pdm-aggregated", "pdm-uniform", "pdm-tail", "pdm-exact"], ("pdm", "topk_kl")
        ),
        "dppo-symmetric": ("symmetric_binary_tv", "binary_tv"),
        "kpop": ("kpop", "binary_kl_both_ways"),
    }
    assert all(
        PRESETS[n].fixed["measure"] == divergences[n] for n in exceptions if n.startswith("cppo")
    )


def test_what_each_algorithm_costs_is_declared():
    algorithms = {name: build_algorithm(name) for name in PRESETS}
    assert {n for n, a in algorithms.items() if a.needs_recomputed} == {
        "minirl", "minirl-tis", "dppo-decoupled-binary-tv", "dppo-decoupled-binary-kl",
        "mask-0.5-recompute", "icepop", "recomputed-exact-tv", "recomputed-exact-kl",
        "geometric-mask", "vaco", "triage",
    }  # fmt: skip
    assert {n: a.topk for n, a in algorithms.items() if a.topk} == {
        **dict.fromkeys(
            [
                *("dppo-topk-tv", "dppo-topk-kl", "cppo-topk-tv", "cppo-topk-kl"),
                *("pdm-aggregated", "pdm-uniform", "pdm-tail", "troll"),
            ],
            20,
        ),
        "score-centering": 32,
    }
    assert {n for n, a in algorithms.items() if a.needs_full_distribution} == {
        "dppo-exact-tv",
        "dppo-exact-kl",
        "pdm-exact",
    }
    assert {n for n, a in algorithms.items() if a.needs_recomputed_distribution} == {
        "recomputed-exact-tv",
        "recomputed-exact-kl",
    }
    assert {n for n, a in algorithms.items() if a.reads_topk} == {
        n for n in PRESETS if any(word in n for word in ("topk", "exact", "pdm", "center", "troll"))
    }
    assert {n for n, a in algorithms.items() if a.step_bound} == {"m2po", "m2po-areal"}
    assert {n for n, a in algorithms.items() if a.needs_sum_squares} == {"pdm-tail"}
    assert {n for n, row in PRESETS.items() if row.centers} == {"score-centering"}
    assert {n for n, row in PRESETS.items() if row.projects} == {"troll"}
    assert {n for n, a in algorithms.items() if a.needs_topk_gradient} == {
        "score-centering",
        "troll",
    }
    assert {n for n, a in algorithms.items() if a.correction} == {"triage"}
    assert {n for n, row in PRESETS.items() if row.sequences} == {
        "gspo", "cppo-binary-tv", "cppo-topk-tv", "cppo-binary-kl", "cppo-topk-kl", "gmpo", "minpro",
        "trm-max", "trm-mean", "geometric-mask", "vaco", "off-policy-sequence-mask",
        "triage",
    }  # fmt: skip


def test_options_replace_numbers_and_reach_the_mask():
    algorithm = build_algorithm("dppo-topk-tv", {"tv_threshold": 0.1, "ratio_cap": 5, "topk": 8})
    assert (algorithm.ratio_cap, algorithm.topk) == (5, 8)
    assert isinstance(algorithm.mask, partial)
    assert algorithm.mask.func is rules.topk_tv
    assert keywords_of(algorithm) == {"anchor": rollout, "tv_threshold": 0.1}
    assert algorithm.numbers == {"tv_threshold": 0.1, "ratio_cap": 5, "topk": 8}


def keywords_of(algorithm: Algorithm) -> dict[str, Any]:
    """Return the arguments with which the algorithm calls its mask."""
    assert isinstance(algorithm.mask, partial)
    return algorithm.mask.keywords


def test_options_go_on_top_of_the_settings():
    algorithm = build_algorithm("dppo-binary-tv", {"ratio_cap": 7}, "scaling")
    assert algorithm.numbers == {"tv_threshold": 0.2, "ratio_cap": 7}
    with pytest.raises(ValueError, match=mentioning("'paper'")):
        build_algorithm("dppo-binary-tv", {}, "paper")  # type: ignore[arg-type]


def test_options_that_no_preset_has_by_itself_reach_mask_and_loss():
    algorithm = build_algorithm(
        "dppo-topk-kl", {"kl_threshold_negative": 0.01, "kl_coefficient": 0.5}
    )
    assert keywords_of(algorithm)["kl_threshold_negative"] == 0.01
    assert algorithm.penalties == ((0.5, rules.kl),)
    assert build_algorithm("pg-is", {"log_ratio_coefficient": 2}).penalties == (
        (2, rules.squared_log_ratio),
    )
    assert build_algorithm("pg-is", {"kl_coefficient": 0}).penalties == ()


def test_every_number_of_every_preset_is_a_described_option():
    own = {n for p in PRESETS.values() for s in get_args(Settings) for n in p.numbers(s)}
    assert own | set(NEGATIVE_THRESHOLDS.values()) | set(COEFFICIENTS) == set(OPTIONS)


def test_exact_divergences_take_all_of_mu_from_the_engine_or_are_refused():
    exact = build_algorithm("dppo-exact-tv")
    assert carried_topk(exact, 0, 4096) == carried_topk(exact, 4096, 4096) == 4096
    with pytest.raises(ValueError, match=mentioning(4097, 32776, 4096)):
        check_topk(exact, 0, 4097)
    with pytest.raises(ValueError, match=mentioning("recomputed-exact-tv")):
        check_topk(exact, 0, 151936)
    with pytest.raises(ValueError, match=mentioning("topk_log_probs", 20, 0, 36)):
        check_topk(exact, 20, 36)
    with pytest.raises(
        ValueError, match=mentioning(4096, "pdm-aggregated", "pdm-uniform", "pdm-tail")
    ):
        check_topk(build_algorithm("pdm-exact"), 0, 4097)
    assert carried_topk(build_algorithm("recomputed-exact-tv"), 0, 151936) == 0


def test_carried_top_k_is_what_the_algorithm_looks_at():
    topk = build_algorithm("dppo-topk-tv")
    assert [carried_topk(topk, k, 151936) for k in (0, 20)] == [20, 20]
    # With more or fewer ids the mask would bound another divergence under the same name.
    for other in (19, 21):
        with pytest.raises(ValueError, match=mentioning(20, other, 0, 20)):
            check_topk(topk, other, 151936)
    assert carried_topk(build_algorithm("dppo-topk-tv", {"topk": 50}), 50, 151936) == 50
    assert carried_topk(build_algorithm("grpo"), 0, 99) == 0
    assert carried_topk(build_algorithm("grpo"), 5, 99) == 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dpo", {}, "unknown algorithm 'dpo'; known: pg-is"),
        ("", {}, "unknown algorithm ''; known: pg-is"),
        ("mask", {}, "'mask'; did you mean mask-0.5, mask-0.8, mask-0.5-recompute? known: pg-is"),
        ("grpo", {"tv_threshold": 0.1}, "has no option 'tv_threshold'; it has clip_high"),
        ("dppo-topk-tv", {"topk": True}, "expected a number, got True"),
        ("dppo-topk-tv", {"topk": 0}, "outside its range"),
        ("dppo-topk-tv", {"topk": 2.5}, "expected a whole number, got 2.5"),
        ("dppo-binary-tv", {"tv_threshold": 1.5}, "outside its range"),
        ("dppo-binary-tv", {"tv_threshold": "0.1"}, "expected a number, got '0.1'"),
        ("pg-tis", {"ratio_cap": 0}, "outside its range"),
        ("pg-tis", {"ratio_cap": math.nan}, "outside its range"),
        ("drpo", {"penalty_threshold": -1.0}, "outside its range"),
        ("dppo-binary-tv", {"tv_threshold": -1e-9}, "outside its range, [0, 1]"),
        ("grpo", {"tv_threshold_negative": 0.1}, "has no option 'tv_threshold_negative'"),
        ("grpo", {"kl_coefficient": -0.1}, "outside its range, [0, inf]"),
        ("cppo-binary-tv", {"budget_low": 0.05}, "budget_low 0.05 lies above budget_high 0.04"),
        ("cppo-binary-tv", {"tv_threshold_negative": 0.1}, "has no option 'tv_threshold_negative'"),
        ("dppo-symmetric", {"tv_threshold_negative": 0.1}, "has no option"),
        ("icepop", {"mismatch_low": 6}, "mismatch_low 6 lies above mismatch_high 5, expected"),
    ],
)
def test_bad_names_and_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_algorithm(name, options)


RANGES = {
    **dict.fromkeys(["tv_threshold", "tv_threshold_negative", "clip_low", "rare_below"], "[0, 1]"),
    "max_drop": "(0, 1]",
    **dict.fromkeys(["kl_threshold", "kl_threshold_negative", "clip_high"], "[0, inf]"),
    **dict.fromkeys(["budget_low", "sequence_low"], "[0, 1]"),
    **dict.fromkeys(["weight_min", "budget_high"], "(0, 1]"),
    **dict.fromkeys(
        [
            "smoothing",
            "tau_positive",
            "tau_negative",
            "log_clip",
            "drift_threshold",
            "largest_k2",
            "mean_k3",
            "second_moment",
            "largest_shift",
        ],
        "(0, inf]",
    ),
    "sequence_high": "[1, inf]",
    **dict.fromkeys(["mismatch_low", "kl_coefficient", "log_ratio_coefficient"], "[0, inf]"),
    **dict.fromkeys(["regression", "repair"], "[0, inf]"),
    **dict.fromkeys(["mismatch_high", "penalty_threshold", "ratio_cap", "topk"], "(0, inf]"),
    **dict.fromkeys(["gate_segment", "repair_segment", "kl_bound"], "(0, inf]"),
}
"""The expected range of each option. A square bracket means that the end is included."""


@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_option_takes_its_range_with_these_ends(name):
    option, range_text = OPTIONS[name], RANGES[name]
    low, high = int(range_text[1]), 1 if range_text.endswith("1]") else math.inf
    if option.whole:
        assert option.fault(1) is None
        assert "(0, inf]" in option.fault(0)
        return
    assert option.fault(low + 1e-9) is option.fault(high) is None
    assert range_text in option.fault(low - 1e-9)
    assert (option.fault(low) is None) == range_text.startswith("[")
    if high == 1:
        assert range_text in option.fault(high + 1e-9)


def test_counts_are_whole_numbers():
    whole = [name for name, option in OPTIONS.items() if option.whole]
    assert whole == ["gate_segment", "repair_segment", "topk"]


def test_bounds_of_the_mismatch_may_meet():
    numbers = build_algorithm("icepop", {"mismatch_low": 2, "mismatch_high": 2}).numbers
    assert (numbers["mismatch_low"], numbers["mismatch_high"]) == (2, 2)


def test_each_relaxed_clip_frees_its_own_side():
    keywords = {n: keywords_of(build_algorithm(f"relax-{n}")) for n in ("low", "high", "both")}
    freed = {n: (found["relax_low"], found["relax_high"]) for n, found in keywords.items()}
    assert freed == {"low": (True, False), "high": (False, True), "both": (True, True)}
