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
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import xxhash

Usable = Callable[[np.ndarray, Mapping[str, np.ndarray]], np.ndarray]
"""(loss_mask [S], the trajectory's columns) -> bool, one for each row of a column."""

Check = Callable[[np.ndarray, Mapping[str, np.ndarray], str], None]
"""(a column, all columns of the trajectory, their origin): raises ValueError for invalid values."""


@cache
def _dtype_name(dtype: np.dtype) -> str:
    # Cache the name: numpy builds it at each access, and this takes longer than all other checks of an array.
    return dtype.name


class Rows(Enum):
    """The tokens of a trajectory that have a row in a column."""

    SAMPLED = "sampled"
    """Each token that the policy sampled; row i belongs to the i-th sampled token."""
    INPUT = "input"
    """Each token but the last: the last token is never the input of a model."""


class ReadBy(Enum):
    """The pipeline stages that read a column, in the replica that trains on a trajectory. Other stages do not receive
    the column.
    """

    FIRST = "the first stage, which embeds the tokens"
    LAST = "the last stage, which computes the loss"
    ALL = "every stage; a column by MoE layer is split, and each stage reads its own layers"

    def includes(self, stage: int, stages: int) -> bool:
        """Whether ``stage`` of ``stages``, counted from 0, reads the column."""
        return {ReadBy.FIRST: stage == 0, ReadBy.LAST: stage == stages - 1, ReadBy.ALL: True}[self]


