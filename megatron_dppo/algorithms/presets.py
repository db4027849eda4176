"""Every algorithm of arXiv 2602.04879 and its common comparators, as one table: name -> mask,
anchor, thresholds, cap.

A preset's numbers belong to a setting. ``stability`` is the paper's stability study, ``scaling``
its scaling runs. Where the paper gives no number for one of them, docs/algorithms.md says "chosen".
Every number is an option.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from torch import Tensor

from megatron_dppo.algorithms import masks
from megatron_dppo.algorithms import token_weights as weights
from megatron_dppo.algorithms.inputs import Anchor, recomputed, rollout
from megatron_dppo.algorithms.masks import Mask
from megatron_dppo.algorithms.options import OPTIONS, Settings, replaced
from megatron_dppo.algorithms.penalties import PENALTIES, Penalty
from megatron_dppo.algorithms.token_weights import Weight


@dataclass(frozen=True)
class Algorithm:
    """What the loss and the loop need to know of an algorithm.

    ``mask``: True where a token trains. ``weight``: w in M min(w, C) A grad log pi. ``ratio_cap``:
    C. ``penalties``: additive terms with their coefficients. ``needs_recomputed``: the trainer must
    recompute the log-probabilities at the rollout's weights. ``topk``: K of the engine's TopK(mu);
    0: none. ``needs_full_distribution``: K must be the whole vocabulary.
    ``needs_recomputed_distribution``: the trainer must recompute the whole distribution, pi', which
    then takes TopK(mu)'s place. ``needs_sequences``: ``TokenInputs.sequence_ids`` must be set.
    ``numbers``: thresholds, cap and K as they are in force, for the run's records.
    """

    name: str
    mask: Mask
    weight: Weight
    ratio_cap: float
    penalties: tuple[tuple[float, Penalty], ...]
    needs_recomputed: bool
    topk: int
    needs_full_distribution: bool
    needs_recomputed_distribution: bool
    needs_sequences: bool
    numbers: Mapping[str, float]

    @property
    def reads_topk(self) -> bool:
        """Whether the mask looks at the Top-K tensors, whatever they hold."""
        return bool(self.topk or self.needs_full_distribution or self.needs_recomputed_distribution)


@dataclass(frozen=True)
class Preset:
    """A row of the table. ``stability``: the mask's and the weight's numbers, the cap (infinite
    where it is missing) and K. ``scaling``: those that differ there.
    """

    mask: Callable[..., Tensor] = masks.train_all
    stability: Mapping[str, float] = field(default_factory=dict)
    scaling: Mapping[str, float] = field(default_factory=dict)
    anchor: Anchor = rollout
    weight: Callable[..., Tensor] = weights.importance_ratio
    needs_full_distribution: bool = False
    needs_recomputed_distribution: bool = False
    needs_sequences: bool = False

    def numbers(self, settings: Settings) -> dict[str, float]:
        """The preset's numbers in a setting, each of them an option."""
        changed = self.scaling if settings == "scaling" else {}
        return {"ratio_cap": math.inf, **self.stability, **changed}


CAP = {"ratio_cap": 5.0}
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
CLIP_HIGHER_SCALING = {"clip_high": 0.27, **CAP}
TV, TV_SCALING = {"tv_threshold": 0.15}, {"tv_threshold": 0.2, **CAP}
KL = {"kl_threshold": 0.05}
TOPK = {"topk": 20}
TIS = {"ratio_cap": 3.0}
RELAXED = {**CLIP_HIGHER, "rare_below": 0.1}
DROP = {"max_drop": 0.5}
ICEPOP = {"mismatch_low": 0.5, "mismatch_high": 5.0, **CLIP}
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}


def _relaxed(low: bool, high: bool) -> Preset:
    mask = partial(masks.relaxed_clip, relax_low=low, relax_high=high)
    return Preset(mask, RELAXED, CLIP_HIGHER_SCALING)


