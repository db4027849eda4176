"""Metrics as sums on the device. The sums are read once a step.

One all-reduce of a vector reduces sums, maxima and minima over the ranks. Losses return sums instead of means: the
division of a sum by a global count gives the same number for every packing, micro-batching and data-parallel layout.

This module also counts the tokens that the mask blocks, by token id and by response. A line of
``masked_tokens.jsonl`` is ``{"step": n, "tokens": [{"id", "raised", "lowered", "text"}, ...]}``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from megatron_dppo.metrics.records import MASKED_TOKENS_FILE, read_step_lines
from megatron_dppo.metrics.table import METRICS


@dataclass(frozen=True)
class MetricNames:
    """Names of the metrics of a ``MetricSums`` in the order of its vector; equal on all ranks of a reduction."""

    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    minima: tuple[str, ...] = ()

    def vector_size(self, world_size: int) -> int:
        """Length of ``MetricSums.to_vector`` for a reduction over ``world_size`` ranks."""
        return len(self.sums) + world_size * (len(self.maxima) + len(self.minima))


@dataclass(frozen=True)
class MetricSums:
    """Scalar tensors by metric name: sums, maxima and minima over tokens, micro-batches and ranks.

    The names depend on the configuration, never on the data, so the vectors of all ranks have the same order. Only
    ``values`` waits for the device.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> MetricNames:
        """The names, sorted. ``to_vector`` has the same order."""
        return MetricNames(
            tuple(sorted(self.sums)), tuple(sorted(self.maxima)), tuple(sorted(self.minima))
        )

    def __add__(self, other: MetricSums) -> MetricSums:
        """Add sums and take maxima and minima by name. A metric of only one of the operands is kept."""
        return MetricSums(
            _merged(self.sums, other.sums, torch.add),
            _merged(self.maxima, other.maxima, torch.maximum),
            _merged(self.minima, other.minima, torch.minimum),
        )

    def add(self, name: str, value: Tensor | float) -> MetricSums:
        return self + MetricSums(sums={name: torch.as_tensor(value, dtype=torch.float64)})

    def to_vector(
        self, rank: int = 0, world_size: int = 1, device: torch.device | str | None = None
    ) -> Tensor:
        """Pack sums, maxima and minima into a float64 vector for one SUM all-reduce.

        Args:
            rank: this rank in the group of the all-reduce.
            world_size: number of ranks in this group.
            device: device of the vector; default: the device of the metrics.

        Returns:
            float64 ``[names.vector_size(world_size)]``, detached.
        """
        names = self.names
        sums = [self.sums[n] for n in names.sums]
        extremes = [self.maxima[n] for n in names.maxima] + [self.minima[n] for n in names.minima]
        if device is None:
            device = "cpu"
            if sums or extremes:
                device = (sums + extremes)[0].device
        vector = torch.zeros(names.vector_size(world_size), dtype=torch.float64, device=device)
        if sums:
            vector[: len(sums)] = _stacked(sums, device)
        if extremes:
            # The vector has a slot for each rank. This rank writes its extremes to its own slot and leaves 0 in the
            # other slots. So the sum of all ranks' vectors has every rank's extremes.
            start = len(sums) + rank * len(extremes)
            vector[start : start + len(extremes)] = _stacked(extremes, device)
        return vector

    @staticmethod
    def from_vector(names: MetricNames, vector: Tensor, world_size: int = 1) -> MetricSums:
        """Unpack the sum of the vectors of ``world_size`` ranks; inverse of ``to_vector``.

        Raises ValueError if the vector's length does not match ``names`` and ``world_size``.
        """
        expected_length = names.vector_size(world_size)
        if vector.shape != (expected_length,):
            raise ValueError(
                f"metric vector has shape {tuple(vector.shape)}, expected ({expected_length},) for "
                f"{len(names.sums)} sums, {len(names.maxima)} maxima and {len(names.minima)} minima "
                f"of {world_size} ranks"
            )
        sum_count = len(names.sums)
        max_count = len(names.maxima)
        slots = vector[sum_count:].reshape(world_size, max_count + len(names.minima))
        # torch has no maximum of an empty dimension.
        maxima = vector.new_empty(0)
        minima = vector.new_empty(0)
        if names.maxima:
            maxima = slots[:, :max_count].amax(0)
        if names.minima:
            minima = slots[:, max_count:].amin(0)
        return MetricSums(
            dict(zip(names.sums, vector[:sum_count].unbind(), strict=True)),
            dict(zip(names.maxima, maxima.unbind(), strict=True)),
            dict(zip(names.minima, minima.unbind(), strict=True)),
        )

    def values(self) -> dict[str, float]:
        """Return all metrics as Python floats, in one transfer. Device sync: call once a step, after the reduction."""
        names = self.names
        numbers = self.to_vector().tolist()
        return dict(zip((*names.sums, *names.maxima, *names.minima), numbers, strict=True))


