"""``head_stats`` against its dense twin, and which tokens it reads, which logits it computes twice, and how it sums."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dppo.vocab_parallel.head import HeadFactor, HeadOptions, dense_head_stats, head_stats
from tests.messages import mentioning

T, H, COLUMNS, V, K = 37, 16, 120, 113, 4
LIMITS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-2}


def problem(dtype=torch.float32, widths=(H,), tokens=T):
    """Return (hidden states, weight) of each factor, target ids, Top-K ids, which tokens count, and loss weights."""
    g = torch.Generator().manual_seed(5)
    pairs = [
        (
            torch.randn(tokens, h, generator=g).to(dtype),
            torch.randn(COLUMNS, h, generator=g).to(dtype),
        )
        for h in widths
    ]
    ids = torch.randint(0, V, (tokens,), generator=g)
    topk = torch.rand(tokens, V + 1, generator=g).topk(K).indices - 1  # -1: no id
    counted = torch.rand(tokens, generator=g) < 0.7
    weights = torch.randn(2, tokens, generator=g, dtype=torch.float64)
    weights[:, ::4] = 0
    return pairs, ids, topk, counted, weights


def leaves(pairs, dtype=None):
    return [[x.to(dtype or x.dtype).clone().requires_grad_() for x in pair] for pair in pairs]


def loss_of(stats, weights):
    return (stats.log_probs * weights[0]).sum() + (stats.entropy * weights[1]).sum()


def error(value, expected):
    expected = expected.nan_to_num(neginf=0)
    return float((value.detach().double().nan_to_num(neginf=0) - expected).norm() / expected.norm())


@pytest.mark.parametrize("through_ids", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("widths", [(H,), (H, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_agrees_with_the_dense_twin(dtype, widths, chunk_tokens, through_ids):
    pairs, ids, topk, counted, weights = problem(dtype, widths)
    query = {
        "vocab_size": V,
        "temperature": 0.8,
        "topk_ids": topk,
        "with_entropy": True,
        "with_squares": True,
        "counted": counted,
    }
    leaf_pairs, twin_pairs = leaves(pairs), leaves(pairs, torch.float64)
    stats = head_stats(
        [HeadFactor(*p) for p in leaf_pairs], ids, options=HeadOptions(chunk_tokens), **query
    )
    twin = dense_head_stats([HeadFactor(*p) for p in twin_pairs], ids, **query)
    for result in (stats, twin):
        values = torch.where((topk >= 0) & counted[:, None], result.topk_log_probs, 0.0)
        # Every fourth token has no gradient by ``loss_of``. With ``through_ids`` it has one by its Top-K ids.
        topk_sum = (values * torch.linspace(-1, 1, T, dtype=torch.float64)[:, None]).sum()
        (loss_of(result, weights) + (topk_sum if through_ids else 0)).backward()
    assert stats.vocab_size == twin.vocab_size == V
    limit = LIMITS[dtype]
    assert not stats.sum_squares.requires_grad
    for name in ("log_probs", "topk_log_probs", "entropy", "sum_squares"):
        value = getattr(stats, name).detach()
        assert error(value, getattr(twin, name).detach()) <= limit
        assert (value[~counted] == 0).all()
    for pair, expected in zip(leaf_pairs, twin_pairs, strict=True):
        for leaf, twin_leaf in zip(pair, expected, strict=True):
            assert leaf.grad.dtype == dtype
            assert error(leaf.grad, twin_leaf.grad) <= limit


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_what_needs_no_gradient_gets_none_and_the_others_theirs(frozen):
    """Two factors have four tensors: hidden states, weight, hidden states, weight. ``frozen`` is the index of one."""
    pairs, ids, *_ = problem(widths=(H, 3))
    leaf_pairs, twin_pairs = leaves(pairs), leaves(pairs, torch.float64)
    for tensors in (leaf_pairs, twin_pairs):
        [x for pair in tensors for x in pair][frozen].requires_grad_(False)
    for stats_of, tensors in ((head_stats, leaf_pairs), (dense_head_stats, twin_pairs)):
        stats = stats_of([HeadFactor(*p) for p in tensors], ids, vocab_size=V)
        stats.log_probs.sum().backward()
    tensors = [x for pair in leaf_pairs for x in pair]
    twins = [x for pair in twin_pairs for x in pair]
    for number, (leaf, twin) in enumerate(zip(tensors, twins, strict=True)):
        assert (leaf.grad is None) == (number == frozen)
        assert number == frozen or error(leaf.grad, twin.grad) <= 3e-6


def test_all_tokens_count_where_none_are_named():
    pairs, ids, *_ = problem()
    stats = head_stats([HeadFactor(*pairs[0])], ids, vocab_size=V)
    twin = dense_head_stats([HeadFactor(*pairs[0])], ids, vocab_size=V)
    assert error(stats.log_probs, twin.log_probs) <= 3e-6
    assert (stats.topk_log_probs, stats.entropy) == (None, None)
    assert (twin.topk_log_probs, twin.entropy) == (None, None)


def test_a_token_that_does_not_count_is_never_read():
    """Its NaN hidden state and its ids outside the vocabulary change no result and no gradient."""
    pairs, ids, topk, counted, weights = problem()
    pairs[0][0][~counted] = torch.nan
    ids[~counted], topk[~counted] = V + 1, V + 1
    ((hidden, weight),) = leaves(pairs)
    stats = head_stats(
        [HeadFactor(hidden, weight)], ids, vocab_size=V, topk_ids=topk, with_entropy=True,
        counted=counted, options=HeadOptions(8),
    )  # fmt: skip
    loss_of(stats, weights).backward()
    assert stats.fault_counts.tolist() == [0, 0, 0]
    assert weight.grad.isfinite().all()
    assert (hidden.grad[~counted] == 0).all()
    assert hidden.grad[counted].isfinite().all()


@pytest.mark.parametrize("chunk_tokens", [5, 1000])
def test_a_main_gradient_takes_the_sum_in_its_own_dtype(chunk_tokens):
    """Two backward passes add their gradients to a float32 ``main_gradient`` of 1000, and autograd gets none."""
    pairs, ids, _, counted, weights = problem(torch.bfloat16, tokens=600)
    main = torch.full((COLUMNS, H), 1e3)
    ((hidden, weight),) = leaves(pairs)
    for _ in range(2):
        stats = head_stats(
            [HeadFactor(hidden, weight, main)], ids, vocab_size=V, with_entropy=True,
            counted=counted, options=HeadOptions(chunk_tokens),
        )  # fmt: skip
        loss_of(stats, weights).backward()
    assert weight.grad is None
    ((twin_hidden, twin_weight),) = leaves(pairs, torch.float64)
    twin = dense_head_stats(
        [HeadFactor(twin_hidden, twin_weight)],
        ids,
        vocab_size=V,
        with_entropy=True,
        counted=counted,
    )
    loss_of(twin, weights).backward()
    # bf16 logits cause an error of 5e-3. A bf16 sum would lose the gradient: near 1000 its resolution is 4.
    assert error(main - 1e3, 2 * twin_weight.grad) <= 1e-2


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
def test_the_weight_is_summed_in_float32_over_chunks(chunk_tokens):
    """Each of 1200 equal tokens adds the same gradient. A bf16 sum would stop at 256 times the summand."""
    hidden = torch.ones(1200, 2, dtype=torch.bfloat16)
    weight = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    stats = head_stats(
        [HeadFactor(hidden, weight)], torch.zeros(1200, dtype=torch.int64), vocab_size=2,
        options=HeadOptions(chunk_tokens),
    )  # fmt: skip
    stats.log_probs.sum().backward()
    assert weight.grad.tolist() == [[600, 600], [-600, -600]]


def test_padding_columns_do_not_count():
    pairs, ids, *_ = problem()
    ((hidden, weight),) = leaves(pairs)
    with torch.no_grad():
        weight[V:] = 100 * hidden[0]
    stats = head_stats([HeadFactor(hidden, weight)], ids, vocab_size=V, options=HeadOptions(5))
    twin = dense_head_stats([HeadFactor(hidden, weight)], ids, vocab_size=V)
    assert error(stats.log_probs.detach(), twin.log_probs.detach()) <= 3e-6
    stats.log_probs.sum().backward()
    assert (weight.grad[V:] == 0).all()


@pytest.mark.parametrize("chunk_tokens", [5, 1000])
def test_logits_of_float32_do_without_the_rounding_of_bf16(chunk_tokens):
    """With bf16 weights, bf16 logits change log pi by hundredths of a nat, and float32 logits do not change it."""
    pairs, ids, _, _, weights = problem(torch.bfloat16)
    errors = {}
    for dtype in (None, torch.float32):
        ((hidden, weight),) = leaves(pairs)
        stats = head_stats(
            [HeadFactor(hidden, weight)], ids, vocab_size=V, with_entropy=True,
            options=HeadOptions(chunk_tokens, dtype),
        )  # fmt: skip
        twin = dense_head_stats([HeadFactor(hidden, weight)], ids, vocab_size=V)
        errors[dtype] = float((stats.log_probs - twin.log_probs).detach().abs().mean())
        loss_of(stats, weights).backward()
        assert weight.grad.dtype == hidden.grad.dtype == torch.bfloat16
    assert errors[torch.float32] <= 1e-6
    assert errors[None] >= 1e-3


@pytest.mark.parametrize("counted", [torch.zeros(T, dtype=torch.bool), None])
def test_rows_without_a_gradient_are_nothing_to_the_backward_pass(counted):
    """If no token counts, or no token has a gradient, the gradients are tensors of zeros, not None."""
    pairs, ids, *_ = problem()
    ((hidden, weight),) = leaves(pairs)
    stats = head_stats(
        [HeadFactor(hidden, weight)], ids, vocab_size=V, counted=counted, options=HeadOptions(8)
    )
    (stats.log_probs * 0).sum().backward()
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("through", ["log_probs", "topk_log_probs", "entropy"])
def test_only_rows_with_a_gradient_are_computed_again(through):
    """36 tokens are in chunks of 6. The forward pass keeps the logits of the last chunk. Of the other tokens, 8 have a
    gradient: the backward pass computes the logits of 6 of them, then of 2."""
    pairs, ids, topk, *_ = problem(tokens=36)
    ((hidden, weight),) = leaves(pairs)
    stats = head_stats(
        [HeadFactor(hidden, weight)], ids, vocab_size=V, topk_ids=topk, with_entropy=True,
        options=HeadOptions(6),
    )  # fmt: skip
    gradient = torch.zeros_like(getattr(stats, through))
    gradient[:16:2] = 1.0
    products = Products()
    with products:
        getattr(stats, through).backward(gradient)
    # For 6 rows, then for 2: the product that makes the logits, then the one that makes the hidden states' gradient.
    assert products.rows == [6, 6, 2, 2]
    (twins,) = leaves(pairs, torch.float64)
    dense = dense_head_stats(
        [HeadFactor(*twins)], ids, vocab_size=V, topk_ids=topk, with_entropy=True
    )
    finite = torch.where(gradient != 0, getattr(dense, through), 0.0)
    finite.backward(gradient.double())
    for found, expected in zip((hidden, weight), twins, strict=True):
        assert error(found.grad, expected.grad) < LIMITS[torch.float32]


class Products(TorchDispatchMode):
    """Records, in order, how many rows each matrix product has, if it has at most the 6 rows of a chunk."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_) and len(result) <= 6:
            self.rows.append(len(result))
        return result


