"""What ranks exchange in a step: statistics of a sequence whose tokens they share, and bounds of a whole step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

ROWS, V, K = 8, 11, 2


def gathered_statistics() -> dict[str, Any]:
    """Compute ``whole_stats`` on each of two ranks, which have half of one sequence each. Rank 1 has a NaN row, and
    rank 0 an id outside the vocabulary."""
    from dataclasses import replace

    from megatron_dppo.data.packing import pack
    from megatron_dppo.trainer.context_parallel import own_batch, whole_stats
    from megatron_dppo.vocab_parallel import policy_stats
    from tests.trajectories import trajectory

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    topology: Any = SimpleNamespace(cp_size=size, cp_rank=rank, context_group=group)
    batch = pack(
        [trajectory([1], range(2, ROWS + 1))], pad_multiple=2 * size, sequence_multiple=2 * size
    )
    share = own_batch(batch, topology)
    g = torch.Generator().manual_seed(rank)
    logits = torch.randn(share.num_tokens, V, generator=g)
    targets = torch.full((share.num_tokens,), 3)
    if rank == 1:
        logits[0] = torch.nan
    else:
        targets[1] = V
    leaf = logits.requires_grad_()
    topk = torch.tensor([[0, 1]]).expand(share.num_tokens, K)
    stats = policy_stats(
        leaf, targets, vocab_size=V, topk_ids=topk, with_entropy=True, with_squares=True,
        raise_on_faults=False,
    )  # fmt: skip
    out: dict[str, Any] = {"own faults": stats.fault_counts, "has gradient": {}}
    for needs_gradient in (True, False):
        topk_log_probs = stats.topk_log_probs if needs_gradient else stats.topk_log_probs.detach()
        whole = whole_stats(replace(stats, topk_log_probs=topk_log_probs), batch, topology)
        out["faults"] = whole.fault_counts
        out["has gradient"][str(needs_gradient)] = [
            getattr(whole, name).requires_grad
            for name in ("log_probs", "entropy", "topk_log_probs", "sum_squares")
        ]
    dist.destroy_process_group()
    return out


@pytest.mark.distributed
def test_faults_of_all_ranks_are_known_on_each_and_gradients_flow_where_they_should() -> None:
    target = "tests.distributed.test_context_parallel:gathered_statistics"
    reports = run_ranks(target, 2)
    own = [report["own faults"] for report in reports]
    assert not torch.equal(own[0], own[1])
    for report in reports:
        assert torch.equal(report["faults"], own[0] + own[1])
        # log pi at TopK(mu) has a gradient only if the loss needs it, and the sum of squares never has one.
        assert report["has gradient"] == {
            "True": [True, True, True, False],
            "False": [True, True, False, False],
        }


def bounds_of_two_replicas(hf_dir: str) -> dict[str, Any]:
    """Return the step bound of each rule on each of two replicas. log r is .1 on one replica and 1 on the other."""
    from megatron_dppo.algorithms.algorithm import build_algorithm
    from megatron_dppo.loop.learning import MiniBatch, with_step_bound
    from megatron_dppo.trainer.step import StatsSpec
    from megatron_dppo.trainer.trainer import Trainer
    from tests.distributed.test_trainer_parity import own_micro_batches, run_config, samples

    trainer = Trainer.read(run_config(hf_dir, {"world_size": 2}, {}), StatsSpec(False, True))
    try:
        gap = 0.1 if trainer.topology.dp_rank == 0 else 1.0
        batches = []
        given = own_micro_batches(trainer, samples())
        for batch, log_probs in zip(given, trainer.log_probs(given), strict=True):
            column = torch.where(batch.loss_mask, log_probs.cpu() - gap, 0.0)
            batches.append(batch.with_columns(rollout_log_probs=column))
        out: dict[str, Any] = {
            "tokens": sum(int(b.loss_mask.sum()) for b in batches),
            "outward": sum(int((b.loss_mask & (b.advantages > 0)).sum()) for b in batches),
        }
        for name, second_moment in (("m2po", 0.2), ("m2po-areal", 0.0101)):
            algorithm = build_algorithm(name, {"second_moment": second_moment})
            mini = with_step_bound(MiniBatch(batches, 1.0), trainer, algorithm.step_bound)
            out[name] = sorted(
                {float(x) for b in mini.micro_batches for x in b.column("step_bound")}
            )
        return out
    finally:
        trainer.close()


@pytest.mark.distributed
def test_a_step_bound_is_that_of_all_replicas(tmp_path) -> None:
    from tests.distributed.test_trainer_parity import FAMILIES, VOCABULARY
    from tests.tiny_models import save_tiny_model

    folder = tmp_path / "model"
    save_tiny_model(folder, vocab_size=VOCABULARY, **{"family": "qwen2", **FAMILIES["qwen2"]})
    target = "tests.distributed.test_context_parallel:bounds_of_two_replicas"
    reports = run_ranks(target, 2, str(folder))
    near, far = (report["outward"] for report in reports)
    # The level c at which (.01 near + c far) / (near + far) = .2.
    level = (0.2 * (near + far) - 0.01 * near) / far
    assert 0.01 < level < 1
    for report in reports:
        assert report["m2po"] == [pytest.approx(level, rel=1e-3)]
        # AReaL's rule drops all tokens of the far replica: its bound is halfway between .01 and 1.
        assert report["m2po-areal"] == [pytest.approx(0.505, rel=1e-3)]
