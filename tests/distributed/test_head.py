"""The head without logits over tensor-parallel ranks: it equals the dense twin with one all-reduce, and bad input is an
error."""

import pytest
import torch

from megatron_dppo.diagnostics.gpu_check.held_memory import LiveTensors
from megatron_dppo.vocab_parallel.head import HeadFactor, HeadOptions, dense_head_stats, head_stats
from tests.distributed.test_policy_stats import join
from tests.ranks import run_ranks

pytestmark = [pytest.mark.first, pytest.mark.distributed]

T, H, V, K = 41, 12, 501, 3


def problem(columns, dtype):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, H, generator=g).to(dtype)
    weight = torch.randn(columns, H, generator=g).to(dtype)
    ids = torch.randint(0, V, (T,), generator=g)
    topk = torch.randint(-1, V, (T, K), generator=g)
    counted = torch.rand(T, generator=g) < 0.8
    weights = torch.randn(2, T, generator=g, dtype=torch.float64)
    weights[:, ::3] = 0
    return hidden, weight, ids, topk, counted, weights


class Collectives(LiveTensors):
    """Records the dtypes of tensors that are reduced over ranks."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allreduce" in func.name():
            self.dtypes.append(args[0][0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


def results_worker(columns, dtype_name, chunk_tokens):
    """Worker: return this rank's statistics, gradients and number of all-reduces of floats."""
    group, rank, ranks = join()
    hidden, weight, ids, topk, counted, weights = problem(columns, getattr(torch, dtype_name))
    width = columns // ranks
    hidden.requires_grad_()
    shard = weight[rank * width : (rank + 1) * width].clone().requires_grad_()
    collectives = Collectives()
    with collectives:
        stats = head_stats(
            [HeadFactor(hidden, shard)], ids, group, vocab_size=V, temperature=0.9, topk_ids=topk,
            with_entropy=True, counted=counted, options=HeadOptions(chunk_tokens),
        )  # fmt: skip
        ((stats.log_probs * weights[0]).sum() + (stats.entropy * weights[1]).sum()).backward()
    return {
        "log_probs": stats.log_probs.detach(), "topk": stats.topk_log_probs.detach(),
        "entropy": stats.entropy.detach(), "hidden": hidden.grad, "weight": shard.grad,
        "reductions": sum(dtype.is_floating_point for dtype in collectives.dtypes),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "columns", "dtype", "chunk_tokens"),
    [
        (2, 502, "float32", 1),
        (3, 504, "float64", 7),
        (4, 504, "float32", 7),
        (4, 504, "bfloat16", 16),
    ],
)
def test_ranks_compute_what_the_dense_twin_does(ranks, columns, dtype, chunk_tokens):
    found = run_ranks(
        "tests.distributed.test_head:results_worker", ranks, columns, dtype, chunk_tokens
    )
    hidden, weight, ids, topk, counted, weights = problem(columns, getattr(torch, dtype))
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    twin = dense_head_stats(
        [HeadFactor(hidden, weight)], ids, vocab_size=V, temperature=0.9, topk_ids=topk,
        with_entropy=True, counted=counted,
    )  # fmt: skip
    ((twin.log_probs * weights[0]).sum() + (twin.entropy * weights[1]).sum()).backward()
    limit = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 2e-2}[dtype]
    expected = {
        "log_probs": twin.log_probs,
        "topk": twin.topk_log_probs.detach(),
        "entropy": twin.entropy,
        "hidden": hidden.grad,
        "weight": weight.grad,
    }
    # The caller sums the gradients of hidden states over ranks. Each rank has the weight gradient of its shard.
    whole = {
        "hidden": sum(r["hidden"].double() for r in found),
        "weight": torch.cat([r["weight"] for r in found]),
    }
    for name, value in expected.items():
        got = whole.get(name, found[0][name])
        assert distance(got, value.detach()) <= limit, name
    for result in found:
        assert result["reductions"] == 1
        for name in ("log_probs", "topk", "entropy"):
            assert torch.equal(result[name], found[0][name])


def distance(value, expected):
    value, expected = (x.double().nan_to_num(neginf=0) for x in (value, expected))
    return float((value - expected).norm() / expected.norm())


def disagreement_worker():
    """Worker: ranks count different tokens, then no tokens. Return the error, and the result without tokens."""
    group, rank, ranks = join()
    hidden, weight, ids, *_ = problem(504, torch.float32)
    shard = weight[: 504 // ranks]
    counted = torch.arange(T) < T - rank
    try:
        head_stats([HeadFactor(hidden, shard)], ids, group, vocab_size=V, counted=counted)
        error = "none"
    except ValueError as found:
        error = str(found)
    nothing = torch.zeros(T, dtype=torch.bool)
    empty = head_stats([HeadFactor(hidden, shard)], ids, group, vocab_size=V, counted=nothing)
    return {"error": error, "empty": empty.log_probs}


def test_ranks_that_count_other_tokens_are_told():
    for result in run_ranks("tests.distributed.test_head:disagreement_worker", 2):
        assert "tokens: [41, 40]" in result["error"]
        assert result["empty"].tolist() == [0.0] * T
