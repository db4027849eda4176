"""The reading of a rule: a short name of the gradients that its loss gives to fixed tokens.

A run's key holds it (``lab.Cell.key``), so that what was run by another reading of a rule, with another formula, anchor
or number, is not taken for a run of the rule as it is now. A function that computes the same under another name is the
same reading.

The names of kept runs' readings stand with their gradients in ``readings.json.gz``, because processors round
differently: gradients within ``TOLERANCE`` have the stored name. Other gradients are named by a hash of their digits.

    python -m examples.arena.readings     stores the readings of all registered runs that are not stored yet
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.algorithms.algorithm import Algorithm, build_algorithm
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import policy_loss

OPTION = "algorithm.options."
RESPONSES, LENGTH, WORDS = 40, 5, 60
DIGITS = 8
STORED = Path(__file__).with_name("readings.json.gz")
TOLERANCE = 1e-4
"""Largest relative difference of two gradients of the same reading."""
_ROUNDING = 1e-12
"""Gradients below it are what rounding leaves of sums that cancel."""
_NOISE, _NOISY_PASSES = 1e-13, 256


def reading_of(algorithm: str, changes: Sequence[str] = ()) -> str:
    """The reading of ``algorithm`` with the options among ``changes``, of the form ``algorithm.options.x=1``."""
    return _reading(algorithm, options_of(changes))


def options_of(changes: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The algorithm's options among ``changes``: (name, value)."""
    options = (c.removeprefix(OPTION).partition("=") for c in changes if c.startswith(OPTION))
    return tuple((name, value) for name, _, value in options)


@functools.cache
def _reading(algorithm: str, options: tuple[tuple[str, str], ...]) -> str:
    values = flat_gradients(algorithm, options)
    for name, stored in _stored().items():
        if is_same_reading(values, stored):
            return name
    return hash_of(values)


def flat_gradients(
    algorithm: str, options: tuple[tuple[str, str], ...], noise: int | None = None
) -> np.ndarray:
    """The gradients of ``gradients_of`` in one row, float64."""
    numbers = {name: float(value) for name, value in options}
    gradients = gradients_of(build_algorithm(algorithm, numbers), noise)
    return torch.cat([gradient.flatten() for gradient in gradients]).numpy()


def hash_of(values: np.ndarray) -> str:
    """A hash of the gradients' first three digits."""
    text = " ".join(f"{x:.2e}" for x in values.tolist())
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def is_same_reading(values: np.ndarray, stored: np.ndarray) -> bool:
    """Whether ``values`` are the gradients of a stored reading, which has NaN where rounding decides."""
    if values.shape != stored.shape:
        return False
    is_close = np.isclose(values, stored, rtol=TOLERANCE, atol=_ROUNDING)
    return bool((is_close | np.isnan(stored)).all())


@functools.cache
def _stored() -> Mapping[str, np.ndarray]:
    """The gradients of the stored readings, by name."""
    with gzip.open(STORED, "rt", encoding="utf-8") as file:
        rows = json.load(file)
    return {name: np.array(row, dtype=float) for name, row in rows.items()}


def stable_gradients(algorithm: str, options: tuple[tuple[str, str], ...]) -> np.ndarray:
    """The gradients of a rule with NaN in the place of those that noise of the size of rounding changes."""
    values = flat_gradients(algorithm, options)
    for seed in range(_NOISY_PASSES):
        noisy = flat_gradients(algorithm, options, noise=seed)
        is_stable = np.isclose(noisy, values, rtol=TOLERANCE, atol=_ROUNDING)
        values = np.where(is_stable, values, np.nan)
    return values


def gradients_of(algorithm: Algorithm, noise: int | None = None) -> list[Tensor]:
    """Of the loss of ``fixed_tokens``, by log pi of the sampled token and, where the rule centers, of TopK(mu)."""
    inputs, leaves = fixed_tokens(algorithm, noise)
    loss = policy_loss(algorithm, inputs).loss
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [g.detach() for g in gradients if g is not None]


