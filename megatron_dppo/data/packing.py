"""Micro-batches: who trains on which sequences, and these laid end to end in Megatron's thd format, and per-token
columns beside the tokens. There is no padding but what makes equal parts for ranks that share tokens.

T = tokens in the pack, S = sequences in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.data.columns import Column, Form, Rows, declared
from megatron_dppo.data.trajectory import Trajectory, forms_of

# --- who trains on what: sequences spread over data-parallel ranks and over micro-batches
#
# Memory bounds a micro-batch's tokens; time is balanced by cost, which grows faster than the
# tokens (``forward_flops`` in ``model/shape.py``). Every function is a pure function of its arguments, so that ranks
# which know the same lengths agree without talking.

Groups = list[list[int]]


def partition_by_cost(costs: Sequence[float], ranks: int) -> Groups:
    """Indices of ``costs`` in ``ranks`` groups of nearly equal sums (Karmarkar-Karp largest differencing).

    Deterministic; indices ascend within a group. Groups are empty where there are fewer sequences than ranks.
    """
    # A partial partition is `ranks` pairs (sum, indices), the heaviest first. The two with the widest
    # spread are merged heaviest onto lightest until one is left; the first index breaks ties.
    heap = [
        (-cost, index, [(cost, [index])] + [(0, [])] * (ranks - 1))
        for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, wide), (_, second, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [
            (a + b, left + right)
            for (a, left), (b, right) in zip(wide, reversed(other), strict=True)
        ]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(first, second), merged))
    if not heap:
        return [[] for _ in range(ranks)]
    return [sorted(indices) for _, indices in heap[0][2]]


def plan_micro_batches(lengths: Sequence[int], token_budget: int) -> Groups:
    """Indices of ``lengths`` in as few groups of at most ``token_budget`` tokens as first-fit-decreasing finds.

    A sequence longer than the budget has a group to itself. Deterministic: equal lengths keep their order.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    # Of the groups that are open, in order of opening.
    free = np.zeros(len(sizes), dtype=np.int64)
    groups: Groups = []
    for index in np.argsort(-sizes, kind="stable").tolist():
        fits = np.flatnonzero(free[: len(groups)] >= sizes[index])
        if len(fits):
            group = int(fits[0])
            groups[group].append(index)
            free[group] -= sizes[index]
        else:
            # Below zero for a sequence above the budget: nothing joins it.
            free[len(groups)] = token_budget - sizes[index]
            groups.append([index])
    return groups


def plan_mini_batch(
    lengths: Sequence[int],
    costs: Sequence[float],
    dp_size: int,
    token_budget: int,
    count_multiple: int = 1,
) -> list[Groups]:
    """``plan[dp rank][micro-batch]`` -> indices of ``lengths``: the work of one optimiser step.

    Ranks share the cost evenly, and each rank's micro-batches do. Every rank gets the same number of
    micro-batches, a multiple of ``count_multiple`` (the interleaved pipeline schedule wants a
    multiple of the pipeline's size); each rank's come heaviest first. None exceeds ``token_budget``
    unless it is a single sequence. Micro-batches are empty only where a rank has too few sequences.
    """
    shares = partition_by_cost(costs, dp_size)
    share_lengths = [[lengths[i] for i in share] for share in shares]
    share_costs = [[costs[i] for i in share] for share in shares]
    fewest = [plan_micro_batches(share, token_budget) for share in share_lengths]
    # Expert parallelism makes the ranks take part in each other's layers, so all need the same number.
    count = max(1, *(len(groups) for groups in fewest))
    count += -count % count_multiple
    plan = []
    for share, of_lengths, of_costs, groups in zip(
        shares, share_lengths, share_costs, fewest, strict=True
    ):
        spread = _spread(of_lengths, of_costs, groups, token_budget, count)
        plan.append([[share[i] for i in group] for group in spread])
    return plan


