"""Staleness by token, its bound, and the figures of a batch, with numbers worked by hand."""

import math
from typing import Any, cast

import numpy as np
import pytest

from megatron_dppo.data.columns import Form
from megatron_dppo.data.trajectory import FinishReason, Trajectory
from megatron_dppo.loop.gap_guard import GapError, GapGuard, is_coarse
from megatron_dppo.loop.group_quota import Selection
from megatron_dppo.loop.rollout_figures import (
    GroupRow,
    StalenessError,
    check_staleness,
    generated_figures,
    routing_figures,
    rows_of,
    selection_figures,
    speed_figures,
    staleness_figures,
    trained_figures,
    with_stale_gap_renamed,
)
from megatron_dppo.loop.rollout_sources import GeneratedRollouts, _Draft
from megatron_dppo.metrics import table as names
from tests.messages import mentioning, mentions
from tests.unit.config_files import minimal_config


def answer(
    *spans: tuple[int, int], reward: float = 0.0, reason: FinishReason = "stop"
) -> Trajectory:
    """Return a response that consists of pieces (weight version, number of tokens)."""
    versions = np.concatenate([np.full(tokens, version, np.int32) for version, tokens in spans])
    return Trajectory.of_response(
        [1], [2] * len(versions), problem_id=7, sample_index=2, finish_reason=reason,
        reward=reward, columns={"weight_version": versions},
    )  # fmt: skip


def test_staleness_is_a_mean_over_tokens_not_over_responses():
    batch = [answer((4, 1)), answer((3, 6)), answer((3, 2), (4, 1))]
    figures = staleness_figures(batch, step=5)  # trained from version 4: 6 + 2 tokens are 1 behind
    assert figures == {"rollout/staleness": 8 / 10, "rollout/staleness_max": 1}


def test_tokens_beyond_the_bound_are_refused_by_name():
    batch = [answer((4, 3)), answer((3, 2), (4, 1))]
    check_staleness(batch, step=5, max_staleness=1)
    with pytest.raises(StalenessError) as caught:
        check_staleness(batch, step=5, max_staleness=0)
    values = ("step 5", 4, "response 2", "problem 7", 0, 1, 3, "rollout.max_staleness: 0")
    assert mentions(str(caught.value), *values)


def test_weights_that_the_trainer_never_had_are_refused():
    with pytest.raises(StalenessError, match=mentioning("version 5")):
        check_staleness([answer((5, 1))], step=5, max_staleness=1)


def test_the_gap_of_a_stale_batch_is_not_called_one_at_equal_weights():
    figures = {names.GAP_ON_POLICY: 0.25, "loss/mean": 1.0}
    assert with_stale_gap_renamed(figures, {"rollout/staleness_max": 0}) == figures
    assert with_stale_gap_renamed(figures, {"rollout/staleness_max": 1}) == {
        names.GAP_STALE: 0.25,
        "loss/mean": 1.0,
    }


def test_figures_are_those_of_all_generated_groups():
    batch = [
        answer((0, 2), reward=1.0),
        answer((0, 4), reward=1.0),
        answer((0, 3), reward=0.0, reason="length"),
        answer((0, 3), reward=1.0),
    ]
    rows = rows_of(batch, group_size=2)
    assert rows == [
        GroupRow(2, 2.0, True, 6, 0, 2, 0.0, turns=2, branches=2),
        GroupRow(2, 1.0, False, 6, 1, 1, 0.0, turns=2, branches=2),
    ]
    assert generated_figures(rows) == {
        "reward/mean": 0.75,
        "reward/groups_without_spread": 0.5,
        "rollout/response_length": 3.0,
        "rollout/truncated": 0.25,
        "rollout/distinct": 0.75,
        "rollout/twins": 0.0,
        "rollout/tokens": 12,
        "rollout/turns": 1.0,
    }
    cached = [row._replace(prompt_tokens=10, cached_tokens=n) for n, row in enumerate(rows, 4)]
    assert generated_figures(cached)["rollout/prefix_cached"] == (4 + 5) / 20
    assert (
        generated_figures([row._replace(verify_steps=4) for row in rows])["rollout/accepted_length"]
        == 12 / 8
    )
    assert trained_figures(batch[2:]) == {"rollout/response_length_trained": 3.0}
    assert trained_figures(batch[1:]) == {"rollout/response_length_trained": 10 / 3}
    figures = selection_figures(rows, Selection((1,), dropped=1), rounds=2)
    assert figures["reward/mean_trained"] == 0.5
    assert figures["rollout/groups_generated"] == 2
    assert figures["rollout/groups_dropped"] == 1
    assert figures["rollout/generation_rounds"] == 2


