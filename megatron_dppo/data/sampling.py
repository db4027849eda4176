"""The training files as one set of problems, and the order in which they are drawn: seeded, and resumable at any
position.

A sampler is the same on every rank, and its state plain JSON values.
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
from megatron_dppo.data.records import joined_sha256


def joined(sets: Sequence[ProblemSet]) -> ProblemSet:
    """The problems of all sets in a row; ``problem_id`` counts on from file to file.

    One set stays as it is, its SHA-256 too.
    """
    if len(sets) == 1:
        return sets[0]
    starts = accumulate((s.records for s in sets), initial=0)
    moved = (
        replace(problem, problem_id=problem.problem_id + start)
        for part, start in zip(sets, starts, strict=False)
        for problem in part.problems
    )
    return ProblemSet(
        problems=tuple(moved),
        dropped=sum(s.dropped for s in sets),
        sha256=joined_sha256([s.sha256 for s in sets]),
        records=sum(s.records for s in sets),
        bad_answers=sum(s.bad_answers for s in sets),
        parts=tuple(part for s in sets for part in s.parts),
    )


class TrainingFiles:
    """Which training file a problem of :func:`joined` is from.

    Args:
        paths: of the files; a file is called by its name without the ending, or by its number where
            two have the same name.
        records: records of each file.
    """

    def __init__(self, paths: Sequence[str], records: Sequence[int]) -> None:
        stems = [Path(path).stem for path in paths]
        unique = len(set(stems)) == len(stems)
        self.names = stems if unique else [f"{stem}-{i}" for i, stem in enumerate(stems)]
        self._ends = list(accumulate(records))

    def of(self, problem_id: int) -> str:
        return self.names[bisect_right(self._ends, problem_id)]


class ProblemSampler:
    """Returns positions ``0 <= i < count``, each exactly once in an epoch.

    The order of an epoch depends only on ``seed`` and the number of the epoch, so the state is a few
    integers and a resumed sampler continues with the same positions.

    Args:
        count: number of problems, at least 1.
        seed: of the order.
        shuffle: False: file order in every epoch.
    """

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        assert count >= 1
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def drawn(self) -> int:
        """Number of positions that were handed out."""
        return self._epoch * self._count + self._position

    def next(self, n: int) -> list[int]:
        """The next ``n`` positions; after the end of an epoch the next one begins."""
        taken: list[int] = []
        while len(taken) < n:
            upcoming = self._order[self._position : self._position + n - len(taken)]
            taken.extend(upcoming.tolist())
            self._position += len(upcoming)
            if self._position == self._count:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return taken

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

        Raises ValueError if it belongs to another data set or order, or is malformed.
        """
        expected = self.state_dict()
        if set(state) != set(expected):
            raise ValueError(f"sampler state has keys {sorted(state)}, expected {sorted(expected)}")
        for key in ("count", "seed", "shuffle"):
            if state[key] != expected[key]:
                raise ValueError(
                    f"sampler state was saved with {key}={state[key]}, this run has {expected[key]}"
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
        # A generator an epoch: whoever resumes needs none of the draws before.
        return np.random.default_rng((self._seed, epoch)).permutation(self._count)


class WeightedSampler:
    """Positions in the problems of several files in a row, each file drawn by its weight.

    The file that lacks most of its share of the draws is next, the first of several; so after n draws each has had
    its share of n, to within a draw or two. Within a file every problem comes once in an epoch of its own, in a
    seeded order. The state is the files' positions; a resumed sampler goes on exactly.

    Args:
        counts: problems of each file.
        weights: of each file, above 0; only their ratios matter.
        seed: of the orders.
        shuffle: False: file order.
    """

    def __init__(
        self, counts: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True
    ) -> None:
        assert len(counts) == len(weights)
        self._weights = [float(weight) for weight in weights]
        self._starts = list(accumulate(counts, initial=0))[:-1]
        # A seed each, or files of one length would all come in one order.
        self._files = [ProblemSampler(n, seed + i, shuffle) for i, n in enumerate(counts)]

    def next(self, n: int) -> list[int]:
        drawn = [file.drawn for file in self._files]
        total, weight = sum(drawn), sum(self._weights)
        taken = []
        for number in range(total + 1, total + n + 1):
            lacking = [w * number / weight - d for w, d in zip(self._weights, drawn, strict=True)]
            file = lacking.index(max(lacking))
            drawn[file] += 1
            taken.append(self._starts[file] + self._files[file].next(1)[0])
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {"weights": self._weights, "files": [f.state_dict() for f in self._files]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Raises ValueError if it belongs to other files, weights or orders."""
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
    """Hands out first what an interrupted run had drawn and not trained on, then what ``sampler`` draws.

    A run draws ahead. Where a batch that is trained on sooner drew after one that is trained on later, the position
    alone doesn't tell what is still to be trained on; the state then has the indices under ``returned``.
    """

    def __init__(self, sampler: ProblemSampler | WeightedSampler) -> None:
        self._sampler = sampler
        self._returned: list[int] = []

    def next(self, n: int) -> list[int]:
        taken, self._returned = self._returned[:n], self._returned[n:]
        return taken + self._sampler.next(n - len(taken))

    def state_dict(self, drawn_ahead: Sequence[int] = ()) -> dict[str, Any]:
        """The state as plain JSON values. ``drawn_ahead``: of what was handed out, what is to be handed out again."""
        returned = [*drawn_ahead, *self._returned]
        return {**self._sampler.state_dict(), **({"returned": returned} if returned else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Raises ValueError if it belongs to another data set or order, or is malformed."""
        rest = dict(state)
        returned = rest.pop("returned", [])
        if not all(isinstance(i, int) and i >= 0 for i in returned):
            raise ValueError(f"sampler state returns {returned}, expected positions")
        self._sampler.load_state_dict(rest)
        self._returned = list(returned)


Sampler = ProblemSampler | WeightedSampler | ReturningSampler
