"""``Learner`` on one rank, with a real trainer: the inputs of each optimiser step, and the figures of the batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.columns import LOSS_COLUMNS
from megatron_dppo.data.trajectory import Outline, Trajectory
from megatron_dppo.loop.exchange import ExchangeError
from megatron_dppo.loop.gap_guard import GapError
from megatron_dppo.loop.learning import Learner, PlannedBatch
from megatron_dppo.loop.rollout_sources import RolloutBatch
from megatron_dppo.metrics import table as names
from megatron_dppo.trainer import platform
from tests.distributed.test_trainer_parity import VOCABULARY, run_config, samples
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.usefixtures("ends_process_group")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dense model and a model with experts, each of one layer."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_moe"):
        save_tiny_model(folder / family, family, vocab_size=VOCABULARY, layers=1)
    return folder


class WatchedLearner:
    """A learner of one rank; ``steps`` are the arguments and the result of each optimiser step."""

    def __init__(
        self,
        models: Path,
        algorithm: str = "pg-is",
        options: dict[str, Any] | None = None,
        *,
        family: str = "qwen3",
        changes: dict[str, Any] | None = None,
        **rollout: Any,
    ) -> None:
        from megatron_dppo.trainer.step import StatsSpec
        from megatron_dppo.trainer.trainer import Trainer

        algorithm_section = {"algorithm": {"name": algorithm, "options": options or {}}}
        config = run_config(str(models / family), {}, algorithm_section | (changes or {}))
        self.config: TrainConfig = config.model_copy(
            update={
                "rollout": config.rollout.model_copy(update=rollout),
                "training": config.training.model_copy(update={"prompts_per_mini_batch": 1}),
            }
        )
        rule = build_algorithm(algorithm, options or {})
        self.trainer = Trainer.read(self.config, StatsSpec(topk=rule.reads_topk, entropy=True))
        self.learner = Learner(self.config, self.trainer, rule, 0)
        self.steps: list[tuple[dict[str, Any], Any]] = []
        train = self.trainer.train_mini_batch

        def record_step(micro_batches: Any, loss: Any, denominator: float, **keywords: Any) -> Any:
            arguments = {"micro_batches": micro_batches, "denominator": denominator, **keywords}
            result = train(micro_batches, loss, denominator, **keywords)
            self.steps.append((arguments, result))
            return result

        self.trainer.train_mini_batch = record_step  # type: ignore[method-assign,assignment]

    def plan(self, data: list[Trajectory], **figures: float) -> PlannedBatch:
        batch = RolloutBatch([Outline.of(t) for t in data], dict(enumerate(data)), figures, {})
        return self.learner.plan(batch)


@pytest.fixture
def watch(models: Path) -> Iterator[Callable[..., WatchedLearner]]:
    open_learners: list[WatchedLearner] = []

    def open_learner(*words: Any, **keywords: Any) -> WatchedLearner:
        open_learners.append(WatchedLearner(models, *words, **keywords))
        return open_learners[-1]

    yield open_learner
    for watched in open_learners:
        watched.trainer.close()


def test_each_group_is_a_step_and_the_figures_are_theirs(watch) -> None:
    watched = watch("dppo-binary-tv", {"tv_threshold": 0.001}, save=True)
    planned_batch = watched.plan(samples())
    began = time.perf_counter()
    metrics = watched.learner.learn(planned_batch)
    seconds = time.perf_counter() - began

    assert len(planned_batch.plans) == len(watched.steps) == metrics[names.OPTIMIZER_STEPS] == 3
    assert [arguments["is_last"] for arguments, _ in watched.steps] == [False, False, True]
    assert [arguments["denominator"] for arguments, _ in watched.steps] == [
        p.denominator for p in planned_batch.plans
    ]
    norms = [result.grad_norm for _, result in watched.steps]
    assert metrics[names.GRAD_NORM] == pytest.approx(sum(norms) / 3)
    assert metrics[names.GRAD_NORM_MAX] == max(norms) > min(norms)
    assert metrics[names.LEARNING_RATE] == watched.steps[-1][1].lr > 0
    assert metrics[names.IDLE_SHARE] == pytest.approx(sum(p.idle for p in planned_batch.plans) / 3)
    flops = 3 * sum(watched.learner.layout.cost(t.length) for t in samples())
    assert metrics[names.TFLOPS] * 1e12 > flops / seconds  # the steps take a part of the seconds
    assert metrics[names.TFLOPS] * 1e12 < 50 * flops / seconds
    peak = platform.peak_memory_bytes() / 2**30
    assert metrics[names.PEAK_MEMORY] == pytest.approx(peak, rel=0.2)

    # The micro-batches have the responses of their plan, and blocked tokens are counted by response.
    for (arguments, _), plan in zip(watched.steps, planned_batch.plans, strict=True):
        rows = [
            [i for i in b.sequence_index.tolist() if i >= 0] for b in arguments["micro_batches"]
        ]
        assert rows == plan.positions[0]
    assert sum(watched.learner.masked_by_response.values()) > 0
    assert watched.learner.most_masked
    columns = watched.learner.loss_columns
    assert columns.keys() == set(range(24))
    for position, trajectory in enumerate(samples()):
        trained = columns[position]["loss_trains"]
        assert len(trained) == trajectory.sampled
        blocked = watched.learner.masked_by_response.get(position, 0)
        assert np.count_nonzero(~trained) == blocked
        assert columns[position].keys() <= set(LOSS_COLUMNS)


def test_a_run_that_saves_no_batches_keeps_no_columns(watch) -> None:
    watched = watch()
    watched.learner.learn(watched.plan(samples()))
    assert watched.learner.loss_columns == {}


def test_the_gap_is_looked_at_before_the_first_step_alone(watch) -> None:
    """The second group's gap is too large, but it does not stop the run: the weights have moved before its step."""
    data = samples()
    data_with_gap = [
        t.with_columns(rollout_log_probs=np.zeros(t.sampled, np.float32)) if i >= 8 else t
        for i, t in enumerate(data)
    ]
    watched = watch(save=True)
    watched.learner.learn(watched.plan(data_with_gap))
    assert len(watched.steps) == 3
    with pytest.raises(GapError):
        watched.learner.learn(watched.plan([*data_with_gap[8:16], *data_with_gap[:8]]))
    assert len(watched.steps) == 3
    # The loss columns of the rejected mini-batch are kept, so that they can be saved.
    assert watched.learner.loss_columns.keys() == set(range(8))
    stale = watched.plan([*data_with_gap[8:16], *data_with_gap[:8]], **{names.STALENESS_MAX: 1})
    assert stale.is_stale
    watched.learner.learn(stale)
    assert len(watched.steps) == 5
    assert not watched.plan(data, **{names.STALENESS_MAX: 0}).is_stale
    assert not watched.plan(data).is_stale


