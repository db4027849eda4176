"""The comparisons before a commit: fixed prompts, tolerances, and the engines and tensors that an error names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.weights.canary import (
    CanaryError,
    CanaryReport,
    Tolerance,
    canary_prompts,
    canary_tolerance,
    compare_canary,
    compare_scores,
    decode_tolerance,
)
from megatron_dppo.weights.engines import EngineFaultError, Engines
from megatron_dppo.weights.verification import (
    ChecksumMismatch,
    ChecksumMismatchError,
    ExpectedByLayout,
    compare_checksums,
    compare_tensors,
    expected_digests,
)
from tests.constant_scores import ConstantScores
from tests.messages import mentioning
from tests.unit.weight_doubles import A, B, runner

C = "http://127.0.0.1:3"


def test_the_prompts_of_the_canary_are_these_and_spare_the_last_id() -> None:
    prompts = canary_prompts(500)
    first = [[434, 285, 302], [113, 144, 368], [324, 24, 105], [46, 136, 488]]
    assert [prompt[:3] for prompt in prompts] == first
    assert [len(prompt) for prompt in prompts] == [24] * 4
    assert len({token for prompt in prompts for token in prompt}) > 60
    assert {token for prompt in canary_prompts(3) for token in prompt} == {0, 1}


@pytest.mark.parametrize(
    ("dtype_name", "layers", "expected"),
    [
        ("float32", 2, Tolerance(1e-3, 1e-4)),
        ("float32", 64, Tolerance(1e-3, 2e-4)),
        ("bfloat16", 8, Tolerance(10.0, 0.3)),
        ("bfloat16", 64, Tolerance(10.0, 0.6)),
    ],
)
def test_tolerances_follow_from_the_type_unless_the_configuration_sets_them(
    dtype_name: str, layers: int, expected: Tolerance
) -> None:
    assert canary_tolerance(WeightSyncConfig(), dtype_name, layers) == expected
    set_bounds = WeightSyncConfig(canary_largest=5.0, canary_mean=0.4)
    assert canary_tolerance(set_bounds, dtype_name, layers) == Tolerance(5.0, 0.4)


def test_the_mean_over_fewer_decoded_tokens_has_a_wider_bound() -> None:
    """A prompt has 4 decoded tokens and 23 scored ones: the bound is wider by sqrt(23 / 4) = 2.398."""
    bound = decode_tolerance(Tolerance(10.0, 0.3))
    assert (bound.largest, bound.mean) == (10.0, pytest.approx(0.7194, abs=1e-4))


def test_mismatches_of_checksums_name_tensor_and_rank() -> None:
    expected = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert compare_checksums(expected, expected) == []
    actual = [{"a": "1", "b": "2"}, {"a": "9", "c": "5"}]
    mismatches = compare_checksums(expected, actual)
    assert mismatches == [
        ChecksumMismatch("a", 1, "3", "9"),
        ChecksumMismatch("b", 1, "4", None),
        ChecksumMismatch("c", 1, None, "5"),
    ]
    assert "rank 1: " in str(ChecksumMismatchError(mismatches))
    with pytest.raises(ValueError, match="shorter"):
        compare_checksums(expected, actual[:1])


def test_tensors_that_only_one_side_has_are_another_model() -> None:
    differ, lacks = ChecksumMismatch("a", 0, "1", "2"), ChecksumMismatch("b", 0, "1", None)
    assert ChecksumMismatchError([differ, differ]).attempts == 2
    assert ChecksumMismatchError([differ, lacks]).attempts == 1


def test_five_mismatches_are_named_and_the_rest_counted() -> None:
    mismatches = [ChecksumMismatch(name, 0, "1", "2") for name in "abcdef"]
    five, six = (str(ChecksumMismatchError(mismatches[:n])) for n in (5, 6))
    assert five.startswith("5 ")
    assert all(f"{name} on " in six for name in "abcde")
    assert "f on " not in six
    assert "e on " in five
    assert ("more" in five, six.endswith("; and 1 more")) == (False, True)


LARGE_TOLERANCE = Tolerance(0.5, 0.5)


def test_prompts_without_a_token_are_compared_beside_others() -> None:
    report = compare_canary([[], [-1.0]], [[], [-1.5]], LARGE_TOLERANCE)
    assert report == CanaryReport(0.5, 0.5, 1)


TRAINER_SCORES, ENGINE_SCORES = [[-1.0, -2.0], [-3.0]], [[-1.0, -2.5], [-3.25]]


def test_the_canary_reports_the_largest_and_the_mean_difference() -> None:
    report = compare_canary(TRAINER_SCORES, ENGINE_SCORES, Tolerance(0.5, 0.25))
    assert report == CanaryReport(0.5, 0.25, 3)


@pytest.mark.parametrize(
    ("trainer", "engine", "tolerance", "error", "words"),
    [
        (
            TRAINER_SCORES,
            ENGINE_SCORES,
            Tolerance(0.49, 1.0),
            CanaryError,
            mentioning("token 1", 0, 0.5, "1 of 3"),
        ),
        (TRAINER_SCORES, ENGINE_SCORES, Tolerance(1.0, 0.24), CanaryError, r" 0.25, .* 0.24"),
        (
            [[-1.0], [-3.0]],
            [[-9.0], [float("nan")]],
            LARGE_TOLERANCE,
            CanaryError,
            mentioning("token 0", 1, "nan"),
        ),
        ([[-1.0]], [[-1.0, -2.0]], LARGE_TOLERANCE, ValueError, "counts"),
        ([[]], [[]], LARGE_TOLERANCE, ValueError, "empty"),
    ],
)
def test_the_canary_names_the_worst_token(trainer, engine, tolerance, error, words) -> None:
    with pytest.raises(error, match=words):
        compare_canary(trainer, engine, tolerance)


FP32_TOLERANCE = Tolerance(1e-3, 1e-4)
SCORES = [[-2.0] * 23 for _ in range(4)]


def move_scores(changes: dict[int, float]) -> list[list[float]]:
    """Return SCORES with the second half of each prompt in ``changes`` moved by its value."""
    scores = [list(prompt) for prompt in SCORES]
    for prompt, difference in changes.items():
        scores[prompt][11:] = [score + difference for score in scores[prompt][11:]]
    return scores


def test_a_near_tie_of_the_router_at_one_prompt_is_no_wrong_arithmetic() -> None:
    report = compare_canary(SCORES, move_scores({2: 0.011}), FP32_TOLERANCE, is_routed=True)
    assert report.has_near_tie
    assert report.max_abs_diff == pytest.approx(0.011)
    small = compare_canary(SCORES, move_scores({2: 0.0005}), Tolerance(1e-3, 1e-3), is_routed=True)
    assert not small.has_near_tie


@pytest.mark.parametrize(
    ("changes", "tolerance", "is_routed"),
    [
        ({2: 0.011}, FP32_TOLERANCE, False),
        ({1: 0.011, 2: 0.011}, FP32_TOLERANCE, True),
        ({2: 10.5}, FP32_TOLERANCE, True),
        ({2: float("nan")}, FP32_TOLERANCE, True),
        ({0: 0.011, 1: float("nan")}, FP32_TOLERANCE, True),
        # The mean of the other prompts is beyond its bound.
        ({0: 0.011, 1: 0.0005, 2: 0.0005, 3: 0.0005}, FP32_TOLERANCE, True),
        # This tolerance has room for near ties, so they are no exception. The mean over all tokens is 3 x 12 / 92.
        ({2: 3.0}, Tolerance(10.0, 0.3), True),
    ],
)
def test_other_differences_of_the_canary_are_refused(changes, tolerance, is_routed) -> None:
    with pytest.raises(CanaryError):
        compare_canary(SCORES, move_scores(changes), tolerance, is_routed=is_routed)


def test_one_prompt_alone_has_no_other_to_judge_by() -> None:
    with pytest.raises(CanaryError):
        compare_canary([[-1.0]], [[-1.1]], FP32_TOLERANCE, is_routed=True)


class FixedEngine(ConstantScores):
    """An engine without a server. ``held``: the checksums of its tensors, for each rank."""

    layout: Any = None

    def __init__(
        self, url: str, layout: tuple[int, str], held: Sequence[Mapping[str, str]]
    ) -> None:
        self.url, self.layout, self.held = url, layout, list(held)
        self.score_value = self.decode_value = -2.0
        self.resumed = False

    async def checksums(self) -> Any:
        return self.held

    async def resume(self) -> None:
        self.resumed = True

    def expected(self) -> Any:
        """Return digests that name the ranks of the layout and the senders' parts: "<ranks>:<parts>"."""
        ranks, _ = self.layout
        return SimpleNamespace(digests=lambda parts: [{"w": f"{ranks}:{'+'.join(parts)}"}] * ranks)