class Form(NamedTuple):
    """Type and trailing shape (without the rows) that all arrays of one column have in a batch."""

    dtype: str
    trailing: tuple[int, ...]

    @classmethod
    def of(cls, array: np.ndarray) -> Form:
        return cls(_dtype_name(array.dtype), array.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return np.dtype(self.dtype).itemsize * math.prod(self.trailing)


@dataclass(frozen=True)
class Column:
    """The declaration of a per-token column. Its arrays are [rows, *trailing].

    Attributes:
        name: Name of the column.
        dtypes: Names of the allowed types. Values that are not an array get the first type.
        rows: The tokens that have a row.
        trailing: Names of the sizes of the axes after the rows. The sizes are equal in all trajectories of a batch.
        fill: In a pack, the number that stands in rows without a value.
        complete: True: either all trajectories of a batch have the column, or no trajectory has it. False: some
            trajectories may lack the column.
        packed: Whether micro-batches have the column.
        usable: Computes which rows are valid. None: all rows are valid.
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
        """Whether some rows may be invalid or missing, so that a pack needs a mask of the valid rows."""
        return not self.complete or self.usable is not None

    def count(self, loss_mask: np.ndarray) -> int:
        """Number of rows for a trajectory with this mask [S]."""
        if self.rows is Rows.SAMPLED:
            return int(np.count_nonzero(loss_mask))
        return len(loss_mask) - 1

    def positions(self, loss_mask: np.ndarray) -> np.ndarray:
        """Return for each row the position in the trajectory where a pack places it: int64 [rows].

        The row of a sampled token is placed at the token before, because the model predicts the sampled token there.
        """
        if self.rows is Rows.SAMPLED:
            return np.flatnonzero(loss_mask) - 1
        return np.arange(len(loss_mask) - 1)

    def array(self, values: object, loss_mask: np.ndarray, location: object) -> np.ndarray:
        """Convert ``values`` to this column of a trajectory with ``loss_mask``: contiguous and read-only.

        Raises ValueError, beginning with ``location``, for a type, a number of axes or a number of rows that differs
        from the declaration.
        """
        array = values if isinstance(values, np.ndarray) else np.asarray(values, self.dtypes[0])
        dtype = _dtype_name(array.dtype)
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
    # XXH3 of 128 bits takes a tenth of the time of copying the array.
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
    """The column ``name``. Raises ValueError if it is not declared."""
    if name not in COLUMNS:
        raise ValueError(f"column {name!r} is not declared; known are {', '.join(sorted(COLUMNS))}")
    return COLUMNS[name]


LOG_PROB_ROUNDING = 1e-6
"""Log-probabilities may exceed 0 by this much, because float32 rounds probabilities near 1."""


def check_log_probs(log_probs: Sequence[float] | np.ndarray, location: str) -> None:
    """Raise ValueError, with ``location`` and the position, for a number that is above ``LOG_PROB_ROUNDING`` or not
    finite."""
    values = np.asarray(log_probs, dtype=np.float64)
    is_valid = np.isfinite(values) & (values <= LOG_PROB_ROUNDING)
    if not is_valid.all():
        position = tuple(int(i) for i in np.argwhere(~is_valid)[0])
        raise ValueError(
            f"{location}: {values[position]} at token {position[0]}, expected a finite log-probability <= 0"
        )


def check_topk(ids: np.ndarray, log_probs: np.ndarray, location: str) -> None:
    """Check Top-K log-probabilities [R, K] as ``check_log_probs`` does. The fill, with negative ids, is not checked.

    Raises ValueError also if a token has an id twice: the probability of this id would count twice.
    """
    is_valid = ids >= 0
    check_log_probs(np.where(is_valid, log_probs, 0.0), f"{location}: Top-K log-probabilities")
    sorted_ids = np.sort(ids, axis=1)
    is_repeated = (sorted_ids[:, 1:] == sorted_ids[:, :-1]) & (sorted_ids[:, 1:] >= 0)
    if is_repeated.any():
        row, column = np.argwhere(is_repeated)[0]
        raise ValueError(
            f"{location}: Top-K id {sorted_ids[row, column]} stands twice at token {row}, expected different ids"
        )


UNWRITTEN_TOKENS = 8
"""A recording of one expert per token was never written if all its values are 0 and it has more than this number of
tokens. No router sends so many tokens to expert 0 of every layer."""


def check_recording(routed: np.ndarray, experts: int) -> None:
    """Raise ValueError unless each token goes to distinct experts of 0 .. ``experts`` - 1.

    ``routed``, [rows, L, E] of any integer type, has the recorded expert choices (R3, arXiv 2510.11370); L = MoE
    layers, E = experts per token. A trajectory of S tokens has uint8 or uint16 [S - 1, L, E]: row t has the experts of
    token t in each MoE layer. The last token is never fed back to the engine, so it has no row.
    """
    if routed.size == 0:
        return
    if routed.min() < 0 or routed.max() >= experts:
        raise ValueError(f"routed expert outside 0..{experts - 1}")
    # With one expert per token, a short recording may truly have only zeros (``is_unwritten``).
    if routed.shape[-1] > 1 and not routed.any():
        raise ValueError("routed experts are all 0: the engine recorded nothing")
    # A repeated expert would break the dispatch of tokens.
    if has_repeats(routed):
        raise ValueError("a token is routed to the same expert twice")


def has_repeats(routed: np.ndarray) -> bool:
    """Whether a token has the same expert twice in a layer; ``routed`` is [..., E]."""
    # Compare each of the E columns with the columns after it: sorting the short rows takes ten times as long.
    size = routed.shape[-1]
    choices = np.ascontiguousarray(routed.reshape(-1, size).T)
    return any((choices[i + 1 :] == choices[i]).any() for i in range(size - 1))


def is_unwritten(routed: np.ndarray) -> bool:
    """Whether a recording with one expert per token has only zeros, and so was never written."""
    return routed.shape[-1] == 1 and len(routed) > UNWRITTEN_TOKENS and not routed.any()


def usable_rows(loss_mask: np.ndarray, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Whether each row of a recording was recorded by the weights that sampled the next token: bool [S - 1].

    The column ``routing_version`` has the version that recorded the row. Without the column, the last version recorded
    all rows: an engine that continues a response after a weight update records the whole sequence again under the new
    weights. A row whose next token was not sampled is usable. Without ``weight_version`` all rows are usable.
    """
    is_usable = np.ones(len(loss_mask) - 1, dtype=bool)
    versions = columns.get("weight_version")
    if versions is not None and len(versions):
        recording_versions = columns.get("routing_version", versions[-1])
        has_mismatch = versions != recording_versions
        unusable_targets = np.flatnonzero(loss_mask)[has_mismatch]
        is_usable[unusable_targets - 1] = False
    return is_usable


def _log_probs(name: str, array: np.ndarray, _: Mapping[str, np.ndarray], location: str) -> None:
    check_log_probs(array, f"{location}: {name}")


def _topk_pair(owner: str, _: np.ndarray, columns: Mapping[str, np.ndarray], location: str) -> None:
    """Raise ValueError unless both columns, whose names begin with ``owner``, are there."""
    ids, log_probs = f"{owner}topk_ids", f"{owner}topk_log_probs"
    if not {ids, log_probs} <= columns.keys():
        raise ValueError(f"{location}: {ids} and {log_probs} go together")


def _topk(owner: str, array: np.ndarray, columns: Mapping[str, np.ndarray], location: str) -> None:
    """Check both columns of a Top-K, whose names begin with ``owner``."""
    _topk_pair(owner, array, columns, location)
    whose = f"{location}: teacher" if owner else location
    check_topk(columns[f"{owner}topk_ids"], columns[f"{owner}topk_log_probs"], whose)


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
    Column(
        "rollout_log_probs",
        ("float32",),
        Rows.SAMPLED,
        check=partial(_log_probs, "rollout_log_probs"),
        read_by=ReadBy.LAST,
    )
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
        "advantages", ("float32",), Rows.SAMPLED, packed=False, check=_finite, read_by=ReadBy.LAST
    )
)
"""The advantage of each token's turn, if turns have separate advantages (``environment.credit: turn``)."""

