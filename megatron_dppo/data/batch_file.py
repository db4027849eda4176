"""Ragged rows as one flat array and back; hashes of arrays."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from megatron_dppo.data.columns import Rows, declared
from megatron_dppo.data.trajectory import FINISH_REASONS, Trajectory, forms_of
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import write_atomically


def flat(rows: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    """One array of all rows, also of none at all."""
    return np.concatenate([np.empty(0, dtype), *rows]).astype(dtype, copy=False)


def digest(array: np.ndarray) -> str:
    """A hash of the values, type and shape: XXH3 of 128 bits, in a tenth of the time of copying them."""
    found = xxhash.xxh3_128(f"{array.dtype.str}{array.shape}".encode())
    found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def split(rows: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """``rows`` in pieces of ``counts``. Raises ValueError unless that is all of them."""
    if int(counts.sum()) != len(rows):
        raise ValueError(f"{len(rows)} rows, expected {int(counts.sum())}")
    return np.split(rows, np.cumsum(counts)[:-1]) if len(counts) else []


# The arrays of a saved batch, in memory or in a file: rows of them, without the others.


class BatchRows(Protocol):
    """Where rows are read from."""

    def names(self) -> Collection[str]:
        """Of the arrays."""

    def size(self, name: str) -> int:
        """Rows of an array. Raises KeyError where there is none."""

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        """Rows ``begin`` to ``end``."""


class RowsInMemory:
    """Of ``arrays``; what is read are views."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def names(self) -> Collection[str]:
        """Of the arrays."""
        return self._arrays.keys()

    def size(self, name: str) -> int:
        """Rows of an array."""
        return len(self._arrays[name])

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        """A view of rows ``begin`` to ``end``."""
        return self._arrays[name][begin:end]


class RowsInFile:
    """Of a safetensors file, which is mapped; what is read are copies, and nothing else takes memory.

    Raises FileNotFoundError, and SafetensorError where the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="numpy")
        self._slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118

    def names(self) -> Collection[str]:
        """Of the arrays."""
        return self._slices.keys()

    def size(self, name: str) -> int:
        """Rows of an array."""
        return int(self._slices[name].get_shape()[0])

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        """A copy of rows ``begin`` to ``end``."""
        if not self.size(name):  # which safetensors takes no slice of
            return np.asarray(self._file.get_tensor(name))
        if begin == end:
            begin = end = 0
        return np.asarray(self._slices[name][begin:end])


# Batch files of version 1, in which each trajectory was a prompt and a response.
# ``counts`` [n, 6]: problem, sample, prompt tokens, response tokens, finish reason, version
# spans. Read alone: ``trajectory_codec`` writes the present form.


def is_earlier(names: Container[str]) -> bool:
    """Whether a file with arrays of these names has the form that this module reads."""
    return "counts" in names


def from_earlier(arrays: Mapping[str, np.ndarray]) -> list[Trajectory]:
    """The batch. Raises KeyError, ValueError and IndexError where it is none."""
    counts, scores = arrays["counts"], arrays["scores"]
    prompts = split(arrays["prompt_ids"], counts[:, 2])
    responses = split(arrays["response_ids"], counts[:, 3])
    spans = split(arrays["weight_versions"], counts[:, 5])
    per_token = {
        name: split(arrays[name], counts[:, 3])
        for name in ("rollout_log_probs", "topk_ids", "topk_log_probs")
        if name in arrays
    }
    routing = _routing(arrays, counts)
    batch = []
    for i, (problem, sample, _, _, reason, _) in enumerate(counts.tolist()):
        columns = {name: parts[i] for name, parts in per_token.items()} | routing[i]
        if len(arrays["weight_versions"]):
            versions, starts, ends = spans[i].T
            columns["weight_version"] = np.repeat(versions, ends - starts).astype(np.int32)
        batch.append(
            Trajectory.of_response(
                prompts[i],
                responses[i],
                problem_id=problem,
                sample_index=sample,
                columns=columns,
                finish_reason=FINISH_REASONS[reason],
                reward=float(scores[i, 0]),
                advantage=float(scores[i, 1]),
            )
        )
    return batch


def _routing(arrays: Mapping[str, np.ndarray], counts: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Each trajectory's recorded routing under its column's name, where it has any."""
    if "routed_experts" not in arrays:
        return [{} for _ in counts]
    recorded = arrays["routed"]
    parts = split(arrays["routed_experts"], np.where(recorded, counts[:, 2] + counts[:, 3] - 1, 0))
    return [
        {"routed_experts": part} if there else {}
        for part, there in zip(parts, recorded, strict=True)
    ]


# Batches of trajectories as flat arrays: what travels between ranks and what a saved batch file
# holds. Nothing is pickled.
# Arrays of the trajectories are concatenated; ``trajectories`` holds the numbers that tell them
# apart. Each trajectory's part of each array has a hash in the file, which is compared when the
# part is read; a file that an earlier version wrote has none. The text is left out: the tokens
# say it. Columns follow from their declarations (``data/columns.py``).

