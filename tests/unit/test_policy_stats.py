"""policy_stats on one rank, compared with its dense float64 twin for every backend and dtype."""

import contextlib
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_dppo.system import kernels
from megatron_dppo.vocab_parallel import agreement, backends, policy_stats, wire
from megatron_dppo.vocab_parallel.backends import BACKENDS, RowGradient, choose
from megatron_dppo.vocab_parallel.policy_stats import (
    OverwrittenLogitsError,
    StatsQuery,
    dense_policy_stats,
)
from megatron_dppo.vocab_parallel.wire import VocabShard
from tests.messages import mentioning, mentions

T, COLUMNS, V, K = 29, 5003, 4999, 6
CASES = [(b, d) for b in ("eager", "cpp") for d in (torch.float32, torch.bfloat16)]
CASES.append(("eager", torch.float64))


def problem(dtype, seed=0, spread=3.0):
    """Return logits, sampled ids, Top-K ids and weights of the tokens in a loss."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(T, COLUMNS, generator=g, dtype=torch.float64) * spread).to(dtype)
    logits[:, V:] = 50.0  # padding must not count
    ids = torch.randint(0, V, (T,), generator=g)
    topk = torch.randint(0, V, (T, K), generator=g)
    topk[:, 1] = ids  # the Top-K has the sampled token, not in the first place,
    topk[:, 2] = ids  # and has it twice
    topk[3, 3] = -1
    weights = torch.randn(2, T, generator=g, dtype=torch.float64)
    weights[:, ::4] = 0
    return logits, ids, topk, weights


def loss_of(stats, weights):
    loss = (stats.log_probs * weights[0]).sum()
    return loss if stats.entropy is None else loss + (stats.entropy * weights[1]).sum()


def test_the_dense_twin_by_hand():
    """At temperature 2, p is 1/2, 1/4, 1/4 and 0. The last column is padding, and the Top-K id -1 means no id."""
    logits = 2 * torch.tensor([[0.5, 0.25, 0.25, 0.0, 99.0]]).log()
    options: dict[str, Any] = {"vocab_size": 4, "temperature": 2.0}
    twin = dense_policy_stats(
        logits, torch.tensor([2]), topk_ids=torch.tensor([[0, 3, -1]]), with_entropy=True,
        with_squares=True, **options
    )  # fmt: skip
    assert twin.log_probs.tolist() == pytest.approx([math.log(0.25)])
    assert twin.topk_log_probs.tolist() == [pytest.approx([math.log(0.5), -math.inf, -math.inf])]
    assert twin.entropy.tolist() == pytest.approx([1.5 * math.log(2)])
    assert twin.sum_squares.tolist() == pytest.approx([1 / 4 + 2 / 16])
    assert twin.fault_counts.tolist() == [0, 0, 0]
    plain = dense_policy_stats(logits, torch.tensor([2]), **options)
    assert (plain.topk_log_probs, plain.entropy, plain.sum_squares) == (None, None, None)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_agrees_with_the_dense_twin(backend, dtype, with_entropy, temperature):
    logits, ids, topk, weights = problem(dtype)
    with_squares = temperature != 1
    options = {"vocab_size": V, "temperature": temperature, "topk_ids": topk,
               "with_entropy": with_entropy, "with_squares": with_squares}  # fmt: skip
    leaf = logits.clone().requires_grad_()
    stats = policy_stats(leaf, ids, backend=backend, **options)
    twin_leaf = logits.double().requires_grad_()
    twin = dense_policy_stats(twin_leaf, ids, **options)

    tolerance: dict[str, Any] = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 2e-6}
    torch.testing.assert_close(stats.log_probs.double(), twin.log_probs, **tolerance)
    torch.testing.assert_close(stats.topk_log_probs.double(), twin.topk_log_probs, **tolerance)
    assert stats.topk_log_probs[3, 3] == -math.inf
    if with_entropy:
        torch.testing.assert_close(stats.entropy.double(), twin.entropy, **tolerance)
    assert (stats.sum_squares is not None) == with_squares
    if with_squares:
        assert not stats.sum_squares.requires_grad
        # The squares of all columns are summed: their rounding adds up to more than that of a log-probability.
        relative: dict[str, Any] = {"rtol": 2 * tolerance["atol"], "atol": 0}
        torch.testing.assert_close(stats.sum_squares.double(), twin.sum_squares, **relative)

    loss_of(stats, weights).backward()
    loss_of(twin, weights).backward()
    error = (leaf.grad.double() - twin_leaf.grad).norm() / twin_leaf.grad.norm()
    # bfloat16: the gradient is rounded once, to 2^-8 relative at most.
    limit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    assert error <= limit
    assert (leaf.grad[:, V:] == 0).all()
    assert (leaf.grad[::4] == 0).all()


def loss_at_ids(stats, weights, topk):
    """Return a loss with random weights at all Top-K ids. The weights of row 1 sum to 0; every fourth row has none."""
    g = torch.Generator().manual_seed(9)
    at_ids = torch.randn(T, K, generator=g, dtype=torch.float64)
    at_ids[1] -= (at_ids[1].sum() + weights[0, 1]) / K
    at_ids[::4] = 0
    values = torch.where(topk >= 0, stats.topk_log_probs, 0.0)
    return loss_of(stats, weights) + (at_ids * values).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_a_gradient_flows_through_every_id(backend, dtype, with_entropy, temperature):
    logits, ids, topk, weights = problem(dtype)
    logits[2, ids[2]] = 40.0  # 1 - p is tiny here, and must not be computed as a difference
    options = {"vocab_size": V, "temperature": temperature, "topk_ids": topk,
               "with_entropy": with_entropy}  # fmt: skip
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss_at_ids(policy_stats(leaf, ids, backend=backend, **options), weights, topk).backward()
    loss_at_ids(dense_policy_stats(exact, ids, **options), weights, topk).backward()
    error = (leaf.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error <= {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    assert (leaf.grad[:, V:] == 0).all()
    assert (leaf.grad[::4] == 0).all()
    at_ids = topk.clamp(min=0)
    difference = leaf.grad.double().gather(1, at_ids) - exact.grad.gather(1, at_ids)
    # Each of these elements was rounded once.
    rounding = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2.01**-8}[dtype]
    assert (difference.abs() <= rounding * exact.grad.gather(1, at_ids).abs() + 1e-6).all()


@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_a_bfloat16_gradient_is_rounded_to_the_nearest(backend):
    assert rounding_of(*bfloat16_gradients(backend)) <= 1.001


def bfloat16_gradients(backend):
    """Return the backend's gradient and the exact gradient, both by the same logits."""
    logits, ids, _, weights = problem(torch.bfloat16)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss_of(policy_stats(leaf, ids, vocab_size=V, backend=backend), weights).backward()
    loss_of(dense_policy_stats(exact, ids, vocab_size=V), weights).backward()
    return leaf.grad, exact.grad


