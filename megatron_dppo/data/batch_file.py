"""Files of batches: a step's trajectories as flat arrays in one safetensors file. Nothing is pickled.

    trajectories    int64 [n, 4]: problem, sample, tokens, finish reason
    scores          float64 [n, 2]: reward, advantage
    token_ids       int32, of all trajectories, end to end
    loss_mask       bool, of all trajectories, end to end
    column.NAME     rows of the trajectories that have the column, end to end
    present.NAME    bool [n]: whether each trajectory has the column
    hash.ARRAY      uint8 [n, 16]: hash of each trajectory's part of an array; zeros for a trajectory without a part
    hash.numbers    uint8 [n, 16]: hash of each trajectory's rows in trajectories and scores, as bytes
    seal            JSON in the file's metadata: the origin of the batch (``data/seal.py``); missing without a seal

A hash is compared when its part is read. The file has no texts, because tokens can be decoded to text. The alignment of
columns follows from their declarations (``data/columns.py``).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megatron_dppo.data.columns import Rows, declared_column, digest
from megatron_dppo.data.seal import Seal
from megatron_dppo.data.trajectory import FINISH_REASONS, Trajectory, forms_of
from megatron_dppo.metrics.records import step_name
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import write_atomically

COLUMN, PRESENT, HASH, NUMBERS, SEAL = "column.", "present.", "hash.", "numbers", "seal"


class BatchFormatError(RunError, ValueError):
    """A file is not a batch of trajectories, or not the expected batch."""


def batch_path(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"{step_name(step)}.safetensors"


def save_batch(
    folder: str | Path, step: int, trajectories: Sequence[Trajectory], seal: Seal | None = None
) -> Path:
    """Write the batch of ``step`` with its seal, if it has one. The file is written atomically.

    Raises ValueError if only some trajectories have a column that is declared as complete (``data/columns.py``), or if
    a column's arrays differ in type or trailing shape.
    """
    path = batch_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = None
    if seal is not None:
        metadata = {SEAL: seal.to_text()}
    write_atomically(path, save(_arrays_of(trajectories), metadata))
    return path


def load_batch(folder: str | Path, step: int) -> list[Trajectory]:
    """Read the batch of ``step``. Raises FileNotFoundError, or BatchFormatError with the path and the error."""
    saved = SavedBatch(folder, step)
    return saved.read(range(len(saved.problems)))


class SavedBatch:
    """The batch of one step in its file. Only the trajectories that ``read`` returns are loaded into memory.

    ``problems`` has the problem id of each trajectory, in order. ``seal`` is None if the file has no seal. Raises
    FileNotFoundError, or BatchFormatError with the path and the error.
    """

    def __init__(self, folder: str | Path, step: int) -> None:
        self._path = batch_path(folder, step)
        with self._faults_named():
            self._file = safe_open(self._path, framework="numpy")
            # A slice reads nothing yet: the columns of a batch may be larger than the memory.
            self._arrays: dict[str, Any] = {n: self._file.get_slice(n) for n in self._file.keys()}  # noqa: SIM118
            self._numbers = self._rows("trajectories", 0, self._size("trajectories"))
            self._scores = self._rows("scores", 0, self._size("scores"))
            self.problems: list[int] = self._numbers[:, 0].tolist()
            lengths = self._numbers[:, 2]
            self._token_ends = self._ends("token_ids", lengths)
            # The masks have the same ends. This call checks their number of rows.
            self._ends("loss_mask", lengths)
            sampled_counts = np.zeros(len(lengths), np.int64)
            for position in range(len(lengths)):
                sampled_counts[position] = np.count_nonzero(self._mask(position))
            # Column -> whether each trajectory has it, and the ends of the trajectories' rows.
            self._columns: dict[str, tuple[np.ndarray, list[int]]] = {}
            for key in self._arrays:
                if not key.startswith(COLUMN):
                    continue
                name = key.removeprefix(COLUMN)
                are_present = self._rows(PRESENT + name, 0, self._size(PRESENT + name))
                row_counts = sampled_counts
                if declared_column(name).rows is not Rows.SAMPLED:
                    row_counts = lengths - 1
                ends = self._ends(COLUMN + name, np.where(are_present, row_counts, 0))
                self._columns[name] = are_present, ends
            self._check_names()
            text = (self._file.metadata() or {}).get(SEAL)
            self.seal = None if text is None else Seal.from_text(text)
            if self.seal is not None and len(self.seal.stamps) != len(lengths):
                raise ValueError(f"{len(self.seal.stamps)} stamps of {len(lengths)} trajectories")

    def read(
        self, positions: Iterable[int], without: Container[str] = frozenset()
    ) -> list[Trajectory]:
        """Read the trajectories at these positions, with empty texts and without the columns in ``without``.

        Raises BatchFormatError, also for a column that is not declared or has invalid values.
        """
        with self._faults_named():
            batch = [self._trajectory(i, without) for i in positions]
            for trajectory in batch:
                trajectory.check()
        return batch

    def _trajectory(self, i: int, without: Container[str]) -> Trajectory:
        problem, sample, _, reason = self._numbers[i].tolist()
        self._check(NUMBERS, i, _number_bytes(self._numbers[i], self._scores[i]))
        columns = {}
        for name, (are_present, ends) in self._columns.items():
            if name in without:
                continue
            rows = None
            if are_present[i]:
                rows = self._rows(COLUMN + name, ends[i], ends[i + 1])
            self._check(COLUMN + name, i, rows)
            if rows is not None:
                columns[name] = rows
        tokens = self._rows("token_ids", self._token_ends[i], self._token_ends[i + 1])
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
            stamp=None if self.seal is None else self.seal.stamps[i],
        )

    def _check(self, name: str, i: int, array: np.ndarray | None) -> None:
        """Raise ValueError unless ``array``, the part of trajectory ``i``, has the hash in the file.

        None: the trajectory has no part.
        """
        if not np.array_equal(self._rows(HASH + name, i, i + 1), _hashes([array])):
            raise ValueError(
                f"altered: the {name.removeprefix(COLUMN)} of trajectory {i} do not have the recorded hash"
            )

    def _check_names(self) -> None:
        """Raise ValueError unless the file has exactly the expected arrays.

        Without this check, a column whose name was altered would be dropped silently.
        """
        columns = [COLUMN + name for name in self._columns]
        parts = [NUMBERS, "token_ids", "loss_mask", *columns]
        expected_names = {"trajectories", "scores", "token_ids", "loss_mask", *columns}
        expected_names |= {PRESENT + name for name in self._columns}
        expected_names |= {HASH + name for name in parts}
        wrong_names = expected_names ^ self._arrays.keys()
        if wrong_names:
            raise ValueError(f"altered: its arrays lack, or should not have, {sorted(wrong_names)}")

    def _mask(self, i: int) -> np.ndarray:
        return self._rows("loss_mask", self._token_ends[i], self._token_ends[i + 1])

    def _ends(self, name: str, row_counts: np.ndarray) -> list[int]:
        """Return 0 and the end of each trajectory's rows: trajectory i has the rows from ends[i] to ends[i + 1].

        Raises ValueError if the number of rows of the array ``name`` is not the sum of ``row_counts``.
        """
        ends = [0, *np.cumsum(row_counts).tolist()]
        if self._size(name) != ends[-1]:
            raise ValueError(f"{name} has {self._size(name)} rows, expected {ends[-1]}")
        return ends

    def _size(self, name: str) -> int:
        return int(self._arrays[name].get_shape()[0])

    def _rows(self, name: str, begin: int, end: int) -> np.ndarray:
        # safetensors raises an error for a slice of an array without rows, and for a slice that begins at the array's
        # end.
        if not self._size(name):
            return np.asarray(self._file.get_tensor(name))
        array = self._arrays[name]
        if begin == end:
            return np.asarray(array[0:0])
        return np.asarray(array[begin:end])

    @contextmanager
    def _faults_named(self) -> Iterator[None]:
        """Raise BatchFormatError, with the file's path, for an error in the block."""
        try:
            yield
        except (SafetensorError, KeyError, ValueError, IndexError) as error:
            raise BatchFormatError(
                f"{self._path}: not a batch of trajectories: {error!r}"
            ) from error


