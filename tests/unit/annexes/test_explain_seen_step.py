"""Rules that are evaluated again on the columns that the loss saved of a step."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.algorithms import divergence
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.decisions import decide
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.diagnostics.explain.seen_step import SeenStep, explain_seen
from megatron_dppo.loop.learning import LossRecord, by_response
from megatron_dppo.trainer.token_loss import inputs_from, make_token_loss
from megatron_dppo.vocab_parallel import policy_stats
from tests.unit.test_token_loss import K, V, bounded, packed, samples


class Texts:
    """Texts of token ids, for tests that read no text."""

    def __getitem__(self, token_id: int) -> str:
        return str(token_id)

    def joined(self, token_ids: list[int]) -> str:
        return str(token_ids)


def test_another_rule_of_topk_decides_about_a_saved_step_as_it_would_have_in_the_loss():
    trajectories = samples()
    record, seen = LossRecord(build_algorithm("dppo-topk-tv", {"topk": K})), []
    other = build_algorithm("dppo-topk-kl", {"topk": K, "kl_threshold": 0.5})
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(3)).requires_grad_()
    algorithm = build_algorithm("dppo-topk-tv", {"topk": K})
    loss = make_token_loss(algorithm, observers=[record.add, lambda b, i, _: seen.append((b, i))])
    for rows in ([0, 1, 3], [2, 4]):
        batch = bounded(packed(trajectories, rows, indices=rows))
        ids = batch.columns["topk_ids"].long()
        loss(
            policy_stats(table[batch.token_ids], batch.target_ids, vocab_size=V, topk_ids=ids),
            batch,
        )
    saved, expected = {}, {}
    for (batch, statistics), (_, of_loss) in zip(record._parts, seen, strict=True):
        saved |= by_response(batch, statistics)
        expected |= by_response(batch, {"trains": decide(other, of_loss).trains})
    settings = AlgorithmConfig(name="dppo-topk-tv", options={"topk": K})
    step = SeenStep.of([trajectories[i].with_columns(**saved[i]) for i in sorted(saved)], settings)
    trains = np.concatenate([expected[i]["trains"] for i in sorted(expected)])
    assert 0 < trains.sum() < len(trains)
    assert step.decisions(other).trains.tolist() == trains.tolist()
    with pytest.raises(
        ValueError, match=r"TopK\(mu\), K = 5, .* K = 4 \(rollout\.topk_log_probs\)"
    ):
        step.decisions(build_algorithm("dppo-topk-kl", {"topk": K + 1}))
    # No K is large enough for a rule of every id.
    for name, needed_weights in (
        ("dppo-exact-tv", "--policy"),
        ("recomputed-exact-tv", "--policy and --rollout-policy"),
    ):
        with pytest.raises(
            ValueError, match=f"every id.* give weights with {needed_weights}$"
        ) as caught:
            step.decisions(build_algorithm(name, {}))
        assert "K = " not in str(caught.value)
        assert "topk_log_probs" not in str(caught.value)
    # A rule of fewer ids sees the likeliest of those that were saved.
    fewer = build_algorithm("dppo-topk-kl", {"topk": 2, "kl_threshold": 0.5})
    trains_by_fewer: dict[int, dict] = {}
    for batch, _ in seen:
        log_mu, ids = batch.column("topk_log_probs"), batch.column("topk_ids")
        columns = log_mu.masked_fill(ids < 0, -torch.inf).topk(2).indices
        narrow = batch.with_columns(
            topk_ids=ids.gather(1, columns), topk_log_probs=log_mu.gather(1, columns)
        )
        stats = policy_stats(
            table[narrow.token_ids], narrow.target_ids, vocab_size=V,
            topk_ids=narrow.column("topk_ids").long(),
        )  # fmt: skip
        decisions = decide(fewer, inputs_from(stats, narrow))
        trains_by_fewer |= by_response(narrow, {"trains": decisions.trains})
    expected_by_fewer = np.concatenate(
        [trains_by_fewer[i]["trains"] for i in sorted(trains_by_fewer)]
    )
    wide = decide(fewer, step.inputs).trains.tolist()
    assert step.decisions(fewer).trains.tolist() == expected_by_fewer.tolist() != wide
    # The other rule's divergence is measured again. It is not the saved divergence of the run's rule.
    index = step.positions[0]
    texts: Any = Texts()
    by_run, by_other = (
        explain_seen(step, index, 1, rule, step.decisions(rule), texts)
        for rule in (algorithm, other)
    )
    first = step.counts[0]
    assert [t.topk_tv for t in by_run.tokens] == step.divergence[:first].tolist()
    topk = (step.inputs.topk_log_probs, step.inputs.rollout_topk_log_probs, step.inputs.topk_valid)
    assert [t.topk_kl for t in by_other.tokens] == divergence.topk_kl(*topk)[:first].tolist()