def rounding_of(gradient, exact):
    """Return the largest error in halves of an element's last place: up to 1 by rounding, up to 2 by truncation."""
    half_place = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 9)
    is_counted = exact.abs() > 1e-30
    assert is_counted.any()
    return ((gradient.double() - exact).abs() / half_place)[is_counted].max()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(with_entropy):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, generator=g, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 5, 2])

    def function(z):
        stats = policy_stats(
            z.clone(), ids, vocab_size=6, temperature=0.8, with_entropy=with_entropy
        )
        return (stats.log_probs, stats.entropy) if with_entropy else stats.log_probs

    # gradcheck calls backward several times, and each call overwrites the logits. So each call recomputes them.
    recompute = partial(checkpoint, function, use_reentrant=False)
    assert torch.autograd.gradcheck(recompute, (logits,))


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_values_worked_by_hand(backend, dtype):
    # p = (1/4, 1/2, 1/4), so H = 3/2 log 2 and dH/dz = -p (log p + H).
    leaf = torch.tensor([[0.0, math.log(2), 0.0]]).to(dtype).requires_grad_()
    stats = policy_stats(leaf, torch.tensor([1]), vocab_size=3, with_entropy=True, backend=backend)
    tolerance: dict[str, Any] = {"rel": 2e-3 if dtype == torch.bfloat16 else 1e-6}
    assert stats.log_probs.item() == pytest.approx(-math.log(2), **tolerance)
    assert stats.entropy.item() == pytest.approx(1.5 * math.log(2), **tolerance)
    (stats.log_probs + stats.entropy).sum().backward()
    log2 = math.log(2)
    expected = [-0.25 + 0.125 * log2, 0.5 - 0.25 * log2, -0.25 + 0.125 * log2]
    assert leaf.grad[0].tolist() == pytest.approx(
        expected, rel=1e-2 if dtype == torch.bfloat16 else 1e-6
    )


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_minus_infinity_certainty_and_far_tails(backend, dtype):
    logits = torch.full((4, 3000), -math.inf).to(dtype)
    logits[0, 1] = 5.0  # the only token of the row
    logits[1, :2] = torch.tensor([0.0, -30.0])  # log-prob -30
    logits[2, 2999] = -200.0  # the only token, with a logit far below 0
    logits[3, [0, 2500]] = torch.tensor([1000.0, 1000.0]).to(dtype)
    ids = torch.tensor([1, 1, 2999, 2500])
    leaf = logits.clone().requires_grad_()
    stats = policy_stats(leaf, ids, vocab_size=3000, with_entropy=True, backend=backend)
    torch.testing.assert_close(
        stats.log_probs.double(), torch.tensor([0.0, -30.0, 0.0, -math.log(2)], dtype=torch.float64),
        rtol=0, atol=1e-6,
    )  # fmt: skip
    torch.testing.assert_close(
        stats.entropy.double()[[0, 2, 3]], torch.tensor([0, 0, math.log(2)], dtype=torch.float64),
        rtol=0, atol=1e-6,
    )  # fmt: skip
    (stats.log_probs.sum() + stats.entropy.sum()).backward()
    assert leaf.grad.isfinite().all()
    assert leaf.grad[1, 1].item() == pytest.approx(1.0, abs=1e-2)
    assert (leaf.grad[3, [1, 2]] == 0).all()