def test_only_tokens_at_equal_weights_may_stop_a_run_by_their_frequency(watch, monkeypatch) -> None:
    watched, checks = watch(), []
    for name in ("_canary", "_canary_of_other_weights"):
        canary = getattr(watched.learner, name)
        monkeypatch.setattr(canary, "check", lambda _, name=name: checks.append(name))
    data = samples()
    watched.learner.learn(watched.plan(data))
    # ``_canary`` checks only the first mini-batch, and nothing if older weights sampled the batch.
    assert checks == ["_canary", *["_canary_of_other_weights"] * (len(checks) - 1)]
    assert len(checks) > 1
    checks.clear()
    watched.learner.learn(watched.plan(data, **{names.STALENESS_MAX: 1}))
    assert set(checks) == {"_canary_of_other_weights"}


@pytest.mark.parametrize(
    ("lora", "passes", "stops"),
    # A frozen weight has no gradient, so the backward pass costs as much as one forward pass instead of two.
    [({}, 3, True), ({"rank": 2}, 2, True), ({"rank": 2, "dropout": 0.5}, 2, False)],
)
def test_adapters_take_a_pass_less_and_with_dropout_no_gap_stops_a_run(
    watch, lora, passes, stops
) -> None:
    data_with_gap = [
        t.with_columns(rollout_log_probs=np.zeros(t.sampled, np.float32)) for t in samples()[:8]
    ]
    watched = watch(changes={"lora": lora})
    planned_batch = watched.plan(data_with_gap)
    flops = passes * sum(watched.learner.layout.cost(t.length) for t in data_with_gap)
    speed = watched.learner._speed(planned_batch, 2.0)
    assert speed[names.TFLOPS] * 1e12 == pytest.approx(flops / 2)
    with pytest.raises(GapError) if stops else nullcontext():
        watched.learner.learn(planned_batch)
    assert len(watched.steps) == (not stops)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("pg-is", set()),
        ("mask-0.5-recompute", {"recomputed_log_probs"}),
        ("recomputed-exact-tv", {"recomputed_log_probs", "topk_ids", "topk_log_probs"}),
    ],
)
def test_what_the_algorithm_needs_is_recomputed_before_the_first_step(watch, name, columns) -> None:
    watched = watch(name)
    planned_batch = watched.plan(samples())
    batches = [
        b
        for plan in planned_batch.plans
        for b in watched.learner._packed(planned_batch, plan).micro_batches
    ]
    expected = watched.trainer.log_probs(batches)
    watched.learner.learn(planned_batch)
    micro_batches = [b for step, _ in watched.steps for b in step["micro_batches"]]
    for batch, values in zip(micro_batches, expected, strict=True):
        assert columns == batch.columns.keys() - {"rollout_log_probs"}
        if "recomputed_log_probs" in columns:
            found = batch.column("recomputed_log_probs")
            torch.testing.assert_close(found[batch.loss_mask], values[batch.loss_mask])
            assert not found[~batch.loss_mask].any()
        if "topk_ids" in columns:
            trained = batch.loss_mask
            assert batch.column("topk_ids").tolist() == [list(range(VOCABULARY))] * batch.num_tokens
            picked = batch.column("topk_log_probs").gather(1, batch.target_ids[:, None])[:, 0]
            torch.testing.assert_close(picked[trained], values[trained])


