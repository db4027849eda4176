"""An engine samples the same tokens in every run: seeds, noise, and matrix products in equal blocks of rows."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_dppo.cpu.engine import matrix_products
from megatron_dppo.cpu.engine.matrix_products import ROWS, blocked_addmm, blocked_mm
from megatron_dppo.cpu.engine.sampling import (
    FilteredSampling,
    filtered,
    multinomial_with_seed,
    murmur_hash32,
)
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.engine.protocol import SamplingParams
from megatron_dppo.fleet.generation import GenerationJob, SamplingSeeds

SEEDS = np.array([0, 1, 42, 2**40 + 7, 2**63 - 1])
POSITIONS = np.array([0, 5, 17, 1000, 32767])
SGLANG_HASHES = [
    [2167721464, 10027521, 2423355346, 1368026766, 78347357, 350656522],
    [948601489, 2575477683, 2066289413, 4115130141, 2526157055, 1734904784],
    [3382997381, 3497547135, 889188079, 4185919001, 2083960395, 1365578745],
    [3416396453, 3518448643, 618279219, 804334268, 1168200031, 1632155831],
    [2369629134, 3095544765, 2505865746, 444327433, 738940154, 189837975],
]
"""Hashes by the Triton kernel of SGLang 0.5.23, run by Triton's interpreter."""


def test_the_noise_is_that_of_sglang_on_a_gpu():
    assert murmur_hash32(SEEDS, POSITIONS, 6).tolist() == SGLANG_HASHES


def test_a_draw_follows_the_distribution_and_only_its_own_seed_and_position():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    log_probs = probabilities.log().expand(20_000, 5)
    seeds, positions = torch.arange(20_000), torch.full((20_000,), 7)
    samples = multinomial_with_seed(log_probs, seeds, positions)[:, 0]
    frequencies = torch.bincount(samples, minlength=5) / 20_000
    assert frequencies[4] == 0
    assert (frequencies - probabilities).abs().max() < 0.012  # over three standard deviations
    order = torch.randperm(20_000, generator=torch.Generator().manual_seed(1))
    reordered = multinomial_with_seed(log_probs[order], seeds[order], positions[order])
    assert torch.equal(reordered[:, 0], samples[order])
    other_samples = multinomial_with_seed(log_probs, seeds, positions + 1)[:, 0]
    assert 0.3 < (other_samples == samples).float().mean() < 0.43  # 0.365 if they are independent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "columns"), [(64, 36), (128, 512), (37, 53), (2048, 96)])
def test_a_row_of_a_product_does_not_depend_on_the_others(inner, columns, dtype):
    """A row has the same product alone, among other rows and in any place, which torch does not promise."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2 * ROWS + 3, inner, generator=generator).to(dtype)
    b = torch.randn(columns, inner, generator=generator).to(dtype).t()
    product = blocked_mm(a, b)
    torch.testing.assert_close(product, a @ b)
    for rows in (1, 2, 3, ROWS - 1, ROWS, ROWS + 1):
        assert torch.equal(blocked_mm(a[:rows], b), product[:rows])
    order = torch.randperm(len(a), generator=generator)
    assert torch.equal(blocked_mm(a[order], b), product[order])
    assert blocked_mm(a[:0], b).shape == (0, columns)


def test_a_bias_and_both_factors_count():
    a, b, bias = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    torch.testing.assert_close(blocked_addmm(bias, a, b), torch.addmm(bias, a, b))
    expected = torch.addmm(bias, a, b, beta=0.5, alpha=3)
    torch.testing.assert_close(blocked_addmm(bias, a, b, beta=0.5, alpha=3), expected)


CHECK_LAYERS = """
import torch
from megatron_dppo.cpu.engine import matrix_products
matrix_products.enable()
matrix_products.enable()
torch.manual_seed(0)
for bias in (False, True):
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(64, 40, bias=bias, dtype=dtype)
        x = torch.randn(21, 64, dtype=dtype)
        with torch.no_grad():
            whole = layer(x)
            assert all(torch.equal(layer(x[i : i + 1]), whole[i : i + 1]) for i in range(21))
            assert torch.equal(layer(x[None])[0], whole)
            assert torch.equal(torch.matmul(x[:2], layer.weight.T), torch.matmul(x, layer.weight.T)[:2])