@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_a_sampled_token_of_probability_zero_is_minus_infinity(backend):
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    stats = policy_stats(logits, torch.tensor([1]), vocab_size=3, backend=backend)
    assert stats.log_probs.item() == -math.inf


@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_gradient_is_written_over_the_logits_and_their_reuse_raises(backend):
    logits, ids, _, _ = problem(torch.float32)
    leaf = logits.clone().requires_grad_()
    z = leaf * 1.0
    other_use = (z * z).sum()  # saves z
    stats = policy_stats(z, ids, vocab_size=V, backend=backend)
    stats.log_probs.sum().backward(retain_graph=True)
    assert leaf.grad.data_ptr() == z.data_ptr() or torch.equal(leaf.grad, z)
    with pytest.raises(OverwrittenLogitsError):
        policy_stats(z, ids, vocab_size=V)
    with pytest.raises(RuntimeError, match=mentioning("inplace")):
        other_use.backward()
    with pytest.raises(RuntimeError, match=mentioning("inplace")):
        stats.log_probs.sum().backward()


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_rows_without_a_gradient_are_not_read(backend, with_entropy):
    logits, ids, _, weights = problem(torch.float32)
    leaf = logits.clone().requires_grad_()
    stats = policy_stats(leaf, ids, vocab_size=V, backend=backend, with_entropy=with_entropy)
    leaf.data[::4] = math.nan  # a backward pass that reads these rows returns NaN
    loss_of(stats, weights).backward()
    assert (leaf.grad[::4] == 0).all()


