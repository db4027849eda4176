"""The training files as one set of problems, and samplers of the problems: seeded, and resumable at any position.

A sampler is the same on every rank, and its state consists of plain JSON values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dppo.data.problems import ProblemSet
from megatron_dppo.data.records import FilePart, joined_sha256
from megatron_dppo.data.trajectory import Problem


def joined(sets: Sequence[ProblemSet]) -> ProblemSet:
    """Join the problems of all sets. ``problem_id`` continues from file to file. A single set is returned unchanged."""
    if len(sets) == 1:
        return sets[0]
    problems: list[Problem] = []
    parts: list[FilePart] = []
    start = 0
    for problem_set in sets:
        for problem in problem_set.problems:
            problems.append(replace(problem, problem_id=problem.problem_id + start))
        parts += problem_set.parts
        start += problem_set.records
    return ProblemSet(
        problems=tuple(problems),
        dropped=sum(s.dropped for s in sets),
        sha256=joined_sha256([s.sha256 for s in sets]),
        records=sum(s.records for s in sets),
        bad_answers=sum(s.bad_answers for s in sets),
        parts=tuple(parts),
    )


class TrainingFiles:
    """The names of the training files, and the file of each problem of :func:`joined`.

    Args:
        paths: Paths of the files. The name of a file is the last part of its path without the ending. If two names are
            equal, each name gets the number of its file.
        records: Number of records of each file.
    """

    def __init__(self, paths: Sequence[str], records: Sequence[int]) -> None:
        stems = [Path(path).stem for path in paths]
        if len(set(stems)) < len(stems):
            stems = [f"{stem}-{i}" for i, stem in enumerate(stems)]
        self.names = stems
        self._ends = list(accumulate(records))

    def of(self, problem_id: int) -> str:
        """The name of the problem's file."""
        return self.names[bisect_right(self._ends, problem_id)]