ONE_RANK, TWO_RANKS = (1, "cuda"), (2, "cuda")
PARTIALS = [["one/first", "two/first"], ["one/second", "two/second"]]
"""The parts of two senders: one for each layout, in the order in which the layouts occur among the engines."""
HELD_ONE = [{"w": "1:one/first+one/second"}]
HELD_TWO = [{"w": "2:two/first+two/second"}] * 2


def engines_of(*members: FixedEngine) -> Engines:
    return Engines(members, runner())


def test_engines_of_each_layout_are_compared_with_all_senders_parts_of_it() -> None:
    engines = engines_of(
        FixedEngine(A, ONE_RANK, HELD_ONE),
        FixedEngine(B, TWO_RANKS, HELD_TWO),
        FixedEngine(C, ONE_RANK, HELD_ONE),
    )
    # There is one tensor on 1 + 2 + 1 engine ranks.
    assert compare_tensors(engines, expected_digests(engines, PARTIALS)) == 4


def test_only_engines_whose_tensors_differ_are_at_fault() -> None:
    engines = engines_of(
        FixedEngine(A, ONE_RANK, HELD_ONE),
        FixedEngine(B, TWO_RANKS, [HELD_TWO[0], {"w": "9"}]),
        FixedEngine(C, TWO_RANKS, HELD_TWO),
    )
    with pytest.raises(EngineFaultError) as failure:
        compare_tensors(engines, expected_digests(engines, PARTIALS))
    assert failure.value.engines == (B,)
    (error,) = failure.value.faults.values()
    assert isinstance(error, ChecksumMismatchError)
    assert error.mismatches == (ChecksumMismatch("w", 1, HELD_TWO[0]["w"], "9"),)


