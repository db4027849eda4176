"""Sampler of problems: epochs in a seeded order, resumable at any position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class Sampler(Protocol):
    """Which problems come next; the same on every rank, and resumable from plain JSON values."""

    def next(self, n: int) -> list[int]:
        """The next ``n`` positions in the training set."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Raises ValueError if it belongs to another data set or order."""


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
        if count < 1:
            raise ValueError(f"a sampler needs at least one problem, got {count}")
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    @property
    def drawn(self) -> int:
        """Number of positions that were handed out."""
        return self._epoch * self._count + self._position

    def next(self, n: int) -> list[int]:
        """The next ``n`` positions; after the end of an epoch the next one begins."""
        if n < 0:
            raise ValueError(f"cannot hand out {n} problems")
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
        return np.random.default_rng((self._seed, epoch)).permutation(self._count)
