"""The memory of statistics from hidden states, measured by gpu_check's count of live tensors."""

import pytest
import torch

from megatron_dppo.diagnostics.gpu_check.held_memory import LiveTensors
from megatron_dppo.vocab_parallel.head import HeadFactor, HeadOptions, head_stats
from tests.unit.test_head import COLUMNS, K, T, V, leaves, loss_of, problem


def test_nothing_that_is_kept_for_the_backward_pass_outlives_it():
    """Statistics that are still referenced hold neither the last chunk's logits nor what autograd saved."""
    pairs, ids, topk, *_, weights = problem()
    ((hidden, weight),) = leaves(pairs)
    with LiveTensors() as live:
        stats = head_stats(
            [HeadFactor(hidden, weight)], ids, vocab_size=V, topk_ids=topk, with_entropy=True,
            options=HeadOptions(9),
        )  # fmt: skip
        before = live._bytes
        loss_of(stats, weights).backward()
        kept = live._bytes
    results = (stats.log_probs, stats.topk_log_probs, stats.entropy, stats.fault_counts)
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    of_results = sum(x.untyped_storage().nbytes() for x in results)
    assert before > of_results + 9 * COLUMNS * 4  # the buffer of logits
    of_ids = 2 * T * (1 + K) * 8  # ids, and their columns
    assert kept - gradients <= of_results + of_ids + 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [64, 640])
def test_memory_beyond_hidden_states_and_weight_is_less_than_two_chunks_of_logits(dtype, tokens):
    """Chunks of 64 tokens, 100,000 columns; the weight's gradient lies in the main gradient."""
    columns, width, chunk = 100_000, 8, 64
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(columns, width).to(dtype).requires_grad_()
    main = torch.zeros(columns, width)
    ids = torch.arange(tokens)
    with LiveTensors() as live:
        stats = head_stats(
            [HeadFactor(hidden, weight, main)], ids, vocab_size=columns, options=HeadOptions(chunk)
        )
        stats.log_probs.sum().backward()
    logits = chunk * columns * dtype.itemsize
    assert logits <= live.peak <= 2 * logits
