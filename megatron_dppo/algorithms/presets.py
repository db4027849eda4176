"""Every algorithm of arXiv 2602.04879 and its common comparators, as one table: name -> mask,
anchor, thresholds, cap.

Numbers are those of the paper's stability study where it names them: TV 0.15, KL 0.05, infinite
caps. Its scaling runs set ``ratio_cap: 5`` for all of them and ``tv_threshold: 0.2``; its Top-K
ablation uses TV 0.2. Every number is an option.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from megatron_dppo.algorithms import masks
from megatron_dppo.algorithms import token_weights as weights
from megatron_dppo.algorithms.inputs import Anchor, recomputed, rollout
from megatron_dppo.algorithms.masks import Mask
from megatron_dppo.algorithms.token_weights import Weight


@dataclass(frozen=True)
class Algorithm:
    """What the loss and the loop need to know of an algorithm.

    ``mask``: True where a token trains. ``weight``: w in M min(w, C) A grad log pi. ``ratio_cap``:
    C. ``needs_recomputed``: the trainer must recompute the log-probabilities at the rollout's
    weights. ``topk``: K of the engine's TopK(mu); 0: none. ``needs_full_distribution``: K must be
    the whole vocabulary. ``needs_sequences``: ``TokenInputs.sequence_ids`` must be set.
    ``numbers``: thresholds, cap and K as they are in force, for the run's records.
    """

    name: str
    mask: Mask
    weight: Weight
    ratio_cap: float = math.inf
    needs_recomputed: bool = False
    topk: int = 0
    needs_full_distribution: bool = False
    needs_sequences: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """A row of the table. ``mask_numbers`` and ``weight_numbers`` are the keyword arguments of
    those functions.
    """

    mask: Callable[..., Tensor] = masks.train_all
    mask_numbers: Mapping[str, float] = field(default_factory=dict)
    anchor: Anchor = rollout
    weight: Callable[..., Tensor] = weights.importance_ratio
    weight_numbers: Mapping[str, float] = field(default_factory=dict)
    ratio_cap: float = math.inf
    topk: int = 0
    needs_full_distribution: bool = False
    needs_sequences: bool = False

    @property
    def numbers(self) -> dict[str, float]:
        """Every option of the preset with its default."""
        topk = {"topk": self.topk} if self.topk else {}
        return {**self.mask_numbers, **self.weight_numbers, "ratio_cap": self.ratio_cap, **topk}


CLIP = {"clip_low": 0.2, "clip_high": 0.2}
CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
TV = {"tv_threshold": 0.15}
KL = {"kl_threshold": 0.05}
TOPK_TV = {"tv_threshold": 0.2}
RELAXED = {**CLIP_HIGHER, "rare_below": 0.1}
ICEPOP = {"mismatch_low": 0.5, "mismatch_high": 5.0, **CLIP}
GSPO_CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}


def _relaxed(low: bool, high: bool) -> Preset:
    return Preset(partial(masks.relaxed_clip, relax_low=low, relax_high=high), RELAXED)


PRESETS: dict[str, Preset] = {
    "pg-is": Preset(),
    "pg-tis": Preset(ratio_cap=3.0),
    "cispo": Preset(ratio_cap=5.0),
    "ppo": Preset(masks.ratio_clip, CLIP),
    "grpo": Preset(masks.ratio_clip, CLIP),
    "grpo-clip-higher": Preset(masks.ratio_clip, CLIP_HIGHER),
    "minirl": Preset(masks.ratio_clip, CLIP_HIGHER, recomputed),
    "minirl-tis": Preset(masks.ratio_clip, CLIP_HIGHER, recomputed, ratio_cap=3.0),
    "dppo-binary-tv": Preset(masks.binary_tv, TV),
    "dppo-binary-kl": Preset(masks.binary_kl, KL),
    "dppo-topk-tv": Preset(masks.topk_tv, TOPK_TV, topk=20),
    "dppo-topk-kl": Preset(masks.topk_kl, KL, topk=20),
    "dppo-exact-tv": Preset(masks.topk_tv, TOPK_TV, needs_full_distribution=True),
    "dppo-exact-kl": Preset(masks.topk_kl, KL, needs_full_distribution=True),
    "dppo-decoupled-binary-tv": Preset(masks.binary_tv, TV, recomputed),
    "dppo-decoupled-binary-kl": Preset(masks.binary_kl, KL, recomputed),
    "mask-0.5": Preset(masks.large_drop, {"max_drop": 0.5}),
    "mask-0.8": Preset(masks.large_drop, {"max_drop": 0.8}),
    "mask-0.5-recompute": Preset(masks.large_drop, {"max_drop": 0.5}, recomputed),
    "relax-high": _relaxed(low=False, high=True),
    "relax-low": _relaxed(low=True, high=False),
    "relax-both": _relaxed(low=True, high=True),
    "icepop": Preset(masks.icepop, ICEPOP, recomputed),
    "gspo": Preset(
        masks.sequence_clip,
        GSPO_CLIP,
        weight=weights.sequence_importance_ratio,
        needs_sequences=True,
    ),
    "drpo": Preset(weight=weights.drpo, weight_numbers={"penalty_threshold": 12.5}),
}
"""Chosen here, not published: IcePop's clip bounds, the exact divergences' thresholds (as Top-K's),
MiniRL's Clip-Higher
bounds. IcePop's band [0.5, 5] is Ring-1T's; GSPO's bounds are its paper's."""


@dataclass(frozen=True)
class Number:
    """What an option means, and between which values it lies (``low`` exclusive, ``high``
    inclusive).
    """

    meaning: str
    low: float = 0.0
    high: float = math.inf


OPTIONS: dict[str, Number] = {
    "tv_threshold": Number(
        "largest total variation at which a diverging token still trains", -1e-300, 1.0
    ),
    "kl_threshold": Number(
        "largest KL(mu || pi), nats, at which a diverging token still trains", -1e-300
    ),
    "clip_low": Number("r below 1 - this is blocked where A < 0", -1e-300, 1.0),
    "clip_high": Number("r above 1 + this is blocked where A > 0", -1e-300),
    "max_drop": Number("drop of probability from which a token with A < 0 is blocked", 0.0, 1.0),
    "rare_below": Number("rollout probability below which the clip is relaxed", -1e-300, 1.0),
    "mismatch_low": Number("smallest pi' / mu that trains", -1e-300),
    "mismatch_high": Number("largest pi' / mu that trains"),
    "penalty_threshold": Number("delta of DRPO's quadratic penalty, in probability"),
    "ratio_cap": Number("C: the weight of a token is cut to this"),
    "topk": Number("K: ids of TopK(mu) that the engine returns for each token"),
}


def build_algorithm(name: str, options: Mapping[str, Any] | None = None) -> Algorithm:
    """The preset ``name`` with ``options`` in place of its numbers.

    Raises ValueError, naming what is accepted, for an unknown name or option, a value of the wrong
    type (a bool is not a number; ``topk`` is whole) or outside its range.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown algorithm {name!r}; known: {', '.join(PRESETS)}")
    preset = PRESETS[name]
    numbers = preset.numbers
    for option, value in (options or {}).items():
        if option not in numbers:
            raise ValueError(
                f"algorithm {name!r} has no option {option!r}; it has {', '.join(sorted(numbers))}"
            )
        numbers[option] = _checked(name, option, value)
    mask = partial(
        preset.mask, anchor=preset.anchor, **{k: numbers[k] for k in preset.mask_numbers}
    )
    weight = partial(
        preset.weight, anchor=preset.anchor, **{k: numbers[k] for k in preset.weight_numbers}
    )
    return Algorithm(
        name=name,
        mask=mask,
        weight=weight,
        ratio_cap=numbers["ratio_cap"],
        needs_recomputed=preset.anchor is recomputed,
        topk=int(numbers.get("topk", 0)),
        needs_full_distribution=preset.needs_full_distribution,
        needs_sequences=preset.needs_sequences,
        numbers=numbers,
    )


def _checked(name: str, option: str, value: Any) -> float:
    number = OPTIONS[option]
    where = f"algorithm {name!r}, option {option!r} ({number.meaning})"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: expected a number, got {value!r}")
    if option == "topk" and not isinstance(value, int):
        raise ValueError(f"{where}: expected a whole number, got {value!r}")
    if not number.low < value <= number.high:
        raise ValueError(
            f"{where}: {value!r} is outside its range, ({number.low:g}, {number.high:g}]"
        )
    return value