def fixed_tokens(
    algorithm: Algorithm, noise: int | None = None
) -> tuple[TokenInputs, list[Tensor]]:
    """Tokens of ``RESPONSES`` responses whose policies lie from hardly to far apart, and the tensors whose gradient the
    loss gives: what ``algorithm`` reads of them, float64. ``noise``: seed of relative noise of the size of rounding."""
    mu, recomputed, pi = _policies()
    if noise is not None:
        generator = torch.Generator().manual_seed(noise)
        mu, recomputed, pi = (
            x * (1 + _NOISE * torch.randn(x.shape, generator=generator, dtype=x.dtype))
            for x in (mu, recomputed, pi)
        )
    count = RESPONSES * LENGTH
    responses = torch.arange(count) // LENGTH
    sampled = (torch.arange(count) * 7) % WORDS
    # Likely and unlikely words in turn: where a ratio and a divergence differ.
    likely = torch.arange(count) % 2 == 0
    sampled = torch.where(likely, mu.argmax(-1), sampled)
    log_pi, log_mu, log_recomputed = (p.gather(1, sampled[:, None])[:, 0] for p in (pi, mu, recomputed))  # fmt: skip
    log_pi = log_pi.requires_grad_()
    advantages = torch.where((responses + responses // 3) % 2 == 0, 0.5, -0.5).double()
    anchor = recomputed if algorithm.needs_recomputed_distribution else mu
    kept = WORDS if algorithm.preset.whole_vocabulary else algorithm.topk or WORDS
    ids = anchor.topk(kept).indices
    is_new = ~(ids == sampled[:, None]).any(1, keepdim=True)
    topk_pi, topk_anchor = (p.gather(1, ids) for p in (pi, anchor))
    topk_pi = topk_pi.requires_grad_()
    valid = torch.cat([torch.ones_like(ids, dtype=torch.bool), is_new], 1)
    bound = None
    if algorithm.step_bound is not None:
        found = algorithm.step_bound(log_pi.detach() - log_mu, advantages, lambda sums: sums)
        bound = torch.full_like(log_mu, found)
    inputs = TokenInputs(
        log_probs=log_pi,
        rollout_log_probs=log_mu,
        advantages=advantages,
        loss_mask=torch.ones(count, dtype=torch.bool),
        recomputed_log_probs=log_recomputed,
        topk_log_probs=torch.cat([topk_pi, log_pi.detach()[:, None]], 1),
        rollout_topk_log_probs=torch.cat([topk_anchor, log_mu[:, None]], 1),
        topk_valid=valid,
        sequence_ids=responses,
        tail_ids=WORDS - valid.sum(-1),
        sum_squares=pi.exp().square().sum(-1),
        step_bound=bound,
    )
    return inputs, [log_pi, topk_pi]


def _policies() -> tuple[Tensor, Tensor, Tensor]:
    """log mu, log of the recomputed policy, log pi: [tokens, words], float64, the same on every machine."""
    tokens = torch.arange(RESPONSES * LENGTH, dtype=torch.float64)[:, None]
    words = torch.arange(WORDS, dtype=torch.float64)[None]
    # From flat to peaked within each response.
    sharpness = 0.5 + 4 * (tokens % LENGTH)
    logits = sharpness * (
        torch.cos(tokens * 0.7 + words * 1.3) + torch.cos(tokens * 1.9 - words * 0.6)
    )
    # The first responses are nearly on policy, the last ones far from it.
    distance = 6 * (((tokens // LENGTH) + 1) / RESPONSES) ** 2
    of_engine = 0.4 * distance * torch.cos(tokens * 2.3 + words * 2.9)
    of_step = distance * torch.cos(tokens * 1.1 + words * 3.7)
    return (
        logits.log_softmax(-1),
        (logits + of_engine).log_softmax(-1),
        (logits + of_engine + of_step).log_softmax(-1),
    )


def store(rows: Mapping[str, np.ndarray]) -> None:
    """Store readings, by name."""
    texts = {name: [float(f"{x:.6g}") for x in values.tolist()] for name, values in rows.items()}
    with open(STORED, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(json.dumps(texts).encode())


def main() -> None:
    """Store the readings of all registered runs that are not stored yet, under their hashes."""
    from examples.arena import findings, fp8, run

    rows = dict(_stored())
    for cell in (*findings.cells_by_setting(), *run.cells_of(fp8.CLAIMS)):
        reading = reading_of(cell.algorithm, cell.changes)
        if reading not in rows:
            rows[reading] = stable_gradients(cell.algorithm, options_of(cell.changes))
    store(rows)


if __name__ == "__main__":
    main()
