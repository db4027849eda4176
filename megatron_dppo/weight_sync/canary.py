"""The canary: log-probabilities of fixed prompts, compared between trainer and engines after an update."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.weights import DecodedScores
from megatron_dppo.weight_sync.engines import EngineFaultError, Engines

log = logging.getLogger(__name__)

PROMPTS = 4


PROMPT_TOKENS = 24


DECODED_TOKENS = 4
"""Tokens of each prompt that the engine computes one by one, after its first token, which ends the prompt's prefill."""


class Tolerance(NamedTuple):
    """The largest differences of log-probabilities, in nats, that rounding explains.

    Attributes:
        largest: bound for a single token.
        mean: bound for the mean over all tokens.
    """

    largest: float
    mean: float


_NEAR_TIE_LARGEST = 10.0
"""The largest difference in nats at one token whose router, by a near tie, sends it to another expert."""
_TOLERANCE = {
    "float32": Tolerance(1e-3, 1e-4),
    "bfloat16": Tolerance(_NEAR_TIE_LARGEST, 0.3),
    "fp8": Tolerance(_NEAR_TIE_LARGEST, 0.6),
}
"""The tolerance by dtype of the weights; fp8: between a bfloat16 trainer that scores with rounded weights, and engines
that round activations too. In bfloat16 a logit of 20 is rounded to a multiple of 0.125, and a router with
a near tie sends a token to another expert: a single token may differ by several nats (6.3 measured), the mean hardly
(0.21 measured). FP8 activations move the mean of a model with random weights by 0.07, eight times as much as bfloat16
does; a wrong mapping in every layer moves it by 0.69 or more."""


_LAYERS = 8
"""Number of layers of the models in which these tolerances were measured."""


def canary_tolerance(config: WeightSyncConfig, dtype_name: str, num_layers: int) -> Tolerance:
    """Return the tolerance of ``config``, completed by the defaults for weights of ``dtype_name``.

    Beyond 8 layers the default mean grows with the cube root of the number of layers, as the differences measured
    with 2 to 48 layers do (docs/weight_sync.md).
    """
    default = _TOLERANCE[dtype_name]
    deeper = max(1.0, num_layers / _LAYERS) ** (1 / 3)
    return Tolerance(
        largest=default.largest if config.canary_largest is None else config.canary_largest,
        mean=default.mean * deeper if config.canary_mean is None else config.canary_mean,
    )


def decode_tolerance(tolerance: Tolerance) -> Tolerance:
    """Return the tolerance between an engine's own decode and prefill.

    The mean is taken over fewer tokens than that of the prompts, so its bound grows with the square root of the ratio.
    """
    return tolerance._replace(mean=tolerance.mean * ((PROMPT_TOKENS - 1) / DECODED_TOKENS) ** 0.5)


@dataclass(frozen=True)
class CanaryReport:
    """Differences of log-probabilities in nats.

    Attributes:
        max_abs_diff: largest difference between trainer and engine, over all tokens of the fixed prompts.
        mean_abs_diff: mean of these differences.
        tokens: number of these tokens.
        has_near_tie: whether one prompt differs by more than the tolerance, as a near tie of a router explains.
        decode_max_abs_diff: largest difference between the engine's decode and its prefill of the same tokens.
    """

    max_abs_diff: float
    mean_abs_diff: float
    tokens: int
    has_near_tie: bool = False
    decode_max_abs_diff: float = 0.0


class CanaryError(EngineError):
    attempts = 2


def canary_prompts(vocab_size: int) -> list[list[int]]:
    """Return PROMPTS fixed sequences of PROMPT_TOKENS ids, uniform over the vocabulary and the same in every run.

    The last id is left out: SGLang 0.5.23 treats it as padding and scores id 0 in its place.
    """
    # A separate generator keeps the prompts fixed and leaves the run's own generators unchanged.
    generator = random.Random(20_240_711)
    prompts = []
    for _ in range(PROMPTS):
        prompts.append([generator.randrange(vocab_size - 1) for _ in range(PROMPT_TOKENS)])
    return prompts


