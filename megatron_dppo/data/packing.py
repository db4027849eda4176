"""Packs: the sequences of a micro-batch end to end in Megatron's thd format, with per-token columns beside the tokens.

There is no padding, except to make equal parts for ranks that share a pack's tokens. T = tokens in the pack, S = its
sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.data.columns import Column, Form, Rows, declared_column
from megatron_dppo.data.trajectory import Trajectory, forms_of


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch in Megatron's thd format. Tensors are on the CPU until ``to``.

    Token t of a sequence predicts token t + 1, so row t of a column of sampled tokens belongs to ``target_ids[t]``.
    Padding tokens have the id 0. To pad T to a multiple, the pack ends with one sequence of padding tokens. To pad a
    sequence to a multiple, padding tokens are appended to it and count as its part.

    Attributes:
        token_ids, position_ids, target_ids: int64 [T]. The target is 0 at the last token of a sequence.
        cu_seqlens: int32 [S + 1], the bounds of the sequences.
        max_seqlen: Length of the longest sequence.
        loss_mask: Bool [T]: whether the target was sampled and trains.
        advantages: float32 [T], 0 outside ``loss_mask``.
        sequence_index: int64 [S], positions of the trajectories in their batch: equal for the branches of one
            trajectory, -1 for the padding.
        columns: Tensors [T, ...] by the names of ``data/columns.py``, with the declared fill in rows without a value.
            Columns of the input (``Rows.INPUT``) have only the rows that the argument ``input_rows`` of ``pack``
            selects.
        valid: For columns with gaps, by the column's name: bool [T], whether each row has a value.
    """

    token_ids: Tensor
    position_ids: Tensor
    target_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    loss_mask: Tensor
    advantages: Tensor
    sequence_index: Tensor
    columns: Mapping[str, Tensor]
    valid: Mapping[str, Tensor]

    @property
    def num_tokens(self) -> int:
        """T, the padding included."""
        return self.token_ids.shape[0]

    def column(self, name: str) -> Tensor:
        """The column's tensor. Raises ValueError if the batch has none."""
        if name not in self.columns:
            raise ValueError(f"the micro-batch has no {name}; it has {sorted(self.columns)}")
        return self.columns[name]

    def with_columns(self, **columns: Tensor) -> PackedBatch:
        """A copy with ``columns`` [T, ...] added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def without(self, name: str) -> PackedBatch:
        """A copy without that column."""
        columns = dict(self.columns)
        valid = dict(self.valid)
        columns.pop(name, None)
        valid.pop(name, None)
        return replace(self, columns=columns, valid=valid)

    def rows(self, index: Tensor) -> PackedBatch:
        """A copy with only the rows ``index``, int64 [t], of its tensors [T, ...].

        ``cu_seqlens`` and ``sequence_index`` still describe the whole pack. The batch must have no column of the input:
        row t of such a column need not belong to token t (``input_rows`` of ``pack``).
        """
        columns = {n: x[index] for n, x in self.columns.items()}
        valid = {n: x[index] for n, x in self.valid.items()}
        return replace(
            self,
            token_ids=self.token_ids[index],
            position_ids=self.position_ids[index],
            target_ids=self.target_ids[index],
            loss_mask=self.loss_mask[index],
            advantages=self.advantages[index],
            columns=columns,
            valid=valid,
        )

    def to(self, device: torch.device | str) -> PackedBatch:
        """A copy with every tensor on ``device``."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=True)
            if isinstance(value, Mapping):
                return {name: move(entry) for name, entry in value.items()}
            return value

        moved_values: dict[str, Any] = {}
        for dataclass_field in fields(self):
            moved_values[dataclass_field.name] = move(getattr(self, dataclass_field.name))
        return replace(self, **moved_values)


InputRows = Callable[[Tensor], Tensor]
"""cu_seqlens of a pack, int32 [S + 1] -> the rows of the pack that this rank reads, int64 [t]."""


