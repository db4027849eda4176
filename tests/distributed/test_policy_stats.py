"""policy_stats over tensor-parallel gloo ranks: the results equal those of one rank and of the dense
twin, and bad input is an error on every rank.
"""

import datetime
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.vocab_parallel import policy_stats
from megatron_dppo.vocab_parallel.policy_stats import dense_policy_stats
from tests.ranks import run_ranks

pytestmark = [pytest.mark.first, pytest.mark.distributed]

T, V, K = 23, 1001, 5


def problem(columns, dtype=torch.float32, vocabulary=V):
    """Return logits padded to ``columns``, ids, Top-K ids and the weights of the loss."""
    g = torch.Generator().manual_seed(11)
    logits = (torch.randn(T, columns, generator=g, dtype=torch.float64) * 3).to(dtype)
    ids = torch.randint(0, vocabulary, (T,), generator=g)
    # The ids of a row are distinct, except that any of them may equal the sampled id in column 0.
    topk = torch.rand(T, vocabulary - 4, generator=g).topk(K).indices + 2
    topk[:, 0] = ids
    topk[:4, 1] = torch.tensor([0, vocabulary - 1, 1, -1])
    weights = torch.randn(2, T, generator=g, dtype=torch.float64)
    weights[:, ::3] = 0
    return logits, ids, topk, weights


def join():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    return dist.group.WORLD, dist.get_rank(), dist.get_world_size()