COLUMN, PRESENT, HASH = "column.", "present.", "hash."
"""Prefixes of a column's rows, of a bool for each trajectory (whether it has the column), and of the hashes
of an array's parts, uint8 [trajectories, 16]: zeros where a trajectory has none."""
NUMBERS = "numbers"
"""Under ``HASH``: of a trajectory's row of ``trajectories`` and of ``scores``, as bytes."""


class BatchFormatError(RunError, ValueError):
    """The bytes are not an encoded batch of trajectories."""


def encode(trajectories: Sequence[Trajectory]) -> bytes:
    """A batch as one safetensors blob.

    Raises ValueError where some trajectories alone have a column that is complete or absent, or
    where a column's arrays differ in type or trailing shape.
    """
    numbers = [
        (t.problem_id, t.sample_index, t.length, FINISH_REASONS.index(t.finish_reason))
        for t in trajectories
    ]
    scores = [(t.reward, t.advantage) for t in trajectories]
    arrays = {
        "trajectories": np.array(numbers, dtype=np.int64).reshape(-1, 4),
        "scores": np.array(scores, dtype=np.float64).reshape(-1, 2),
        "token_ids": flat([t.token_ids for t in trajectories], np.int32),
        "loss_mask": flat([t.loss_mask for t in trajectories], np.bool_),
    }
    for name in forms_of(trajectories):
        arrays[COLUMN + name] = np.concatenate(
            [t.columns[name] for t in trajectories if name in t.columns]
        )
        arrays[PRESENT + name] = np.array([name in t.columns for t in trajectories])
        arrays[HASH + COLUMN + name] = _hashes([t.columns.get(name) for t in trajectories])
    for name in ("token_ids", "loss_mask"):
        arrays[HASH + name] = _hashes([getattr(t, name) for t in trajectories])
    rows = zip(arrays["trajectories"], arrays["scores"], strict=True)
    arrays[HASH + NUMBERS] = _hashes([_number_bytes(*row) for row in rows])
    return save(arrays)


def decode(blob: bytes) -> list[Trajectory]:
    """Inverse of :func:`encode`, with empty texts; reads batches of earlier versions too.

    Raises BatchFormatError, also for a column that is not declared or holds what can't be.
    """
    with _faults_named():
        arrays = load(blob)
        if is_earlier(arrays):
            return _checked(from_earlier(arrays))
        batch = _Batch(RowsInMemory(arrays))
        return _checked(batch.trajectory(i) for i in range(len(batch.problems)))


def batch_path(folder: str | Path, step: int) -> Path:
    """File of the batch of ``step`` in ``folder``."""
    return Path(folder) / f"step_{step:06d}.safetensors"


def save_batch(folder: str | Path, step: int, trajectories: Sequence[Trajectory]) -> Path:
    """Write one step's batch; the file appears whole or not at all."""
    path = batch_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, encode(trajectories))
    return path


def load_batch(folder: str | Path, step: int) -> list[Trajectory]:
    """Read one step's batch. Raises FileNotFoundError, or BatchFormatError with the path and the fault."""
    saved = SavedBatch(folder, step)
    return saved.read(range(len(saved.problems)))


def saved_step(folder: Path, asked: int | None, *, default: int) -> int:
    """The step of a saved batch: ``asked``, or where that is None the one at index ``default`` of those there are.

    Raises ValueError where there is none, or not of that step.
    """
    saved = sorted(int(p.stem.removeprefix("step_")) for p in folder.glob("step_*.safetensors"))
    if not saved:
        raise ValueError(f"{folder}: no saved rollout batch; start the run with rollout.save=true")
    if asked is not None and asked not in saved:
        raise ValueError(
            f"{folder}: no batch of step {asked}; saved are {saved[0]} to {saved[-1]}"
            f" ({len(saved)} batches)"
        )
    return saved[default] if asked is None else asked


class SavedBatch:
    """One step's batch in its file, of which single trajectories are read.

    ``problems``: the problem's id of each, in order.

    Raises FileNotFoundError, or BatchFormatError with the path and the fault.
    """

    def __init__(self, folder: str | Path, step: int) -> None:
        self._path = batch_path(folder, step)
        with _faults_named(f"{self._path}: "):
            rows = RowsInFile(self._path)
            self._batch: _Batch | None = None
            self._whole: list[Trajectory] = []
            if is_earlier(rows.names()):
                self._whole = from_earlier({n: rows.read(n, 0, rows.size(n)) for n in rows.names()})
                self.problems = [t.problem_id for t in self._whole]
            else:
                self._batch = _Batch(rows)
                self.problems = self._batch.problems

    def read(
        self, positions: Iterable[int], without: Container[str] = frozenset()
    ) -> list[Trajectory]:
        """The trajectories at these positions, with empty texts and all columns but those ``without``. Of the others
        nothing is in memory, unless an earlier version wrote the file."""
        with _faults_named(f"{self._path}: "):
            if self._batch is None:
                return _checked(self._whole[i] for i in positions)
            return _checked(self._batch.trajectory(i, without) for i in positions)