def padded_length(length: int, multiple: int) -> int:
    """Round ``length`` up to a multiple of ``multiple``."""
    return length + -length % multiple


def pack(
    trajectories: Sequence[Trajectory],
    *,
    indices: Sequence[int] | None = None,
    trains: Sequence[bool] | None = None,
    pad_multiple: int = 1,
    sequence_multiple: int = 1,
    forms: Mapping[str, Form] | None = None,
    input_rows: InputRows | None = None,
) -> PackedBatch:
    """Lay the branches of ``trajectories`` end to end, each as a sequence.

    Each sequence is padded to a multiple of ``sequence_multiple`` tokens, and T to a multiple of ``pad_multiple``. The
    pack has the columns that are declared ``packed``.

    Args:
        trajectories: The trajectories of the micro-batch.
        indices: Positions of the trajectories in the batch; None: 0, 1, ...
        trains: Whether each trajectory has a gradient; None: all have. A trajectory without a gradient keeps its tokens
            and the columns of its input; its loss mask is False, and columns of its sampled tokens have the fill.
        pad_multiple: T becomes a multiple of this number. It must be a multiple of ``sequence_multiple``.
        sequence_multiple: The length of every sequence becomes a multiple of this number.
        forms: Forms of the whole batch (``forms_of``). Only ``pack([])`` reads them, for a rank that has no trajectory
            but must take part in a micro-batch: the result has ``pad_multiple`` tokens of padding, trains nothing, and
            has the same columns as the packs of other ranks.
        input_rows: Selects the rows of columns of the input, if ranks share a micro-batch's tokens and each rank
            replays only the routing of its own tokens; None: all rows.

    Raises:
        ValueError: An error of ``forms_of``; ``pad_multiple`` is below 1 or no multiple of ``sequence_multiple``; or a
            trajectory with a gradient has an invalid value in a column of sampled tokens: a log-probability that is
            above 0 or not finite, or a Top-K id twice.
    """
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple must be at least 1, got {pad_multiple}")
    if pad_multiple % sequence_multiple:
        raise ValueError(
            f"pad_multiple is {pad_multiple}, expected a multiple of sequence_multiple {sequence_multiple}"
        )
    trains = [True] * len(trajectories) if trains is None else trains
    indices = range(len(trajectories)) if indices is None else indices
    branches: list[Trajectory] = []
    branch_trains: list[bool] = []
    sequence_index: list[int] = []
    for t, has_gradient, index in zip(trajectories, trains, indices, strict=True):
        branches += t.branches
        branch_trains += [has_gradient] * len(t.branch_lengths)
        sequence_index += [index] * len(t.branch_lengths)
    lengths = [padded_length(branch.length, sequence_multiple) for branch in branches]
    branch_tokens = sum(lengths)
    # A pack without trajectories consists of padding alone.
    padding = pad_multiple
    if branches:
        padding = -branch_tokens % pad_multiple
    if padding:
        lengths.append(padding)
        sequence_index.append(-1)
    tokens = branch_tokens + padding
    ends = np.cumsum(lengths)
    starts = ends - lengths
    token_ids = np.zeros(tokens, dtype=np.int64)
    loss_mask = np.zeros(tokens, np.bool_)
    advantages = np.zeros(tokens, np.float32)
    # ``starts`` may have one more sequence, the padding.
    for branch, start, has_gradient in zip(branches, starts, branch_trains, strict=False):
        token_ids[start : start + branch.length] = branch.token_ids
        if has_gradient:
            # Row t belongs to token t + 1.
            is_target_sampled = branch.loss_mask[1:]
            rows = slice(start, start + branch.length - 1)
            loss_mask[rows] = is_target_sampled
            advantages[rows][is_target_sampled] = branch.advantages
    target_ids = np.roll(token_ids, -1)
    target_ids[ends - 1] = 0
    cu_seqlens = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
    own_rows = np.arange(tokens) if input_rows is None else input_rows(cu_seqlens).numpy()
    columns, valid = _columns(branches, starts, branch_trains, tokens, forms, own_rows)
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(np.arange(tokens) - np.repeat(starts, lengths)),
        target_ids=torch.from_numpy(target_ids),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
        loss_mask=torch.from_numpy(loss_mask),
        advantages=torch.from_numpy(advantages),
        sequence_index=torch.tensor(sequence_index, dtype=torch.int64),
        columns=columns,
        valid=valid,
    )


