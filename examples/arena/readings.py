"""The reading of a rule: a short name of the gradients that its loss gives to fixed tokens.

A run's key contains the reading (``lab.Cell.key``). If the rule later changes its formula, its anchor or a number, its
new runs have another key, and the old run does not count for the present rule. Two functions with equal gradients have
one reading.

``readings.json.gz`` has the readings of kept runs with their gradients, because processors round differently: gradients
within ``TOLERANCE`` of stored gradients have the stored name. Other gradients are named by a hash of their digits.

    python -m examples.arena.readings     # store the readings of all registered runs that are not stored yet
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
HASH_DIGITS = 8
"""Digits of a hash that names a reading."""
STORED = Path(__file__).with_name("readings.json.gz")
TOLERANCE = 1e-4
"""Largest relative difference of two gradients of the same reading."""
_ROUNDING = 1e-12
"""Smaller gradients are rounding errors of sums that cancel."""
_NOISE = 1e-13
"""Relative size of the noise that stands for another processor's rounding."""
_NOISY_PASSES = 256


def reading_of(algorithm: str, changes: Sequence[str] = ()) -> str:
    """Return the reading of ``algorithm`` with the options among ``changes``, such as ``algorithm.options.x=1``."""
    return _reading(algorithm, options_of(changes))


def options_of(changes: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the algorithm's options among ``changes``: (name, value)."""
    options = []
    for change in changes:
        if change.startswith(OPTION):
            name, _, value = change.removeprefix(OPTION).partition("=")
            options.append((name, value))
    return tuple(options)


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
    """Return the gradients of ``gradients_of`` in one row, float64."""
    numbers = {name: float(value) for name, value in options}
    gradients = gradients_of(build_algorithm(algorithm, numbers), noise)
    return torch.cat([gradient.flatten() for gradient in gradients]).numpy()


def hash_of(values: np.ndarray) -> str:
    """Return a hash of the gradients' first three digits."""
    text = " ".join(f"{x:.2e}" for x in values.tolist())
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def is_same_reading(values: np.ndarray, stored: np.ndarray) -> bool:
    """Return whether ``values`` are the gradients ``stored``. A stored NaN marks a value that depends on rounding."""
    if values.shape != stored.shape:
        return False
    is_close = np.isclose(values, stored, rtol=TOLERANCE, atol=_ROUNDING)
    return bool((is_close | np.isnan(stored)).all())


@functools.cache
def _stored() -> Mapping[str, np.ndarray]:
    """Return the gradients of the stored readings, by name."""
    with gzip.open(STORED, "rt", encoding="utf-8") as file:
        rows = json.load(file)
    return {name: np.array(row, dtype=float) for name, row in rows.items()}


def stable_gradients(algorithm: str, options: tuple[tuple[str, str], ...]) -> np.ndarray:
    """Return the gradients of a rule. A gradient is NaN if noise of the size of rounding errors changes it."""
    values = flat_gradients(algorithm, options)
    for seed in range(_NOISY_PASSES):
        noisy = flat_gradients(algorithm, options, noise=seed)
        is_stable = np.isclose(noisy, values, rtol=TOLERANCE, atol=_ROUNDING)
        values = np.where(is_stable, values, np.nan)
    return values


def gradients_of(algorithm: Algorithm, noise: int | None = None) -> list[Tensor]:
    """Return the gradients of the loss of ``fixed_tokens``.

    They are gradients by log pi of the sampled tokens and, for rules that use them, of the Top-K tokens.
    """
    inputs, leaves = fixed_tokens(algorithm, noise)
    loss = policy_loss(algorithm, inputs).loss
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [gradient.detach() for gradient in gradients if gradient is not None]


def fixed_tokens(
    algorithm: Algorithm, noise: int | None = None
) -> tuple[TokenInputs, list[Tensor]]:
    """Return the inputs of ``algorithm`` for ``RESPONSES`` responses, float64, and the tensors to differentiate by.

    From the first to the last response, pi and mu differ more and more. ``noise``: seed of relative noise of the size
    of rounding errors; None: no noise.
    """
    mu, recomputed, pi = _policies()
    if noise is not None:
        generator = torch.Generator().manual_seed(noise)
        mu = _with_noise(mu, generator)
        recomputed = _with_noise(recomputed, generator)
        pi = _with_noise(pi, generator)
    count = RESPONSES * LENGTH
    responses = torch.arange(count) // LENGTH
    sampled = (torch.arange(count) * 7) % WORDS
    # Every second token is the likeliest word, the other tokens are mostly rare words: ratio and divergence differ most
    # at these two extremes.
    is_likely = torch.arange(count) % 2 == 0
    sampled = torch.where(is_likely, mu.argmax(-1), sampled)
    log_pi = pi.gather(1, sampled[:, None])[:, 0]
    log_mu = mu.gather(1, sampled[:, None])[:, 0]
    log_recomputed = recomputed.gather(1, sampled[:, None])[:, 0]
    log_pi = log_pi.requires_grad_()
    advantages = torch.where((responses + responses // 3) % 2 == 0, 0.5, -0.5).double()
    anchor = recomputed if algorithm.needs_recomputed_distribution else mu
    topk = algorithm.topk or WORDS
    if algorithm.preset.whole_vocabulary:
        topk = WORDS
    ids = anchor.topk(topk).indices
    topk_pi = pi.gather(1, ids).requires_grad_()
    topk_anchor = anchor.gather(1, ids)
    # The last column is the sampled token. This column is valid only if the sampled token is not a Top-K token.
    is_sampled_new = ~(ids == sampled[:, None]).any(1, keepdim=True)
    valid = torch.cat([torch.ones_like(ids, dtype=torch.bool), is_sampled_new], 1)
    bound = None
    if algorithm.step_bound is not None:
        step_bound = algorithm.step_bound(log_pi.detach() - log_mu, advantages, _local_sums)
        bound = torch.full_like(log_mu, step_bound)
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


def _with_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return x * (1 + _NOISE * noise)


def _local_sums(sums: Tensor) -> Tensor:
    """Return ``sums``: there is one process, so they are the sums over all ranks."""
    return sums


def _policies() -> tuple[Tensor, Tensor, Tensor]:
    """Return log mu, the log of the recomputed policy, and log pi: [tokens, words], float64, equal on every machine."""
    tokens = torch.arange(RESPONSES * LENGTH, dtype=torch.float64)[:, None]
    words = torch.arange(WORDS, dtype=torch.float64)[None]
    # Within each response, the distributions become more and more peaked.
    sharpness = 0.5 + 4 * (tokens % LENGTH)
    logits = sharpness * (
        torch.cos(tokens * 0.7 + words * 1.3) + torch.cos(tokens * 1.9 - words * 0.6)
    )
    # The first responses are nearly on policy, the last responses are far from it.
    distance = 6 * (((tokens // LENGTH) + 1) / RESPONSES) ** 2
    engine_error = 0.4 * distance * torch.cos(tokens * 2.3 + words * 2.9)
    step_change = distance * torch.cos(tokens * 1.1 + words * 3.7)
    log_mu = logits.log_softmax(-1)
    log_recomputed = (logits + engine_error).log_softmax(-1)
    log_pi = (logits + engine_error + step_change).log_softmax(-1)
    return log_mu, log_recomputed, log_pi


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