def loss_at_ids(stats, weights, topk):
    id_weights = torch.randn(T, K, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values = torch.where(topk >= 0, stats.topk_log_probs, 0.0)
    other_terms = (stats.log_probs * weights[0]).sum() + (stats.entropy * weights[1]).sum()
    return other_terms + (values * id_weights).sum()


def statistics(cases):
    """Worker: return log-probabilities, Top-K, entropy and this rank's part of the gradient for each case."""
    group, rank, ranks = join()
    return [statistics_of(group, rank, ranks, *case) for case in cases]


def statistics_of(group, rank, ranks, dtype_name, backend, columns, vocabulary):
    logits, ids, topk, weights = problem(columns, getattr(torch, dtype_name), vocabulary)
    width = columns // ranks
    leaf = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    reduced_dtypes, plain = [], dist.all_reduce

    def counting_all_reduce(tensor, *args, **kwargs):
        reduced_dtypes.append(tensor.dtype)
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = counting_all_reduce
    stats = policy_stats(
        leaf, ids, group, vocab_size=vocabulary, temperature=0.9, topk_ids=topk, with_entropy=True,
        with_squares=True, backend=backend,
    )  # fmt: skip
    ((stats.log_probs * weights[0]).sum() + (stats.entropy * weights[1]).sum()).backward()
    dist.all_reduce = plain
    payloads = sum(dtype.is_floating_point for dtype in reduced_dtypes)
    through_ids = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    again = policy_stats(
        through_ids, ids, group, vocab_size=vocabulary, temperature=0.9, topk_ids=topk,
        with_entropy=True, backend=backend,
    )  # fmt: skip
    loss_at_ids(again, weights, topk).backward()
    return {"log_probs": stats.log_probs.detach(), "topk": stats.topk_log_probs.detach(),
            "through_ids": through_ids.grad,
            "squares": stats.sum_squares,
            "entropy": stats.entropy.detach(), "grad": leaf.grad, "payloads": payloads}  # fmt: skip


# ranks -> (dtype, backend, padded columns, vocabulary)
CASES = {
    2: [("float32", "cpp", 1008, V), ("bfloat16", "cpp", 1008, V), ("float64", "eager", 1008, V)],
    3: [
        # 3 x 384, as Megatron-Core pads: rank 2 holds 233 true columns.
        ("float32", "cpp", 1152, V),
        ("bfloat16", "cpp", 1152, V),
        ("float64", "eager", 1152, V),
        ("float32", "eager", 1536, V),  # 3 x 512: rank 1 holds 489, rank 2 none
    ],
    4: [
        ("float32", "eager", 1200, V),  # rank 3 holds 101 true columns
        ("float32", "cpp", 1600, V),  # rank 3 holds none
        ("bfloat16", "cpp", 1200, V),
        ("float64", "eager", 1200, V),
        ("float32", "eager", 512, 130),  # 4 x 128: ranks 2 and 3 hold none, rank 1 two
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_ranks_agree_with_the_dense_twin(ranks):
    """A rank whose shard is only padding neither fails nor leaves the other ranks waiting."""
    by_rank = run_ranks("tests.distributed.test_policy_stats:statistics", ranks, CASES[ranks])
    for case, *results in zip(CASES[ranks], *by_rank, strict=True):
        check(results, *case)


def check(results, dtype, backend, columns, vocabulary):
    """Assert that every rank's results equal the twin's and the other ranks'."""
    logits, ids, topk, weights = problem(columns, getattr(torch, dtype), vocabulary)
    leaf = logits.double().requires_grad_()
    twin = dense_policy_stats(
        leaf, ids, vocab_size=vocabulary, temperature=0.9, topk_ids=topk, with_entropy=True,
        with_squares=True,
    )  # fmt: skip
    ((twin.log_probs * weights[0]).sum() + (twin.entropy * weights[1]).sum()).backward()
    atol = 1e-12 if dtype == "float64" else 2e-6
    for r in results:
        assert r["payloads"] == 1
        for name, expected in (
            ("log_probs", twin.log_probs), ("topk", twin.topk_log_probs), ("entropy", twin.entropy),
            ("squares", twin.sum_squares),
        ):  # fmt: skip
            torch.testing.assert_close(r[name].double(), expected.detach(), rtol=0, atol=atol)
            assert torch.equal(r[name], results[0][name])  # bit for bit on every rank
    assert results[0]["topk"][3, 1] == -math.inf
    again = logits.detach().double().clone().requires_grad_()
    twin_through_ids = dense_policy_stats(
        again, ids, vocab_size=vocabulary, temperature=0.9, topk_ids=topk, with_entropy=True
    )
    loss_at_ids(twin_through_ids, weights, topk).backward()
    limit = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 2**-8}[dtype]
    for name, expected in (("grad", leaf.grad), ("through_ids", again.grad)):
        grad = torch.cat([r[name] for r in results], 1).double()
        assert (grad - expected).norm() / expected.norm() <= limit
        assert (grad[:, vocabulary:] == 0).all()


BAD = {
    "tokens": lambda a, rank: {**a, "logits": a["logits"][rank:], "target_ids": a["target_ids"][rank:]},
    "far apart": lambda a, rank: {**a, "logits": a["logits"].repeat(1 + 400 * rank, 1),
                                  "target_ids": a["target_ids"].repeat(1 + 400 * rank)},
    "columns": lambda a, rank: {**a, "logits": a["logits"][:, rank:].contiguous()},
    "topk": lambda a, rank: {**a, "topk_ids": torch.zeros(4, 1 + rank, dtype=torch.int64)},
    "entropy": lambda a, rank: {**a, "with_entropy": rank == 1},
    "squares": lambda a, rank: {**a, "with_squares": rank == 0},
    "ids": lambda a, rank: {**a, "target_ids": a["target_ids"] + rank},
    "outside on one rank": lambda a, rank: {**a, "target_ids": a["target_ids"] + 100 * rank},
    "wrong type on one rank": lambda a, rank: {**a, "target_ids": a["target_ids"].to([torch.int64, torch.int32][rank])},
    "nan on one rank": lambda a, rank: {**a, "logits": a["logits"] * [1.0, math.nan][rank]},
    "outside": lambda a, rank: {**a, "target_ids": a["target_ids"] + 100},
}  # fmt: skip
MESSAGES = {
    "tokens": "disagree on tokens: [4, 3]",
    "far apart": "disagree on tokens: [4, 1604]",
    "columns": "disagree on shard columns: [10, 9]",
    "topk": "disagree on Top-K ids: [1, 2]",
    "entropy": "disagree on entropy: [0, 1]",
    "squares": "disagree on sum of squares: [1, 0]",
    "ids": "disagree on checksum of ids",
    "outside on one rank": ("rank(s) [1] were given bad input", "4 target ids outside"),
    "wrong type on one rank": ("rank(s) [1] were given bad input", "expected torch.int64 (4,)"),
    "nan on one rank": "4 rows of logits that hold NaN",
    "outside": "4 target ids outside the vocabulary",
}


def bad_calls():
    """Worker: return the error of each bad call, and the result of a good call after all of them."""
    group, rank, _ = join()
    errors = {}
    for name, change in BAD.items():
        good: dict[str, Any] = {
            "logits": torch.zeros(4, 10),
            "target_ids": torch.tensor([0, 1, 2, 3]),
            "vocab_size": 18,
        }
        try:
            policy_stats(group=group, **change(good, rank))
            errors[name] = "no error"
        except ValueError as error:
            errors[name] = str(error)
    stats = policy_stats(good["logits"], good["target_ids"], group, vocab_size=18)
    return errors, stats.log_probs


def test_bad_input_is_a_clear_error_on_every_rank_and_the_group_survives():
    results = run_ranks("tests.distributed.test_policy_stats:bad_calls", 2, timeout=120)
    for rank, (errors, log_probs) in enumerate(results):
        for name, expected in MESSAGES.items():
            message = expected if isinstance(expected, str) else expected[rank]
            assert message in errors[name], (rank, name, errors[name])
        assert log_probs.tolist() == pytest.approx([-math.log(18)] * 4, rel=1e-6)