def idle_share(plan: Sequence[Groups], costs: Sequence[float]) -> float:
    """The share of all ranks' time that is spent waiting, where the k-th micro-batches of all ranks
    run together and each takes as long as the costliest: 1 - sum of all costs / (ranks * sum over k
    of the largest cost). 0 for no work.
    """
    slots = [[_total(costs, group) for group in rank] for rank in plan]
    longest = sum(max(column) for column in zip(*slots, strict=True))
    return 1 - sum(map(sum, slots)) / (len(plan) * longest) if longest else 0.0


def _spread(
    lengths: Sequence[int],
    costs: Sequence[float],
    groups: Groups,
    token_budget: int,
    count: int,
) -> Groups:
    """Exactly ``count`` groups, heaviest first: evenly balanced if that keeps to the budget, else
    each sequence onto the cheapest group with room, else ``groups`` split.
    """
    even: Groups | None = partition_by_cost(costs, count)
    if any(len(g) > 1 and _total(lengths, g) > token_budget for g in even or []):
        even = _cheapest_with_room(lengths, costs, token_budget, count)
    if even is None:
        even = _split(costs, groups, count)
    # The k-th micro-batches of all ranks run together: the heaviest wait for the heaviest.
    return sorted(even, key=lambda g: (-_total(costs, g), g))


def _cheapest_with_room(
    lengths: Sequence[int], costs: Sequence[float], token_budget: int, count: int
) -> Groups | None:
    """``count`` groups: costliest first, each sequence joins the cheapest group that has room for its
    tokens; None where one finds no room."""
    groups: Groups = [[] for _ in range(count)]
    sums, tokens = np.zeros(count), np.zeros(count, dtype=np.int64)
    for index in np.argsort(-np.asarray(costs), kind="stable").tolist():
        room = (tokens + lengths[index] <= token_budget) | (tokens == 0)
        if not room.any():
            return None
        group = int(np.argmin(np.where(room, sums, np.inf)))
        groups[group].append(index)
        sums[group] += costs[index]
        tokens[group] += lengths[index]
    return [sorted(group) for group in groups]


def _split(costs: Sequence[float], groups: Groups, count: int) -> Groups:
    """Halve the heaviest group that has two sequences until there are ``count``, which is below the
    number of sequences: as many groups are within the budget, each sequence in its own.
    """
    groups = list(groups)
    while len(groups) < count:
        heaviest = max((g for g in groups if len(g) > 1), key=lambda g: _total(costs, g))
        groups.remove(heaviest)
        halves = partition_by_cost([costs[i] for i in heaviest], 2)
        groups.extend([heaviest[i] for i in half] for half in halves)
    return groups


def _total(values: Sequence[float], group: Sequence[int]) -> float:
    return sum(values[i] for i in group)


