"""The per-token columns of a trajectory, each declared once: type, shape, alignment and readers.

Requests to the engine (``engine/protocol.py``), batch files, the exchange between ranks and packing follow from the
declarations. To add a column, call ``declare`` here or in another module; a column that the engine returns also needs a
source in ``engine/protocol.py``.
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
"""(a column, all columns of the trajectory, their origin): raises ValueError for invalid values."""


@cache
def _name(dtype: np.dtype) -> str:
    # Cached: numpy builds the name at each access, which takes longer than all other checks of an array.
    return dtype.name


class Rows(Enum):
    """Which tokens of a trajectory have a row."""

    SAMPLED = "sampled"
    """Each token that the policy sampled; row i is of the i-th of them."""
    INPUT = "input"
    """Each token but the last, which is never fed back to a model."""


class ReadBy(Enum):
    """The pipeline stages that read a column, in the replica that trains on a trajectory. Only these receive it."""

    FIRST = "the first stage, which embeds the tokens"
    LAST = "the last stage, which computes the loss"
    ALL = "every stage; of a column by MoE layer, that stage's layers"

    def includes(self, stage: int, stages: int) -> bool:
        """Whether ``stage`` of ``stages``, counted from 0, reads the column."""
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
    """The declaration of a per-token column, whose arrays are [rows, *trailing].

    Attributes:
        name: Name of the column.
        dtypes: Names of the allowed types, the usual one first.
        rows: The tokens that have a row.
        trailing: Names of the sizes of the further axes, which are equal in a batch.
        fill: The value in a pack's rows that have no value.
        complete: Whether all trajectories of a batch have the column, or none. Otherwise some may lack it.
        packed: Whether micro-batches have the column.
        usable: Computes which rows are valid. None: all.
        check: Validates values from a file or the engine (``Trajectory.check``).
        read_by: The pipeline stages that receive the column.
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
        """Whether a pack needs a mask of the column's valid rows."""
        return not self.complete or self.usable is not None

    def count(self, loss_mask: np.ndarray) -> int:
        """Number of rows for a trajectory with this mask [S]."""
        if self.rows is Rows.SAMPLED:
            return int(np.count_nonzero(loss_mask))
        return len(loss_mask) - 1

    def positions(self, loss_mask: np.ndarray) -> np.ndarray:
        """The position in the trajectory at which a pack places each row: int64 [rows].

        The row of a sampled token is placed at the token before it, which predicts it.
        """
        if self.rows is Rows.SAMPLED:
            return np.flatnonzero(loss_mask) - 1
        return np.arange(len(loss_mask) - 1)

    def array(self, values: object, loss_mask: np.ndarray, location: object) -> np.ndarray:
        """Convert ``values`` to this column of a trajectory with ``loss_mask``: contiguous and read-only.

        A sequence that is no array gets the usual type. Raises ValueError, beginning with ``location``, for a type, a
        number of axes or a number of rows that differs from the declaration.
        """
        array = values if isinstance(values, np.ndarray) else np.asarray(values, self.dtypes[0])
        dtype = _name(array.dtype)
        if dtype not in self.dtypes:
            raise ValueError(
                f"{location}: {self.name} is {dtype}, expected {' or '.join(self.dtypes)}"
            )
        if array.ndim != 1 + len(self.trailing):
            axes = ", ".join(("rows", *self.trailing))
            raise ValueError(f"{location}: {self.name} has shape {array.shape}, expected [{axes}]")
        if len(array) != self.count(loss_mask):
            tokens = "tokens but the last"
            if self.rows is Rows.SAMPLED:
                tokens = "sampled tokens"
            raise ValueError(
                f"{location}: {len(array)} rows of {self.name}, expected {self.count(loss_mask)}, one "
                f"for each of the {tokens}"
            )
        return read_only(array)


def read_only(array: np.ndarray) -> np.ndarray:
    """A contiguous read-only view. The array itself is not changed."""
    if not array.flags.writeable and array.flags.c_contiguous:
        return array
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view


def digest(array: np.ndarray) -> str:
    """Hash the values, type and shape: 32 hexadecimal digits."""
    # XXH3 of 128 bits takes a tenth of the time of a copy.
    hasher = xxhash.xxh3_128(f"{array.dtype.str}{array.shape}".encode())
    hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()


