"""From packed micro-batches to summed losses: alignment, Top-K columns, and independence of packing."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.table import PRESETS
from megatron_dppo.data.packing import pack
from megatron_dppo.data.trajectory import Trajectory, forms_of
from megatron_dppo.trainer.token_loss import branch_ids, inputs_from, make_token_loss, sequence_ids
from megatron_dppo.vocab_parallel import policy_stats
from tests.messages import mentioning
from tests.trajectories import trajectory

V, K = 17, 4


def samples(count=5, seed=0):
    g = np.random.default_rng(seed)
    trajectories = []
    for _ in range(count):
        prompt, response = g.integers(1, 4), g.integers(2, 7)
        logs = np.log(g.dirichlet(np.ones(V), response)).astype(np.float32)
        ids = g.integers(0, V, response)
        order = np.argsort(-logs, 1)[:, :K].astype(np.int32)
        sampled = logs[np.arange(response), ids]
        trajectories.append(
            trajectory(
                g.integers(0, V, prompt).tolist(),
                ids.tolist(),
                advantage=float(g.normal()),
                rollout_log_probs=sampled,
                recomputed_log_probs=sampled + np.float32(0.01),
                topk_ids=order,
                topk_log_probs=np.take_along_axis(logs, order, 1),
            )
        )
    return trajectories


def packed(trajectories, rows, **options):
    """Return the pack of the trajectories at ``rows``. The trajectory at index 3 is not trained."""
    forms = forms_of(trajectories)
    return pack(
        [trajectories[i] for i in rows], trains=[i != 3 for i in rows], forms=forms, **options
    )


def bounded(batch):
    """Return the batch with a step bound, which some rules compute from all tokens of the step."""
    return batch.with_columns(step_bound=torch.full((batch.num_tokens,), 0.3))


def model(table, batch):
    """Return logits that depend only on the current token, so that they do not depend on the pack."""
    return table[batch.token_ids].contiguous()


def run(name, packs, **options):
    """Return the gradient of the summed loss with respect to the table of logits, and the merged metrics."""
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(3)).requires_grad_()
    algorithm = build_algorithm(name, options)
    token_loss, total, metrics = make_token_loss(algorithm), torch.zeros(()), None
    for unbounded in packs:
        batch = bounded(unbounded)
        stats = policy_stats(
            model(table, batch), batch.target_ids, vocab_size=V, with_entropy=True,
            topk_ids=batch.columns["topk_ids"].long() if algorithm.topk else None,
            with_squares=algorithm.needs_sum_squares,
        )  # fmt: skip
        sums = token_loss(stats, batch)
        total = total + sums.loss
        metrics = sums.metrics if metrics is None else metrics + sums.metrics
    total.backward()
    return table.grad, metrics.values()


@pytest.mark.parametrize("name", [n for n in PRESETS if "exact" not in n])
def test_loss_and_metrics_do_not_depend_on_packing(name):
    trajectories = samples()
    options = {"topk": K} if build_algorithm(name).topk else {}
    grad, metrics = run(name, [packed(trajectories, range(5))], **options)
    packings = [
        [packed(trajectories, range(5)[::-1], pad_multiple=16)],
        [packed(trajectories, [i], pad_multiple=8) for i in range(5)],
        [
            packed(trajectories, [0, 1]),
            packed(trajectories, [2, 3, 4]),
            packed(trajectories, [], pad_multiple=4),
        ],
    ]
    for packs in packings:
        other_grad, other_metrics = run(name, packs, **options)
        torch.testing.assert_close(other_grad, grad, rtol=1e-5, atol=1e-6)
        assert other_metrics == pytest.approx(metrics, rel=1e-5)
    trained = sum(t.sampled for i, t in enumerate(trajectories) if i != 3)
    assert metrics["policy/tokens"] == trained


def test_each_entry_meets_its_own_token():
    sample = trajectory(
        [1, 2], [3, 4], advantage=0.5,
        rollout_log_probs=[-1.0, -2.0], recomputed_log_probs=[-1.5, -2.5],
        topk_ids=np.array([[3, 0], [7, -1]], np.int32),  # 0 is a token as any other
        topk_log_probs=np.array([[-1.0, -3.0], [-0.5, -np.inf]], np.float32),
    )  # fmt: skip
    batch = pack([sample], pad_multiple=8)
    ids = batch.columns["topk_ids"].long()
    stats = policy_stats(torch.zeros(8, V), batch.target_ids, vocab_size=V, topk_ids=ids)
    x = inputs_from(stats, batch)
    assert x.loss_mask.tolist() == [False, True, True] + [False] * 5
    assert x.rollout_log_probs[1:3].tolist() == [-1.0, -2.0]
    assert x.recomputed_log_probs[1:3].tolist() == [-1.5, -2.5]
    assert x.log_probs[1].item() == pytest.approx(-math.log(V))
    # Token 3 is in its TopK(mu); token 4 is not, and there the engine gave one id only.
    assert x.topk_valid[1:3].tolist() == [[True, True, False], [True, False, True]]
    assert x.rollout_topk_log_probs[1:3].tolist() == [[-1.0, -3.0, -1.0], [-0.5, 0.0, -2.0]]
    assert not x.topk_log_probs.requires_grad
    assert not x.topk_valid[[0, *range(3, 8)], :2].any()  # no token was sampled there
    assert (x.rollout_topk_log_probs[[0, *range(3, 8)]] == 0).all()


@pytest.mark.parametrize("missing", ["rollout_log_probs", "topk_ids", "topk_log_probs"])
def test_a_batch_without_what_the_statistics_meet_is_refused(missing):
    batch = pack(samples(2))
    ids = batch.columns["topk_ids"].long()
    logits = torch.zeros(batch.num_tokens, V)
    stats = policy_stats(logits, batch.target_ids, vocab_size=V, topk_ids=ids)
    with pytest.raises(ValueError, match=mentioning(missing)):
        inputs_from(stats, batch.without(missing))


def penalty_gradient(name, aggregation, *, weighted=False, **options):
    """Return what a reference penalty adds to each token's gradient [T], the sums with the penalty, and the pack."""
    batch = packed(samples(), range(3))
    reference = batch.columns["rollout_log_probs"] - 0.5
    batch = batch.with_columns(reference_log_probs=reference)
    grads = []
    for coefficient in (0.0, 0.1):
        table = torch.randn(V, V, generator=torch.Generator().manual_seed(3))
        stats = policy_stats(model(table, batch), batch.target_ids, vocab_size=V)
        stats = replace(stats, log_probs=stats.log_probs.requires_grad_())
        algorithm = build_algorithm(name, options)
        penalty: dict[str, Any] = {"weighted_reference": True} if weighted else {}
        token_loss = make_token_loss(algorithm, aggregation, reference_kl=coefficient, **penalty)
        sums = token_loss(stats, batch)
        grads.append(torch.autograd.grad(sums.loss, stats.log_probs)[0])
    return grads[1] - grads[0], sums, batch