def _merged(
    a: dict[str, Tensor], b: dict[str, Tensor], combine: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    merged = dict(a)
    for name, value in b.items():
        if name in merged:
            merged[name] = combine(merged[name], value)
        else:
            merged[name] = value
    return merged


def _stacked(values: list[Tensor], device: torch.device | str) -> Tensor:
    return torch.stack([v.detach().to(device=device, dtype=torch.float64) for v in values])


MAX_MASKED_TOKENS = 50
"""Token ids of each sign of A in a line of ``masked_tokens.jsonl``, at most; the number of Appendix D of the paper."""


FREQUENCY_SUMS = (
    "frequency/high",
    "frequency/high_square",
    "frequency/low",
    "frequency/low_square",
)
"""Sums that only the frequency canary (``loop/frequency_canary.py``) reads; they are not recorded."""


def means(values: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers to record, by metric name, from sums, maxima and minima that were reduced over all ranks.

    A sum with a divisor is divided by the divisor's value; if this value is 0, the quotient is nan. Metrics without a
    divisor, or without a row in the table, are returned unchanged.
    """
    recorded_values = {}
    for name, value in values.items():
        if name in FREQUENCY_SUMS:
            continue
        row = METRICS.get(name)
        if row is None or row.divisor is None:
            recorded_values[name] = value
            continue
        quotient = math.nan
        if values[row.divisor]:
            quotient = value / values[row.divisor]
        recorded_values[row.recorded_as or name] = quotient
    return recorded_values


class MaskedToken(TypedDict):
    """The number of times that the mask blocked a token id in one step, by the sign of the advantage."""

    id: int
    raised: int
    """Times with A > 0: the update would have raised the token's probability."""
    lowered: int
    """Times with A < 0: the update would have lowered the token's probability."""


@dataclass
class MaskedTokenCounts:
    """Counts of blocked tokens of one step: int32 ``[2, V]``. Row 0: A > 0, row 1: A < 0; V: the unpadded vocabulary.

    The first ``add`` allocates the counts on the device of its tokens (8 V bytes: 1.2 MB for V = 151,936). No device
    sync.
    """

    vocab_size: int
    counts: Tensor | None = None

    def add(self, token_ids: Tensor, advantages: Tensor, blocked: Tensor) -> None:
        """Count the blocked tokens of a micro-batch. Tokens with A = 0 do not count: they have no gradient anyway.

        Args:
            token_ids: int64 ``[T]``.
            advantages: float ``[T]``.
            blocked: bool ``[T]``.
        """
        if self.counts is None:
            self.counts = torch.zeros(
                (2, self.vocab_size), dtype=torch.int32, device=token_ids.device
            )
        for row, has_sign in enumerate((advantages > 0, advantages < 0)):
            self.counts[row].scatter_add_(0, token_ids, (blocked & has_sign).int())

    def clear(self) -> None:
        """Set all counts to 0, for the next step."""
        if self.counts is not None:
            self.counts.zero_()


@dataclass
class MaskedResponses:
    """Number of blocked tokens of each response in one step. There is no device sync before ``counts``."""

    _parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(
        self, positions: Tensor, cu_seqlens: Tensor, advantages: Tensor, blocked: Tensor
    ) -> None:
        """Count each sequence's blocked tokens of a micro-batch. Tokens with A = 0 do not count: they have no gradient
        anyway.

        Args:
            positions: int64 ``[S]``, position of each sequence's response in the batch; -1 for padding.
            cu_seqlens: int32 ``[S + 1]``, boundaries of the sequences.
            advantages: float ``[T]``.
            blocked: bool ``[T]``.
        """
        # Take differences of a running sum: a loop over sequences would synchronise with the device for each.
        is_counted = (blocked & (advantages != 0)).long()
        running_sum = torch.nn.functional.pad(is_counted.cumsum(0), (1, 0))
        sums_at_bounds = running_sum[cu_seqlens.to(running_sum.device, torch.int64)]
        self._parts.append((positions, sums_at_bounds.diff()))

    def counts(self) -> dict[int, int]:
        """Return the number of blocked tokens by position in the batch, for responses that have some. Device sync."""
        total = Counter[int]()
        for positions, counts in self._parts:
            # A response with several branches has several sequences.
            for position, count in zip(positions.tolist(), counts.tolist(), strict=True):
                if position >= 0 and count > 0:
                    total[position] += count
        return dict(total)


def most_masked(counts: Tensor, limit: int = MAX_MASKED_TOKENS) -> list[MaskedToken]:
    """Return the ids with the largest counts at A > 0 and those at A < 0, up to ``limit`` each.

    The ids are in descending order of both counts together; ties in the order of ids. ``counts``: int ``[2, V]``, as
    in ``MaskedTokenCounts``. Device sync.
    """
    most_ids: list[Tensor] = []
    for sign_counts in counts:
        blocked_id_count = int(sign_counts.count_nonzero())
        # Sort stably, unlike topk: the order of equal counts is then the same on every device.
        order = torch.argsort(sign_counts, descending=True, stable=True)
        most_ids.append(order[: min(blocked_id_count, limit)])
    # ``unique`` sorts the ids, so that ties of the stable sort are in the order of ids.
    ids = torch.cat(most_ids).unique()
    ids = ids[torch.argsort(counts[:, ids].sum(0), descending=True, stable=True)]
    raised, lowered = counts[:, ids].tolist()
    tokens: list[MaskedToken] = []
    for token_id, raised_count, lowered_count in zip(ids.tolist(), raised, lowered, strict=True):
        tokens.append(MaskedToken(id=token_id, raised=raised_count, lowered=lowered_count))
    return tokens


def read_masked_tokens(directory: str | Path, step: int) -> list[MaskedToken] | None:
    """Return the tokens that the step's mask blocked most often; None for a step without a line in the file.

    Raises RecordsError.
    """
    for line in read_step_lines(Path(directory) / MASKED_TOKENS_FILE):
        if line["step"] == step:
            tokens: list[MaskedToken] = []
            for token in line["tokens"]:
                # The line also has the token's text. Leave the text out.
                tokens.append(
                    MaskedToken(id=token["id"], raised=token["raised"], lowered=token["lowered"])
                )
            return tokens
    return None