def sample_group(rng: np.random.Generator, probs: list[float], seeds: list[int]) -> GroupRow:
    """Return the row of a group with a response for each of ``seeds``. ``probs``: probabilities of its second token."""
    answer_of = {seed: int(rng.choice(len(probs), p=probs)) for seed in sorted(set(seeds))}
    return GroupRow.of(
        [
            Trajectory.of_response(
                [1],
                [2, 3 + answer_of[seed]],
                columns={"rollout_log_probs": [0.0, math.log(probs[answer_of[seed]])]},
            )
            for seed in seeds
        ]
    )


def test_repetition_by_equal_seeds_is_told_from_chance():
    """One answer has half of the probability, 128 rare answers share the rest. Two servers may use the same seeds."""
    rng, probs = np.random.default_rng(0), [0.5, *[0.5 / 128] * 128]
    different_seeds = [sample_group(rng, probs, [*range(8)]) for _ in range(500)]
    equal_seeds = [sample_group(rng, probs, [*range(4), *range(4)]) for _ in range(500)]
    by_chance, by_seed = generated_figures(different_seeds), generated_figures(equal_seeds)
    assert abs(by_chance["rollout/twins"]) < 0.02  # 4000 responses: a standard error of 0.003
    # Half of the responses are rare. Each equals its twin, and by chance 6 others, with probability 0.5 / 128 each. The
    # figure subtracts what chance gives for 7 others: 7 * 0.5 / 128.
    assert by_seed["rollout/twins"] == pytest.approx(0.5 * (1 - 0.5 / 128), abs=0.03)
    assert by_seed["rollout/distinct"] < 0.5 < by_chance["rollout/distinct"]


def test_twins_by_hand():
    """Equal responses of probability 1/2 don't count. At 1/1000, each of 4 has 3 twins; chance explains 3/1000."""
    rng = np.random.default_rng(0)
    likely = sample_group(rng, [0.5, 0.5], [0] * 4)
    assert (likely.distinct, likely.twins) == (1, 0.0)
    rare = sample_group(rng, [0.001] * 1000, [0] * 4)
    assert (rare.distinct, rare.twins) == (1, pytest.approx(4 * 3 - 4 * 3 * 0.001))


def test_the_overlap_is_the_share_that_nobody_waited_for():
    figures = speed_figures(tokens=100, seconds=4.0, waited=1.0)
    assert figures["rollout/generation_overlapped"] == 0.75
    assert figures["rollout/tokens_per_second"] == 25.0
    waited_more = speed_figures(tokens=100, seconds=4.0, waited=4.1)
    assert waited_more["rollout/generation_overlapped"] == 0.0


def test_recorded_routing_in_figures():
    """Three sequences of 4, 4 and 6 tokens with their prompt. The last two have recorded routing.

    Two weight versions sampled the third response; the routing of the older version's 2 tokens is discarded.
    """
    batch = [answer((5, 3)), answer((5, 3)), answer((4, 2), (5, 3))]
    figures = routing_figures(batch, {1, 2}, Form("uint16", (4, 2)))
    assert figures == {
        "r3/bytes_per_token": (3 + 5) * 16 / (4 + 6),
        "r3/unrecorded_share": 1 - (3 + 3) / (3 + 3 + 5),
        "r3/discarded_tokens": 2,
    }


