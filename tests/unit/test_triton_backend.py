"""The Triton kernels in Triton's interpreter, compared with the dense backend.

Triton reads TRITON_INTERPRET when it is imported, so the kernels run in a process of their own. If this process was
started with the variable, as by ``make mutants``, they run in this process.
"""

import math
import os
from typing import Any

import pytest
import torch

from megatron_dppo.vocab_parallel import policy_stats
from megatron_dppo.vocab_parallel.backends import BACKENDS
from megatron_dppo.vocab_parallel.policy_stats import dense_policy_stats
from tests.ranks import run_ranks

pytestmark = pytest.mark.second

T, COLUMNS, V = 6, 9000, 8990
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def problem(dtype):
    g = torch.Generator().manual_seed(2)
    logits = (torch.randn(T, COLUMNS, generator=g, dtype=torch.float64) * 3).to(dtype)
    logits[0, :5000] = -math.inf  # a first block with nothing in it
    ids = torch.tensor([6000, 0, 8989, 4096, 4095, 17])
    topk = torch.randint(0, V, (T, 4), generator=g)
    weights = torch.randn(2, T, generator=g, dtype=torch.float64)
    weights[:, 2] = 0
    return logits, ids, topk, weights


def interpreted_stats(dtype_name, with_entropy):
    """Return statistics and gradient of the Triton backend on CPU tensors. Runs in the interpreter's process."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    logits, ids, topk, weights = problem(getattr(torch, dtype_name))
    leaf = logits.requires_grad_()
    stats = policy_stats(
        leaf, ids, vocab_size=V, temperature=0.8, topk_ids=topk, with_entropy=with_entropy,
        with_squares=dtype_name == "float32", backend="triton",
    )  # fmt: skip
    loss = (stats.log_probs * weights[0]).sum()
    entropy = None
    if with_entropy:
        loss = loss + (stats.entropy * weights[1]).sum()
        entropy = stats.entropy.detach()
    loss.backward()
    nan_logits = problem(torch.float32)[0]
    nan_logits[1, 7000] = math.nan
    error_text = ""
    try:
        policy_stats(nan_logits, ids, vocab_size=V, backend="triton")
    except ValueError as error:
        error_text = str(error)
    sums = entropy, stats.sum_squares
    log_probs, edge_gradient = stats.log_probs.detach(), gradient_at_edges()
    return log_probs, stats.topk_log_probs, sums, leaf.grad, error_text, edge_gradient


def edges(dtype):
    """Return logits near 1e4, with one column more than a block has, and the sampled ids."""
    g = torch.Generator().manual_seed(3)
    return (torch.randn(2, 4097, generator=g) * 3 + 1e4).to(dtype), torch.tensor([4096, 0])


def gradient_at_edges():
    """Return the Triton backend's gradient at ``edges``. Checks inputs without rows and degenerate rows, too."""
    logits, ids = edges(torch.float32)
    leaf, nothing = logits.requires_grad_(), torch.zeros(0, 5, requires_grad=True)
    options: dict[str, Any] = {"backend": "triton", "temperature": 0.5}
    policy_stats(leaf, ids, vocab_size=4097, **options).log_probs.sum().backward()
    policy_stats(nothing, ids[:0], vocab_size=5, **options).log_probs.sum().backward()
    assert nothing.grad.shape == (0, 5)
    # The rows have no probability mass; p = (1/2, 1/2); and a second token too rare to change the sum. In the second
    # round, both columns are padding.
    rows = torch.tensor([[-math.inf, -math.inf], [0.0, 0.0], [0.0, -50.0]])
    for real, expected in ((2, [0, -math.log(2), -50 * math.exp(-50)]), (0, [0, 0, 0])):
        lse, plogp, squares, _ = BACKENDS["triton"].forward(
            rows, real, 1.0, torch.full((3, 1), -1), True, True
        )
        assert squares.tolist() == pytest.approx([0, 0.5, 1] if real else [0] * 3)
        assert lse[0] == -math.inf
        torch.testing.assert_close(
            plogp, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0
        )
    return leaf.grad


def run_worker(monkeypatch, worker, *arguments):
    """Run ``worker`` of this file in Triton's interpreter and return its result."""
    if IS_INTERPRETED:
        return worker(*arguments)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (result,) = run_ranks(
        f"tests.unit.test_triton_backend:{worker.__name__}", 1, *arguments, own_interpreter=True
    )
    return result


@pytest.mark.parametrize(
    ("dtype", "with_entropy"), [("float32", True), ("float32", False), ("bfloat16", True)]
)
def test_interpreted_kernels_agree_with_the_dense_twin(monkeypatch, dtype, with_entropy):
    log_probs, topk_log_probs, (entropy, squares), grad, error_text, edge_gradient = run_worker(
        monkeypatch, interpreted_stats, dtype, with_entropy
    )
    logits, ids, topk, weights = problem(getattr(torch, dtype))
    leaf = logits.double().requires_grad_()
    dense = dense_policy_stats(
        leaf, ids, vocab_size=V, temperature=0.8, topk_ids=topk, with_entropy=with_entropy,
        with_squares=True,
    )  # fmt: skip
    loss = (dense.log_probs * weights[0]).sum()
    torch.testing.assert_close(log_probs.double(), dense.log_probs.detach(), rtol=0, atol=2e-6)
    torch.testing.assert_close(topk_log_probs.double(), dense.topk_log_probs, rtol=0, atol=2e-6)
    assert (squares is None) == (dtype == "bfloat16")
    if squares is not None:
        torch.testing.assert_close(squares.double(), dense.sum_squares, rtol=2e-6, atol=0)
    if with_entropy:
        torch.testing.assert_close(entropy.double(), dense.entropy.detach(), rtol=0, atol=2e-6)
        loss = loss + (dense.entropy * weights[1]).sum()
    loss.backward()
    limit = 1e-6 if dtype == "float32" else 2**-8
    assert (grad.double() - leaf.grad).norm() / leaf.grad.norm() <= limit
    assert (grad[:, V:] == 0).all()
    assert (grad[2] == 0).all()
    assert "1 rows of logits that hold NaN" in error_text
    leaf, ids = edges(torch.float64)
    leaf.requires_grad_()
    dense = dense_policy_stats(leaf, ids, vocab_size=4097, temperature=0.5)
    dense.log_probs.sum().backward()
    torch.testing.assert_close(edge_gradient.double(), leaf.grad, rtol=0, atol=2e-6)


def test_without_a_gpu_or_the_interpreter_it_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = BACKENDS["triton"].unsupported_reason(torch.zeros(1, 4))
    assert "TRITON_INTERPRET=1 is not set" in reason
    assert "not torch.float64" in BACKENDS["triton"].unsupported_reason(
        torch.zeros(1, 4, dtype=torch.float64)
    )
