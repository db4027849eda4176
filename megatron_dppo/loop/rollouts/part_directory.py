"""Who holds which part of which trajectory of a batch, and in what form: the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from megatron_dppo.data.columns import Form, declared
from megatron_dppo.data.flat_arrays import digest
from megatron_dppo.data.outline import Outline
from megatron_dppo.data.trajectory import Trajectory, check_complete, sizes_of
from megatron_dppo.loop.rollouts.parts import TOKENS, Part, Stages
from megatron_dppo.trainer.collectives import all_gather_json
from megatron_dppo.trainer.topology import Topology


class ExchangeError(RuntimeError):
    """A column is missing, belongs to another model, or changed on its way."""


@dataclass(frozen=True)
class PartDirectory:
    """``holders``: by part the global ranks of the leaders that hold it, with the hash of it.
    ``forms``: by column what all its whole arrays have in common.
    """

    holders: Mapping[Part, Mapping[int, str]]
    forms: Mapping[str, Form]

    @classmethod
    def gather(
        cls,
        outlines: Sequence[Outline],
        own: Mapping[int, Trajectory],
        parts: Mapping[Part, np.ndarray],
        at: Topology,
        stages: Stages,
        sizes: Mapping[str, int],
    ) -> Self:
        """Of what every leader has: its ``own`` trajectories by position, and the ``parts`` of them.
        Collective.

        ``sizes``: what trailing sizes must be, by their declared names. Raises ExchangeError, on all
        ranks, where arrays do not fit them or each other.
        """
        columns: dict[tuple[str, Form], list[int]] = {}
        for position, t in own.items():
            for name, array in t.columns.items():
                columns.setdefault((name, Form.of(array)), []).append(position)
        hashes: dict[tuple[str, int], list[tuple[int, str]]] = {}
        for part, array in parts.items():
            hashes.setdefault((part.name, part.stage), []).append((part.position, digest(array)))
        shares = all_gather_json([list(columns.items()), list(hashes.items())])
        forms, problems = dict[str, Form](), list[str]()
        present: dict[str, set[int]] = {}
        for (name, told), positions in (c for leader in at.leaders for c in shares[leader][0]):
            form = Form(told[0], tuple(told[1]))
            problem = _misfit(name, form, forms.setdefault(name, form), sizes)
            if problem:
                problems += [f"{name_of(position, outlines)}: {problem}" for position in positions]
            present.setdefault(name, set()).update(positions)
        problems = problems or _incomplete(forms, present, len(outlines))
        if problems:
            raise ExchangeError("\n".join(dict.fromkeys(problems)))  # holders may be several
        holders: dict[Part, dict[int, str]] = {}
        for leader in at.leaders:
            for (name, stage), held in shares[leader][1]:
                for position, found in held:
                    holders.setdefault(Part(position, name, stage), {})[leader] = found
        return cls(holders, dict(sorted(forms.items())))

    @property
    def held(self) -> dict[str, frozenset[int]]:
        """By column, the positions that somebody holds."""
        found: dict[str, set[int]] = {name: set() for name in self.forms}
        for part in self.holders:
            if part.name in found:
                found[part.name].add(part.position)
        return {name: frozenset(positions) for name, positions in found.items()}

    def source(self, part: Part, target: int) -> int:
        """The rank that ``target`` has the part from: itself, or the first that holds it."""
        holders = self.holders[part]
        return target if target in holders else min(holders)

    def changed(
        self, received: Mapping[Part, np.ndarray], outlines: Sequence[Outline], rank: int
    ) -> list[str]:
        """A line for each array that no holder has sent so."""
        lines = []
        for part, array in received.items():
            holders, found = self.holders[part], digest(array)
            if found not in holders.values():
                source = min(holders)
                lines.append(
                    f"{name_of(part.position, outlines)}: the {part.name} that rank {rank} received "
                    f"has the hash {found}, expected {holders[source]}, which rank {source} holds"
                )
        return lines


def name_of(position: int, outlines: Sequence[Outline]) -> str:
    """The trajectory at ``position`` in an error."""
    return f"sample {position} ({outlines[position]})"


def _incomplete(
    forms: Mapping[str, Form], present: Mapping[str, set[int]], trajectories: int
) -> list[str]:
    """What makes the columns no batch of that many trajectories."""
    try:
        sizes_of(forms)
        for name, positions in present.items():
            check_complete(declared(name), len(positions), trajectories)
    except ValueError as error:
        return [str(error)]
    return []


def _misfit(name: str, form: Form, first: Form, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with the form of an array, beside the first one's of this column."""
    assert name not in TOKENS
    for size, found in zip(declared(name).trailing, form.trailing, strict=True):
        if found != sizes.get(size, found):
            return f"{name} has {size} {found}, expected {sizes[size]}"
    if form != first:
        return f"{name} is {_told(form)}, that of others {_told(first)}"
    return None


def _told(form: Form) -> str:
    return f"{form.dtype} [rows, {', '.join(map(str, form.trailing))}]"