def test_a_reference_penalty_has_the_aggregation_s_factor_of_each_token():
    plain, _, batch = penalty_gradient("pg-is", "sequence-mean-token-sum")
    scaled, _, _ = penalty_gradient("pg-is", "sequence-mean-token-mean")
    assert (plain[batch.loss_mask] != 0).all()
    sequence = sequence_ids(batch, branch_ids(batch))
    trained_counts = torch.bincount(sequence, batch.loss_mask.float())[sequence].clamp(min=1)
    assert len(set(trained_counts.tolist())) > 2
    torch.testing.assert_close(scaled, plain / trained_counts, rtol=1e-5, atol=1e-7)


def test_a_weighted_reference_penalty_counts_tokens_by_pi_over_mu_up_to_the_cap():
    plain, _, batch = penalty_gradient("dppo-binary-tv", "sequence-mean-token-sum")
    weighted, _, _ = penalty_gradient(
        "dppo-binary-tv", "sequence-mean-token-sum", weighted=True, ratio_cap=3.0
    )
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(3))
    stats = policy_stats(model(table, batch), batch.target_ids, vocab_size=V)
    ratio = (stats.log_probs - batch.columns["rollout_log_probs"]).exp()[batch.loss_mask]
    cap = 3.0
    assert (ratio > cap).any()
    assert (ratio < cap).any()
    expected = plain[batch.loss_mask] * ratio.clamp(max=cap)
    torch.testing.assert_close(weighted[batch.loss_mask], expected, rtol=1e-4, atol=1e-6)