"""


def test_layers_use_it_once_it_is_enabled():
    """The layers run in a new process, because ``enable`` is not undone."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHECK_LAYERS], check=True)
    assert not matrix_products._overrides


def problem(number: int) -> Problem:
    return Problem(number, "", "", (number,))


def test_seeds_follow_from_what_a_response_is_for():
    """The seed of a response does not depend on the division of problems among ranks. No two responses share a seed."""

    def seeds(problems, positions, run_seed=1, purpose="step 1"):
        sampling_seeds = SamplingSeeds(run_seed, purpose, positions)
        job = GenerationJob(
            [problem(n) for n in problems], 2, SamplingParams(8), seeds=sampling_seeds
        )
        return {(r.problem_id, r.sample_index): r.sampling.seed for r in job.requests()}

    all_seeds = seeds((30, 31, 32), (0, 1, 2))
    assert all_seeds == seeds((31,), (1,)) | seeds((30, 32), (0, 2))
    assert len(set(all_seeds.values())) == 6
    other_runs = [seeds((30, 31, 32), (0, 1, 2), 2), seeds((30, 31, 32), (0, 1, 2), 1, "step 2")]
    assert len({s for run_seeds in (all_seeds, *other_runs) for s in run_seeds.values()}) == 18
    assert all(0 <= s < 2**63 for s in all_seeds.values())
    # A problem that is sampled in two rounds has two positions.
    repeated_problem = SamplingSeeds(1, "step 1", (0, 3))
    assert repeated_problem.of(0, 0) != repeated_problem.of(1, 0)


def test_without_seeds_nothing_is_sent():
    (request, _) = GenerationJob([problem(1)], 2, SamplingParams(8)).requests()
    assert "sampling_seed" not in request.sampling.as_json()
    assert SamplingParams(8, seed=5).as_json()["sampling_seed"] == 5


ALL = 1 << 30
"""SGLang's top-k for "no filter"."""


def test_a_filter_keeps_the_likeliest_and_a_row_without_one_keeps_all():
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).repeat(4, 1)
    top_ks = torch.tensor([2, ALL, ALL, 1])
    top_ps = torch.tensor([1.0, 0.65, 1.0, 1.0])
    # The sorted probabilities are .4 .3 .2 .1, and the mass before each is 0 .4 .7 .9. Top-p 0.65 keeps two.
    expected = [[0, 0.4, 0, 0.3], [0, 0.4, 0, 0.3], [0.1, 0.4, 0.2, 0.3], [0, 0.4, 0, 0]]
    torch.testing.assert_close(filtered(probs, top_ks, top_ps), torch.tensor(expected))


def test_the_mass_may_reach_top_p_before_a_token_that_is_kept():
    probs = torch.tensor([[0.5, 0.25, 0.25]])
    filtered_probs = filtered(probs, torch.tensor([ALL]), torch.tensor([0.5]))
    # The mass before the second token, 0.5, is not above top-p.
    assert filtered_probs.tolist() == [[0.5, 0.25, 0.0]]


def test_a_draw_does_not_depend_on_filters_of_other_rows():
    probs = torch.softmax(torch.randn(3, 50, generator=torch.Generator().manual_seed(1)), dim=-1)
    seeds, positions = torch.tensor([7, 8, 9]), torch.tensor([3, 4, 5])
    expected = multinomial_with_seed(probs.log(), seeds, positions)[:, 0]
    sampling = FilteredSampling(sample_by_sglang)
    ones = torch.ones(3)
    tokens = sampling(
        probs, torch.tensor([ALL, 1, ALL]), ones, 0 * ones, False, seeds, positions, max_top_k=ALL
    )
    assert tokens.dtype is torch.int32
    assert tokens.tolist() == [expected[0], probs[1].argmax(), expected[2]]


def sample_by_sglang(*arguments: object, **options: object) -> str:
    return "SGLang's own"


@pytest.mark.parametrize(
    ("min_p", "seed", "options"),
    [
        (False, None, {}),
        (True, torch.tensor([1]), {}),
        (False, torch.tensor([1]), {"return_filtered_probs": True}),
    ],
)
def test_what_has_no_seed_or_asks_for_more_is_sglangs_own(min_p, seed, options):
    one = torch.ones(1)
    result = FilteredSampling(sample_by_sglang)(
        torch.ones(1, 4) / 4, torch.tensor([2]), one, one, min_p, seed, torch.tensor([1]), **options
    )
    assert result == "SGLang's own"
