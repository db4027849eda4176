"""What is compared before a commit: a checksum of every tensor, and log-probabilities (the canary).

Checksums say that the bytes arrived. They can't see whether engine and trainer mean the same by the
same bytes: a conversion that swaps two tensors hands both sides the same wrong bytes, and a kernel may
keep a stale copy of right ones. The log-probabilities of fixed prompts, computed by both, tell that.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.checksums import ExpectedChecksums
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.weight_sync.engines import Bucket, EngineFaultError, Engines

PROMPTS = 4
PROMPT_TOKENS = 24


class Tolerance(NamedTuple):
    """Differences of log-probabilities (nats) that numerics explain: of one token, and the mean of all."""

    largest: float
    mean: float


_TOLERANCE = {"float32": Tolerance(1e-3, 1e-4), "bfloat16": Tolerance(10.0, 0.3)}
"""By weight type. In bfloat16 one logit of 20 is rounded to a multiple of 0.125, and a router whose choice is a tie
sends a token to another expert: a single token may differ by several nats (6.3 measured), their mean hardly (0.21)."""
_LAYERS = 8
"""Of the models in which they were measured."""


def canary_tolerance(config: WeightSyncConfig, dtype_name: str, num_layers: int) -> Tolerance:
    """What ``config`` takes for rounding in weights of ``dtype_name``, its defaults filled in.

    The default mean grows with the cube root of the layers from 8 on, as the differences measured with 2 to 48
    layers do (docs/weight_sync.md).
    """
    default = _TOLERANCE[dtype_name]
    deeper = max(1.0, num_layers / _LAYERS) ** (1 / 3)
    return Tolerance(
        largest=default.largest if config.canary_largest is None else config.canary_largest,
        mean=default.mean * deeper if config.canary_mean is None else config.canary_mean,
    )


@dataclass(frozen=True)
class CanaryReport:
    """Differences of log-probabilities in nats over all tokens of the fixed prompts."""

    max_abs_diff: float
    mean_abs_diff: float
    tokens: int


class CanaryError(EngineError):
    attempts = 2


def canary_prompts(vocab_size: int) -> list[list[int]]:
    """PROMPTS fixed sequences of PROMPT_TOKENS ids all over the vocabulary: the same in every run.

    Without the last id, in whose place SGLang 0.5.23 scores id 0 (it takes it for padding).
    """
    # A generator of its own: every run asks the same, and the run's own generators stay as they are.
    draw = random.Random(20_240_711)
    return [[draw.randrange(vocab_size - 1) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def compare_canary(
    trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]], tolerance: Tolerance
) -> CanaryReport:
    """Compare log-probabilities ``[prompt][token]`` of the same tokens at temperature 1.

    Raises CanaryError naming the worst prompt and token where a difference, or the mean of all,
    exceeds ``tolerance`` or is not a number; ValueError where the two don't hold the same tokens.
    """
    if [len(p) for p in trainer] != [len(p) for p in engine] or not any(trainer):
        raise ValueError(
            f"canary: token counts by prompt differ or are empty: trainer {[len(p) for p in trainer]}, "
            f"engine {[len(p) for p in engine]}"
        )
    differences = [
        (abs(a - b), prompt, token)
        for prompt, (ours, theirs) in enumerate(zip(trainer, engine, strict=True))
        for token, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ]
    values = [d[0] for d in differences]
    mean = sum(values) / len(values)
    # NaN compares false with everything: look for what is not within the tolerance.
    failed = [d for d in differences if not d[0] <= tolerance.largest]
    if failed or not mean <= tolerance.mean:
        # A NaN is the worst of all, and max finds it by chance only.
        worst, prompt, token = next((d for d in failed if d[0] != d[0]), max(differences))
        raise CanaryError(
            f"canary: log-probability of token {token} of prompt {prompt} differs by {worst:.3g} "
            f"(trainer {trainer[prompt][token]:.6g}, engine {engine[prompt][token]:.6g}), "
            f"expected at most {tolerance.largest:g}; {len(failed)} of {len(differences)} tokens are "
            f"off; the mean difference is {mean:.3g}, expected at most {tolerance.mean:g}"
        )
    return CanaryReport(max(values), mean, len(values))


def compare_scores(
    engines: Engines,
    prompts: Sequence[Sequence[int]],
    trainer: Sequence[Sequence[float]],
    tolerance: Tolerance,
    adapter: str | None = None,
) -> CanaryReport:
    """Let the engines go on, for as long as it takes to score ``prompts`` (with their ``adapter``), and compare.

    Returns the worst engine's report. Raises EngineFaultError of CanaryError.
    """
    engines.each(lambda engine: engine.resume())
    scores = engines.each(lambda engine: engine.score(prompts, adapter))
    reports: list[CanaryReport] = []
    faults: dict[str, BaseException] = {}
    for url, theirs in scores.items():
        try:
            reports.append(compare_canary(trainer, theirs, tolerance))
        except CanaryError as error:
            faults[url] = error
    if faults:
        raise EngineFaultError(faults)
    return max(reports, key=lambda report: report.max_abs_diff)


@dataclass(frozen=True)
class ChecksumMismatch:
    """One engine tensor whose bytes aren't the trainer's.

    ``expected`` or ``actual`` None: that side has no such tensor.
    """

    tensor: str
    rank: int
    expected: str | None
    actual: str | None

    def __str__(self) -> str:
        sides = f"expected {self.expected}, got {self.actual}"
        return f"{self.tensor} on engine rank {self.rank}: {sides}"


class ChecksumMismatchError(EngineError):
    def __init__(self, mismatches: Sequence[ChecksumMismatch]) -> None:
        shown = "; ".join(str(m) for m in mismatches[:5])
        more = f"; and {len(mismatches) - 5} more" if len(mismatches) > 5 else ""
        super().__init__(
            f"{len(mismatches)} engine tensors differ from the trainer's: {shown}{more}"
        )
        self.mismatches = tuple(mismatches)
        # Other names are those of another model; wrong bytes may arrive right the next time.
        other_names = any(m.expected is None or m.actual is None for m in mismatches)
        self.attempts = 1 if other_names else 2


def compare_checksums(
    expected: Sequence[Mapping[str, str]], actual: Sequence[Mapping[str, str]]
) -> list[ChecksumMismatch]:
    """Differences by engine rank and tensor name; a tensor that only one side has is one, too."""
    return [
        ChecksumMismatch(name, rank, ours.get(name), theirs.get(name))
        for rank, (ours, theirs) in enumerate(zip(expected, actual, strict=True))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


class ExpectedByLayout:
    """Checksums of the buckets that this rank sends, once for each layout among the engines."""

    def __init__(self, engines: Engines) -> None:
        self._by_layout: dict[tuple[int, str], ExpectedChecksums] = {}
        for engine in engines.members:
            if engine.layout not in self._by_layout:
                self._by_layout[engine.layout] = engine.expected()

    def add(self, bucket: Bucket) -> None:
        for expected in self._by_layout.values():
            expected.add(bucket)

    def partials(self) -> list[Any]:
        """What was added, by layout; JSON."""
        return [expected.partial() for expected in self._by_layout.values()]


def compare_tensors(engines: Engines, partials: Sequence[Sequence[Any]]) -> int:
    """Compare every engine tensor with what all senders' ``partials`` say; returns how many there are.

    Raises EngineFaultError of ChecksumMismatchError, and IncompleteWeightsError.
    """
    layouts = list(dict.fromkeys(engine.layout for engine in engines.members))
    digests: dict[tuple[int, str], Sequence[Mapping[str, str]]] = {}
    for engine in engines.members:
        if engine.layout not in digests:
            mine = [sender[layouts.index(engine.layout)] for sender in partials]
            digests[engine.layout] = engine.expected().digests(mine)
    actual = engines.each(lambda engine: engine.checksums())
    faults = {}
    for engine in engines.members:
        mismatches = compare_checksums(digests[engine.layout], actual[engine.url])
        if mismatches:
            faults[engine.url] = ChecksumMismatchError(mismatches)
    if faults:
        raise EngineFaultError(faults)
    return sum(len(rank) for ranks in actual.values() for rank in ranks)
