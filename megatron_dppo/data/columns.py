"""The per-token columns of a trajectory, each declared once: type, shape, alignment and readers.

What the engine is asked for (``engine/column_sources.py``), batch files, the exchange between ranks
and packing follow from the declarations: a new column is a ``declare`` here or in any other module,
and a source where the engine is what says it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_dppo.data.log_prob_checks import check_log_probs, check_topk
from megatron_dppo.data.routing import check_stored, usable_rows

Usable = Callable[[np.ndarray, Mapping[str, np.ndarray]], np.ndarray]
"""(loss_mask [S], the trajectory's columns) -> bool, one for each row of a column."""

Check = Callable[[np.ndarray, Mapping[str, np.ndarray], str], None]
"""(a column, all of the trajectory's, where they are from): raises ValueError for what can't be."""


@cache
def _name(dtype: np.dtype) -> str:
    """numpy makes the name anew each time, which takes longer than all other checks of an array."""
    return dtype.name


class Rows(Enum):
    """Which tokens of a trajectory have a row."""

    SAMPLED = "sampled"
    """Each token that the policy sampled; row i is of the i-th of them."""
    INPUT = "input"
    """Each token but the last, which is never fed back to a model."""


class Reach(Enum):
    """Which ranks hold a column once a batch has been exchanged."""

    TRAINING_REPLICA = "the replica that trains on the trajectory"
    SAVED = "no rank; saved batches have it"


class ReadBy(Enum):
    """Which pipeline stages of the replica that trains on a trajectory read a column: only these get it."""

    FIRST = "the first stage, which embeds the tokens"
    LAST = "the last stage, which computes the loss"
    ALL = "every stage; of a column by MoE layer, that stage's layers"

    def includes(self, stage: int, stages: int) -> bool:
        """Whether ``stage`` of ``stages``, counted from 0, is one of them."""
        return {
            ReadBy.FIRST: stage == 0,
            ReadBy.LAST: stage == stages - 1,
            ReadBy.ALL: True,
        }[self]


class Form(NamedTuple):
    """Type and trailing shape that a batch's arrays of one column have in common."""

    dtype: str
    trailing: tuple[int, ...]

    @classmethod
    def of(cls, array: np.ndarray) -> Form:
        """Of an array [rows, ...]."""
        return cls(_name(array.dtype), array.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return np.dtype(self.dtype).itemsize * math.prod(self.trailing)


@dataclass(frozen=True)
class Column:
    """What one per-token column is; its arrays are [rows, *trailing].

    ``dtypes``: names of the allowed types, the usual one first. ``trailing``: names of the sizes of
    the further axes, which are equal in a batch. ``fill``: the value of rows that a pack has no value
    for. ``complete``: every trajectory of a batch has the column, or none; otherwise some may lack
    it. ``packed``: micro-batches carry it. ``usable``: which rows hold (None: all). ``check``: of
    values that come from elsewhere (``Trajectory.check``). ``read_by``: which pipeline stages get it.
    """

    name: str
    dtypes: tuple[str, ...]
    rows: Rows
    reach: Reach
    trailing: tuple[str, ...] = ()
    fill: int = 0
    complete: bool = True
    packed: bool = True
    usable: Usable | None = None
    check: Check | None = None
    read_by: ReadBy = ReadBy.ALL

    @property
    def has_gaps(self) -> bool:
        """Whether a pack must say which of its rows hold."""
        return not self.complete or self.usable is not None

    def count(self, loss_mask: np.ndarray) -> int:
        """Rows of a trajectory with this mask [S]."""
        if self.rows is Rows.SAMPLED:
            return int(np.count_nonzero(loss_mask))
        return len(loss_mask) - 1

    def places(self, loss_mask: np.ndarray) -> np.ndarray:
        """Position in the trajectory that each row stands at in a pack: int64 [rows].

        A sampled token's row stands at the token before it, which predicts it.
        """
        if self.rows is Rows.SAMPLED:
            return np.flatnonzero(loss_mask) - 1
        return np.arange(len(loss_mask) - 1)

    def array(self, values: object, loss_mask: np.ndarray, where: object) -> np.ndarray:
        """``values`` as this column of a trajectory with ``loss_mask``: contiguous and read-only.

        A sequence that is no array becomes one of the usual type. Raises ValueError, beginning with
        ``where``, for a type, a number of axes or a number of rows that is not the declared one.
        """
        array = values if isinstance(values, np.ndarray) else np.asarray(values, self.dtypes[0])
        dtype = _name(array.dtype)
        if dtype not in self.dtypes:
            raise ValueError(
                f"{where}: {self.name} is {dtype}, expected {' or '.join(self.dtypes)}"
            )
        if array.ndim != 1 + len(self.trailing):
            axes = ", ".join(("rows", *self.trailing))
            raise ValueError(f"{where}: {self.name} has shape {array.shape}, expected [{axes}]")
        if len(array) != self.count(loss_mask):
            tokens = "sampled tokens" if self.rows is Rows.SAMPLED else "tokens but the last"
            raise ValueError(
                f"{where}: {len(array)} rows of {self.name}, expected {self.count(loss_mask)}, one "
                f"for each of the {tokens}"
            )
        return read_only(array)


def read_only(array: np.ndarray) -> np.ndarray:
    """A contiguous view that can't be written through; the given array stays as it is."""
    if not array.flags.writeable and array.flags.c_contiguous:
        return array
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view


COLUMNS: dict[str, Column] = {}
"""All declared columns by name."""


def declare(column: Column) -> Column:
    """Make ``column`` known. Raises ValueError where the name is taken."""
    if column.name in COLUMNS:
        raise ValueError(f"column {column.name!r} is declared already")
    COLUMNS[column.name] = column
    return column


def declared(name: str) -> Column:
    """The column of that name. Raises ValueError where there is none."""
    if name not in COLUMNS:
        raise ValueError(f"column {name!r} is not declared; known are {', '.join(sorted(COLUMNS))}")
    return COLUMNS[name]


def _log_probs(array: np.ndarray, _: Mapping[str, np.ndarray], where: str) -> None:
    check_log_probs(array, f"{where}: rollout_log_probs")


def _topk(_: np.ndarray, columns: Mapping[str, np.ndarray], where: str) -> None:
    if "topk_ids" not in columns:
        raise ValueError(f"{where}: topk_ids and topk_log_probs go together")
    check_topk(columns["topk_ids"], columns["topk_log_probs"], where)


def _routing(array: np.ndarray, _: Mapping[str, np.ndarray], where: str) -> None:
    try:
        check_stored(array)
    except ValueError as error:
        raise ValueError(f"{where}: routed_experts: {error}") from error


ROLLOUT_LOG_PROBS = declare(
    Column(
        "rollout_log_probs",
        ("float32",),
        Rows.SAMPLED,
        Reach.TRAINING_REPLICA,
        check=_log_probs,
        read_by=ReadBy.LAST,
    )
)
"""Natural log mu(token) at the sampling temperature, as the engine returned it."""

RECOMPUTED_LOG_PROBS = declare(
    Column(
        "recomputed_log_probs",
        ("float32",),
        Rows.SAMPLED,
        Reach.TRAINING_REPLICA,
        read_by=ReadBy.LAST,
    )
)
"""The trainer's own log-probabilities at the rollout's weights."""

REFERENCE_LOG_PROBS = declare(
    Column(
        "reference_log_probs",
        ("float32",),
        Rows.SAMPLED,
        Reach.TRAINING_REPLICA,
        read_by=ReadBy.LAST,
    )
)
"""The trainer's own log-probabilities at the weights that training started from."""

TOPK_IDS = declare(
    Column(
        "topk_ids",
        ("int32",),
        Rows.SAMPLED,
        Reach.TRAINING_REPLICA,
        ("topk",),
        fill=-1,
        read_by=ReadBy.LAST,
    )
)
"""Ids of TopK(mu) where each token was sampled; -1 where the engine gave fewer than K."""

TOPK_LOG_PROBS = declare(
    Column(
        "topk_log_probs",
        ("float32",),
        Rows.SAMPLED,
        Reach.TRAINING_REPLICA,
        ("topk",),
        check=_topk,
        read_by=ReadBy.LAST,
    )
)
"""Natural log mu at ``topk_ids``."""

WEIGHT_VERSION = declare(
    Column("weight_version", ("int32",), Rows.SAMPLED, Reach.TRAINING_REPLICA, packed=False)
)
"""The weights that sampled each token; every rank knows its runs (``data/outline.py``). Every stage needs them
for the rows of ``routed_experts`` that hold."""

ROUTED_EXPERTS = declare(
    Column(
        "routed_experts",
        ("uint8", "uint16"),
        Rows.INPUT,
        Reach.TRAINING_REPLICA,
        ("moe_layers", "experts_per_token"),
        complete=False,
        usable=usable_rows,
        check=_routing,
    )
)
"""The experts that the engine sent each token to, for router replay."""

LOSS_COLUMNS = tuple(
    declare(
        Column(f"loss_{name}", (dtype,), Rows.SAMPLED, Reach.SAVED, complete=False, packed=False)
    ).name
    for name, dtype in {
        "log_probs": "float32",
        "recomputed_log_probs": "float32",
        "entropy": "float32",
        "divergence": "float64",
        "trains": "bool",
    }.items()
)
"""What the loss saw of each token in the optimiser step that trained on it: log pi; log pi' and the
entropy of pi where it had them; the divergence that the mask compared with its threshold, if it
measures one; and whether the token trained. A response without a gradient has none of them."""
