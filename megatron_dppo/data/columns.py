"""The per-token columns of a trajectory, each declared once: type, shape, alignment and readers.

What the engine is asked for (``engine/protocol.py``), batch files, the exchange between ranks
and packing follow from the declarations: a new column is a ``declare`` here or in any other module,
and a source where the engine is what says it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

import numpy as np
import xxhash

Usable = Callable[[np.ndarray, Mapping[str, np.ndarray]], np.ndarray]
"""(loss_mask [S], the trajectory's columns) -> bool, one for each row of a column."""

Check = Callable[[np.ndarray, Mapping[str, np.ndarray], str], None]
"""(a column, all of the trajectory's, where they are from): raises ValueError for what can't be."""


@cache
def _name(dtype: np.dtype) -> str:
    # numpy makes the name anew each time, which takes longer than all other checks of an array.
    return dtype.name


class Rows(Enum):
    """Which tokens of a trajectory have a row."""

    SAMPLED = "sampled"
    """Each token that the policy sampled; row i is of the i-th of them."""
    INPUT = "input"
    """Each token but the last, which is never fed back to a model."""


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

    def positions(self, loss_mask: np.ndarray) -> np.ndarray:
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


def digest(array: np.ndarray) -> str:
    """A hash of the values, type and shape: 32 hexadecimal digits."""
    # XXH3 of 128 bits takes a tenth of the time of copying them.
    hasher = xxhash.xxh3_128(f"{array.dtype.str}{array.shape}".encode())
    hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()


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


# --- what log-probabilities must be: the same that the engine's protocol asks of answers

# A log-probability may exceed 0 by this much: what fp32 makes of a near-certain token.
LOG_PROB_ROUNDING = 1e-6


def check_log_probs(log_probs: Sequence[float] | np.ndarray, where: str) -> None:
    """Raise ValueError, naming ``where`` and the position, unless all are finite and at most 0, give
    or take fp32's rounding.
    """
    values = np.asarray(log_probs, dtype=np.float64)
    good = np.isfinite(values) & (values <= LOG_PROB_ROUNDING)
    if not good.all():
        first = tuple(int(i) for i in np.argwhere(~good)[0])
        raise ValueError(
            f"{where}: {values[first]} at token {first[0]}, expected a finite log-probability <= 0"
        )


def check_topk(ids: np.ndarray, log_probs: np.ndarray, where: str) -> None:
    """As ``check_log_probs``, of Top-K entries [R, K] whose id is not negative; ValueError also where
    a token has an id twice, whose probability would count twice.
    """
    valid = ids >= 0
    check_log_probs(np.where(valid, log_probs, 0.0), f"{where}: Top-K log-probabilities")
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        row, column = np.argwhere(twice)[0]
        raise ValueError(
            f"{where}: Top-K id {ordered[row, column]} stands twice at token {row}, expected different ids"
        )


# --- recorded expert choices (R3, arXiv 2510.11370): what no router chooses, and which rows hold
#
# A recording of one trajectory is uint8 or uint16 [S - 1, L, E]: row t holds the experts of token t in each
# mixture-of-experts layer. The last token is never fed back to the engine, so it has none. S = tokens of the
# trajectory, L = mixture-of-experts layers, E = experts a token.

# Where one expert serves a token, zeros in every layer for more tokens than this were never written: no router
# sends so many tokens to expert 0 of every layer.
UNWRITTEN_TOKENS = 8


def check_recording(routed: np.ndarray, experts: int) -> None:
    """Raise ValueError unless each token goes to distinct experts of 0 .. ``experts`` - 1.

    ``routed`` [rows, L, E] of any integer type.
    """
    if routed.size == 0:
        return
    if routed.min() < 0 or routed.max() >= experts:
        raise ValueError(f"routed expert outside 0..{experts - 1}")
    if routed.shape[-1] > 1 and not routed.any():
        raise ValueError("routed experts are all 0: the engine recorded nothing")
    # They would break the dispatch of tokens.
    if has_repeats(routed):
        raise ValueError("a token is routed to the same expert twice")


def has_repeats(routed: np.ndarray) -> bool:
    """Whether an entry [..., E] has one number twice."""
    # Pairs are compared: a sort of so short rows takes ten times as long.
    size = routed.shape[-1]
    choices = np.ascontiguousarray(routed.reshape(-1, size).T)
    return any((choices[i + 1 :] == choices[i]).any() for i in range(size - 1))


def is_unwritten(routed: np.ndarray) -> bool:
    """Whether a recording with one expert a token holds zeros alone: a buffer nobody wrote to."""
    return routed.shape[-1] == 1 and len(routed) > UNWRITTEN_TOKENS and not routed.any()


def usable_rows(loss_mask: np.ndarray, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """bool [S - 1]: whether each row of a recording belongs to the tokens' log-probabilities.

    Rows that predict a token of another version than the one that recorded them are left out: ``routing_version`` says
    which did. Without that column it was the last version: an engine that goes on with a response after a weight update
    records the whole sequence again under the new weights. Without ``weight_version`` all rows hold.
    """
    rows = np.ones(len(loss_mask) - 1, dtype=bool)
    versions = columns.get("weight_version")
    if versions is not None and len(versions):
        recorded = columns.get("routing_version", versions[-1])
        rows[np.flatnonzero(loss_mask)[versions != recorded] - 1] = False
    return rows


# --- the columns


def _log_probs(array: np.ndarray, _: Mapping[str, np.ndarray], where: str) -> None:
    check_log_probs(array, f"{where}: rollout_log_probs")


def _topk_ids(_: np.ndarray, columns: Mapping[str, np.ndarray], where: str) -> None:
    if not {"topk_ids", "topk_log_probs"} <= columns.keys():
        raise ValueError(f"{where}: topk_ids and topk_log_probs go together")


def _topk(ids: np.ndarray, columns: Mapping[str, np.ndarray], where: str) -> None:
    _topk_ids(ids, columns, where)
    check_topk(columns["topk_ids"], columns["topk_log_probs"], where)


def _routing(array: np.ndarray, _: Mapping[str, np.ndarray], where: str) -> None:
    try:
        # Without the model: any expert that the type can name.
        check_recording(array, np.iinfo(array.dtype).max + 1)
    except ValueError as error:
        raise ValueError(f"{where}: routed_experts: {error}") from error


def _finite(array: np.ndarray, _: Mapping[str, np.ndarray], where: str) -> None:
    if not np.isfinite(array).all():
        raise ValueError(f"{where}: an advantage is not finite")


ROLLOUT_LOG_PROBS = declare(
    Column("rollout_log_probs", ("float32",), Rows.SAMPLED, check=_log_probs, read_by=ReadBy.LAST)
)
"""Natural log mu(token) at the sampling temperature, as the engine returned it."""

RECOMPUTED_LOG_PROBS = declare(
    Column("recomputed_log_probs", ("float32",), Rows.SAMPLED, read_by=ReadBy.LAST)
)
"""The trainer's own log-probabilities at the rollout's weights."""

REFERENCE_LOG_PROBS = declare(
    Column("reference_log_probs", ("float32",), Rows.SAMPLED, read_by=ReadBy.LAST)
)
"""The trainer's own log-probabilities at the weights that training started from."""

# Packs have it as ``PackedBatch.advantages``, whatever it is made from.
ADVANTAGES = declare(
    Column(
        "advantages", ("float32",), Rows.SAMPLED, packed=False, check=_finite, read_by=ReadBy.LAST
    )
)
"""The advantage of each token's turn, where turns have their own (``environment.credit: turn``)."""

STEP_BOUND = declare(Column("step_bound", ("float32",), Rows.SAMPLED, read_by=ReadBy.LAST))
"""What an algorithm found of all tokens of the optimiser step (``algorithms/rules.py``), the same at each of them."""

TOPK_IDS = declare(
    Column(
        "topk_ids",
        ("int32",),
        Rows.SAMPLED,
        ("topk",),
        fill=-1,
        check=_topk_ids,
        read_by=ReadBy.LAST,
    )
)
"""Ids of TopK(mu) where each token was sampled; -1 where the engine gave fewer than K."""

TOPK_LOG_PROBS = declare(
    Column(
        "topk_log_probs", ("float32",), Rows.SAMPLED, ("topk",), check=_topk, read_by=ReadBy.LAST
    )
)
"""Natural log mu at ``topk_ids``."""

# Every stage needs them, for the rows of ``routed_experts`` that hold.
WEIGHT_VERSION = declare(Column("weight_version", ("int32",), Rows.SAMPLED, packed=False))
"""The weights that sampled each token; every rank knows its runs (``Outline``)."""

ROUTING_VERSION = declare(
    Column("routing_version", ("int32",), Rows.SAMPLED, complete=False, packed=False)
)
"""The weights that recorded the row of ``routed_experts`` which predicts each token; -1: that row was lost, and holds
nothing. Only where not all rows are of the last version (``usable_rows``)."""

ROUTED_EXPERTS = declare(
    Column(
        "routed_experts",
        ("uint8", "uint16"),
        Rows.INPUT,
        ("moe_layers", "experts_per_token"),
        complete=False,
        usable=usable_rows,
        check=_routing,
    )
)
"""The experts that the engine sent each token to, for router replay."""

# It says how to cut the others, and is of no use behind that.
BRANCH = declare(Column("branch", ("uint16",), Rows.INPUT, complete=False, packed=False))
"""Which branch of its episode each token belongs to: 0, 1, ... Only where there is more than one."""

LOSS_COLUMNS = tuple(
    declare(
        Column(f"loss_{name}", (dtype,), Rows.SAMPLED, trailing, complete=False, packed=False)
    ).name
    for name, dtype, trailing in (
        ("log_probs", "float32", ()),
        ("recomputed_log_probs", "float32", ()),
        ("topk_log_probs", "float32", ("topk",)),
        ("entropy", "float32", ()),
        ("divergence", "float64", ()),
        ("trains", "bool", ()),
    )
)
"""What the loss saw of each token in the optimiser step that trained on it; saved batches have them, no rank.

log pi; log pi', log pi at TopK(mu) and the entropy of pi where it had them; the divergence that the mask compared with
its threshold, if it measures one; and whether the token trained. A response without a gradient has none of them.
"""