# --- the pack


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch in Megatron's thd format; CPU tensors until ``to``.

    Token t of a sequence predicts token t + 1, so entry t of what concerns sampled tokens belongs to
    ``target_ids[t]``. T is padded to a multiple by one sequence of its own, of token 0, at the end; a sequence
    to a multiple by such tokens at its end, which are a part of it.

    ``token_ids``, ``position_ids``, ``target_ids`` int64 [T] (the target is 0 where a sequence
    ends); ``cu_seqlens`` int32 [S + 1]; ``loss_mask`` bool [T]: the target was sampled and trains;
    ``advantages`` float32 [T], 0 outside ``loss_mask``; ``sequence_index`` int64 [S]: the
    trajectories' positions in their batch, the same for branches of one, -1 for the padding.
    ``columns``: tensors [T, ...] by the names of ``data/columns.py``, with the declared fill in rows
    that have no value; of columns with gaps ``valid`` has a bool [T] by the same name: the rows that
    hold. Of columns of the input (``Rows.INPUT``) only ``pack``'s ``input_rows`` are there.
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
        """The column's tensor. Raises ValueError where the batch has none."""
        if name not in self.columns:
            raise ValueError(f"the micro-batch has no {name}; it has {sorted(self.columns)}")
        return self.columns[name]

    def with_columns(self, **columns: Tensor) -> PackedBatch:
        """The same batch with ``columns`` [T, ...] beside or instead of its own."""
        return replace(self, columns={**self.columns, **columns})

    def without(self, name: str) -> PackedBatch:
        """The same batch without that column."""
        columns, valid = (
            {n: x for n, x in c.items() if n != name} for c in (self.columns, self.valid)
        )
        return replace(self, columns=columns, valid=valid)

    def rows(self, index: Tensor) -> PackedBatch:
        """The same batch with only the rows ``index``, int64 [t], of its tensors [T, ...]; where the sequences of the
        whole pack lie is still said. It must have no column of the input."""
        columns, valid = ({n: x[index] for n, x in c.items()} for c in (self.columns, self.valid))
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
        """The same batch with every tensor on ``device``."""

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=True)
            if isinstance(value, Mapping):
                return {name: moved(entry) for name, entry in value.items()}
            return value

        return replace(self, **{f.name: moved(getattr(self, f.name)) for f in fields(self)})


InputRows = Callable[[Tensor], Tensor]
"""Boundaries of a pack's sequences, int32 [S + 1] -> rows of the pack, int64 [t]."""


def padded_length(length: int, multiple: int) -> int:
    """``length`` up to the next multiple."""
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
    """Lay the branches of ``trajectories`` end to end, each a sequence; pad each up to a multiple of
    ``sequence_multiple`` tokens and T up to one of ``pad_multiple``.

    Args:
        trajectories: What to pack; their columns, as far as they are declared ``packed``.
        indices: Their positions in the batch they come from; None: 0, 1, ...
        trains: Whether each has a gradient; None: all. One without keeps its tokens and the columns
            of its input, and has no loss mask and no column of its sampled tokens.
        pad_multiple: T becomes a multiple of it. It must be one of ``sequence_multiple``.
        sequence_multiple: The length of every sequence becomes a multiple of it.
        forms: Of the whole batch (``forms_of``). ``pack([])``, for a rank that must take part in a
            micro-batch it has no trajectory for, is a pad-only batch of ``pad_multiple`` tokens that
            trains nothing and has these columns, as its peers' packs have; not read otherwise.
        input_rows: Of columns of the input lay out these rows alone, as ranks that share a micro-batch's tokens
            replay them; None: all.

    Raises:
        ValueError: As ``forms_of``, ``pad_multiple`` is below 1 or no multiple of ``sequence_multiple``, or of
            what trains a column of sampled tokens holds what can't be: a log-probability that is not finite or
            above 0, a Top-K id twice.
    """
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple must be at least 1, got {pad_multiple}")
    if pad_multiple % sequence_multiple:
        raise ValueError(
            f"pad_multiple is {pad_multiple}, expected a multiple of sequence_multiple {sequence_multiple}"
        )
    trains = [True] * len(trajectories) if trains is None else trains
    indices = range(len(trajectories)) if indices is None else indices
    numbers = [n for n, t in enumerate(trajectories) for _ in t.branch_lengths]
    trajectories = [branch for t in trajectories for branch in t.branches]
    trains, indices = [trains[n] for n in numbers], [indices[n] for n in numbers]
    lengths = [padded_length(t.length, sequence_multiple) for t in trajectories]
    filled = sum(lengths)
    padding = pad_multiple if not trajectories else -filled % pad_multiple
    lengths += [padding] * bool(padding)
    tokens = filled + padding
    ends = np.cumsum(lengths)
    starts = ends - lengths
    token_ids = np.zeros(tokens, dtype=np.int64)
    loss_mask, advantages = np.zeros(tokens, np.bool_), np.zeros(tokens, np.float32)
    for t, start, has_gradient in zip(trajectories, starts, trains, strict=False):
        token_ids[start : start + t.length] = t.token_ids
        if has_gradient:
            predicting = slice(start, start + t.length - 1)
            loss_mask[predicting] = t.loss_mask[1:]
            advantages[predicting][t.loss_mask[1:]] = t.advantages
    target_ids = np.roll(token_ids, -1)
    target_ids[ends - 1] = 0
    cu_seqlens = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
    laid_out = np.arange(tokens) if input_rows is None else input_rows(cu_seqlens).numpy()
    columns, valid = _columns(trajectories, starts, trains, tokens, forms, laid_out)
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(np.arange(tokens) - np.repeat(starts, lengths)),
        target_ids=torch.from_numpy(target_ids),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
        loss_mask=torch.from_numpy(loss_mask),
        advantages=torch.from_numpy(advantages),
        sequence_index=torch.tensor([*indices, *[-1] * bool(padding)], dtype=torch.int64),
        columns=columns,
        valid=valid,
    )


