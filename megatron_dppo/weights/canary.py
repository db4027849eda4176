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
from megatron_dppo.model.quantization import SCALED_BY
from megatron_dppo.weights.engine_weights import DecodedScores
from megatron_dppo.weights.engines import EngineFaultError, Engines

log = logging.getLogger(__name__)

PROMPTS = 4
"""Number of prompts."""
FP8_PROMPTS = 64
"""Number of prompts with FP8 weights. Their differences are larger, so that their mean needs more tokens."""


PROMPT_TOKENS = 24
"""Number of tokens of a prompt."""


DECODED_TOKENS = 4
"""Number of tokens that the engine decodes one by one after each prompt. The first token of the response is not
counted, because the prompt's prefill computes it."""


class Tolerance(NamedTuple):
    """The largest differences of log-probabilities, in nats, that rounding explains.

    Attributes:
        largest: bound for a single token.
        mean: bound for the mean over all tokens.
    """

    largest: float
    mean: float


_NEAR_TIE_LARGEST = 10.0
"""The largest difference in nats at a token whose expert changes because of a near tie in the router's scores."""
_TOLERANCE = {
    "float32": Tolerance(1e-3, 1e-4),
    "bfloat16": Tolerance(_NEAR_TIE_LARGEST, 0.3),
    "fp8": Tolerance(_NEAR_TIE_LARGEST, 0.6),
}
"""The tolerance by dtype of the engines' weights.

In bfloat16 a logit of 20 is rounded to a multiple of 0.125. If a router has a near tie, rounding sends a token to
another expert. So a single token may differ by several nats, but the mean over all tokens stays small. In a trained
model, right weights differed by at most 6.3 nats at one token, and by 0.21 in the mean. A mapping that is wrong in a
whole layer moves the mean by 0.69 or more.

With fp8 a bfloat16 trainer scores with rounded weights, and the engines round activations too. So the mean is larger
than in bfloat16: in a model with random weights it was 0.07, eight times the mean of the same model in bfloat16. The
bound of a model follows from its own noise (``Fp8Noise``), and is at most the number in this table.
"""

_NOISE_FACTOR = {True: 1.25, False: 1.75}
"""The largest ratio of the mean difference to the mean effect of one more rounding, by ``Fp8Noise.is_exact``.

Activations are rounded with the relative step of weights. In eight random models the ratio was 0.61 to 0.94 with right
scales, 1.20 with unrounded weights, and 3.4 or more with one wrong expert or one wrong projection."""
_STANDARD_ERRORS = 3.0
_SCALE_STANDARD_ERRORS = 5.0
_SMALLEST_SCALE_ERROR = 0.015
"""The smallest error of all scales that the canary reports.

In 20 random models the error was found as -0.1% to 0.8% with right scales, and as 2.3% to 3.0% with scales that were
too large by 5%: rounding in g makes the found error smaller. The standard error was at most 0.3%."""


class Fp8Noise(NamedTuple):
    """The trainer's log-probabilities ``[prompt][token]`` with weights that are rounded in other ways.

    Attributes:
        twice: with ``fp8_twice``. The difference from the scores with ``fp8`` is the effect of one more rounding.
        scaled: with ``fp8_scaled``. The difference is the effect of scales that are too large by 5%.
        is_exact: whether ``fp8`` rounds the weights that the engines hold.
    """

    twice: Sequence[Sequence[float]]
    scaled: Sequence[Sequence[float]]
    is_exact: bool = True


class TrainerScores(NamedTuple):
    """The trainer's log-probabilities ``[prompt][token]``; ``noise`` with FP8 weights."""

    values: Sequence[Sequence[float]]
    noise: Fp8Noise | None = None


_MEASURED_LAYERS = 8
"""The default tolerances were measured with models of at most this many layers."""


def canary_tolerance(config: WeightSyncConfig, dtype_name: str, num_layers: int) -> Tolerance:
    """Return the tolerance of ``config``, completed by the defaults for weights of ``dtype_name``.

    Beyond 8 layers the default mean grows with the cube root of the number of layers, as the differences measured
    with 2 to 48 layers do (docs/weight_sync.md).
    """
    default = _TOLERANCE[dtype_name]
    depth_factor = max(1.0, num_layers / _MEASURED_LAYERS) ** (1 / 3)
    largest = config.canary_largest
    if largest is None:
        largest = default.largest
    mean = config.canary_mean
    if mean is None:
        mean = default.mean * depth_factor
    return Tolerance(largest, mean)


def decode_tolerance(tolerance: Tolerance) -> Tolerance:
    """Return the tolerance between an engine's own decode and prefill, from the tolerance of the prompts' scores.

    Here the mean is over fewer tokens of each prompt: DECODED_TOKENS instead of PROMPT_TOKENS - 1. So its bound is
    larger, by the square root of the ratio of the two counts.
    """
    scored_tokens = PROMPT_TOKENS - 1
    return tolerance._replace(mean=tolerance.mean * (scored_tokens / DECODED_TOKENS) ** 0.5)


