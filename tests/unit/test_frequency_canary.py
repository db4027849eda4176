"""The frequency canary finds a sampler that does not draw from the distribution that trainer and engine both report.
Healthy and faulty runs are simulated in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.config.schema import AlgorithmConfig, RolloutConfig
from megatron_dppo.loop.frequency_canary import LARGEST_EVIDENCE, FrequencyCanary, FrequencyError
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.sums import FREQUENCY_SUMS

TOKENS, WORDS = 640, 24
"""The tokens of a step, as in the demo's first mini-batch, and the words of the vocabulary."""


def draw_logits(rng: np.random.Generator) -> np.ndarray:
    """Return logits for the tokens of a step. Half of the tokens are nearly certain, as in a language model."""
    return rng.normal(size=(TOKENS, WORDS)) * rng.choice([1.0, 8.0], size=(TOKENS, 1))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def sums_of(
    rng: np.random.Generator,
    logits: np.ndarray,
    *,
    reported: float = 1.0,
    sampled: float = 1.0,
    top_p: float = 1.0,
    noise: float = 0.0,
) -> dict[str, float]:
    """Return the metric sums of tokens that are drawn at the temperature ``sampled``. Engine and trainer both compute
    log-probabilities at the temperature ``reported``, from logits that differ by ``noise``."""
    p = np.exp(log_softmax(logits / sampled))
    if top_p < 1:
        order = np.argsort(-p, axis=1)
        ranked = np.take_along_axis(p, order, 1)
        is_kept = ranked.cumsum(1) - ranked < top_p
        np.put_along_axis(p, order, ranked * is_kept, 1)
        p /= p.sum(1, keepdims=True)
    tokens = (p.cumsum(1) < rng.random((TOKENS, 1))).sum(1).clip(max=WORDS - 1)
    mu = log_softmax(logits / reported)
    pi = log_softmax((logits + noise * rng.normal(size=logits.shape)) / reported)
    rows = np.arange(TOKENS)
    inputs = TokenInputs(
        log_probs=torch.from_numpy(pi[rows, tokens]),
        rollout_log_probs=torch.from_numpy(mu[rows, tokens]),
        advantages=torch.ones(TOKENS, dtype=torch.float64),
        loss_mask=torch.ones(TOKENS, dtype=torch.bool),
        entropy=torch.from_numpy(-(np.exp(pi) * pi).sum(1)),
    )
    return policy_loss(build_algorithm("dppo-binary-tv"), inputs).metrics.values()


def rollout_of(**settings: object) -> RolloutConfig:
    sizes = {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": 1}
    return RolloutConfig(**{**sizes, **settings})  # type: ignore[arg-type]


def make_canary(algorithm: AlgorithmConfig | None = None, **rollout: object) -> FrequencyCanary:
    return FrequencyCanary(rollout_of(**rollout), algorithm or AlgorithmConfig())


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5], ids=["alike", "as bfloat16", "far apart"])
def test_a_thousand_healthy_steps_raise_no_alarm(noise):
    rng, canary = np.random.default_rng(0), make_canary()
    evidence = []
    for _ in range(1000):
        canary.check(sums_of(rng, draw_logits(rng), noise=noise))
        evidence.append(canary.evidence)
    assert max(evidence) < 2.0


def test_the_martingale_has_a_mean_of_at_most_1():
    """The evidence of a healthy run is a supermartingale that begins at 1, so its mean is at most 1. After one step the
    values of different runs still vary, so this mean can be measured."""
    rng = np.random.default_rng(0)
    final = []
    for _ in range(300):
        canary = make_canary()
        canary.check(sums_of(rng, draw_logits(rng)))
        final.append(10**canary.evidence)
    assert np.std(final) > 0.05
    assert np.mean(final) < 1 + 3 * np.std(final) / math.sqrt(len(final))


def check_steps(canary: FrequencyCanary, rng: np.random.Generator, **fault: float) -> None:
    for _ in range(40):
        canary.check(sums_of(rng, draw_logits(rng), **fault))


@pytest.mark.parametrize(
    ("fault", "side"),
    [
        ({"sampled": 1.0, "reported": 0.7}, "more"),
        ({"sampled": 0.7, "reported": 1.0}, "less"),
        ({"top_p": 0.9}, "less"),
        ({"sampled": 1.0, "reported": 0.7, "noise": 0.02}, "more"),
    ],
    ids=["temperature missing in the sampler", "in both reports", "top-p", "beside rounding"],
)
def test_a_sampler_that_draws_otherwise_is_found(fault, side):
    """Trainer and engine compute equal or nearly equal log-probabilities, so |pi - mu| does not show the fault."""
    rng, canary = np.random.default_rng(0), make_canary()
    with pytest.raises(FrequencyError) as caught:
        check_steps(canary, rng, **fault)
    assert f"nats {side} surprising" in str(caught.value)
    assert "was not trained on" in str(caught.value)