def test_a_sender_hashes_each_bucket_once_for_each_layout() -> None:
    hashers: list[Any] = []

    class HashingEngine(FixedEngine):
        def expected(self) -> Any:
            buckets: list[Any] = []
            hashers.append(buckets)
            return SimpleNamespace(
                add=buckets.append, partial=lambda: [self.layout[0], list(buckets)]
            )

    layouts = {A: ONE_RANK, B: TWO_RANKS, C: ONE_RANK}
    members = [HashingEngine(url, layout, []) for url, layout in layouts.items()]
    expected = ExpectedByLayout(engines_of(*members))
    expected.add([("a", None)])
    expected.add([("b", None)])
    assert len(hashers) == 2
    buckets = [[("a", None)], [("b", None)]]
    assert expected.partials() == [[1, buckets], [2, buckets]]


def test_the_worst_engines_canary_is_reported() -> None:
    first, worst = FixedEngine(A, ONE_RANK, []), FixedEngine(B, ONE_RANK, [])
    first.score_value = first.decode_value = -2.25
    worst.score_value = worst.decode_value = -2.5
    engines = Engines([first, worst], runner())
    prompts, trainer = [[1, 2, 3]], [[-2.0, -2.0]]
    report = compare_scores(engines, prompts, trainer, Tolerance(0.5, 0.5), 500)
    assert report == CanaryReport(0.5, 0.5, 2)
    assert (first.resumed, worst.resumed) == (True, True)
    with pytest.raises(EngineFaultError, match=r" 0\.5") as failure:
        compare_scores(engines, prompts, trainer, Tolerance(0.4, 0.5), 500)
    assert failure.value.engines == (B,)