COLUMNS: dict[str, Column] = {}
"""All declared columns by name."""


def declare(column: Column) -> Column:
    """Add ``column`` to ``COLUMNS``. Raises ValueError if the name is in use."""
    if column.name in COLUMNS:
        raise ValueError(f"column {column.name!r} is declared already")
    COLUMNS[column.name] = column
    return column


def declared_column(name: str) -> Column:
    """The column of that name. Raises ValueError if there is none."""
    if name not in COLUMNS:
        raise ValueError(f"column {name!r} is not declared; known are {', '.join(sorted(COLUMNS))}")
    return COLUMNS[name]


# A log-probability may exceed 0 by this much, by fp32's rounding for a near-certain token. The engine's protocol checks
# answers with the same functions.
LOG_PROB_ROUNDING = 1e-6


def check_log_probs(log_probs: Sequence[float] | np.ndarray, location: str) -> None:
    """Raise ValueError, with ``location`` and the position, unless all are finite and at most ``LOG_PROB_ROUNDING``."""
    values = np.asarray(log_probs, dtype=np.float64)
    is_valid = np.isfinite(values) & (values <= LOG_PROB_ROUNDING)
    if not is_valid.all():
        position = tuple(int(i) for i in np.argwhere(~is_valid)[0])
        raise ValueError(
            f"{location}: {values[position]} at token {position[0]}, expected a finite log-probability <= 0"
        )


def check_topk(ids: np.ndarray, log_probs: np.ndarray, location: str) -> None:
    """Check the log-probabilities of Top-K entries [R, K] as ``check_log_probs`` does, where their id is not negative.

    Raises ValueError also if a token has an id twice, because its probability would count twice.
    """
    valid = ids >= 0
    check_log_probs(np.where(valid, log_probs, 0.0), f"{location}: Top-K log-probabilities")
    ordered = np.sort(ids, axis=1)
    is_repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if is_repeated.any():
        row, column = np.argwhere(is_repeated)[0]
        raise ValueError(
            f"{location}: Top-K id {ordered[row, column]} stands twice at token {row}, expected different ids"
        )


UNWRITTEN_TOKENS = 8
"""With one expert per token, a recording with zeros in every layer for more tokens than this was never written: no
router sends so many tokens to expert 0 of every layer."""


def check_recording(routed: np.ndarray, experts: int) -> None:
    """Raise ValueError unless each token goes to distinct experts of 0 .. ``experts`` - 1.

    ``routed`` [rows, L, E] of any integer type: recorded expert choices (R3, arXiv 2510.11370). The recording of one
    trajectory is uint8 or uint16 [S - 1, L, E]: row t has the experts of token t in each mixture-of-experts layer. The
    last token is never fed back to the engine, so it has no row. S = tokens of the trajectory, L = mixture-of-experts
    layers, E = experts a token.
    """
    if routed.size == 0:
        return
    if routed.min() < 0 or routed.max() >= experts:
        raise ValueError(f"routed expert outside 0..{experts - 1}")
    if routed.shape[-1] > 1 and not routed.any():
        raise ValueError("routed experts are all 0: the engine recorded nothing")
    # A repeated expert would break the dispatch of tokens.
    if has_repeats(routed):
        raise ValueError("a token is routed to the same expert twice")


def has_repeats(routed: np.ndarray) -> bool:
    """Whether an entry [..., E] has a number twice."""
    # Compare pairs: sorting such short rows takes ten times as long.
    size = routed.shape[-1]
    choices = np.ascontiguousarray(routed.reshape(-1, size).T)
    return any((choices[i + 1 :] == choices[i]).any() for i in range(size - 1))


def is_unwritten(routed: np.ndarray) -> bool:
    """Whether a recording with one expert per token has only zeros, and so was never written."""
    return routed.shape[-1] == 1 and len(routed) > UNWRITTEN_TOKENS and not routed.any()


