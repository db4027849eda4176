"""Who holds which column of which trajectory of a batch, and in what form: the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from megatron_dppo.data.columns import Form, declared
from megatron_dppo.data.trajectory import Trajectory, check_complete, sizes_of
from megatron_dppo.trainer.collectives import all_gather_json
from megatron_dppo.trainer.topology import Topology

Key = tuple[int, str]
"""(position in the batch, column)."""


class ExchangeError(RuntimeError):
    """A column is missing, belongs to another model, or changed on its way."""


@dataclass(frozen=True)
class ColumnDirectory:
    """``holders``: by key the leaders (by data-parallel rank) that hold it, with the hash of it.
    ``forms``: by column what all its arrays have in common.
    """

    holders: Mapping[Key, Mapping[int, str]]
    forms: Mapping[str, Form]

    @classmethod
    def gather(
        cls,
        trajectories: Sequence[Trajectory],
        local: Mapping[Key, np.ndarray],
        topology: Topology,
        sizes: Mapping[str, int],
    ) -> Self:
        """Of what every leader has (``local``). Collective.

        ``sizes``: what trailing sizes must be, by their declared names. Raises ExchangeError, on all
        ranks, where arrays do not fit them or each other.
        """
        shares = all_gather_json(
            [[*key, *Form.of(array), digest(array)] for key, array in local.items()]
        )
        holders: dict[Key, dict[int, str]] = {}
        forms: dict[str, Form] = {}
        problems: list[str] = []
        for dp_rank, leader in enumerate(topology.leaders):
            for position, name, dtype, trailing, found in shares[leader]:
                form = Form(dtype, tuple(trailing))
                problem = _misfit(name, form, forms.setdefault(name, form), sizes)
                if problem:
                    problems.append(f"{name_of(position, trajectories)}: {problem}")
                holders.setdefault((position, name), {})[dp_rank] = found
        directory = cls(holders, dict(sorted(forms.items())))
        if not problems:
            problems = directory.problems(len(trajectories))
        if problems:
            raise ExchangeError("\n".join(dict.fromkeys(problems)))  # holders may be several
        return directory

    @property
    def held(self) -> dict[str, frozenset[int]]:
        """By column, the positions that somebody holds."""
        return {
            name: frozenset(position for position, other in self.holders if other == name)
            for name in self.forms
        }

    def problems(self, trajectories: int) -> list[str]:
        """What makes the columns no batch of that many trajectories."""
        try:
            sizes_of(self.forms)
            for name, positions in self.held.items():
                check_complete(declared(name), len(positions), trajectories)
        except ValueError as error:
            return [str(error)]
        return []

    def changed(
        self, received: Mapping[Key, np.ndarray], trajectories: Sequence[Trajectory], at: Topology
    ) -> list[str]:
        """A line for each array that no holder has sent so."""
        lines = []
        for key, array in received.items():
            holders, found = self.holders[key], digest(array)
            if found not in holders.values():
                source = min(holders)
                lines.append(
                    f"{name_of(key[0], trajectories)}: the {key[1]} that rank {at.rank} received "
                    f"has the hash {found}, expected {holders[source]}, which rank "
                    f"{at.leaders[source]} holds"
                )
        return lines


def digest(array: np.ndarray) -> str:
    """A hash of the values."""
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest()


def name_of(position: int, trajectories: Sequence[Trajectory]) -> str:
    """The trajectory at ``position`` in an error."""
    return f"sample {position} ({trajectories[position]})"


def _misfit(name: str, form: Form, first: Form, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with the form of an array, beside the first one's of this column."""
    for size, found in zip(declared(name).trailing, form.trailing, strict=True):
        if found != sizes.get(size, found):
            return f"{name} has {size} {found}, expected {sizes[size]}"
    if form != first:
        return f"{name} is {_told(form)}, that of others {_told(first)}"
    return None


def _told(form: Form) -> Any:
    return f"{form.dtype} [rows, {', '.join(map(str, form.trailing))}]"