def compare_canary(
    trainer: Sequence[Sequence[float]],
    engine: Sequence[Sequence[float]],
    tolerance: Tolerance,
    sides: tuple[str, str] = ("trainer", "engine"),
    *,
    is_routed: bool = False,
) -> CanaryReport:
    """Compare log-probabilities ``[prompt][token]`` of the same tokens at temperature 1.

    Where two experts have almost the same router score, the two sides may round to different experts, and from this
    token on the prompt's log-probabilities differ by more than rounding. A model with a router meets such a near tie at
    one prompt in some thousands of updates; wrong arithmetic is at all prompts.

    Args:
        trainer: log-probabilities of one side.
        engine: log-probabilities of the other side.
        tolerance: bounds of the differences.
        sides: names of the two sides.
        is_routed: whether the model has a router. Then one of several prompts may exceed a ``tolerance`` without room
            for near ties, up to 10 nats at a token.

    Raises:
        CanaryError: a difference, or the mean of all, exceeds ``tolerance`` or is NaN; names the worst token.
        ValueError: the two sides do not have the same number of tokens.
    """
    if [len(p) for p in trainer] != [len(p) for p in engine] or not any(trainer):
        raise ValueError(
            f"canary: token counts by prompt differ or are empty: {sides[0]} {[len(p) for p in trainer]}, "
            f"{sides[1]} {[len(p) for p in engine]}"
        )
    differences = []
    for prompt, (trainer_scores, engine_scores) in enumerate(zip(trainer, engine, strict=True)):
        for token, (pi, mu) in enumerate(zip(trainer_scores, engine_scores, strict=True)):
            differences.append(_Difference(abs(pi - mu), prompt, token))
    mean = _mean(differences)
    worst = max(differences, key=_rank)
    is_close = _is_within(differences, tolerance)
    is_near_tie = False
    # A tolerance for 16 bits has room for near ties.
    if not is_close and is_routed and tolerance.largest < _NEAR_TIE_LARGEST:
        others = [row for row in differences if row.prompt != worst.prompt]
        is_near_tie = worst.nats <= _NEAR_TIE_LARGEST and _is_within(others, tolerance)
    if not is_close and not is_near_tie:
        worst_difference, prompt, token = worst
        too_large = sum(not row.nats <= tolerance.largest for row in differences)
        raise CanaryError(
            f"canary: log-probability of token {token} of prompt {prompt} differs by {worst_difference:.3g} "
            f"({sides[0]} {trainer[prompt][token]:.6g}, {sides[1]} {engine[prompt][token]:.6g}), "
            f"expected at most {tolerance.largest:g}; {too_large} of {len(differences)} tokens are "
            f"off; the mean difference is {mean:.3g}, expected at most {tolerance.mean:g}"
        )
    if is_near_tie:
        log.info(
            "the canary's log-probabilities of one prompt differ by up to %.3g nats (%s and %s), those of the others "
            "hardly: a near tie of a router",
            *(worst.nats, *sides),
        )
    return CanaryReport(worst.nats, mean, len(differences), is_near_tie)


class _Difference(NamedTuple):
    """The difference of the log-probabilities of one token, in nats."""

    nats: float
    prompt: int
    token: int


def _mean(differences: Sequence[_Difference]) -> float:
    return sum(row.nats for row in differences) / len(differences)


def _is_within(differences: Sequence[_Difference], tolerance: Tolerance) -> bool:
    """Whether each difference and their mean are within ``tolerance``; False for none, and where one is NaN."""
    # Every comparison with NaN is false.
    is_each_small = all(row.nats <= tolerance.largest for row in differences)
    return bool(differences) and is_each_small and _mean(differences) <= tolerance.mean


def _rank(row: _Difference) -> tuple[bool, float]:
    """Order differences by size; a NaN is larger than any number."""
    is_nan = math.isnan(row.nats)
    return is_nan, 0.0 if is_nan else row.nats


def _compare_decode(scores: DecodedScores, tolerance: Tolerance, *, is_routed: bool) -> float:
    """Return the largest difference between decode and prefill. Raises CanaryError beyond the tolerance."""
    if not any(scores.decode):
        # Every continuation ended at once, which weights of any value may do.
        return 0.0
    sides = ("prefill", "decode")
    bound = decode_tolerance(tolerance)
    report = compare_canary(scores.prefill, scores.decode, bound, sides, is_routed=is_routed)
    return report.max_abs_diff


def compare_scores(
    engines: Engines,
    prompts: Sequence[Sequence[int]],
    trainer: Sequence[Sequence[float]],
    tolerance: Tolerance,
    vocab_size: int,
    adapter: str | None = None,
    *,
    is_routed: bool = False,
) -> CanaryReport:
    """Resume the engines, score ``prompts`` on each (with its ``adapter``), and compare with the ``trainer``'s scores.

    Scoring is a prefill. Responses come from the engine's decode, which has kernels of its own, and on GPUs captured
    graphs, which can keep old weights. So each engine also continues the prompts, and its log-probabilities of these
    tokens are compared with its own prefill of them.

    Returns the report of the engine with the largest difference. Raises EngineFaultError, with a CanaryError for each
    engine beyond ``tolerance``.
    """
    engines.each(lambda engine: engine.resume())
    scores = engines.each(lambda engine: engine.score(prompts, adapter))
    decoded = engines.each(
        lambda engine: engine.decode(
            prompts,
            DECODED_TOKENS,
            end_before=vocab_size - 1,
            adapter=adapter,
        )
    )
    reports: list[CanaryReport] = []
    faults: dict[str, BaseException] = {}
    for url, engine_scores in scores.items():
        try:
            report = compare_canary(trainer, engine_scores, tolerance, is_routed=is_routed)
            difference = _compare_decode(decoded[url], tolerance, is_routed=is_routed)
        except CanaryError as error:
            faults[url] = error
        else:
            reports.append(replace(report, decode_max_abs_diff=difference))
    if faults:
        raise EngineFaultError(faults)
    return max(reports, key=attrgetter("max_abs_diff"))