def _arrays_of(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    numbers = [
        (t.problem_id, t.sample_index, t.length, FINISH_REASONS.index(t.finish_reason))
        for t in trajectories
    ]
    scores = [(t.reward, t.advantage) for t in trajectories]
    arrays = {
        "trajectories": np.array(numbers, dtype=np.int64).reshape(-1, 4),
        "scores": np.array(scores, dtype=np.float64).reshape(-1, 2),
        "token_ids": _flat([t.token_ids for t in trajectories], np.int32),
        "loss_mask": _flat([t.loss_mask for t in trajectories], np.bool_),
    }
    for name in forms_of(trajectories):
        parts = [t.columns.get(name) for t in trajectories]
        arrays[COLUMN + name] = np.concatenate([part for part in parts if part is not None])
        arrays[PRESENT + name] = np.array([part is not None for part in parts])
        arrays[HASH + COLUMN + name] = _hashes(parts)
    for name in ("token_ids", "loss_mask"):
        arrays[HASH + name] = _hashes([getattr(t, name) for t in trajectories])
    rows = zip(arrays["trajectories"], arrays["scores"], strict=True)
    arrays[HASH + NUMBERS] = _hashes([_number_bytes(*row) for row in rows])
    return arrays


def _flat(parts: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


def _hashes(parts: Sequence[np.ndarray | None]) -> np.ndarray:
    """Hash each part: uint8 [parts, 16], with zeros for a missing part.

    A missing part has a hash too, so a part that was removed from the file counts as altered.
    """
    hashes = bytearray()
    for part in parts:
        hashes += bytes(16) if part is None else bytes.fromhex(digest(part))
    return np.frombuffer(bytes(hashes), np.uint8).reshape(-1, 16)


def _number_bytes(numbers: np.ndarray, scores: np.ndarray) -> np.ndarray:
    return np.frombuffer(numbers.tobytes() + scores.tobytes(), np.uint8)