class _Batch:
    """Where each trajectory's rows are. Raises ValueError and KeyError where arrays don't fit each other."""

    def __init__(self, rows: BatchRows) -> None:
        self._rows = rows
        self._numbers = rows.read("trajectories", 0, rows.size("trajectories"))
        self._scores = rows.read("scores", 0, rows.size("scores"))
        self.problems: list[int] = self._numbers[:, 0].tolist()
        self._is_hashed = any(name.startswith(HASH) for name in rows.names())
        lengths = self._numbers[:, 2]
        self._tokens = self._ends("token_ids", lengths)
        self._ends("loss_mask", lengths)
        sampled = np.array([np.count_nonzero(self._mask(i)) for i in range(len(lengths))], np.int64)
        self._columns = {
            name.removeprefix(COLUMN): self._column_ends(
                name.removeprefix(COLUMN), sampled, lengths
            )
            for name in rows.names()
            if name.startswith(COLUMN)
        }

        if self._is_hashed:
            self._check_names()

    def _check_names(self) -> None:
        """Raise ValueError where a name was altered: a column would be gone without a word."""
        columns = [COLUMN + name for name in self._columns]
        parts = [NUMBERS, "token_ids", "loss_mask", *columns]
        expected = {"trajectories", "scores", "token_ids", "loss_mask", *columns}
        expected |= {PRESENT + name for name in self._columns} | {HASH + name for name in parts}
        if odd := expected ^ set(self._rows.names()):
            raise ValueError(f"altered: its arrays lack, or should not have, {sorted(odd)}")

    def trajectory(self, i: int, without: Container[str] = frozenset()) -> Trajectory:
        """The one at position ``i``, ``without`` some columns."""
        problem, sample, _, reason = self._numbers[i].tolist()
        self._check(NUMBERS, i, _number_bytes(self._numbers[i], self._scores[i]))
        columns = {}
        for name, (present, ends) in self._columns.items():
            if name in without:
                continue
            found = self._rows.read(COLUMN + name, ends[i], ends[i + 1]) if present[i] else None
            self._check(COLUMN + name, i, found)
            if found is not None:
                columns[name] = found
        tokens = self._rows.read("token_ids", self._tokens[i], self._tokens[i + 1])
        mask = self._mask(i)
        self._check("token_ids", i, tokens)
        self._check("loss_mask", i, mask)
        return Trajectory(
            problem_id=problem,
            sample_index=sample,
            token_ids=tokens,
            loss_mask=mask,
            columns=columns,
            finish_reason=FINISH_REASONS[reason],
            reward=float(self._scores[i, 0]),
            advantage=float(self._scores[i, 1]),
        )

    def _check(self, name: str, i: int, array: np.ndarray | None) -> None:
        """Raise ValueError where the trajectory's part of an array is not as it was written."""
        if not self._is_hashed:
            return
        recorded = self._rows.read(HASH + name, i, i + 1)
        if not np.array_equal(recorded, _hashes([array])):
            raise ValueError(
                f"altered: the {name.removeprefix(COLUMN)} of trajectory {i} are not those of their hash"
            )

    def _mask(self, i: int) -> np.ndarray:
        return self._rows.read("loss_mask", self._tokens[i], self._tokens[i + 1])

    def _column_ends(
        self, name: str, sampled: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, list[int]]:
        """Which trajectories have the column, and where their rows end."""
        size = self._rows.size(PRESENT + name)
        present = self._rows.read(PRESENT + name, 0, size)
        counts = sampled if declared(name).rows is Rows.SAMPLED else lengths - 1
        return present, self._ends(COLUMN + name, np.where(present, counts, 0))

    def _ends(self, name: str, counts: np.ndarray) -> list[int]:
        """0, and where each trajectory's rows end."""
        ends = [0, *np.cumsum(counts).tolist()]
        if self._rows.size(name) != ends[-1]:
            raise ValueError(f"{name} has {self._rows.size(name)} rows, expected {ends[-1]}")
        return ends


def _hashes(parts: Sequence[np.ndarray | None]) -> np.ndarray:
    """uint8 [parts, 16]."""
    found = [bytes(16) if part is None else bytes.fromhex(digest(part)) for part in parts]
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, 16)


def _number_bytes(numbers: np.ndarray, scores: np.ndarray) -> np.ndarray:
    return np.frombuffer(numbers.tobytes() + scores.tobytes(), np.uint8)


def _checked(batch: Iterable[Trajectory]) -> list[Trajectory]:
    checked = list(batch)
    for trajectory in checked:
        trajectory.check()
    return checked


@contextmanager
def _faults_named(where: str = "") -> Iterator[None]:
    """Raise BatchFormatError, which begins with ``where``, for what arrays that are no batch raise."""
    try:
        yield
    except (SafetensorError, KeyError, ValueError, IndexError) as error:
        raise BatchFormatError(f"{where}not a batch of trajectories: {error!r}") from error