PRESETS: dict[str, Preset] = {
    "pg-is": Preset(),
    "pg-tis": Preset(stability=TIS, scaling=CAP),
    "cispo": Preset(stability=TIS, scaling=CAP),
    "ppo": Preset(masks.ratio_clip, CLIP, CAP),
    "grpo": Preset(masks.ratio_clip, CLIP, CAP),
    "grpo-clip-higher": Preset(masks.ratio_clip, CLIP_HIGHER, CLIP_HIGHER_SCALING),
    "minirl": Preset(masks.ratio_clip, CLIP_HIGHER, CLIP_HIGHER_SCALING, recomputed),
    "minirl-tis": Preset(masks.ratio_clip, {**CLIP_HIGHER, **TIS}, CLIP_HIGHER_SCALING, recomputed),
    "dppo-binary-tv": Preset(masks.binary_tv, TV, TV_SCALING),
    "dppo-binary-kl": Preset(masks.binary_kl, KL, CAP),
    "dppo-topk-tv": Preset(masks.topk_tv, {**TV, **TOPK}, TV_SCALING),
    "dppo-topk-kl": Preset(masks.topk_kl, {**KL, **TOPK}, CAP),
    "dppo-exact-tv": Preset(masks.topk_tv, TV, TV_SCALING, needs_full_distribution=True),
    "dppo-exact-kl": Preset(masks.topk_kl, KL, CAP, needs_full_distribution=True),
    "recomputed-exact-tv": Preset(
        masks.topk_tv, TV, TV_SCALING, recomputed, needs_recomputed_distribution=True
    ),
    "recomputed-exact-kl": Preset(
        masks.topk_kl, KL, CAP, recomputed, needs_recomputed_distribution=True
    ),
    "dppo-decoupled-binary-tv": Preset(masks.binary_tv, TV, TV_SCALING, recomputed),
    "dppo-decoupled-binary-kl": Preset(masks.binary_kl, KL, CAP, recomputed),
    "mask-0.5": Preset(masks.large_drop, DROP, CAP),
    "mask-0.8": Preset(masks.large_drop, {"max_drop": 0.8}, CAP),
    "mask-0.5-recompute": Preset(masks.large_drop, DROP, CAP, recomputed),
    "relax-high": _relaxed(low=False, high=True),
    "relax-low": _relaxed(low=True, high=False),
    "relax-both": _relaxed(low=True, high=True),
    "icepop": Preset(masks.icepop, ICEPOP, anchor=recomputed),
    "gspo": Preset(
        masks.sequence_clip, GSPO, weight=weights.sequence_importance_ratio, needs_sequences=True
    ),
    "drpo": Preset(stability={"penalty_threshold": 12.5}, weight=weights.drpo),
}
"""What each of them blocks, and where each number comes from: docs/algorithms.md.

``recomputed-exact-...`` are diagnostics, not DPPO: distance and direction are those of pi', the
trainer's own policy at the rollout's weights, so a gap between mu and pi' stays out of their sight.
"""


def build_algorithm(
    name: str,
    options: Mapping[str, Any] | None = None,
    settings: Settings = "stability",
) -> Algorithm:
    """The preset ``name`` in ``settings``, with ``options`` in place of its numbers.

    Raises ValueError, naming what is accepted, for an unknown name, setting or option, a value of
    the wrong type (a bool is not a number; ``topk`` is whole) or outside its range, and bounds that
    exclude each other.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown algorithm {name!r}; known: {', '.join(PRESETS)}")
    if settings not in get_args(Settings):
        known = ", ".join(get_args(Settings))
        raise ValueError(f"unknown settings {settings!r} of an algorithm; known: {known}")
    preset = PRESETS[name]
    numbers = replaced(name, preset.numbers(settings), options or {})
    of_mask, of_weight = (
        {n: value for n, value in numbers.items() if OPTIONS[n].role == role}
        for role in ("mask", "weight")
    )
    return Algorithm(
        name=name,
        mask=partial(preset.mask, anchor=preset.anchor, **of_mask),
        weight=partial(preset.weight, anchor=preset.anchor, **of_weight),
        ratio_cap=numbers["ratio_cap"],
        penalties=tuple((numbers[n], term) for n, term in PENALTIES.items() if numbers.get(n)),
        needs_recomputed=preset.anchor is recomputed,
        topk=int(numbers.get("topk", 0)),
        needs_full_distribution=preset.needs_full_distribution,
        needs_recomputed_distribution=preset.needs_recomputed_distribution,
        needs_sequences=preset.needs_sequences,
        numbers=numbers,
    )


ENGINE_WHOLE_VOCABULARY = 4096
"""Tokens of a vocabulary up to which the engine is asked for its whole distribution: 8 bytes each,
for every token of a response.
"""


def carried_topk(algorithm: Algorithm, configured: int, vocab_size: int) -> int:
    """K of TopK(mu) that the engine must return for each token; 0: none.

    ``configured``: ``rollout.topk_log_probs``, 0: as the algorithm asks. Raises ValueError where
    that is too few, or the algorithm needs all of a vocabulary too large to be carried.
    """
    if not algorithm.needs_full_distribution:
        if configured and configured < algorithm.topk:
            raise ValueError(
                f"{algorithm.name} needs the engine's top {algorithm.topk} log-probabilities, but "
                f"rollout.topk_log_probs is {configured}; expected 0, or at least {algorithm.topk}"
            )
        return configured or algorithm.topk
    if vocab_size > ENGINE_WHOLE_VOCABULARY:
        raise ValueError(
            f"{algorithm.name} needs mu of the whole vocabulary from the engine, and this model's "
            f"has {vocab_size} tokens, {8 * vocab_size} bytes for each response token; expected at "
            f"most {ENGINE_WHOLE_VOCABULARY}. dppo-topk-tv and dppo-topk-kl bound it from below; "
            f"{algorithm.name.replace('dppo', 'recomputed')} measures the trainer's own recomputed "
            "policy instead, which is another distance"
        )
    if configured not in (0, vocab_size):
        raise ValueError(
            f"{algorithm.name} needs mu of the whole vocabulary, but rollout.topk_log_probs is "
            f"{configured}; expected 0 or {vocab_size}"
        )
    return vocab_size