def unpack_sampled(trajectories: Sequence[Trajectory], values: Tensor) -> list[Tensor]:
    """Select the rows of each trajectory's sampled tokens from ``values`` [T, ...] of ``pack(trajectories)``."""
    ends = np.cumsum([t.length for t in trajectories], dtype=np.int64)
    positions = [np.zeros(0, np.int64)]
    for trajectory, end in zip(trajectories, ends, strict=True):
        start = end - trajectory.length
        positions.append(start + np.flatnonzero(trajectory.loss_mask) - 1)
    rows = np.concatenate(positions)
    sampled_values = values[torch.from_numpy(rows).to(values.device)]
    return list(sampled_values.split([t.sampled for t in trajectories]))


def _columns(
    branches: Sequence[Trajectory],
    starts: np.ndarray,
    trains: Sequence[bool],
    tokens: int,
    forms: Mapping[str, Form] | None,
    input_rows: np.ndarray,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Build the pack's columns, and the masks of the valid rows of columns with gaps.

    Args:
        branches: The sequences of the pack.
        starts: The first token of each sequence.
        trains: Whether each sequence has a gradient.
        tokens: T.
        forms: As in ``pack``.
        input_rows: The rows of the pack that columns of the input have, int64 [t].
    """
    # Each of these arrays maps a token to its row in a column. In columns of sampled tokens, every token has a row. In
    # columns of the input, only the tokens ``input_rows`` have a row; -1 stands for no row.
    sampled_column_rows = np.arange(tokens)
    input_column_rows = np.full(tokens, -1)
    input_column_rows[input_rows] = np.arange(len(input_rows))
    column_forms: Mapping[str, Form]
    if branches:
        column_forms = forms_of(branches)
    else:
        column_forms = {n: form for n, form in (forms or {}).items() if declared_column(n).complete}
    for branch, has_gradient in zip(branches, trains, strict=True):
        if has_gradient:
            branch.check(Rows.SAMPLED)
    columns, valid = {}, {}
    for name, form in column_forms.items():
        column = declared_column(name)
        if not column.packed:
            continue
        is_input = column.rows is Rows.INPUT
        column_rows = input_column_rows if is_input else sampled_column_rows
        row_count = len(input_rows) if is_input else tokens
        values = np.full((row_count, *form.trailing), column.fill, form.dtype)
        has_value = np.zeros(row_count, np.bool_)
        for branch, start, has_gradient in zip(branches, starts, trains, strict=False):
            if has_gradient or is_input:
                _write_rows(column, branch, column_rows[start:], values, has_value)
        columns[name] = torch.from_numpy(values)
        if column.has_gaps:
            valid[name] = torch.from_numpy(has_value)
    return columns, valid


def _write_rows(
    column: Column,
    branch: Trajectory,
    column_rows: np.ndarray,
    values: np.ndarray,
    has_value: np.ndarray,
) -> None:
    """Write the branch's rows of a column to ``values``, and mark them in ``has_value``.

    ``column_rows`` has the row in ``values`` of each token, from the branch's first token on; -1 for no row.
    """
    branch_rows = branch.columns.get(column.name)
    if branch_rows is None:
        return
    target_rows = column_rows[column.positions(branch.loss_mask)]
    is_included = target_rows >= 0
    if column.usable is not None:
        is_included &= column.usable(branch.loss_mask, branch.columns)
    values[target_rows[is_included]] = branch_rows[is_included]
    has_value[target_rows[is_included]] = True