@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_a_gradient_of_the_entropy_alone_reaches_the_logits(backend):
    # p = (1/4, 3/4): dH/dz_0 = -p_0 (log p_0 + H) = p_0 p_1 log(p_1 / p_0)
    leaf = torch.tensor([[0.0, math.log(3)]]).repeat(2, 1).requires_grad_()
    stats = policy_stats(
        leaf, torch.tensor([0, 0]), vocab_size=2, with_entropy=True, backend=backend
    )
    (stats.entropy * torch.tensor([-1.0, 2.0])).sum().backward()
    slope = 3 / 16 * math.log(3)
    expected = [[-slope, slope], [2 * slope, -2 * slope]]
    torch.testing.assert_close(leaf.grad, torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_the_gradient_is_exact_where_the_logits_are_large(backend, temperature):
    g = torch.Generator().manual_seed(3)
    leaf = (torch.randn(4, 9, generator=g) + 1e4).requires_grad_()
    twin_leaf = leaf.detach().double().requires_grad_()
    ids = torch.tensor([0, 3, 8, 5])
    policy_stats(
        leaf, ids, vocab_size=9, temperature=temperature, backend=backend
    ).log_probs.sum().backward()
    dense_policy_stats(
        twin_leaf, ids, vocab_size=9, temperature=temperature
    ).log_probs.sum().backward()
    torch.testing.assert_close(leaf.grad.double(), twin_leaf.grad, rtol=0, atol=1e-6)


def test_a_vocabulary_of_one_token_is_certain_of_it():
    stats = policy_stats(torch.tensor([[3.0, 9.0]]), torch.tensor([0]), vocab_size=1)
    assert stats.log_probs.tolist() == [0.0]


def test_eager_blocks_hold_at_most_their_bytes_on_a_cpu_and_a_sixteenth_elsewhere(monkeypatch):
    def block_ranges(rows, columns, device="cpu"):
        blocks = backends._blocks(torch.empty(rows, columns, device=device))
        return [(block.start, block.stop) for block in blocks]

    monkeypatch.setattr(backends, "BLOCK_BYTES", 36)  # three rows of three float32
    assert block_ranges(7, 3) == [(0, 3), (3, 6), (6, 7)]
    assert block_ranges(2, 10) == [(0, 1), (1, 2)]
    assert block_ranges(18, 0) == [(0, 9), (9, 18)]
    assert block_ranges(33, 3, "meta") == [(at, min(at + 2, 33)) for at in range(0, 33, 2)]
    assert block_ranges(30, 3, "meta") == [(at, at + 1) for at in range(30)]
    assert block_ranges(2, 3, "meta") == [(0, 1), (1, 2)]


def test_vocabulary_order_does_not_matter():
    logits, ids, topk, _ = problem(torch.float32)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    position = torch.empty(V, dtype=torch.int64)
    position[order] = torch.arange(V)
    topk = topk.clamp(min=0)
    plain = policy_stats(logits, ids, vocab_size=V, topk_ids=topk, with_entropy=True)
    permuted = policy_stats(
        logits[:, order].contiguous(),
        position[ids],
        vocab_size=V,
        topk_ids=position[topk],
        with_entropy=True,
    )
    for name in ("log_probs", "topk_log_probs", "entropy"):
        torch.testing.assert_close(getattr(plain, name), getattr(permuted, name), rtol=0, atol=2e-6)


def test_no_tokens_and_no_gradient():
    stats = policy_stats(torch.empty(0, 10), torch.empty(0, dtype=torch.int64), vocab_size=10)
    assert stats.log_probs.shape == (0,)
    with torch.no_grad():
        stats = policy_stats(torch.zeros(2, 10), torch.tensor([1, 2]), vocab_size=10)
    assert stats.log_probs.tolist() == pytest.approx([-math.log(10)] * 2)


def arguments(**changes):
    values = {"logits": torch.zeros(3, 8), "target_ids": torch.tensor([0, 1, 2]), "vocab_size": 8}
    return {**values, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_ids": torch.tensor([0, 8, -1])}, "^.*2 target ids"),
        ({"target_ids": torch.tensor([0, -1, 2])}, "1 target ids"),
        ({"topk_ids": torch.tensor([[0], [-2], [-1]])}, "1 Top-K ids"),
        ({"vocab_size": 0}, "vocab_size is 0, .* 1 .. 8"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"topk_ids": torch.tensor([[0], [7], [9]])}, "1 Top-K ids"),
        ({"topk_ids": torch.zeros(3, 0, dtype=torch.int64)}, r"expected \(3, K\) with K >= 1"),
        ({"topk_ids": torch.zeros(2, 1, dtype=torch.int64)}, r"expected \(3, K\) with K >= 1"),
        ({"topk_ids": torch.ones(3, 1, dtype=torch.bool)}, r"topk_ids are torch\.bool"),
        ({"target_ids": torch.tensor([0, 1])}, r"expected torch\.int64 \(3,\) to match"),
        ({"target_ids": torch.zeros(3)}, r"target_ids are torch\.float32"),
        ({"logits": torch.zeros(3, 2, 4)}, r"expected floating point \[T, C\]"),
        ({"logits": torch.zeros(8, 3).T}, "expected contiguous"),
        ({"logits": torch.full((3, 8), math.nan)}, "3 rows .*NaN"),
        ({"logits": torch.full((3, 8), math.inf)}, "3 rows .*NaN"),
        ({"logits": torch.full((3, 8), -math.inf)}, " -inf"),
        ({"vocab_size": 9}, "vocab_size is 9, .* 1 .. 8"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"backend": "fast"}, "'fast'; known: eager"),
        ({"logits": torch.zeros(3, 8, dtype=torch.float64), "backend": "cpp"}, "take float32 and"),
    ],
)
def test_bad_input_is_one_clear_error(changes, message):
    with pytest.raises(ValueError, match=message):
        policy_stats(**arguments(**changes))


@pytest.mark.parametrize("backend", ["eager", "cpp"])
@pytest.mark.parametrize("where", [0, 3000, 4990])
def test_one_nan_among_finite_logits_is_found(backend, where):
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    logits[1, where] = math.nan
    with pytest.raises(ValueError, match=mentioning("1 rows", "NaN")):
        policy_stats(logits, torch.tensor([0, 1, 2]), vocab_size=V, backend=backend)


def test_the_fastest_available_backend_is_chosen():
    assert choose(torch.zeros(1, 4)) is BACKENDS["cpp"]
    assert choose(torch.zeros(1, 4, dtype=torch.float64)) is BACKENDS["eager"]
    assert choose(torch.zeros(1, 4), "eager") is BACKENDS["eager"]


@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_faults_that_are_not_raised_are_counted_and_make_their_rows_nan(backend):
    logits = torch.zeros(4, 8)
    logits[3, 2] = math.nan
    topk = torch.tensor([[0, -1], [1, 9], [2, 0], [0, 0]])
    stats = policy_stats(
        logits, torch.tensor([0, 1, 8, 3]), vocab_size=8, topk_ids=topk, backend=backend,
        raise_on_faults=False,
    )  # fmt: skip
    assert stats.fault_counts.tolist() == [1, 1, 1]
    assert stats.log_probs.isnan().tolist() == [False, False, True, True]
    assert stats.topk_log_probs.isnan().tolist() == [
        [False] * 2,
        [False, True],
        [False] * 2,
        [True] * 2,
    ]
    assert stats.topk_log_probs[0, 1] == -math.inf
    with pytest.raises(ValueError, match=mentioning(1, "target", 1, "Top-K")):
        stats.raise_on_faults()