def test_a_second_pass_over_one_graph_gives_the_same():
    pairs, ids, *_, weights = problem()
    ((hidden, weight),) = leaves(pairs)
    stats = head_stats(
        [HeadFactor(hidden, weight)], ids, vocab_size=V, with_entropy=True, options=HeadOptions(9)
    )
    passes = [
        torch.autograd.grad(loss_of(stats, weights), (hidden, weight), retain_graph=True)
        for _ in range(2)
    ]
    for first, second in zip(*passes, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


BAD = {
    "widths": ({}, {"weight": torch.zeros(COLUMNS, 3)}, r"expected \[T, H\] and \[C, H\]"),
    "axes": ({}, {"hidden": torch.zeros(T, H, 1)}, r"expected \[T, H\] and \[C, H\]"),
    "dtypes": ({}, {"weight": torch.zeros(COLUMNS, H, dtype=torch.bfloat16)}, "expected one dtype"),
    "main gradient": ({}, {"main_gradient": torch.zeros(3, H)}, "main_gradient is torch.float32"),
    "counted": ({"counted": torch.zeros(T)}, {}, r"expected torch.bool \(37,\)"),
    "targets": ({"target_ids": torch.zeros(3, dtype=torch.int64)}, {}, r"torch.int64 \(37,\)"),
    "chunk": ({"options": HeadOptions(0)}, {}, "chunk_tokens is 0, expected at least 1"),
    "vocabulary": ({"vocab_size": 121}, {}, r"vocab_size is 121, expected 1 .. 120"),
    "ids": ({"target_ids": torch.full((T,), V)}, {}, "37 target ids outside the vocabulary"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    changes: Any
    factor: Any
    changes, factor, message = BAD[case]
    pairs, ids, *_ = problem()
    fields = {"hidden": pairs[0][0], "weight": pairs[0][1], **factor}
    arguments = {"target_ids": ids, "vocab_size": V, **changes}
    with pytest.raises(ValueError, match=message):
        head_stats([HeadFactor(**fields)], **arguments)


@pytest.mark.parametrize("dims", [((T - 1, 3), (COLUMNS, 3)), ((T, 3), (COLUMNS - 1, 3))])
def test_a_second_factor_of_another_length_is_named(dims):
    pairs, ids, *_ = problem()
    second_factor = HeadFactor(*(torch.zeros(d) for d in dims))
    with pytest.raises(ValueError, match=mentioning(T, COLUMNS)):
        head_stats([HeadFactor(*pairs[0]), second_factor], ids, vocab_size=V)


def test_rows_that_are_no_distribution_are_counted():
    pairs, ids, *_ = problem()
    pairs[0][0][3] = torch.nan
    stats = head_stats(
        [HeadFactor(*pairs[0])], ids, vocab_size=V, options=HeadOptions(raise_on_faults=False)
    )
    assert stats.fault_counts.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match=mentioning(1, "NaN")):
        head_stats([HeadFactor(*pairs[0])], ids, vocab_size=V)