@dataclass(frozen=True)
class CanaryReport:
    """Differences of log-probabilities in nats.

    Attributes:
        max_abs_diff: largest difference between trainer and engine, over all tokens of the fixed prompts.
        mean_abs_diff: mean of these differences.
        tokens: number of these tokens.
        has_near_tie: whether one prompt differs by more than the tolerance, and a near tie of a router explains this.
        decode_max_abs_diff: largest difference between the engine's decode and its prefill of the same tokens.
    """

    max_abs_diff: float
    mean_abs_diff: float
    tokens: int
    has_near_tie: bool = False
    decode_max_abs_diff: float = 0.0


class CanaryError(EngineError):
    """Log-probabilities differ by more than the tolerance. After a second failure in a row no retry can help."""

    attempts = 2


def canary_prompts(vocab_size: int, count: int = PROMPTS) -> list[list[int]]:
    """Return ``count`` fixed sequences of PROMPT_TOKENS ids, uniform over the vocabulary and the same in every run.

    The last id is left out: SGLang 0.5.23 treats it as padding and scores id 0 in its place.
    """
    # A separate generator keeps the prompts fixed and leaves the run's own generators unchanged.
    generator = random.Random(20_240_711)
    prompts = []
    for _ in range(count):
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

    If two experts have almost equal router scores (a near tie), rounding may make the sides choose different experts.
    From this token on the prompt's log-probabilities differ by more than rounding. In float32 this happens once in some
    thousands of updates, and then at one prompt. Wrong arithmetic changes all prompts.

    Args:
        trainer: log-probabilities of one side.
        engine: log-probabilities of the other side.
        tolerance: bounds of the differences.
        sides: names of the two sides.
        is_routed: whether the model has a router. Then one of several prompts may exceed ``tolerance``, up to 10 nats
            at a token.

    Raises:
        CanaryError: a difference, or the mean of all differences, exceeds ``tolerance`` or is NaN. The message names
            the worst token.
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
    worst = max(differences, key=_size_order)
    is_close = _is_within(differences, tolerance)
    is_near_tie = False
    # The tolerances of bfloat16 and fp8 include near ties already.
    if not is_close and is_routed and tolerance.largest < _NEAR_TIE_LARGEST:
        other_prompts = [row for row in differences if row.prompt != worst.prompt]
        is_near_tie = worst.nats <= _NEAR_TIE_LARGEST and _is_within(other_prompts, tolerance)
    if not is_close and not is_near_tie:
        worst_difference, prompt, token = worst
        # ``not ... <=`` also counts NaN, because every comparison with NaN is false.
        too_large = sum(not row.nats <= tolerance.largest for row in differences)
        raise CanaryError(
            f"canary: log-probability of token {token} of prompt {prompt} differs by {worst_difference:.3g} "
            f"({sides[0]} {trainer[prompt][token]:.6g}, {sides[1]} {engine[prompt][token]:.6g}), "
            f"expected at most {tolerance.largest:g}; {too_large} of {len(differences)} tokens are "
            f"off; the mean difference is {mean:.3g}, expected at most {tolerance.mean:g}"
        )
    if is_near_tie:
        log.info(
            "the canary's log-probabilities of one prompt differ by up to %.3g nats (%s and %s), those of the other "
            "prompts hardly differ: a near tie of a router",
            worst.nats,
            sides[0],
            sides[1],
        )
    return CanaryReport(worst.nats, mean, len(differences), is_near_tie)


def compare_with_noise(
    trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]], noise: Fp8Noise
) -> None:
    """Compare an FP8 engine's log-probabilities with the trainer's, by the effect that one rounding has on this model.

    n is the effect of one more rounding at each token, d the engine's difference. The mean of min(|d|, max |n|) may be
    at most 1.25 mean |n| (1.75 without ``is_exact``) and three standard errors. The minimum keeps a few near ties of
    routers from deciding.

    g is the effect of scales that are 5% too large. The part of d along g, sum(d g) / sum(g^2), is the relative error
    of the scales in units of 5%. It may be at most five standard errors, or 1.5%. Here d, g and n are first clipped to
    mean |n|: larger values come from near ties of routers, and add noise.

    Raises CanaryError.
    """
    scores = _flat(trainer)
    difference = _subtract(_flat(engine), scores)
    rounding = _subtract(_flat(noise.twice), scores)
    scaling = _subtract(_flat(noise.scaled), scores)
    count = len(scores)
    sizes = [abs(n) for n in rounding]
    mean_size = sum(sizes) / count
    spread = math.sqrt(sum((size - mean_size) ** 2 for size in sizes) / count)
    largest_size = max(sizes)
    mean = sum(min(abs(d), largest_size) for d in difference) / count
    # Both means have an error.
    error = math.sqrt(2 / count) * spread
    bound = _NOISE_FACTOR[noise.is_exact] * mean_size + _STANDARD_ERRORS * error
    if not mean <= bound:
        raise CanaryError(
            f"canary: the mean difference of log-probabilities is {mean:.3g} nats, expected at most {bound:.3g}: one "
            f"rounding of the weights to FP8 changes this model's log-probabilities by {mean_size:.3g}; the engine may "
            "read other scales than were sent"
        )
    scale_error, scale_bound = _scale_error(difference, rounding, scaling, mean_size)
    if not abs(scale_error) <= scale_bound:
        raise CanaryError(
            f"canary: log-probabilities differ as if the engine's scales were {1 + scale_error:.3f} times those that "
            f"were sent, expected 1 within {scale_bound:.3f}"
        )