def unpack_sampled(trajectories: Sequence[Trajectory], values: Tensor) -> list[Tensor]:
    """Per-token ``values`` [T, ...] of ``pack(trajectories)``: for each the rows of its sampled tokens."""
    ends = np.cumsum([t.length for t in trajectories], dtype=np.int64)
    positions = [
        end - t.length + np.flatnonzero(t.loss_mask) - 1
        for t, end in zip(trajectories, ends, strict=True)
    ]
    rows = np.concatenate([np.zeros(0, np.int64), *positions])
    picked = values[torch.from_numpy(rows).to(values.device)]
    return list(picked.split([t.sampled for t in trajectories]))


def _columns(
    trajectories: Sequence[Trajectory],
    starts: np.ndarray,
    trains: Sequence[bool],
    tokens: int,
    forms: Mapping[str, Form] | None,
    input_rows: np.ndarray,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The pack's columns, and the validity of those with gaps."""
    # By row of the pack: its place among the rows that are laid out, -1 for one that is not.
    everywhere, input_places = np.arange(tokens), np.full(tokens, -1)
    input_places[input_rows] = np.arange(len(input_rows))
    if trajectories:
        packed: Mapping[str, Form] = forms_of(trajectories)
    else:
        packed = {n: form for n, form in (forms or {}).items() if declared(n).complete}
    for trajectory, has_gradient in zip(trajectories, trains, strict=True):
        if has_gradient:
            trajectory.check(Rows.SAMPLED)
    columns, valid = {}, {}
    for name, form in packed.items():
        column = declared(name)
        if not column.packed:
            continue
        is_input = column.rows is Rows.INPUT
        count = len(input_rows) if is_input else tokens
        values = np.full((count, *form.trailing), column.fill, form.dtype)
        holds = np.zeros(count, np.bool_)
        for trajectory, start, has_gradient in zip(trajectories, starts, trains, strict=False):
            if has_gradient or is_input:
                pack_rows = (input_places if is_input else everywhere)[start:]
                _lay_out(column, trajectory, pack_rows, values, holds)
        columns[name] = torch.from_numpy(values)
        if column.has_gaps:
            valid[name] = torch.from_numpy(holds)
    return columns, valid


def _lay_out(
    column: Column,
    trajectory: Trajectory,
    pack_rows: np.ndarray,
    values: np.ndarray,
    holds: np.ndarray,
) -> None:
    """Write the trajectory's rows of a column to ``values``. ``pack_rows``: by token of the trajectory, the row of
    ``values``, -1 for none.
    """
    rows = trajectory.columns.get(column.name)
    if rows is None:
        return
    pack_rows = pack_rows[column.positions(trajectory.loss_mask)]
    wanted = pack_rows >= 0
    if column.usable is not None:
        wanted &= column.usable(trajectory.loss_mask, trajectory.columns)
    values[pack_rows[wanted]] = rows[wanted]
    holds[pack_rows[wanted]] = True
