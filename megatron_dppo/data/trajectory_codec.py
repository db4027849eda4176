"""Batches of trajectories as flat arrays: what travels between ranks and what a saved batch file
holds. Nothing is pickled.

Arrays of the trajectories are concatenated; ``trajectories`` holds the numbers that tell them apart.
The text is left out: the tokens say it. Columns follow from their declarations (``data/columns.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megatron_dppo.data.columns import declared
from megatron_dppo.data.earlier_batches import from_earlier, is_earlier
from megatron_dppo.data.flat_arrays import flat, split
from megatron_dppo.data.trajectory import FINISH_REASONS, Trajectory, forms_of
from megatron_dppo.system.files import write_atomically

COLUMN, PRESENT = "column.", "present."
"""Prefixes of a column's rows, and of a bool for each trajectory: whether it has the column."""


class BatchFormatError(ValueError):
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
    return save(arrays)


def decode(blob: bytes) -> list[Trajectory]:
    """Inverse of :func:`encode`, with empty texts; reads batches of earlier versions too.

    Raises BatchFormatError, also for a column that is not declared or holds what can't be.
    """
    try:
        arrays = load(blob)
        batch = from_earlier(arrays) if is_earlier(arrays) else _decoded(arrays)
        for trajectory in batch:
            trajectory.check()
    except (SafetensorError, KeyError, ValueError, IndexError) as error:
        raise BatchFormatError(f"not a batch of trajectories: {error!r}") from error
    return batch


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
    path = batch_path(folder, step)
    try:
        return decode(path.read_bytes())
    except BatchFormatError as error:
        raise BatchFormatError(f"{path}: {error}") from error


def _decoded(arrays: dict[str, np.ndarray]) -> list[Trajectory]:
    numbers, scores = arrays["trajectories"], arrays["scores"]
    tokens = split(arrays["token_ids"], numbers[:, 2])
    masks = split(arrays["loss_mask"], numbers[:, 2])
    columns: list[dict[str, np.ndarray]] = [{} for _ in numbers]
    for name in (key.removeprefix(COLUMN) for key in arrays if key.startswith(COLUMN)):
        _read_column(name, arrays, masks, columns)
    return [
        Trajectory(
            problem_id=problem,
            sample_index=sample,
            token_ids=tokens[i],
            loss_mask=masks[i],
            columns=columns[i],
            finish_reason=FINISH_REASONS[reason],
            reward=float(scores[i, 0]),
            advantage=float(scores[i, 1]),
        )
        for i, (problem, sample, _, reason) in enumerate(numbers.tolist())
    ]


def _read_column(
    name: str,
    arrays: dict[str, np.ndarray],
    masks: Sequence[np.ndarray],
    columns: Sequence[dict[str, np.ndarray]],
) -> None:
    """Give each trajectory's dictionary its rows of the column."""
    column = declared(name)
    present = np.flatnonzero(arrays[PRESENT + name]).tolist()
    counts = np.array([column.count(masks[i]) for i in present], dtype=np.int64)
    for i, rows in zip(present, split(arrays[COLUMN + name], counts), strict=True):
        columns[i][name] = rows