class ProblemSampler:
    """Returns positions ``0 <= i < count``, each exactly once in an epoch.

    The order of an epoch depends only on ``seed`` and the number of the epoch, so the state is a few
    integers and a resumed sampler continues with the same positions.

    Args:
        count: Number of problems, at least 1.
        seed: Seed of the order.
        shuffle: False: file order in every epoch.
    """

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        assert count >= 1
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def drawn(self) -> int:
        """Number of positions that ``next`` has returned."""
        return self._epoch * self._count + self._position

    def next(self, n: int) -> list[int]:
        """The next ``n`` positions. At the end of an epoch the next epoch begins."""
        positions: list[int] = []
        while len(positions) < n:
            upcoming = self._order[self._position : self._position + n - len(positions)]
            positions.extend(upcoming.tolist())
            self._position += len(upcoming)
            if self._position == self._count:
                self._epoch = self._epoch + 1
                self._position = 0
                self._order = self._order_of(self._epoch)
        return positions

    def state_dict(self) -> dict[str, int | bool]:
        """The state as plain JSON values."""
        return {
            "count": self._count,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``.

        Raises ValueError if the state belongs to another data set or order, or is malformed.
        """
        own_state = self.state_dict()
        if set(state) != set(own_state):
            raise ValueError(
                f"sampler state has keys {sorted(state)}, expected {sorted(own_state)}"
            )
        for key in ("count", "seed", "shuffle"):
            if state[key] != own_state[key]:
                raise ValueError(
                    f"sampler state was saved with {key}={state[key]}, this run has {own_state[key]}"
                )
        if state["epoch"] < 0 or not 0 <= state["position"] < self._count:
            raise ValueError(
                f"sampler state stands at epoch {state['epoch']}, position {state['position']} "
                f"of {self._count} problems"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._count)
        # Each epoch has its own generator, so that a resumed sampler need not repeat earlier draws.
        return np.random.default_rng((self._seed, epoch)).permutation(self._count)


class WeightedSampler:
    """Returns positions in the joined problems of several files, with a weight for each file.

    Each draw takes the file that is furthest behind its share of the draws. So after n draws, each file has had its
    share of the n draws, up to a difference of one or two draws. Each file has separate epochs. An epoch has every
    problem of the file once, in a seeded order. The state has the position in each file, so a resumed sampler continues
    exactly.

    Args:
        counts: Number of problems of each file.
        weights: Weight of each file, above 0. Only their ratios matter.
        seed: Seed of the orders.
        shuffle: False: file order.
    """

    def __init__(
        self, counts: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True
    ) -> None:
        assert len(counts) == len(weights)
        self._weights = [float(weight) for weight in weights]
        self._starts = list(accumulate(counts, initial=0))[:-1]
        # Each file has its own seed: with one seed, files of the same length would have the same order.
        self._files = [ProblemSampler(n, seed + i, shuffle) for i, n in enumerate(counts)]

    def next(self, n: int) -> list[int]:
        drawn_counts = [file.drawn for file in self._files]
        drawn_before = sum(drawn_counts)
        weight_sum = sum(self._weights)
        positions = []
        for total in range(drawn_before + 1, drawn_before + n + 1):
            deficits: list[float] = []
            for weight, drawn in zip(self._weights, drawn_counts, strict=True):
                deficits.append(weight * total / weight_sum - drawn)
            index = deficits.index(max(deficits))
            drawn_counts[index] += 1
            (position,) = self._files[index].next(1)
            positions.append(self._starts[index] + position)
        return positions

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {"weights": self._weights, "files": [f.state_dict() for f in self._files]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Raises ValueError if the state belongs to other files, weights or orders."""
        if set(state) != {"weights", "files"}:
            raise ValueError(f"sampler state has keys {sorted(state)}, expected files and weights")
        if state["weights"] != self._weights:
            raise ValueError(
                f"sampler state was saved with weights {state['weights']}, this run has {self._weights}"
            )
        if len(state["files"]) != len(self._files):
            raise ValueError(
                f"sampler state was saved with {len(state['files'])} files, this run has {len(self._files)}"
            )
        for file, part in zip(self._files, state["files"], strict=True):
            file.load_state_dict(part)


class ReturningSampler:
    """Returns first the positions that an interrupted run had drawn but not trained on, then positions of ``sampler``.

    A run draws problems before it trains on them. The state of ``sampler`` does not tell which problems were drawn but
    not trained on. The state of this class also has these positions, under ``returned``.
    """

    def __init__(self, sampler: ProblemSampler | WeightedSampler) -> None:
        self._sampler = sampler
        self._returned: list[int] = []

    def next(self, n: int) -> list[int]:
        positions = self._returned[:n]
        self._returned = self._returned[n:]
        return positions + self._sampler.next(n - len(positions))

    def take(self, positions: Sequence[int]) -> None:
        """Draw exactly these positions. If other positions come before them, the next draws return the others.

        Ranks that were restarted and repeat a step must draw the same positions as before the restart. ``next`` might
        return other positions, because the order of drawing may have depended on rewards.
        """
        for position in positions:
            while position not in self._returned:
                self._returned += self._sampler.next(1)
            self._returned.remove(position)

    def state_dict(self, drawn_ahead: Sequence[int] = ()) -> dict[str, Any]:
        """The state as plain JSON values. ``drawn_ahead`` are positions that a resumed run must return again."""
        state: dict[str, Any] = dict(self._sampler.state_dict())
        returned = [*drawn_ahead, *self._returned]
        if returned:
            state["returned"] = returned
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Raises ValueError if the state belongs to another data set or order, or is
        malformed.
        """
        sampler_state = dict(state)
        returned = sampler_state.pop("returned", [])
        if not all(isinstance(i, int) and i >= 0 for i in returned):
            raise ValueError(f"sampler state returns {returned}, expected positions")
        self._sampler.load_state_dict(sampler_state)
        self._returned = list(returned)


Sampler = ProblemSampler | WeightedSampler | ReturningSampler
