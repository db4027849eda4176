"""The table of presets: every algorithm of the paper is there, with its numbers, and options are
checked.
"""

import math
from functools import partial

import pytest

from megatron_dppo.algorithms import masks
from megatron_dppo.algorithms.presets import OPTIONS, PRESETS, build_algorithm

NAMES = [
    "pg-is",
    "pg-tis",
    "cispo",
    "ppo",
    "grpo",
    "grpo-clip-higher",
    "minirl",
    "minirl-tis",
    "dppo-binary-tv",
    "dppo-binary-kl",
    "dppo-topk-tv",
    "dppo-topk-kl",
    "dppo-exact-tv",
    "dppo-exact-kl",
    "dppo-decoupled-binary-tv",
    "dppo-decoupled-binary-kl",
    "mask-0.5",
    "mask-0.8",
    "mask-0.5-recompute",
    "relax-high",
    "relax-low",
    "relax-both",
    "icepop",
    "gspo",
    "drpo",
]


def test_every_algorithm_is_in_the_table():
    assert sorted(PRESETS) == sorted(NAMES)


def test_what_each_algorithm_costs_is_declared():
    built = {name: build_algorithm(name) for name in PRESETS}
    assert {n for n, a in built.items() if a.needs_recomputed} == {
        "minirl", "minirl-tis", "dppo-decoupled-binary-tv", "dppo-decoupled-binary-kl",
        "mask-0.5-recompute", "icepop",
    }  # fmt: skip
    assert {n: a.topk for n, a in built.items() if a.topk} == {
        "dppo-topk-tv": 20,
        "dppo-topk-kl": 20,
    }
    assert {n for n, a in built.items() if a.needs_full_distribution} == {
        "dppo-exact-tv",
        "dppo-exact-kl",
    }
    assert {n for n, a in built.items() if a.needs_sequences} == {"gspo"}
    assert {n: a.ratio_cap for n, a in built.items() if a.ratio_cap != math.inf} == {
        "pg-tis": 3.0, "cispo": 5.0, "minirl-tis": 3.0,
    }  # fmt: skip


def test_the_papers_numbers():
    assert build_algorithm("dppo-binary-tv").numbers["tv_threshold"] == 0.15
    assert build_algorithm("dppo-binary-kl").numbers["kl_threshold"] == 0.05
    assert build_algorithm("dppo-topk-tv").numbers["tv_threshold"] == 0.2
    assert build_algorithm("grpo-clip-higher").numbers["clip_high"] == 0.28
    assert build_algorithm("mask-0.8").numbers["max_drop"] == 0.8


def test_options_replace_numbers_and_reach_the_mask():
    algorithm = build_algorithm("dppo-topk-tv", {"tv_threshold": 0.1, "ratio_cap": 5, "topk": 8})
    assert (algorithm.ratio_cap, algorithm.topk) == (5, 8)
    assert isinstance(algorithm.mask, partial)
    assert algorithm.mask.func is masks.topk_tv
    assert algorithm.mask.keywords["tv_threshold"] == 0.1
    assert algorithm.numbers == {"tv_threshold": 0.1, "ratio_cap": 5, "topk": 8}


def test_every_number_of_every_preset_is_a_described_option():
    assert {n for p in PRESETS.values() for n in p.numbers} == set(OPTIONS)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dppo", {}, "unknown algorithm 'dppo'; known: pg-is"),
        ("grpo", {"tv_threshold": 0.1}, "has no option 'tv_threshold'; it has clip_high"),
        ("dppo-topk-tv", {"topk": True}, "expected a number, got True"),
        ("dppo-topk-tv", {"topk": 0}, "outside its range"),
        ("dppo-topk-tv", {"topk": 2.5}, "expected a whole number, got 2.5"),
        ("dppo-binary-tv", {"tv_threshold": 1.5}, "outside its range"),
        ("dppo-binary-tv", {"tv_threshold": "0.1"}, "expected a number, got '0.1'"),
        ("pg-tis", {"ratio_cap": 0}, "outside its range"),
        ("pg-tis", {"ratio_cap": math.nan}, "outside its range"),
        ("drpo", {"penalty_threshold": -1.0}, "outside its range"),
    ],
)
def test_bad_names_and_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        build_algorithm(name, options)
