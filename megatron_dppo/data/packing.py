"""Samples laid end to end as one thd micro-batch: no padding between them, and per-token columns
beside the tokens.

T = tokens in the pack, S = sequences in it, P / R = prompt and response tokens of one sample, K =
width of the Top-K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from megatron_dppo.data.balancing import partition_by_length, plan_micro_batches, plan_mini_batch
from megatron_dppo.data.log_prob_checks import check_log_probs, check_topk
from megatron_dppo.data.routing import routing_columns

__all__ = [
    "PackedBatch",
    "TrainingSample",
    "pack",
    "partition_by_length",
    "plan_micro_batches",
    "plan_mini_batch",
    "unpack_responses",
]


@dataclass(frozen=True)
class TrainingSample:
    """One response to train on.

    ``rollout_log_probs`` [R]: natural log mu of each response token; ``recomputed_log_probs`` [R]:
    the trainer's own at the rollout's weights. ``topk_ids`` int32 / ``topk_log_probs`` float32 [R,
    K]: TopK(mu) at each response position, an id below 0 where the engine gave fewer than K.
    ``index``: position in the rollout batch. ``train=False``: the sample is carried without a
    gradient. ``routed_experts``: as in ``Rollout``; ``routed_valid`` bool [P + R - 1]: the rows of it
    to replay, None for all.

    Raises ValueError where lengths disagree, or where the prompt is empty: nothing predicts the
    first token.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    advantage: float
    rollout_log_probs: Sequence[float]
    recomputed_log_probs: Sequence[float] | None
    topk_ids: np.ndarray | None
    topk_log_probs: np.ndarray | None
    index: int
    train: bool = True
    routed_experts: np.ndarray | None = None
    routed_valid: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.prompt_ids) == 0:
            raise ValueError(
                f"sample {self.index}: the prompt is empty, expected at least one token"
            )
        if (self.topk_ids is None) != (self.topk_log_probs is None):
            raise ValueError(f"sample {self.index}: topk_ids and topk_log_probs go together")
        for name in ("rollout_log_probs", "recomputed_log_probs", "topk_ids", "topk_log_probs"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.response_ids):
                raise ValueError(
                    f"sample {self.index}: {len(column)} rows of {name} for "
                    f"{len(self.response_ids)} response tokens"
                )
        for name in ("routed_experts", "routed_valid"):
            column = getattr(self, name)
            if column is not None and len(column) != self.length - 1:
                raise ValueError(
                    f"sample {self.index}: {len(column)} rows of {name} for {self.length} tokens, "
                    f"expected {self.length - 1}: all but the last token's"
                )

        self._check_values()

    def _check_values(self) -> None:
        where = f"sample {self.index}"
        if not math.isfinite(self.advantage):
            raise ValueError(f"{where}: advantage {self.advantage}, expected a finite number")
        check_log_probs(self.rollout_log_probs, f"{where}: rollout_log_probs")
        if self.topk_ids is not None and self.topk_log_probs is not None:
            check_topk(self.topk_ids, self.topk_log_probs, where)

    @property
    def length(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch in Megatron's thd format; CPU tensors until ``to``.

    Token t of a sequence predicts token t + 1, so entry t of every column concerns
    ``target_ids[t]``. T is padded to a multiple by one sequence of its own, of token 0, at the
    end.

    ``token_ids``, ``position_ids``, ``target_ids`` int64 [T] (the target is 0 where a sequence
    ends); ``cu_seqlens`` int32 [S+1]; ``loss_mask`` bool [T]: the target is a response token that
    trains. ``rollout_log_probs``, ``recomputed_log_probs`` and ``advantages`` float32 [T], 0
    outside ``loss_mask``. ``rollout_topk_ids`` int64 and ``rollout_topk_log_probs`` float32 [T, K]
    are TopK(mu) where ``rollout_topk_valid`` bool [T, K], and 0 elsewhere; the sampled token need
    not be among them. ``sequence_index`` int64 [S]: ``TrainingSample.index``, -1 for the padding.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    target_ids: torch.Tensor
    loss_mask: torch.Tensor
    rollout_log_probs: torch.Tensor
    advantages: torch.Tensor
    recomputed_log_probs: torch.Tensor | None
    rollout_topk_ids: torch.Tensor | None
    rollout_topk_log_probs: torch.Tensor | None
    rollout_topk_valid: torch.Tensor | None
    sequence_index: torch.Tensor
    routed_experts: torch.Tensor | None = None
    routed_valid: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T, the padding included."""
        return self.token_ids.shape[0]

    def without_routing(self) -> PackedBatch:
        """The same batch without recorded routing."""
        return replace(self, routed_experts=None, routed_valid=None)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with every tensor on ``device``."""
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **moved)