STEP_BOUND = declare(Column("step_bound", ("float32",), Rows.SAMPLED, read_by=ReadBy.LAST))
"""The number that an algorithm computed from all tokens of the optimiser step (``algorithms/step_rules.py``). It is
equal for all tokens."""

TOPK_IDS = declare(
    Column(
        "topk_ids",
        ("int32",),
        Rows.SAMPLED,
        ("topk",),
        fill=-1,
        check=partial(_topk_pair, ""),
        read_by=ReadBy.LAST,
    )
)
"""Ids of TopK(mu) at each sampled token. If the engine returned fewer than K ids, the rest is -1."""

TOPK_LOG_PROBS = declare(
    Column(
        "topk_log_probs",
        ("float32",),
        Rows.SAMPLED,
        ("topk",),
        check=partial(_topk, ""),
        read_by=ReadBy.LAST,
    )
)
"""Natural log mu at ``topk_ids``."""

TEACHER_LOG_PROBS = declare(
    Column(
        "teacher_log_probs",
        ("float32",),
        Rows.SAMPLED,
        check=partial(_log_probs, "teacher_log_probs"),
        read_by=ReadBy.LAST,
    )
)
"""Natural log p_T(token) of the response's teacher, as returned by the teacher's servers."""

TEACHER_TOPK_IDS = declare(
    Column(
        "teacher_topk_ids",
        ("int32",),
        Rows.SAMPLED,
        ("teacher_topk",),
        fill=-1,
        check=partial(_topk_pair, "teacher_"),
        read_by=ReadBy.LAST,
    )
)
"""Ids of TopK(p_T) at each sampled token."""

TEACHER_TOPK_LOG_PROBS = declare(
    Column(
        "teacher_topk_log_probs",
        ("float32",),
        Rows.SAMPLED,
        ("teacher_topk",),
        check=partial(_topk, "teacher_"),
        read_by=ReadBy.LAST,
    )
)
"""Natural log p_T at ``teacher_topk_ids``."""

# Every stage needs the versions to find the usable rows of ``routed_experts``.
WEIGHT_VERSION = declare(Column("weight_version", ("int32",), Rows.SAMPLED, packed=False))
"""The weight version that sampled each token. ``Outline.version_spans`` has the same information for every rank."""

ROUTING_VERSION = declare(
    Column("routing_version", ("int32",), Rows.SAMPLED, complete=False, packed=False)
)
"""For each sampled token, the weight version that recorded the row of ``routed_experts`` at the token before; -1 for a
lost row. The column exists only if some rows were not recorded by the last version (``usable_rows``)."""

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
        ("advantages", "float32", ()),
        ("trains", "bool", ()),
    )
)
"""The inputs of the loss for each token, in the optimiser step that trained on it. Only saved batches have them.

Responses without a gradient have none of these columns. All other responses have ``loss_log_probs`` (log pi) and
``loss_trains`` (whether the token trained). Each of the other columns exists only if the loss had its values:
``loss_recomputed_log_probs``, ``loss_topk_log_probs`` (log pi at TopK(mu)), ``loss_entropy`` (the entropy of pi),
``loss_divergence`` (the divergence that the mask compares with a threshold) and ``loss_advantages`` (the advantages
that the mask saw, in a run with a teacher).
"""
