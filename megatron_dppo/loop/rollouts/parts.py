"""What travels between ranks: tokens, loss masks and columns of single trajectories, in parts.

A part is one array. Recorded routing has a part for each pipeline stage, which needs no other layers; other
columns go to the stages that read them (``data/columns.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_dppo.data.columns import Form, declared
from megatron_dppo.data.trajectory import Outline, Trajectory, rows_of_column

TOKENS = {"token_ids": Form("int32", ()), "loss_mask": Form("bool", ())}
"""What a trajectory has beside columns; a row a token."""
LAYERS = "moe_layers"
"""The trailing size of columns that are cut by pipeline stage."""


class Part(NamedTuple):
    """``stage``: the pipeline stage whose layers it holds; 0 of what is not cut by layers."""

    position: int
    name: str
    stage: int = 0


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of a replica. ``count``: how many. ``layers``: by stage, the places in a recording that it
    replays; empty: recordings are not cut."""

    count: int = 1
    layers: Sequence[Sequence[int]] = ()

    def cuts(self, name: str) -> bool:
        """Whether the column has a part for each stage."""
        return bool(self.layers) and name not in TOKENS and LAYERS in declared(name).trailing[:1]

    def of(self, position: int, name: str) -> list[Part]:
        """All parts of a trajectory's column."""
        stages = range(self.count if self.cuts(name) else 1)
        return [Part(position, name, stage) for stage in stages]

    def needs(self, part: Part, stage: int) -> bool:
        """Whether the ranks of ``stage`` need it."""
        if part.name in TOKENS:
            return True
        read = declared(part.name).read_by.includes(stage, self.count)
        return read and (not self.cuts(part.name) or part.stage == stage)

    def form(self, part: Part, forms: Mapping[str, Form]) -> Form:
        """Type and trailing shape of the part's array."""
        form = TOKENS.get(part.name) or forms[part.name]
        if not self.cuts(part.name):
            return form
        return form._replace(trailing=(len(self.layers[part.stage]), *form.trailing[1:]))

    def split(self, position: int, trajectory: Trajectory) -> dict[Part, np.ndarray]:
        """The arrays of a whole trajectory."""
        arrays: dict[Part, np.ndarray] = {
            Part(position, "token_ids"): trajectory.token_ids,
            Part(position, "loss_mask"): trajectory.loss_mask,
        }
        for name, array in trajectory.columns.items():
            for part in self.of(position, name):
                cut = array[:, list(self.layers[part.stage])] if self.cuts(name) else array
                arrays[part] = np.ascontiguousarray(cut)
        return arrays

    def joined(self, name: str, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
        """A column from its parts by stage: the one there is, or all layers in their places."""
        if len(arrays) == 1:
            return next(iter(arrays.values()))
        first = next(iter(arrays.values()))
        whole = np.empty((len(first), sum(map(len, self.layers)), *first.shape[2:]), first.dtype)
        for stage, array in arrays.items():
            whole[:, list(self.layers[stage])] = array
        return whole

    def trajectory(self, outline: Outline, arrays: Mapping[Part, np.ndarray]) -> Trajectory:
        """The trajectory of these parts."""
        columns: dict[str, dict[int, np.ndarray]] = {}
        for part, array in arrays.items():
            columns.setdefault(part.name, {})[part.stage] = array
        return Trajectory(
            problem_id=outline.problem_id,
            sample_index=outline.sample_index,
            token_ids=columns.pop("token_ids")[0],
            loss_mask=columns.pop("loss_mask")[0],
            columns={name: self.joined(name, found) for name, found in columns.items()},
            finish_reason=outline.finish_reason,
            reward=outline.reward,
            advantage=outline.advantage,
        )


@dataclass(frozen=True)
class PartShapes:
    """Every rank knows the shape of every part: the rows by its outline, the rest by ``forms``."""

    outlines: Sequence[Outline]
    forms: Mapping[str, Form]
    stages: Stages

    def shape(self, part: Part) -> tuple[int, ...]:
        """Of the part's array."""
        return (self._rows(part), *self.stages.form(part, self.forms).trailing)

    def size(self, part: Part) -> int:
        """Bytes of the part's array."""
        return self._rows(part) * self.stages.form(part, self.forms).row_bytes

    def view(self, part: Part, flat: np.ndarray) -> np.ndarray:
        """The part's array in its bytes."""
        form = self.stages.form(part, self.forms)
        return flat.view(form.dtype).reshape(self._rows(part), *form.trailing)

    def _rows(self, part: Part) -> int:
        outline = self.outlines[part.position]
        if part.name in TOKENS:
            return outline.length
        return rows_of_column(declared(part.name), outline)


ALIGNMENT = 64
"""Where arrays begin in a buffer: a multiple of it."""


class Piece(NamedTuple):
    """Neighbours in a room: ``parts`` in bytes ``begin`` to ``end`` of its buffer."""

    begin: int
    end: int
    parts: list[Part]


@dataclass(frozen=True)
class Room:
    """One buffer with a place for each of ``parts``, in order; whoever knows them knows the places."""

    shapes: PartShapes
    parts: Sequence[Part]

    @cached_property
    def places(self) -> dict[Part, tuple[int, int]]:
        """The first byte of each part, and the one after its last."""
        places, begin = {}, 0
        for part in self.parts:
            end = begin + self.shapes.size(part)
            places[part] = begin, end
            begin = -(-end // ALIGNMENT) * ALIGNMENT
        return places

    @property
    def size(self) -> int:
        """Bytes of the buffer."""
        return self.places[self.parts[-1]][1] if self.parts else 0

    def views(self, buffer: np.ndarray) -> dict[Part, np.ndarray]:
        """The arrays in a ``buffer`` of uint8 [size]; writing to them writes to it."""
        return {
            part: self.shapes.view(part, buffer[begin:end])
            for part, (begin, end) in self.places.items()
        }

    def pieces(self, parts: Iterable[Part], limit: int) -> Iterator[Piece]:
        """``parts``, neighbours in the room's order, in pieces of at most ``limit`` bytes, or of one part."""
        piece: Piece | None = None
        for part in parts:
            begin, end = self.places[part]
            if piece is not None and end - piece.begin > limit:
                yield piece
                piece = None
            piece = (
                Piece(begin, end, [part])
                if piece is None
                else Piece(piece.begin, end, [*piece.parts, part])
            )
        if piece is not None:
            yield piece
