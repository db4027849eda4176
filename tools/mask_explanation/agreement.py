"""Whether what was saved of a step is what the run recorded of it, and follows from the mask's rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mask_explanation.seen import SeenStep
from megatron_dppo.algorithms import masks
from megatron_dppo.algorithms.diagnostics import token_metrics
from megatron_dppo.algorithms.mask_divergence import DISTANCES
from megatron_dppo.algorithms.presets import PRESETS, Algorithm
from megatron_dppo.metrics.definitions import means
from megatron_dppo.metrics.file_names import MASKED_TOKENS_FILE
from megatron_dppo.metrics.masked_tokens import MaskedTokenCounts, most_masked, read_masked_tokens
from megatron_dppo.metrics.records import RECORDS_FILE, read_records, step_of

COUNTS = ("policy/tokens", "mask/tokens_positive", "mask/tokens_negative", "mask/masked")
MEANS = (
    "policy/abs_prob_gap",
    "policy/prob_gap",
    "policy/prob_gap_min",
    "policy/prob_gap_max",
    "policy/ratio_max",
    "policy/bad_update",
    "policy/entropy",
    "mask/masked_positive",
    "mask/masked_negative",
    "mask/cap_hit",
    "mask/rollout_prob_of_masked",
    "mask/entropy_of_masked",
    "mask/ppo_only",
    "mask/dppo_only",
)
RELATIVE, ABSOLUTE = 1e-5, 1e-9
"""Allowed of a mean: another device and another order of summation, from the same float32 numbers."""


class DisagreementError(ValueError):
    """What was saved of a step is not what was recorded of it."""


def check_agreement(seen: SeenStep, algorithm: Algorithm, run: Path, step: int) -> str:
    """Compare ``seen`` with all that the run recorded of ``step``; what was compared, in words.

    ``algorithm``: the run's own. Raises DisagreementError naming the figure.
    """
    _check_rule(seen, algorithm)
    decisions = seen.decisions(algorithm)
    figures = means(token_metrics(seen.inputs, decisions, algorithm.ratio_cap).values())
    record = next((r for r in read_records(run) if step_of(r) == step), None)
    if record is None:
        raise DisagreementError(f"{run / RECORDS_FILE} has no record of step {step}")
    for name in (*COUNTS, *MEANS):
        found, recorded = figures.get(name, np.nan), record.get(name)
        allowed = 0.0 if name in COUNTS else ABSOLUTE + RELATIVE * abs(found)
        differs = recorded is not None and not abs(found - recorded) <= allowed
        if differs or (recorded is None and np.isfinite(found)):
            raise DisagreementError(
                f"step {step}: {name} of the saved tokens is {found:g}, "
                f"{RECORDS_FILE} says {recorded}"
            )
    counts = MaskedTokenCounts(int(seen.token_ids.max()) + 1)
    counts.add(seen.token_ids, seen.inputs.advantages, ~seen.trains)
    assert counts.counts is not None
    found = most_masked(counts.counts)
    recorded = read_masked_tokens(run, step)
    if found != recorded:
        raise DisagreementError(
            f"step {step}: the saved mask blocks {found[:3]}... most often, {MASKED_TOKENS_FILE} says "
            f"{recorded if recorded is None else recorded[:3]}..."
        )
    return (
        f"as the loss saw it: {len(seen.trains)} tokens, {int((~seen.trains).sum())} blocked; agrees "
        f"with {RECORDS_FILE} and {MASKED_TOKENS_FILE}"
    )


def _check_rule(seen: SeenStep, algorithm: Algorithm) -> None:
    """Where the mask bounds a divergence, each token was blocked exactly where the saved one says so."""
    preset = PRESETS[algorithm.name]
    if preset.mask not in DISTANCES:
        return
    if seen.divergence is None:
        raise DisagreementError(f"{algorithm.name} measures a divergence, but none was saved")
    bounds = [v for n, v in algorithm.numbers.items() if n in ("tv_threshold", "kl_threshold")]
    negative = [v for n, v in algorithm.numbers.items() if n.endswith("_threshold_negative")]
    finite = seen.decisions(algorithm).finite
    expected = finite & masks.near(seen.inputs, preset.anchor, seen.divergence, *bounds, *negative)
    wrong = torch.nonzero(expected != seen.trains).flatten().tolist()
    if wrong:
        raise DisagreementError(
            f"{len(wrong)} tokens were not blocked as their saved divergence says; the first has D = "
            f"{float(seen.divergence[wrong[0]]):g}, and {'trained' if seen.trains[wrong[0]] else 'did not'}"
        )