def test_without_a_compiler_the_eager_backend_runs_and_says_why(monkeypatch, caplog):
    def fail_build():
        raise kernels.KernelBuildError("not found on PATH: g++")

    monkeypatch.setattr(backends, "load_kernels", fail_build)
    backends._build_failure.cache_clear()
    try:
        assert choose(torch.zeros(1, 4)) is BACKENDS["eager"]
        assert mentions(caplog.text, "eager", "C++", "PATH: g++")
        with pytest.raises(ValueError, match=mentioning("'cpp'", "C++", "PATH: g++")):
            choose(torch.zeros(1, 4), "cpp")
    finally:
        backends._build_failure.cache_clear()


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(kernels.KernelBuildError, match="no-such-compiler"):
        backends.load_kernels.__wrapped__()


def test_a_cached_library_that_cannot_be_loaded_is_a_build_failure(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = kernels.cache_directory(backends.SOURCE)
    folder.mkdir()
    (folder / f"{backends.SOURCE.stem}.so").write_bytes(b"no library")
    with pytest.raises(kernels.KernelBuildError, match=r"\.so"):
        backends.load_kernels.__wrapped__()


def test_each_compiler_has_a_cache_of_its_own(monkeypatch):
    folders = set()
    for compiler in ("g++", "clang++"):
        monkeypatch.setenv("CXX", compiler)
        folders.add(kernels.cache_directory(backends.SOURCE))
    assert len(folders) == 2


def test_a_cache_that_cannot_be_written_is_named_with_what_to_set(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(kernels.KernelBuildError, match=r"file/.*TORCH_EXTENSIONS_DIR"):
        backends.load_kernels.__wrapped__()


@pytest.mark.parametrize("gap", [5.0, 12.0, 15.0, 20.0, 30.0, 60.0])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_a_nearly_certain_token_is_known_relative_to_its_rest(backend, dtype, with_entropy, gap):
    """log p is between -5e-1 and -1e-24. Computed as the logarithm of a rounded p it could lose all its digits."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor([0, 299, 77])
    logits[torch.arange(3), ids] = gap
    z = logits.double() / 0.9
    rest = z.scatter(1, ids[:, None], -math.inf).logsumexp(1)
    expected = -torch.log1p(torch.exp(rest - z[torch.arange(3), ids]))
    options = {"temperature": 0.9, "with_entropy": with_entropy}
    stats = policy_stats(logits, ids, vocab_size=300, backend=backend, **options)
    torch.testing.assert_close(stats.log_probs.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_a_shard_of_padding_alone_gives_nothing_and_gets_no_gradient(backend, dtype, with_entropy):
    """V = 130 as 4 x 128: the third and fourth ranks hold no token of the vocabulary."""
    g = torch.Generator().manual_seed(0)
    logits, kernel = torch.randn(3, 128, generator=g).to(dtype), BACKENDS[backend]
    no_ids = torch.full((3, 2), -1)
    lse, plogp, squares, owned = kernel.forward(logits, 0, 1.0, no_ids, with_entropy, True)
    assert squares.tolist() == [0.0] * 3
    assert lse.tolist() == [-math.inf] * 3
    assert not with_entropy or plogp.tolist() == [0.0] * 3
    assert (owned == 0).all()
    ones = torch.ones(3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    entropy_inputs = (ones, ones.double()) if with_entropy else (None, None)
    gradient = RowGradient(
        torch.ones(3, dtype=torch.float64), no_ids[:, 0].contiguous(), ones, *entropy_inputs
    )
    out = torch.full_like(logits, 7.0)
    kernel.backward(logits, 0, 1.0, gradient, out)
    assert (out == 0).all()


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_a_shard_without_mass_in_a_row_adds_nothing_to_it(backend, dtype):
    """Another rank's columns have all the mass of row 0. Of row 1, this shard has e^0 + e^0."""
    logits = torch.tensor([[-math.inf, -math.inf], [0.0, 0.0]]).to(dtype)
    no_ids = torch.full((2, 1), -1)
    lse, plogp, squares, _ = BACKENDS[backend].forward(logits, 2, 1.0, no_ids, True, True)
    assert squares.tolist() == pytest.approx([0.0, 0.5])
    assert lse.tolist() == pytest.approx([-math.inf, math.log(2)])
    assert plogp.tolist() == pytest.approx([0.0, -math.log(2)])


def test_a_token_too_rare_to_change_the_sum_still_has_entropy():
    """For z = (0, -50), 1 + e^-50 rounds to 1, but p log p of the second token is -50 e^-50."""
    logits = torch.tensor([[0.0, -50.0]], dtype=torch.float64)
    no_ids = torch.full((1, 1), -1)
    _, plogp, *_ = BACKENDS["eager"].forward(logits, 2, 1.0, no_ids, True)
    assert plogp.item() == pytest.approx(-50 * math.exp(-50), rel=1e-12, abs=0)


def test_eager_sums_over_a_row_are_taken_in_float64():
    """In float32, 1 + e^-20 is 1, so its logarithm would be 0, and -e^-1 - 20 e^-20 would lose half its last term."""
    for z in ([0.0, -20.0], [0.0, -1.0, -20.0]):
        no_ids = torch.full((1, 1), -1)
        lse, plogp, *_ = BACKENDS["eager"].forward(torch.tensor([z]), len(z), 1.0, no_ids, True)
        p = torch.tensor(z).exp()
        total, weighted = p.double().sum(), (p * torch.tensor(z)).double().sum()
        torch.testing.assert_close(lse[0], total.log(), rtol=0, atol=1e-15)
        torch.testing.assert_close(plogp[0], weighted / total - total.log(), rtol=0, atol=1e-15)


def test_everything_stays_on_the_device_of_the_logits():
    logits, ids, topk, _ = (x.to("meta") for x in problem(torch.float32))
    leaf = logits.requires_grad_()
    stats = policy_stats(leaf, ids, vocab_size=V, topk_ids=topk, with_entropy=True)
    assert {x.device.type for x in (stats.log_probs, stats.topk_log_probs, stats.fault_counts)} == {
        "meta"
    }
    stats.entropy.sum().backward()
    assert leaf.grad.shape == (T, COLUMNS)


class UnknownSumError(Exception):
    """A rank has contributed to a sum to which other ranks have not contributed yet."""


class Ranks:
    """Replaces a process group. The ranks run one after another, each up to the first all-reduce whose sum is unknown.
    Then the sum of their contributions is known, and all ranks run again from the start.
    """

    def __init__(self, size):
        self.size, self.sums, self.shares, self.remaining = size, [], [], []

    def all_reduce(self, buffer, *, group, async_op=False):
        assert group is self
        if not self.remaining:
            self.shares.append(buffer.clone())
            raise UnknownSumError
        buffer.copy_(self.remaining.pop(0))
        return self if async_op else None

    def wait(self):
        return True

    def run(self, call, monkeypatch):
        """Return the result of ``call(rank, group)`` for each rank."""
        monkeypatch.setattr(wire.dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(wire.dist, "get_world_size", lambda group: group.size)
        results = []
        while len(results) < self.size:
            results, self.shares = [], []
            for rank in range(self.size):
                monkeypatch.setattr(wire.dist, "get_rank", lambda group, rank=rank: rank)
                self.remaining = list(self.sums)
                with contextlib.suppress(UnknownSumError):
                    results.append(call(rank, self))
            self.sums.append(sum(self.shares))
        return results


def test_two_ranks_together_give_what_one_does(monkeypatch):
    """V = 7 of 2 x 5 columns: the second rank has two ids and three columns of padding."""
    g = torch.Generator().manual_seed(7)
    logits = torch.randn(6, 10, generator=g)
    ids, topk = torch.tensor([0, 4, 5, 6, 2, 6]), torch.tensor([[3, 6], [5, -1]] * 3)
    options: dict[str, Any] = {"vocab_size": 7, "temperature": 0.5, "topk_ids": topk, "with_entropy": True,
               "with_squares": True}  # fmt: skip

    def stats_of_shard(rank, group):
        shard = logits[:, 5 * rank : 5 * (rank + 1)].contiguous()
        return policy_stats(shard, ids, group, **options)

    twin = dense_policy_stats(logits, ids, **options)
    for stats in Ranks(2).run(stats_of_shard, monkeypatch):
        for name in ("log_probs", "topk_log_probs", "entropy", "sum_squares"):
            torch.testing.assert_close(
                getattr(stats, name).double(), getattr(twin, name), rtol=0, atol=2e-6
            )


def test_shards_with_and_without_real_columns_add_up_to_the_whole():
    """The vocabulary is split into 4 x 128 columns by hand. The combined forward passes and the backward passes of the
    shards must agree with the twin.
    """
    g = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 512, generator=g)
    ids = torch.tensor([0, 127, 128, 129, 5])
    kernel, parts = BACKENDS["eager"], whole.split(128, 1)
    shards = [VocabShard.part(i, 4, 128, 130) for i in range(4)]
    assert [(s.start, s.real) for s in shards] == [(0, 128), (128, 2), (256, 0), (384, 0)]
    no_ids = torch.full((5, 1), -1)
    shard_lses = []
    for part, shard in zip(parts, shards, strict=True):
        shard_lses.append(kernel.forward(part.contiguous(), shard.real, 1.0, no_ids, False)[0])
    lse = torch.stack(shard_lses).logsumexp(0)
    leaf = whole.double().requires_grad_()
    twin = dense_policy_stats(leaf, ids, vocab_size=130).log_probs
    twin.sum().backward()
    grads = []
    for part, shard in zip(parts, shards, strict=True):
        out = torch.empty(5, 128)
        gradient = RowGradient(lse, shard.local(ids), torch.ones(5), None, None)
        kernel.backward(part.contiguous(), shard.real, 1.0, gradient, out)
        grads.append(out)
    torch.testing.assert_close(torch.cat(grads, 1).double(), leaf.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_the_log_sum_exp_travels_with_its_low_half(offset, monkeypatch):
    """At |logit| = 1e4 one float32 number holds the log-sum-exp only to 5e-4, so a rank sends it as two numbers."""
    small = torch.tensor([[0.3, 1.7, 0.9, -0.4, 2.2, -1.1]], dtype=torch.float64)
    whole = (small + offset).float()
    shards = [VocabShard(3 * i, 3, 3, 6, i, 2) for i in range(2)]
    ids = torch.tensor([[0]])
    own = [
        BACKENDS["eager"].forward(
            whole[:, s.start : s.start + 3].contiguous(), 3, 1.0, s.local(ids), True
        )
        for s in shards
    ]
    sent = []
    monkeypatch.setattr(wire.dist, "all_reduce", lambda buffer, group: sent.append(buffer.clone()))
    for shard, rows in zip(shards, own, strict=True):
        wire.reduce_rows(shard, *rows, 1.0, None)
    monkeypatch.setattr(wire.dist, "all_reduce", lambda buffer, group: buffer.copy_(sum(sent)))
    reduced = wire.reduce_rows(shards[0], *own[0], 1.0, None)
    twin = whole.double()
    torch.testing.assert_close(reduced.lse, twin.logsumexp(1), rtol=0, atol=1e-7)
    log_p = twin.log_softmax(1)
    torch.testing.assert_close(reduced.entropy, -(log_p.exp() * log_p).sum(1), rtol=0, atol=2e-6)
    got = wire.log_softmax_at(reduced, 1.0)
    torch.testing.assert_close(got, log_p[:, :1], rtol=0, atol=1e-7)
    assert sent[0].dtype == torch.float32
    assert (sent[0][0, :2] != 0).all()


@pytest.mark.parametrize("with_squares", [True, False])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_three_ranks_each_write_their_own_slots(with_entropy, with_squares, monkeypatch):
    """Row 0 is p = (1 | 2 5 | 0) / 8 and row 1 is p = (1 | 1 2 | 4) / 8, where bars separate the ranks' ids. Id 1 is
    sampled, so the sums leave it out. The Top-K ids are 3 and one that no rank owns.
    """
    mass = torch.tensor([[1.0, 2, 5, 0], [1, 1, 2, 4]], dtype=torch.float64)
    parts = [mass[:, :1], mass[:, 2:3], mass[:, 3:]]
    lse = [part.sum(1).log() for part in parts]
    shares = [part / part.sum(1, True) for part in parts]  # NaN where a rank has no mass
    plogp = [torch.xlogy(share, share).nan_to_num().sum(1) for share in shares]
    squares = [share.square().nan_to_num().sum(1) for share in shares]
    owned = [torch.zeros(2, 3, dtype=torch.float64) for _ in parts]  # no rank owns the last id
    owned[1][:, 0] = mass[:, 1].log()
    owned[2][:, 1] = torch.tensor([-9.0, math.log(4)])
    own = [
        (a, b if with_entropy else None, c if with_squares else None, d)
        for a, b, c, d in zip(lse, plogp, squares, owned, strict=True)
    ]
    shards = [VocabShard(start, 2, 2, 4, rank, 3) for rank, start in enumerate((0, 2, 4))]
    sent = []
    monkeypatch.setattr(wire.dist, "all_reduce", lambda buffer, group: sent.append(buffer.clone()))
    for shard, rows in zip(shards, own, strict=True):
        wire.reduce_rows(shard, *rows, 1.0, None)
    slots = 2 + with_entropy + with_squares
    for rank, buffer in enumerate(sent):
        assert buffer.shape == (2, 3 * slots + 3)
        others = [at for at in range(3 * slots) if at // slots != rank]
        assert (buffer[:, others] == 0).all()
        assert buffer[:, rank * slots].tolist() == lse[rank].tolist()
        # The low half is 0 in float64, and for -inf.
        assert (buffer[:, rank * slots + 1] == 0).all()
        assert torch.equal(buffer[:, 3 * slots :], owned[rank])
    monkeypatch.setattr(wire.dist, "all_reduce", lambda buffer, group: buffer.copy_(sum(sent)))
    reduced = wire.reduce_rows(shards[0], *own[0], 1.0, None)
    torch.testing.assert_close(reduced.lse, torch.full((2,), math.log(8), dtype=torch.float64))
    torch.testing.assert_close(reduced.others.exp(), 8 - mass[:, 1])
    got = wire.log_softmax_at(reduced, 1.0).exp() * 8
    torch.testing.assert_close(got[:, 0], mass[:, 1])
    torch.testing.assert_close(got[1, 1], mass[1, 3])
    assert reduced.logits.tolist() == torch.stack(owned).sum(0).tolist()
    p = mass / 8
    if with_squares:
        torch.testing.assert_close(reduced.squares, torch.tensor([30, 22]).double() / 64)
    else:
        assert reduced.squares is None
    if with_entropy:
        torch.testing.assert_close(reduced.entropy, -torch.xlogy(p, p).sum(1))
    else:
        assert reduced.entropy is None


def test_a_group_of_one_rank_agrees_with_itself(monkeypatch):
    sent, waits, reduce = [], [], torch.distributed.all_reduce

    class Work:
        """The handle of an all-reduce. It notes each wait."""

        def __init__(self, work):
            self._work = work

        def wait(self):
            waits.append(len(sent))
            self._work.wait()

    def all_reduce(table, **options):
        assert options["group"] is torch.distributed.group.WORLD
        sent.append(table.clone())
        return Work(reduce(table, **options))

    monkeypatch.setattr(wire.dist, "all_reduce", all_reduce)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        world, ids = torch.distributed.group.WORLD, torch.tensor([0, 1])
        found = policy_stats(torch.zeros(2, 4), ids, world, vocab_size=4)
        assert found.log_probs.tolist() == pytest.approx([-math.log(4)] * 2)
        # Tokens, columns, K, entropy, squares, vocabulary, checksum 1 * 0 + 2 * 1, bad input.
        assert [table.tolist() for table in sent] == [[[2, 4, 0, 0, 0, 4, 2, 0]]]
        assert sent[0].dtype == torch.int64  # float32 would round checksums above 2^24
        with pytest.raises(ValueError, match=mentioning(1, "target")):
            policy_stats(torch.zeros(2, 4), ids, world, vocab_size=1)
        assert sent[1].tolist() == [[0, 0, 0, 0, 0, 0, 0, 1]]
        assert waits == [1, 2]  # each call waits once, the bad call before it raises
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_that_disagree_are_told_what_on():
    """Each rank's row has these facts: tokens, columns, K, entropy, squares, vocabulary, checksum, bad input."""
    good = agreement._facts_row([4, 10, 2, 0, 1, 18, 77])
    assert good == [4, 10, 2, 0, 1, 18, 77, 0]
    assert agreement._facts_row(None) == [0, 0, 0, 0, 0, 0, 0, 1]
    assert agreement.disagreement([good, good, good]) is None
    bad = agreement.disagreement([good, good, agreement._facts_row(None)])
    assert mentions(bad or "", "[2]", "input")
    for place, name in enumerate(agreement.FACTS):
        other = good.copy()
        other[place] += 1
        values = [good[place], good[place] + 1, good[place]]
        assert mentions(agreement.disagreement([good, other, good]) or "", name, values)


def test_the_checksum_notices_other_ids_and_another_order_of_targets():
    targets, topk = torch.tensor([5, 0, 7]), torch.tensor([[2, -1], [3, 4], [9, 9]])
    assert agreement.checksum(targets, None) == 1 * 5 + 2 * 0 + 3 * 7
    assert agreement.checksum(targets, topk) == 26 + 26
    assert agreement.checksum(targets.flip(0), None) == 1 * 7 + 3 * 5


def test_ids_of_a_shard_and_ids_that_nobody_owns():
    shard = VocabShard.part(1, 2, 4, 6)  # ids 4 and 5, and two columns of padding
    ids = torch.tensor([3, 4, 5, 6, -1])
    assert shard.local(ids).tolist() == [-1, 0, 1, -1, -1]
    assert shard.unknown(ids).tolist() == [False, False, False, True, True]
    assert shard.unknown(torch.tensor([0])).tolist() == [False]
    assert VocabShard.part(0, 1, 4, 3) == VocabShard(0, 4, 3, 3, 0, 1)


def test_what_ranks_compare_of_their_calls():
    """The facts are tokens, shard columns, Top-K ids, entropy, squares, vocabulary and checksum. The checksum is
    1*1 + 2*2 + 3*3, plus 4 + ... + 9 for the Top-K ids.
    """
    targets = torch.tensor([1, 2, 3])
    topk = torch.tensor([[4, 5], [6, 7], [8, 9]])
    assert StatsQuery(targets, topk, 20, 1.0, True).facts(3, 7) == [3, 7, 2, 1, 0, 20, 14 + 39]
    assert StatsQuery(targets, None, 20, 1.0, False, True).facts(3, 7) == [3, 7, 0, 0, 1, 20, 14]