def make_guard(tmp_path, dtype="float32", **sections) -> GapGuard:
    """Return the guard of a configuration. ``sections``: settings by the section that they are added to."""
    config = minimal_config(tmp_path, model={"dtype": dtype}, **sections)
    return GapGuard(
        config.precision,
        config.rollout,
        is_coarse=is_coarse(config.sglang, config.megatron),
        has_dropout=bool(config.lora.dropout),
    )


@pytest.mark.parametrize(
    ("dtype", "sections", "largest"),
    [
        ("float32", {}, 0.01),
        ("bfloat16", {}, 0.1),
        ("float32", {"sglang": {"quantization": "fp8"}}, 0.1),
        ("float32", {"sglang": {"kv_cache_dtype": "fp8_e5m2"}}, 0.1),
        ("float32", {"sglang": {"kv_cache_dtype": "auto"}}, 0.01),
        ("float32", {"megatron": {"fp8": "hybrid"}}, 0.1),
        ("bfloat16", {"rollout": {"largest_gap": 0.3}}, 0.3),
        ("bfloat16", {"engine": {"quantization": "fp8"}}, 0.3),
    ],
)
def test_a_gap_beyond_what_rounding_explains_stops_the_run(tmp_path, dtype, sections, largest):
    make_guard(tmp_path, dtype, **sections).check(largest, is_stale=False)
    with pytest.raises(GapError, match=mentioning(f"{largest * 1.01:.3g}")):
        make_guard(tmp_path, dtype, **sections).check(largest * 1.01, is_stale=False)


def test_where_the_weights_may_differ_a_gap_is_told_and_stops_nothing(tmp_path, caplog):
    make_guard(tmp_path).check(0.9, is_stale=True)
    make_guard(tmp_path).check(float("nan"), is_stale=False)
    assert not caplog.text
    for sections in ({"rollout": {"replay_from": "x"}}, {"lora": {"rank": 4, "dropout": 0.1}}):
        caplog.clear()
        make_guard(tmp_path, **sections).check(0.35, is_stale=False)
        assert mentions(caplog.text, 0.35)


def test_a_gap_is_told_again_where_it_has_doubled(tmp_path, caplog):
    guard = make_guard(tmp_path)
    gaps = (1e-7, 1e-4, 1.1e-4, 2e-4, 2.1e-4, 2.3e-4, 5e-4)
    reported_gaps = [gap for gap in gaps if guard.check(gap, is_stale=False)]
    assert reported_gaps == [1.1e-4, 2.3e-4, 5e-4]
    assert [line.split(" is ")[1].split()[0] for line in caplog.messages] == [
        "0.00011",
        "0.00023",
        "0.0005",
    ]


class BegunBatches(GeneratedRollouts):
    """A source that only records which batches it begins, and generates nothing."""

    def _begin(self, step: int) -> None:
        self._newest_step = step
        self._drafts.append(_Draft(step))

    def _clocks(self) -> tuple[float, ...]:
        return ()


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_batch_begins_once_its_oldest_token_can_keep_the_bound(tmp_path, max_staleness):
    """Batch n trains version n - 1, so tokens of version v fit batches up to v + 1 + max_staleness. The last is 6."""
    rollout = minimal_config(tmp_path).rollout
    rollout = rollout.model_copy(update={"max_staleness": max_staleness})
    unused = cast(Any, None)
    source = BegunBatches(rollout, *([unused] * 8), steps=6)  # type: ignore[misc]
    begun_batches = []
    for version in range(6):
        if not source._drafts:
            source._begin(version + 1)
        source.run_ahead(version)
        begun_batches.append([draft.step for draft in source._drafts])
        source._drafts.popleft()
    assert begun_batches == [
        list(range(version + 1, min(version + 1 + max_staleness, 6) + 1)) for version in range(6)
    ]