def pack(
    samples: Sequence[TrainingSample],
    *,
    pad_multiple: int = 1,
    topk: int = 0,
    recomputed: bool = False,
) -> PackedBatch:
    """Lay ``samples`` end to end; pad T up to a multiple of ``pad_multiple`` tokens.

    ``pack([])`` is a pad-only batch of ``pad_multiple`` tokens that trains nothing, for a rank
    which must take part in a micro-batch it has no sequence for; ``topk`` and ``recomputed`` say
    which optional columns its peers' packs have, and apply to it alone. Raises ValueError where
    only some samples carry recomputed log-probs or Top-K, or where K differs. Recordings of routing
    may be there for some samples alone.
    """
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple must be at least 1, got {pad_multiple}")
    lengths = [s.length for s in samples]
    filled = sum(lengths)
    padding = pad_multiple if not samples else -filled % pad_multiple
    if padding:
        lengths.append(padding)
    tokens = filled + padding
    ends = np.cumsum(lengths)
    starts = ends - lengths
    token_ids = np.zeros(tokens, dtype=np.int64)
    token_ids[:filled] = _concatenate(
        [i for s in samples for i in (s.prompt_ids, s.response_ids)], int
    )
    target_ids = np.roll(token_ids, -1)
    target_ids[ends - 1] = 0
    rows = _predicting_rows(samples, starts)
    trains = _concatenate([np.full(len(s.response_ids), s.train) for s in samples], bool)

    def column(values: np.ndarray) -> torch.Tensor:
        """[responses' tokens, ...] -> [T, ...], zero wherever nothing trains."""
        out = np.zeros((tokens, *values.shape[1:]), dtype=values.dtype)
        out[rows[trains]] = values[trains]
        return torch.from_numpy(out)

    topk_ids, topk_log_probs, topk_valid = _topk_columns(samples, topk, column)
    own = _present(samples, "recomputed_log_probs") if samples else [[]] * recomputed
    routed_experts, routed_valid = routing_columns(samples, starts, tokens)
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(np.arange(tokens) - np.repeat(starts, lengths)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        max_seqlen=max(lengths),
        target_ids=torch.from_numpy(target_ids),
        loss_mask=column(np.ones(len(rows), dtype=bool)),
        rollout_log_probs=column(_concatenate([s.rollout_log_probs for s in samples], np.float32)),
        advantages=column(
            _concatenate([[s.advantage] * len(s.response_ids) for s in samples], np.float32)
        ),
        recomputed_log_probs=column(_concatenate(own, np.float32)) if own else None,
        rollout_topk_ids=topk_ids,
        rollout_topk_log_probs=topk_log_probs,
        rollout_topk_valid=topk_valid,
        sequence_index=torch.tensor(
            [s.index for s in samples] + [-1] * bool(padding), dtype=torch.int64
        ),
        routed_experts=routed_experts,
        routed_valid=routed_valid,
    )


def unpack_responses(samples: Sequence[TrainingSample], values: torch.Tensor) -> list[torch.Tensor]:
    """Per-token ``values`` [T, ...] of ``pack(samples)`` as one tensor [R, ...] for each sample."""
    lengths = np.array([s.length for s in samples], dtype=int)
    rows = torch.from_numpy(_predicting_rows(samples, np.cumsum(lengths) - lengths))
    return list(values[rows.to(values.device)].split([len(s.response_ids) for s in samples]))


def _concatenate(parts: Sequence[Any], dtype: type) -> np.ndarray:
    """One array of ``dtype``, also of no parts at all."""
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _predicting_rows(samples: Sequence[TrainingSample], starts: np.ndarray) -> np.ndarray:
    """For each response token, in order, the row of the token before it: [sum of R]."""
    firsts = [start + len(s.prompt_ids) - 1 for s, start in zip(samples, starts, strict=False)]
    return _concatenate(
        [first + np.arange(len(s.response_ids)) for s, first in zip(samples, firsts, strict=True)],
        int,
    )


def _present(samples: Sequence[TrainingSample], name: str) -> list[Any]:
    """The values of an optional field: of every sample, or of none."""
    values = [v for s in samples if (v := getattr(s, name)) is not None]
    if values and len(values) != len(samples):
        lacking = [s.index for s in samples if getattr(s, name) is None]
        raise ValueError(
            f"{name} must come with every sample of a pack or with none; samples {lacking} lack it"
        )
    return values


def _topk_columns(
    samples: Sequence[TrainingSample], topk: int, column: Callable[[np.ndarray], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[None, None, None]:
    """Ids, log-probs and validity [T, K]."""
    ids_of, log_probs_of = _present(samples, "topk_ids"), _present(samples, "topk_log_probs")
    if not samples and topk:
        ids_of, log_probs_of = [np.zeros((0, topk), np.int32)], [np.zeros((0, topk), np.float32)]
    if not ids_of:
        return None, None, None
    widths = {np.shape(values)[1:] for values in (*ids_of, *log_probs_of)}
    if len(widths) != 1:
        raise ValueError(f"Top-K of different widths in one pack: {sorted(widths)}")
    ids = np.concatenate(ids_of).astype(np.int64)
    log_probs = np.concatenate(log_probs_of).astype(np.float32)
    valid = ids >= 0
    return column(np.where(valid, ids, 0)), column(np.where(valid, log_probs, 0)), column(valid)
