"""What earlier starts of a run recorded in its folder, and how a new beginning sets it aside.

last_checkpoint.json        {"step": n}: a checkpoint of that step was written, wherever it is now
earlier-<UTC time>/         records, rollouts and checkpoints of a run that was begun anew
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.metrics import records
from megatron_dppo.metrics.summary import SUMMARY_FILE
from megatron_dppo.system.files import unused_path, write_atomically

CHECKPOINTS_FOLDER = "checkpoints"
ROLLOUTS_FOLDER = "rollouts"
EXPORT_FOLDER = "hf"
_LAST_CHECKPOINT = "last_checkpoint.json"
_RECORDS = (
    *(records.RECORDS_FILE, records.MASKED_TOKENS_FILE, records.SAMPLES_FILE),
    *(records.TENSORBOARD_FOLDER, records.REPORT_FILE, SUMMARY_FILE),
)


@dataclass(frozen=True)
class History:
    """What a run's folder tells of earlier starts, apart from the checkpoints themselves.

    ``recorded``: the last step of ``metrics.jsonl``, None where it has no record. ``saved``: the
    step of the last checkpoint that was written, None where none ever was. ``damage``: why one of
    the two could not be read, None where both could.
    """

    recorded: int | None
    saved: int | None
    damage: str | None = None


def read_history(directory: str | Path) -> History:
    """The history of the run in ``directory``, which need not exist. Raises OSError."""
    directory = Path(directory)
    recorded, saved, damage = None, None, None
    try:
        if (directory / records.RECORDS_FILE).is_file():
            recorded = max(map(records.step_of, records.read_records(directory)), default=None)
        saved = _last_checkpoint(directory / _LAST_CHECKPOINT)
    except records.RecordsError as error:
        damage = str(error)
    return History(recorded, saved, damage)


def remember_checkpoint(directory: str | Path, step: int) -> None:
    """Note that a checkpoint of ``step`` was written, apart from the checkpoint itself."""
    write_atomically(Path(directory) / _LAST_CHECKPOINT, json.dumps({"step": step}) + "\n")


def set_aside(directory: str | Path, *, rollouts: bool) -> Path | None:
    """Move what earlier starts left into a folder named after the time; that folder.

    None where there was nothing. ``rollouts``: move saved rollout batches too.
    Raises OSError where something can't be moved, for one a mounted folder.
    """
    directory = Path(directory)
    names = [*_RECORDS, _LAST_CHECKPOINT, CHECKPOINTS_FOLDER, *([ROLLOUTS_FOLDER] * rollouts)]
    # The checkpoints first: where a mount can't be moved, nothing else has been.
    paths = [path for name in reversed(names) if (path := directory / name).exists()]
    if not paths:
        return None
    folder = _new_folder(directory)
    for path in paths:
        path.rename(folder / path.name)
    return folder


def keep_copy(directory: str | Path) -> Path:
    """Copy the records, of which a start is about to drop the last steps; the copy's folder."""
    directory = Path(directory)
    folder = _new_folder(directory)
    for name in (records.RECORDS_FILE, records.MASKED_TOKENS_FILE):
        if (directory / name).is_file():
            shutil.copy2(directory / name, folder / name)
    return folder


def _new_folder(directory: Path) -> Path:
    """A new ``earlier-<UTC time>``; numbered where two starts fall into one second."""
    folder = unused_path(directory / time.strftime("earlier-%Y%m%d-%H%M%S", time.gmtime()))
    folder.mkdir()
    return folder


def _last_checkpoint(path: Path) -> int | None:
    if not path.is_file():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise records.RecordsError(f"{path}: damaged ({error}), expected a step") from error