@pytest.mark.parametrize("name", ["m2po", "m2po-areal"])
def test_a_bound_is_found_of_each_step_under_the_weights_before_it(watch, name) -> None:
    """The bound of a mini-batch is of its own (log r)^2, which the previous optimiser step has changed."""
    watched = watch(name, {"second_moment": 0.3})
    train, expected = watched.trainer.train_mini_batch, []

    def bound_and_train(micro_batches: Any, *words: Any, **keywords: Any) -> Any:
        values = watched.trainer.log_probs(micro_batches)
        pairs = [
            ((p.cpu() - b.column("rollout_log_probs"))[b.loss_mask], b.advantages[b.loss_mask])
            for b, p in zip(micro_batches, values, strict=True)
        ]
        log_ratio, advantages = (torch.cat(part) for part in zip(*pairs, strict=True))
        bound = watched.learner._algorithm.step_bound
        expected.append(bound(log_ratio, advantages, lambda total: total))
        return train(micro_batches, *words, **keywords)

    watched.trainer.train_mini_batch = bound_and_train
    watched.learner.learn(watched.plan(samples()))
    for (step, _), value in zip(watched.steps, expected, strict=True):
        for batch in step["micro_batches"]:
            bounds = batch.column("step_bound").tolist()
            assert bounds == pytest.approx([value] * batch.num_tokens, rel=1e-6)
    assert len({round(value, 6) for value in expected}) == len(expected) > 1
    assert all(0 < value < float("inf") for value in expected)


def with_routing(trajectory: Trajectory) -> Trajectory:
    experts = np.tile(np.array([[0, 1]], np.uint8), (trajectory.length - 1, 1, 1))
    return trajectory.with_columns(routed_experts=experts)


def test_recorded_routing_is_replayed_and_told_of(watch) -> None:
    data = [with_routing(t) if i else t for i, t in enumerate(samples()[:8])]
    watched = watch(family="qwen3_moe", router_replay=True)
    planned_batch = watched.plan(data)
    rows = sum(t.length - 1 for t in data)
    missing = (data[0].length - 1) / rows
    assert planned_batch.figures[names.ROUTING_UNRECORDED] == pytest.approx(missing)
    metrics = watched.learner.learn(planned_batch)
    assert metrics[names.ROUTING_UNRECORDED] == planned_batch.figures[names.ROUTING_UNRECORDED]
    assert all("routed_experts" in b.columns for b in watched.steps[0][0]["micro_batches"])
    with pytest.raises(ExchangeError, match="no response of the batch has recorded routing"):
        watched.plan(samples()[:8])
    assert watched.plan([]).plans == []


def test_a_recording_that_is_not_replayed_is_left_out(watch) -> None:
    watched = watch(family="qwen3_moe")
    planned_batch = watched.plan([with_routing(t) for t in samples()[:8]])
    assert planned_batch.figures == {}
    watched.learner.learn(planned_batch)
    assert all("routed_experts" not in b.columns for b in watched.steps[0][0]["micro_batches"])
