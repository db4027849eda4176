"""The divergence that an algorithm's mask compares with its threshold, for records of a step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron_dppo.algorithms import divergence, masks
from megatron_dppo.algorithms.inputs import Anchor, TokenInputs
from megatron_dppo.algorithms.presets import PRESETS, Algorithm

Distance = Callable[[TokenInputs, Anchor], Tensor]

DISTANCES: dict[Callable[..., Tensor], Distance] = {
    masks.binary_tv: lambda inputs, anchor: divergence.binary_tv(inputs.log_probs, anchor(inputs)),
    masks.binary_kl: lambda inputs, anchor: divergence.binary_kl(inputs.log_probs, anchor(inputs)),
    masks.topk_tv: lambda inputs, anchor: divergence.topk_tv(*masks.topk_of(inputs)),
    masks.topk_kl: lambda inputs, anchor: divergence.topk_kl(*masks.topk_of(inputs)),
}
"""Mask -> what it measures. Clips and drops compare something else, and are not in here."""


def mask_divergence(algorithm: Algorithm, inputs: TokenInputs) -> Tensor | None:
    """D of each token, float64, as the mask computes it; None where the mask measures none."""
    preset = PRESETS.get(algorithm.name)
    measure = None if preset is None else DISTANCES.get(preset.mask)
    return None if preset is None or measure is None else measure(inputs, preset.anchor)
