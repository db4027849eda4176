"""Packed attention against one sequence at a time, and the plan that buckets sequences."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import megatron_dppo.trainer  # noqa: F401  (adapts megatron before it is imported)
from megatron_dppo.cpu.torch_layers import packed_causal_attention
from megatron_dppo.trainer.context_parallel import own_rows
from megatron_dppo.trainer.padded_batches import padding_plan


def attend_one_by_one(q, k, v, bounds, scale):
    """softmax(q k^T * scale) v with an explicit mask, sequence by sequence."""
    repeat = q.shape[1] // k.shape[1]
    out = []
    for start, end in pairwise(bounds):
        mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        keys = k[start:end].repeat_interleave(repeat, 1)
        scores = torch.einsum("ihd,jhd->hij", q[start:end], keys) * scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        values = v[start:end].repeat_interleave(repeat, 1)
        out.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.cat(out)


@pytest.mark.parametrize(
    "lengths", [[1], [5, 5, 5], [3, 40, 1, 130, 66, 65, 7, 33], [64, 32, 16, 8, 4, 2, 1], [2, 0, 3]]
)
def test_values_and_gradients_equal_one_sequence_at_a_time(lengths: list[int]) -> None:
    torch.manual_seed(0)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    q, k, v = inputs = [
        torch.randn(bounds[-1], heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    upstream = torch.randn(bounds[-1], 4, 8, dtype=torch.float64)
    plan = padding_plan(torch.tensor(bounds, dtype=torch.int32))
    packed_output = packed_causal_attention(q, k, v, plan, scale=0.3)
    expected_output = attend_one_by_one(q, k, v, bounds, 0.3)
    assert torch.allclose(packed_output, expected_output, atol=1e-12, rtol=0)
    actual = torch.autograd.grad(packed_output, inputs, upstream)
    expected = torch.autograd.grad(expected_output, inputs, upstream)
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=0)


def test_first_token_attends_to_itself_alone() -> None:
    v = torch.randn(4, 1, 8)
    q, k = torch.randn(4, 2, 8), torch.randn(4, 1, 8)
    plan = padding_plan(torch.tensor([0, 1, 4], dtype=torch.int32))
    out = packed_causal_attention(q, k, v, plan, None)
    for start in (0, 1):
        assert torch.allclose(out[start], v[start].expand(2, 8))


def test_buckets_hold_like_lengths() -> None:
    plan = padding_plan(torch.tensor([0, 100, 149, 199, 231, 232, 240], dtype=torch.int32))
    # 49 is under half of 100, 8 under half of 49; 1 is under half of 8, but both are short.
    assert [(b.sequences, b.longest) for b in plan.batches] == [(2, 100), (2, 49), (2, 8)]
    assert sorted(plan.row_of_token.tolist()) == sorted(set(plan.row_of_token.tolist()))


def test_plan_lives_as_long_as_its_tensor() -> None:
    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
    assert padding_plan(cu_seqlens) is padding_plan(cu_seqlens)
    assert padding_plan(cu_seqlens.clone()) is not padding_plan(cu_seqlens)


@pytest.mark.parametrize(("lengths", "ranks"), [([3, 1, 5], 1), ([8, 4, 12], 2)])
def test_rotary_of_packed_sequences_restarts_in_each(lengths: list[int], ranks: int) -> None:
    from megatron_dppo.cpu.megatron_shim import _rotary_thd

    torch.manual_seed(0)
    t = torch.randn(sum(lengths), 2, 8)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    angles = torch.outer(torch.arange(12.0), 10.0 ** -torch.arange(4.0)).repeat(1, 2)
    expected = []
    for part in t.split(lengths):
        a = angles[: len(part), None]
        half = torch.cat([-part[..., 4:], part[..., :4]], -1)
        expected.append(part * a.cos() + half * a.sin())
    for rank in range(ranks):
        rows = own_rows(cu_seqlens, len(t), ranks, rank)
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        actual = _rotary_thd(t[rows], cu_seqlens, angles[:, None, None], cp_group=group)
        assert torch.allclose(actual, torch.cat(expected)[rows], atol=1e-6)


def test_gradient_of_padding_is_exactly_zero() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 1, 4, requires_grad=True)
    plan = padding_plan(torch.tensor([0, 5, 7], dtype=torch.int32))
    out = packed_causal_attention(x, x, x, plan, None)
    out[:5].sum().backward()  # the second sequence is padded to the first's length
    assert torch.equal(x.grad[5:], torch.zeros(2, 1, 4))
    direct = x.detach()[:5].transpose(0, 1)[None].requires_grad_()
    F.scaled_dot_product_attention(direct, direct, direct, is_causal=True).sum().backward()
    assert torch.allclose(x.grad[:5], direct.grad[0].transpose(0, 1), atol=1e-6)