def test_a_reference_penalty_holds_for_tokens_that_the_mask_blocks():
    everywhere, _, _ = penalty_gradient("pg-is", "sequence-mean-token-sum")
    masked, sums, _ = penalty_gradient("dppo-binary-tv", "sequence-mean-token-sum", tv_threshold=0)
    assert sums.blocked.any()
    torch.testing.assert_close(masked, everywhere, rtol=1e-5, atol=1e-7)


def test_sequence_ids_follow_the_boundaries_of_the_pack():
    batch = pack(samples(3), pad_multiple=32)
    ids = sequence_ids(batch, branch_ids(batch))
    lengths = batch.cu_seqlens.diff().tolist()
    assert ids.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]


def test_sequence_ids_are_found_where_the_pack_is():
    meta = pack(samples(3)).to("meta")
    assert sequence_ids(meta, branch_ids(meta)).device.type == "meta"


def test_top_k_that_the_statistics_lack_is_left_out_and_a_mask_that_needs_it_says_so():
    batch = pack(samples(2))
    stats = policy_stats(torch.zeros(batch.num_tokens, V), batch.target_ids, vocab_size=V)
    assert inputs_from(stats, batch).topk_log_probs is None
    with pytest.raises(ValueError, match="needs Top-K"):
        make_token_loss(build_algorithm("dppo-topk-tv"))(stats, batch)


def test_exact_divergence_is_topk_over_the_whole_vocabulary():
    """K = V: the mask of dppo-exact-tv sees the divergence of the full distributions."""
    from megatron_dppo.algorithms.divergence import exact_tv, topk_tv

    g = torch.Generator().manual_seed(0)
    logits, rollout = (torch.randn(6, V, generator=g, dtype=torch.float64) for _ in range(2))
    mu = rollout.log_softmax(-1)
    ids = torch.arange(V).expand(6, -1).contiguous()
    targets = torch.arange(6)
    stats = policy_stats(logits, targets, vocab_size=V, topk_ids=ids)
    valid = torch.ones(6, V + 1, dtype=torch.bool)
    valid[:, -1] = False
    pi = torch.cat([stats.topk_log_probs, stats.log_probs[:, None]], 1)
    rollout_topk = torch.cat([mu, mu[range(6), targets][:, None]], 1)
    torch.testing.assert_close(topk_tv(pi, rollout_topk, valid), exact_tv(logits, rollout))


def test_each_turn_weighs_by_its_own_advantage():
    """The loss is the sum, written out here by token, of -A pi / mu with the A of the token's turn, however packed."""
    rng = np.random.default_rng(3)
    table = torch.from_numpy(rng.normal(size=(V, V))).float()
    values = ([0.25, -1.5, 2.0], [-0.75])
    batch = []
    for turn_lengths, turn_advantages in zip(([2, 1, 3], [4]), values, strict=True):
        mask = np.concatenate([np.arange(n + 2) > 1 for n in turn_lengths])
        t = Trajectory(0, 0, rng.integers(0, V, len(mask)), mask, advantage=9.0)
        mu = np.log(rng.uniform(0.01, 0.5, t.sampled)).astype(np.float32)
        batch.append(t.with_columns(rollout_log_probs=mu, advantages=t.by_token(turn_advantages)))
    expected = 0.0
    for t, turn_lengths, turn_advantages in zip(batch, ([2, 1, 3], [4]), values, strict=True):
        row, start = 0, 0
        for n, advantage in zip(turn_lengths, turn_advantages, strict=True):
            for i in range(start + 2, start + 2 + n):
                log_pi = table[t.token_ids[i - 1]].log_softmax(-1)[t.token_ids[i]]
                expected -= advantage * math.exp(log_pi - t.column("rollout_log_probs")[row])
                row += 1
            start += n + 2
    token_loss = make_token_loss(build_algorithm("pg-is"))
    forms: tuple[dict[str, Any], ...] = ({}, {"sequence_multiple": 4, "pad_multiple": 8})
    for options in forms:
        packs = pack(batch, **options)
        assert packs.advantages[~packs.loss_mask].eq(0).all()
        stats = policy_stats(model(table, packs), packs.target_ids, vocab_size=V)
        assert float(token_loss(stats, packs).loss) == pytest.approx(expected, rel=1e-5)