def usable_rows(loss_mask: np.ndarray, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Whether each row of a recording was recorded by the weights that sampled the next token: bool [S - 1].

    ``routing_version`` has the version that recorded each row. Without that column it is the last version: an engine
    that continues a response after a weight update records the whole sequence again under the new weights. Without
    ``weight_version`` all rows are usable.
    """
    rows = np.ones(len(loss_mask) - 1, dtype=bool)
    versions = columns.get("weight_version")
    if versions is not None and len(versions):
        recorded = columns.get("routing_version", versions[-1])
        rows[np.flatnonzero(loss_mask)[versions != recorded] - 1] = False
    return rows


def _log_probs(array: np.ndarray, _: Mapping[str, np.ndarray], location: str) -> None:
    check_log_probs(array, f"{location}: rollout_log_probs")


def _topk_ids(_: np.ndarray, columns: Mapping[str, np.ndarray], location: str) -> None:
    if not {"topk_ids", "topk_log_probs"} <= columns.keys():
        raise ValueError(f"{location}: topk_ids and topk_log_probs go together")


def _topk(ids: np.ndarray, columns: Mapping[str, np.ndarray], location: str) -> None:
    _topk_ids(ids, columns, location)
    check_topk(columns["topk_ids"], columns["topk_log_probs"], location)


def _routing(array: np.ndarray, _: Mapping[str, np.ndarray], location: str) -> None:
    try:
        # The number of experts is unknown here, so allow every number of the type.
        check_recording(array, np.iinfo(array.dtype).max + 1)
    except ValueError as error:
        raise ValueError(f"{location}: routed_experts: {error}") from error


def _finite(array: np.ndarray, _: Mapping[str, np.ndarray], location: str) -> None:
    if not np.isfinite(array).all():
        raise ValueError(f"{location}: an advantage is not finite")


ROLLOUT_LOG_PROBS = declare(
    Column("rollout_log_probs", ("float32",), Rows.SAMPLED, check=_log_probs, read_by=ReadBy.LAST)
)
"""Natural log mu(token) at the sampling temperature, as returned by the engine."""

RECOMPUTED_LOG_PROBS = declare(
    Column("recomputed_log_probs", ("float32",), Rows.SAMPLED, read_by=ReadBy.LAST)
)
"""The trainer's own log-probabilities at the rollout's weights."""

REFERENCE_LOG_PROBS = declare(
    Column("reference_log_probs", ("float32",), Rows.SAMPLED, read_by=ReadBy.LAST)
)
"""The trainer's own log-probabilities at the weights that training started from."""

# Packs have the advantages as ``PackedBatch.advantages``, with or without this column.
ADVANTAGES = declare(
    Column(
        "advantages",
        ("float32",),
        Rows.SAMPLED,
        packed=False,
        check=_finite,
        read_by=ReadBy.LAST,
    )
)
"""The advantage of each token's turn, if turns have separate advantages (``environment.credit: turn``)."""

STEP_BOUND = declare(Column("step_bound", ("float32",), Rows.SAMPLED, read_by=ReadBy.LAST))
"""The number that an algorithm computed from all tokens of the optimiser step (``algorithms/rules.py``); the same for
each token."""

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
"""Ids of TopK(mu) at each sampled token; -1 where the engine returned fewer than K."""

TOPK_LOG_PROBS = declare(
    Column(
        "topk_log_probs",
        ("float32",),
        Rows.SAMPLED,
        ("topk",),
        check=_topk,
        read_by=ReadBy.LAST,
    )
)
"""Natural log mu at ``topk_ids``."""

# Every stage needs the versions to find the usable rows of ``routed_experts``.
WEIGHT_VERSION = declare(Column("weight_version", ("int32",), Rows.SAMPLED, packed=False))
"""The weight version that sampled each token. ``Outline`` has its runs on every rank."""

ROUTING_VERSION = declare(
    Column("routing_version", ("int32",), Rows.SAMPLED, complete=False, packed=False)
)
"""The weight version that recorded the row of ``routed_experts`` before each token; -1 for a lost row. The column
exists only if some rows are not of the last version (``usable_rows``)."""

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

# Packing needs this column only to divide a trajectory into branches, so packs do not have it.
BRANCH = declare(Column("branch", ("uint16",), Rows.INPUT, complete=False, packed=False))
"""The branch of the episode that each token belongs to: 0, 1, ... The column exists only with several branches."""

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
"""The inputs of the loss for each token, in the optimiser step that trained on it. Only saved batches have them.

They are log pi; log pi', log pi at TopK(mu) and the entropy of pi, if the loss had them; the divergence that the mask
compared with its threshold, if it measures one; and whether the token trained. Responses without a gradient have none
of these columns.
"""