def by_hand(p: float, tokens: int) -> dict[str, float]:
    """Return the sums of ``tokens`` tokens that all have pi = mu = ``p``, beside an entropy of log 2."""
    log_probs = torch.full((tokens,), math.log(p), dtype=torch.float64)
    inputs = TokenInputs(
        log_probs, log_probs, log_probs, torch.ones(tokens, dtype=torch.bool),
        entropy=torch.full((tokens,), math.log(2), dtype=torch.float64),
    )  # fmt: skip
    return policy_loss(build_algorithm("pg-is"), inputs).metrics.values()


def test_the_sums_by_hand():
    """Three tokens have -log mu = 2 log 2 and an entropy of log 2. pi is mu, so only the allowance of the cut, 2e-4, is
    subtracted."""
    high, low = math.log(2) - 2e-4, -math.log(2) - 2e-4
    sums = by_hand(0.25, 3)
    expected = (3 * high, 3 * high**2, 3 * low, 3 * low**2)
    assert [sums[name] for name in FREQUENCY_SUMS] == pytest.approx(expected)
    canary = make_canary()
    canary.check(sums)
    # The evidence is the mean of exp(a sum xi / c - psi(a) sum xi^2 / c^2) over both sides and all a, with c = 20.
    exponents = [
        a * xi / 20 + (math.log(1 - a) + a) * xi_squared / 400
        for xi, xi_squared in (expected[:2], expected[2:])
        for a in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
    ]
    assert canary.evidence == pytest.approx(
        math.log10(sum(map(math.exp, exponents)) / len(exponents))
    )
    assert canary.figures() == {names.FREQUENCY_EVIDENCE: canary.evidence}


def test_a_gap_between_trainer_and_engine_explains_a_surprise():
    """mu is 1/8 and pi is 1/2. Then -log mu is 2 log 2 above the entropy, and the gap explains more than this."""
    half, eighth = (torch.tensor([math.log(p)], dtype=torch.float64) for p in (0.5, 0.125))
    inputs = TokenInputs(
        half, eighth, torch.ones(1), torch.ones(1, dtype=torch.bool),
        entropy=torch.tensor([math.log(2)], dtype=torch.float64),
    )  # fmt: skip
    sums = policy_loss(build_algorithm("pg-is"), inputs).metrics.values()
    explained = 3 * math.log(2) + 2 * math.log(2) + 2e-4
    assert sums[FREQUENCY_SUMS[0]] == pytest.approx(2 * math.log(2) - explained)


def test_batches_that_rewards_chose_are_not_looked_at():
    sums = by_hand(0.01, 10**4)
    for canary in (
        make_canary(drop_zero_variance_groups=True),
        make_canary(AlgorithmConfig(truncated_responses="drop")),
    ):
        canary.check(sums)
        assert canary.figures() == {}
    for truncated in ("zero-reward", "as-verified"):
        with pytest.raises(FrequencyError):
            make_canary(AlgorithmConfig(truncated_responses=truncated)).check(sums)


def test_a_replayed_batch_is_only_warned_of(caplog):
    canary = make_canary(replay_from="saved")
    for _ in range(2):
        canary.check(by_hand(0.01, 10**4))
    assert canary.evidence > LARGEST_EVIDENCE
    assert len(caplog.records) == 1


def test_far_apart_nothing_is_proved_and_no_run_is_stopped(caplog):
    """One of the two ids has mu = 0.001 and pi = 100 mu. For its tokens the gap explains 230 nats, but the cut counts
    only 20 of them, so a healthy run of other weights looks wrong."""
    mu = np.array([0.001, 0.999])
    pi = np.array([0.1, 0.9])
    rng = np.random.default_rng(0)
    canary = FrequencyCanary(rollout_of(), AlgorithmConfig(), at_equal_weights=False)
    for _ in range(20):
        ids = rng.choice(2, size=1000, p=mu)
        entropy = torch.full((1000,), float(-(pi * np.log(pi)).sum()), dtype=torch.float64)
        inputs = TokenInputs(
            torch.from_numpy(np.log(pi)[ids]), torch.from_numpy(np.log(mu)[ids]), torch.ones(1000),
            torch.ones(1000, dtype=torch.bool), entropy=entropy,
        )  # fmt: skip
        canary.check(policy_loss(build_algorithm("pg-is"), inputs).metrics.values())
    assert canary.evidence > LARGEST_EVIDENCE
    assert len(caplog.records) == 1
