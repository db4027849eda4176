"""Branches of a response: packing makes each branch a sequence, and everything else sees one response."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.decisions import decide
from megatron_dppo.algorithms.inputs import sequence_totals, with_branches_as_sequences
from megatron_dppo.algorithms.sequence_rules import position_weights
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.batch_file import load_batch, save_batch
from megatron_dppo.data.columns import usable_rows
from megatron_dppo.data.packing import pack, unpack_sampled
from megatron_dppo.data.trajectory import Outline, Trajectory
from megatron_dppo.loop.batch_layout import BatchLayout
from megatron_dppo.loop.credit import returns_by_turn, with_rewards
from megatron_dppo.loop.learning import by_response, plan_mini_batches
from megatron_dppo.loop.rollout_figures import generated_figures, rows_of
from megatron_dppo.metrics.masked_tokens import MaskedResponses
from megatron_dppo.model.shape import SequenceCost
from megatron_dppo.rewards.verifier import Score
from megatron_dppo.trainer.token_loss import branch_ids, inputs_from, sequence_ids
from megatron_dppo.vocab_parallel import policy_stats
from tests.trajectories import same
from tests.unit.test_mini_batches import Config, Part

V = 64


def make_branch(
    tokens: str, versions: list[int], routing: int | None = None, **fields: Any
) -> Trajectory:
    """Return a trajectory of ``tokens``: numbers, of which sampled ones have a point behind them. log mu of token i is
    -i / 64; row t of the routing is ``routing`` and 100 + t."""
    mask = [token.endswith(".") for token in tokens.split()]
    ids = [int(token.rstrip(".")) for token in tokens.split()]
    columns: dict[str, Any] = {
        "rollout_log_probs": [-i / V for i, sampled in zip(ids, mask, strict=True) if sampled],
        "weight_version": versions,
    }
    if routing is not None:
        rows = [[[routing, 100 + t]] for t in range(len(ids) - 1)]
        columns["routed_experts"] = np.array(rows, np.uint8)
    return Trajectory(0, 0, np.array(ids), np.array(mask), columns, **fields)


# Token 3 was sampled in the first branch. In the second branch it is context.
FIRST = make_branch("1 2 3. 4. 5 6 7.", [1, 1, 2], 1, prompt_tokens=2 + 6)
SECOND = make_branch("8 3 9 10.", [3], 2, prompt_tokens=3, cached_tokens=1, verify_steps=2)


def joined(**fields: Any) -> Trajectory:
    """Return the response of both branches, with ``fields`` replaced."""
    return replace(Trajectory.of_branches([FIRST, SECOND]), **fields)


def test_each_sampled_token_has_the_loss_mask_once_and_context_never():
    t = joined()
    assert t.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 3, 9, 10]
    assert t.loss_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1]
    assert t.response_ids.tolist() == [3, 4, 7, 10]
    assert (t.turns, t.sampled, t.branch_lengths) == (3, 4, (7, 4))
    assert (t.prompt_ids.tolist(), t.prompt_tokens, t.cached_tokens) == ([1, 2], 11, 1)
    assert t.verify_steps == 2
    packed = pack([t])
    # The loss mask is at the token before a sampled one: 2 and 3 predict 3 and 4, 6 predicts 7, and 9 predicts 10.
    predicting = packed.loss_mask.nonzero().squeeze(1)
    assert packed.token_ids[predicting].tolist() == [2, 3, 6, 9]
    assert packed.target_ids[predicting].tolist() == [3, 4, 7, 10]


def test_branches_are_cut_as_they_were_joined():
    t = joined()
    for branch, original in zip(t.branches, (FIRST, SECOND), strict=True):
        assert same(branch.without("routing_version"), original)
    assert FIRST.branches == (FIRST,)
    assert Trajectory.of_branches([FIRST]) is FIRST


def test_a_branch_is_a_sequence_and_its_positions_begin_at_0():
    other = replace(make_branch("11 12.", [1], 3), sample_index=1)
    batch = pack([joined(), other], indices=[4, 7], sequence_multiple=2, pad_multiple=4)
    assert batch.cu_seqlens.tolist() == [0, 8, 12, 14, 16]
    assert batch.sequence_index.tolist() == [4, 4, 7, -1]
    assert batch.position_ids.tolist() == [*range(8), *range(4), 0, 1, 0, 1]
    routing = batch.column("routed_experts")[batch.valid["routed_experts"], 0].tolist()
    # The last token of a branch predicts nothing and has no row. Rows 1 and 2 are of another weight version.
    first = [[1, 100 + t] for t in (0, 3, 4, 5)]
    assert routing == [*first, [2, 100], [2, 101], [2, 102], [3, 100]]
    log_probs = batch.column("rollout_log_probs")[batch.loss_mask]
    assert (log_probs * -V).tolist() == [3, 4, 7, 10, 12]


def test_rows_hold_by_the_version_of_their_own_branch():
    """Rows are of the last version of their branch: 2 in the first, 3 in the second. Tokens of version 1 lack rows."""
    t = joined()
    assert t.columns["routing_version"].tolist() == [2, 2, 2, 3]
    assert usable_rows(t.loss_mask, t.columns).tolist() == [i not in (1, 2) for i in range(10)]
    assert t.discarded_rows == 2
    lost = Trajectory.of_branches([FIRST, SECOND.without("routed_experts")])
    assert lost.columns.keys() == {"rollout_log_probs", "weight_version", "branch"}


def test_rules_of_whole_responses_see_all_branches_as_one():
    other = make_branch("11 12. 13.", [1, 1], 3)
    batch = pack([joined(), other], pad_multiple=16)
    assert sequence_ids(batch, branch_ids(batch)).tolist() == [0] * 11 + [1] * 3 + [2] * 2
    stats = policy_stats(torch.zeros(16, V), batch.target_ids, vocab_size=V)
    inputs = inputs_from(stats, batch)
    totals = sequence_totals(inputs, torch.ones(16))
    assert totals[batch.loss_mask].tolist() == [4, 4, 4, 4, 2, 2]


def test_rules_of_a_prefix_see_the_tokens_before_in_their_own_branch():
    """An agent's main conversation may continue after that of a sub-agent. Then tokens that precede the sub-agent's in
    the response were sampled later."""
    main = make_branch("1 2. 3 4.", [1, 1], 3)
    batch = pack([Trajectory.of_branches([main, make_branch("5 6.", [1], 3)])], pad_multiple=8)
    stats = policy_stats(torch.zeros(8, V), batch.target_ids, vocab_size=V)
    x = inputs_from(stats, batch)
    token_branches = x.branch_ids[batch.loss_mask]
    assert token_branches.tolist() == [0, 0, 1]
    assert x.sequence_ids[batch.loss_mask].tolist() == [0, 0, 0]
    ratios = torch.tensor([1.0, 0.1, 1.0])
    log_mu = x.log_probs.detach().clone()
    log_mu[batch.loss_mask] -= ratios.log()
    x = replace(x, rollout_log_probs=log_mu)
    # r_t times the smallest earlier ratio of the branch: 1, .1 x 1, and 1 for the first token of the second branch.
    weights = decide(build_algorithm("minpro"), x).capped[batch.loss_mask]
    assert weights.tolist() == pytest.approx([1.0, 0.1, 1.0], rel=1e-5)
    weight, before = position_weights(with_branches_as_sequences(x), weight_min=0.2)
    assert weight[batch.loss_mask].tolist() == pytest.approx([1.0, 0.2, 1.0])
    assert before[batch.loss_mask].tolist() == pytest.approx([0.0, 1.0, 0.0])
    # D = 0, .4, .1 with A > 0 and d = .15: the second token is masked, and does not reduce the budget of the third.
    pi = x.log_probs.detach().clone()
    mu = pi.clone()
    pi[batch.loss_mask] = torch.tensor([0.5, 0.9, 0.6]).log()
    mu[batch.loss_mask] = torch.tensor([0.5, 0.5, 0.5]).log()
    x = replace(x, log_probs=pi, rollout_log_probs=mu, advantages=torch.ones_like(pi))
    trained = decide(build_algorithm("cppo-binary-tv"), x).trains[batch.loss_mask]
    assert trained.tolist() == [True, False, True]


def test_what_the_loss_saw_goes_back_to_the_response():
    batch = pack([joined(), make_branch("11 12.", [1], 3)], indices=[3, 1])
    rows = torch.arange(batch.num_tokens, dtype=torch.float32)
    columns = by_response(batch, {"loss_log_probs": rows})
    # Values are at the rows of the tokens that predict; the second response begins at row 11.
    assert {p: c["loss_log_probs"].tolist() for p, c in columns.items()} == {
        3: [1, 2, 5, 9],
        1: [11],
    }
    masked = MaskedResponses()
    blocked = torch.isin(rows, torch.tensor([1.0, 9.0]))
    masked.add(batch.sequence_index, batch.cu_seqlens, torch.ones(13), blocked)
    assert masked.counts() == {3: 2}
    (values,) = unpack_sampled([joined()], rows[:11])
    assert values.tolist() == [1, 2, 5, 9]


def test_a_response_is_planned_whole_and_counts_once():
    """There are two groups of two. Branches of 7 and 4 tokens are padded to 8 and 4, and cost 8^2 + 4^2, not 12^2."""
    batch = [joined(), FIRST, FIRST, SECOND]
    config: Any = Config(
        AlgorithmConfig(aggregation="sequence-mean-token-sum"),
        Part(group_size=2),
        Part(prompts_per_mini_batch=1, micro_batch_tokens=12),
    )
    layout = BatchLayout(0, 1, sequence_multiple=2, cost=SequenceCost(0.0, 1.0))
    plans = plan_mini_batches(batch, config.training, config.rollout, config.algorithm, layout)
    assert [plan.positions for plan in plans] == [[[[0], [1]]], [[[2, 3]]]]
    assert [plan.denominator for plan in plans] == [2, 2]
    assert [plan.cost for plan in plans] == [8**2 + 4**2 + 8**2, 8**2 + 4**2]
    (row, _) = rows_of(batch, 2)
    assert (row.responses, row.tokens, row.turns, row.branches) == (2, 4 + 3, 3 + 2, 2 + 1)
    assert generated_figures(rows_of(batch, 2))["rollout/branches"] == 5 / 4
    assert "rollout/branches" not in generated_figures(rows_of(batch[2:], 2))


def test_every_rank_knows_its_branches():
    t = joined(advantage=0.5)
    outline = Outline.from_json(json.loads(json.dumps(Outline.of(t))))
    assert outline == Outline.of(t)
    assert outline.branch_lengths == (7, 4)
    assert FIRST.branch_lengths == (7,)


def test_a_file_and_a_seal_keep_branches(tmp_path):
    t = joined().stamped({}, None)
    assert t.stamp is not None
    assert "branch" in t.stamp.digests
    save_batch(tmp_path, 1, [t, FIRST])
    loaded, single = load_batch(tmp_path, 1)
    assert loaded.digests() == t.stamp.digests
    assert [b.token_ids.tolist() for b in loaded.branches] == [
        b.token_ids.tolist() for b in (FIRST, SECOND)
    ]
    assert single.branch_lengths == (7,)
    # The same tokens with another cut are another batch.
    moved = loaded.with_columns(branch=np.array([0] * 8 + [1] * 2, np.uint16))
    assert moved.digests() != t.stamp.digests


def test_an_update_recomputes_the_tokens_of_its_branch():
    interrupted = make_branch("8 3 9 10. 11. 12.", [3, 3, 4])
    assert interrupted.interruptions == (5,)
    assert Trajectory.of_branches([FIRST, interrupted]).interruptions == (5,)


def test_a_branch_that_begins_with_a_sampled_token_is_refused():
    with pytest.raises(ValueError, match="a branch begins with a sampled token, expected its"):
        FIRST.with_columns(branch=np.array([0, 0, 0, 1, 1, 1], np.uint16))


def test_a_response_has_one_reward_and_one_place_in_its_group():
    """The rewards of a group of two are 1.5 and 0, so A is 0.75 and -0.75 for each token of every branch."""
    batch = [joined(turn_rewards=(0.5, 0.0, 0.0)), FIRST]
    scored = with_rewards(batch, [Score(1.0), Score(0.0)], 2, AlgorithmConfig(), most_tokens=16)
    assert [(t.reward, t.advantage) for t in scored] == [(1.5, 0.75), (0.0, -0.75)]
    assert pack(scored).advantages[pack(scored).loss_mask].tolist() == [0.75] * 4 + [-0.75] * 3
    assert [b.advantage for b in scored[0].branches] == [0.75, 0.75]


def test_a_turn_answers_for_what_was_earned_after_it_in_time():
    """The branches have the turns 1, 3 | 2, which earned 0.5, 1 | 0.25. The response earned 2 at its end, of which
    truncation took 1."""
    t = joined(turn_rewards=(0.5, 1.0, 0.25), turn_times=(0, 2, 1), reward=2.75)
    assert returns_by_turn(t, 2.0, -1.0) == [2.75, 1.0 + 2 - 1, 0.25 + 1 + 2 - 1]
    in_order = replace(t, turn_times=())
    assert returns_by_turn(in_order, 2.0, -1.0) == [2.75, 1.0 + 0.25 + 2 - 1, 0.25 + 2 - 1]