def _scale_error(
    difference: Sequence[float], rounding: Sequence[float], scaling: Sequence[float], limit: float
) -> tuple[float, float]:
    """Return the relative error of all scales, and its bound, as ``compare_with_noise`` defines them.

    The arguments are d, n and g, which are clipped to ``limit`` here.
    """
    d, n, g = (_clipped(values, limit) for values in (difference, rounding, scaling))
    squares = sum(effect * effect for effect in g)
    if squares == 0:
        return 0.0, _SMALLEST_SCALE_ERROR
    unit = (SCALED_BY - 1) / squares
    standard_error = unit * math.sqrt(sum(product * product for product in map(_product, n, g)))
    bound = max(_SMALLEST_SCALE_ERROR, _SCALE_STANDARD_ERRORS * standard_error)
    return unit * sum(map(_product, d, g)), bound


def _clipped(values: Sequence[float], limit: float) -> list[float]:
    return [max(-limit, min(limit, value)) for value in values]


def _flat(scores: Sequence[Sequence[float]]) -> list[float]:
    return [value for prompt in scores for value in prompt]


def _subtract(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _product(left: float, right: float) -> float:
    return left * right


class _Difference(NamedTuple):
    """The difference of the log-probabilities of one token, in nats."""

    nats: float
    prompt: int
    token: int


def _mean(differences: Sequence[_Difference]) -> float:
    return sum(row.nats for row in differences) / len(differences)


def _is_within(differences: Sequence[_Difference], tolerance: Tolerance) -> bool:
    """Whether each difference and their mean are within ``tolerance``; False for no differences, and for a NaN."""
    # Every comparison with NaN is false.
    is_each_small = all(row.nats <= tolerance.largest for row in differences)
    return bool(differences) and is_each_small and _mean(differences) <= tolerance.mean


def _size_order(row: _Difference) -> tuple[bool, float]:
    """Order differences by size; a NaN is larger than any number."""
    if math.isnan(row.nats):
        return True, 0.0
    return False, row.nats


def _compare_decode(scores: DecodedScores, tolerance: Tolerance, *, is_routed: bool) -> float:
    """Return the largest difference between decode and prefill. Raises CanaryError beyond the tolerance."""
    if not any(scores.decode):
        # Every continuation ended before its second token. This may happen with right weights too.
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
    noise: Fp8Noise | None = None,
) -> CanaryReport:
    """Resume the engines, score ``prompts`` on each (with ``adapter``, if given), and compare with the scores of the
    ``trainer``.

    An engine scores prompts with its prefill, but samples responses with its decode. The decode has other kernels, and
    on GPUs it has captured graphs that can keep old weights. So each engine also continues the prompts, and the new
    tokens' log-probabilities from its decode are compared with their log-probabilities from its prefill.

    ``noise``: with FP8 weights, the scores for ``compare_with_noise``.

    Returns the report of the engine with the largest difference. Raises EngineFaultError, with a CanaryError for each
    engine beyond ``tolerance``.
    """
    engines.each(lambda engine: engine.resume())
    scores = engines.each(lambda engine: engine.score(prompts, adapter))
    # Cut each continuation before the last id of the vocabulary, because SGLang treats this id as padding.
    decoded = engines.each(
        lambda engine: engine.decode(
            prompts, DECODED_TOKENS, end_before=vocab_size - 1, adapter=adapter
        )
    )
    reports: list[CanaryReport] = []
    faults: dict[str, BaseException] = {}
    for url, engine_scores in scores.items():
        try:
            report = compare_canary(trainer, engine_scores, tolerance, is_routed=is_routed)
            if noise is not None:
                compare_with_noise(trainer, engine_scores, noise)
            difference = _compare_decode(decoded[url], tolerance, is_routed=is_routed)
        except CanaryError as error:
            faults[url] = error
        else:
            reports.append(replace(report, decode_max_abs_diff=difference))
    if faults:
        raise EngineFaultError(faults)
    return max(reports, key=attrgetter("max_abs_diff"))
