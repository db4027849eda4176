"""``LossRecord``: the loss's figures of each token, moved from packed micro-batches to their responses."""

import math

import numpy as np
import pytest
import torch

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.distillation import Distillation
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.table import PRESETS
from megatron_dppo.data.columns import LOSS_COLUMNS
from megatron_dppo.data.packing import pack
from megatron_dppo.loop.learning import KEPT_TOPK, LossRecord, _decoded, _encoded, by_response
from megatron_dppo.trainer.token_loss import make_token_loss
from megatron_dppo.vocab_parallel import policy_stats
from tests.trajectories import trajectory
from tests.unit.test_token_loss import V, bounded, packed, samples
from tests.unit.token_inputs import inputs


def test_rows_go_to_the_response_that_they_are_of():
    trajectories = [trajectory([1, 2], [3, 4, 5]), trajectory([1], [6, 7]), trajectory([1, 2], [8])]
    batch = pack(trajectories, indices=[7, 2, 5], trains=[True, False, True], pad_multiple=16)
    values = torch.arange(batch.num_tokens)
    found = by_response(batch, {"loss_log_probs": values.float(), "loss_trains": values > 2})
    # A row predicts the next token. The first response is predicted at rows 1, 2, 3, the last at row 5 + 3 + 1 = 9.
    assert {p: c["loss_log_probs"].tolist() for p, c in found.items()} == {7: [1, 2, 3], 5: [9]}
    assert found[7]["loss_trains"].tolist() == [False, False, True]


def test_what_travels_comes_back():
    def columns(count):
        return {
            "loss_log_probs": np.arange(count, dtype=np.float32),
            "loss_trains": np.ones(count, np.bool_),
        }

    by_position = {9: columns(2), 3: columns(1)}
    decoded = _decoded(_encoded(by_position))
    assert set(decoded) == {9, 3}
    for position, expected in by_position.items():
        for name, array in expected.items():
            assert np.array_equal(decoded[position][name], array)
            assert decoded[position][name].dtype == array.dtype
    assert _decoded(_encoded({})) == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dppo-binary-tv", 0.3),
        ("dppo-decoupled-binary-tv", 0.1),
        ("dppo-binary-kl", 0.3 * math.log(1 / 2) + 0.7 * math.log(7 / 4)),
        ("dppo-decoupled-binary-kl", 0.7 * math.log(7 / 6) + 0.3 * math.log(3 / 4)),
    ],
)
def test_the_recorded_divergence_is_from_the_preset_s_own_anchor(name, expected):
    x = inputs([0.6], [0.3], [1.0], recomputed=[0.7])
    assert build_algorithm(name).divergence(x).tolist() == pytest.approx([expected])


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_records_what_its_mask_compared(name):
    """The record has all columns in the declared dtypes, and no token within the threshold is blocked."""
    trajectories = samples()
    algorithm = build_algorithm(name)
    record = LossRecord(algorithm)
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(3)).requires_grad_()
    loss = make_token_loss(algorithm, observers=[record.add])
    for rows in ([0, 1, 3], [2, 4]):
        batch = bounded(packed(trajectories, rows, indices=rows))
        ids = batch.columns["topk_ids"].long()
        stats = policy_stats(
            table[batch.token_ids], batch.target_ids, vocab_size=V, topk_ids=ids, with_entropy=True,
            with_squares=algorithm.needs_sum_squares,
        )  # fmt: skip
        loss(stats, batch)
    found = {}
    for batch, values in record._parts:
        found |= by_response(batch, values)
    assert sorted(found) == [0, 1, 2, 4]
    for position, columns in found.items():
        response = trajectories[position].with_columns(**columns)  # fails on another shape or dtype
        absent = {"loss_divergence", "loss_advantages"}
        if algorithm.needs_recomputed_distribution:
            absent.add("loss_topk_log_probs")
        assert set(columns) - {"loss_divergence"} == set(LOSS_COLUMNS) - absent
        assert np.array_equal(
            response.column("loss_recomputed_log_probs"), response.column("recomputed_log_probs")
        )
    has_threshold = "tv_threshold" in algorithm.numbers or "kl_threshold" in algorithm.numbers
    assert all(("loss_divergence" in c) == has_threshold for c in found.values())
    for columns in found.values():
        if algorithm.preset.mask == algorithm.preset.divergence:
            bound = next(v for n, v in algorithm.numbers.items() if n.endswith("threshold"))
            assert columns["loss_trains"][columns["loss_divergence"] <= bound].all()


@pytest.mark.parametrize(("width", "kept"), [(KEPT_TOPK, True), (KEPT_TOPK + 1, False)])
def test_topk_is_kept_up_to_a_width(width, kept):
    token = torch.zeros(1)
    topk = torch.zeros(1, width + 1)  # the last column is the sampled token's
    x = TokenInputs(
        token, token, token, torch.ones(1, dtype=torch.bool), topk_log_probs=topk, rollout_topk_log_probs=topk,
        topk_valid=torch.ones_like(topk, dtype=torch.bool),
    )  # fmt: skip
    topk = LossRecord(build_algorithm("dppo-topk-tv"))._topk(x)
    assert (None if topk is None else topk.shape[1]) == (width if kept else None)


def test_the_advantages_that_a_teacher_changed_are_recorded_and_read_back():
    """A = 0 for all rewards, so that log p_T - log pi is the advantage of the loss."""
    algorithm = build_algorithm("dppo-binary-tv")
    record = LossRecord(algorithm, has_teacher=True)
    trajectories = []
    for t in samples():
        teacher = np.full(t.sampled, -1.5, np.float32)
        trajectories.append(t.with_columns(teacher_log_probs=teacher))
    distillation = Distillation(algorithm, "sampled", rewards=False)
    loss = make_token_loss(algorithm, observers=[record.add], distillation=distillation)
    batch = packed(trajectories, [0, 1], indices=[0, 1])
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(3)).requires_grad_()
    logits = table[batch.token_ids]
    loss(policy_stats(logits, batch.target_ids, vocab_size=V), batch)
    columns = by_response(*record._parts[0])[1]
    response = trajectories[1].with_columns(**columns)
    expected = -1.5 - response.column("loss_log_probs")
    assert np.allclose(response.advantages, expected, rtol=1e-6)
    assert not np.allclose(trajectories[1].advantages, expected)
