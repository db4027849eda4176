"""The records that a run writes in each step: reading, writing, and series of values.

``metrics.jsonl`` has one flat JSON object for each step. The lines of ``masked_tokens.jsonl``, ``samples.jsonl`` and
``environment_faults.jsonl`` have a step. Other files and folders in the folder of a run:

- ``last_checkpoint.json``, {"step": n}: a checkpoint of step n was written; it may have been removed since.
- ``beginning.json``, {"nonce"}: the start that holds the lease with this nonce has begun the run at step 0.
- ``upload.json``, {"repository", "steps"}: the export after ``steps`` steps was uploaded, or its upload failed.
- ``teachers.json``, {teacher: scores}: what each teacher said of some prompts at the run's first start.
- ``earlier-<UTC time>/``: records, rollouts and checkpoints of earlier starts, moved here when the run began anew.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.metrics import table as metric_names
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.failpoints import failpoint, file_failpoint, write_whole
from megatron_dppo.system.files import atomic_file, unused_path, write_atomically

CONFIG_FILE = "config.yaml"
"""The resolved configuration in a run's folder."""
SPEC_FILE = "spec.json"
"""The facts that follow from the configuration (``megatron_dppo/spec``)."""
RECORDS_FILE = "metrics.jsonl"
START_FOLDER_FILE = "start_folder"
"""File with the folder that the run was started in: the relative paths of ``config.yaml`` begin there."""
MASKED_TOKENS_FILE = "masked_tokens.jsonl"
"""Tokens that the trust region masked, one line for each step."""
SAMPLES_FILE = "samples.jsonl"
"""A few responses of each step as text, one line for each response."""
ENVIRONMENT_FAULTS_FILE = "environment_faults.jsonl"
"""{"step", "environment", "faults": reason -> count}: one line for each step with failed environments."""
TENSORBOARD_FOLDER = "tensorboard"
TRACKERS_FOLDER = "trackers"
"""Folder of the experiment trackers' files, and of the run's id in each tracker."""
REPORT_FILE = "report.png"
"""Plots of the run's metrics."""
SUMMARY_FILE = "summary.json"
UPLOAD_FILE = "upload.json"
TEACHERS_FILE = "teachers.json"
"""The teachers' scores of some prompts at the run's first start (``loop/teachers.py``)."""

_COPIED_BYTES = 2**20
"""Bytes of a file that are copied at once."""
Record = dict[str, float | None]
"""Metric name -> value; ``step`` is always present; None stands for NaN and infinities."""


def start_folder(directory: Path) -> Path | None:
    """Return the folder that the run in ``directory`` was started in.

    None if the run has not stored a folder, or if the stored folder is not on this machine.
    """
    file = directory / START_FOLDER_FILE
    if file.is_file():
        folder = Path(file.read_text(encoding="utf-8").strip())
        if folder.is_dir():
            return folder
    return None


class RecordsError(RunError, ValueError):
    """A metrics file cannot be read, or a value cannot be written to it."""


def encode_record(step: int, values: Mapping[str, float]) -> str:
    """Return a step's metrics as JSON without the line end; null for NaN and infinities. Raises RecordsError."""
    record: Record = {"step": step}
    for name, value in values.items():
        if not isinstance(value, int | float):
            raise RecordsError(
                f"metric {name!r} of step {step} is a {type(value).__name__}, expected a Python number"
            )
        if name == "step" and value != step:
            raise RecordsError(
                f"metric 'step' is {value}, expected the step that is written: {step}"
            )
        if not math.isfinite(value):
            record[name] = None
        elif type(value) is int:
            record[name] = value
        else:
            record[name] = float(value)
    return json.dumps(record, allow_nan=False)


def decode_records(lines: Iterable[str], source: str) -> list[dict[str, Any]]:
    """Parse ``lines``. An incomplete last line, left by a crash, is dropped.

    Raises:
        RecordsError: a line is not a JSON object with an integer ``step``. The message has ``source`` and the line.
    """
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise RecordsError(f"{source}, line {number}: not JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise RecordsError(
                f"{source}, line {number}: expected a JSON object with an integer 'step', got {line[:80]!r}"
            )
        records.append(record)
    return records


def read_records(directory: str | Path) -> list[Record]:
    """Read all records of the run in ``directory``. Raises RecordsError if it has no metrics file."""
    path = Path(directory) / RECORDS_FILE
    if not path.is_file():
        raise RecordsError(f"{directory}: no {RECORDS_FILE} in it, expected the folder of a run")
    return decode_records(read_lines(path), str(path))


def last_step(directory: Path) -> int:
    """Return the last recorded step of the run in ``directory``; -1 without a record.

    The run may be running, so an incomplete last line is ignored.
    """
    try:
        text = (directory / RECORDS_FILE).read_text(encoding="utf-8")
    except OSError:
        return -1
    steps = [json.loads(line)["step"] for line in split_lines(text) if line.endswith("\n")]
    return max(steps, default=-1)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file that the run itself wrote, with their ends.

    Raises RecordsError if the file can't be read, or is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            return file.readlines()
    except OSError as error:
        raise RecordsError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecordsError(
            f"{path}: damaged: not UTF-8 at byte {error.start}; move the file away to continue without it"
        ) from error


def split_lines(text: str) -> list[str]:
    """Return the JSON lines of ``text`` with their ends.

    ``str.splitlines`` also ends a line at other characters, such as U+2028, which a sample's text may have.
    """
    return io.StringIO(text, newline="\n").readlines()


class RecordsHash:
    """The SHA-256 of the values in a run's records, written as one JSON array with sorted keys.

    Records are added one by one. Only the last record is kept. ``last`` may be replaced, because the run may still
    complete this record.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.last: Record | None = None
        self._earlier = hashlib.sha256(b"[")
        self._has_earlier = False
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add the record that follows the last record."""
        if self.last is not None:
            self._earlier = self._including(self.last)
            self._has_earlier = True
        self.last = record

    def copy(self) -> RecordsHash:
        """Return a hash of the same records. Records that are added to the copy do not change this hash."""
        # ``_earlier`` is never updated in place, so the copy may hold the same object.
        return copy.copy(self)

    def until(self, step: int) -> str:
        """Return the hash (hex) of the records up to ``step``. Only the last record may be after ``step``."""
        if self.last is not None and step_of(self.last) <= step:
            whole = self._including(self.last)
        else:
            whole = self._earlier.copy()
        whole.update(b"]")
        return whole.hexdigest()

    def _including(self, record: Record) -> hashlib._Hash:
        """Return the hash of the earlier records and ``record``, without the end of the array."""
        extended = self._earlier.copy()
        separator = ", " if self._has_earlier else ""
        extended.update(f"{separator}{json.dumps(record, sort_keys=True)}".encode())
        return extended


def sha256_until(records: Iterable[Record], step: int) -> str:
    """Return the SHA-256 (hex) of the values in the records up to ``step``."""
    earlier_records = [record for record in records if step_of(record) <= step]
    return RecordsHash(earlier_records).until(step)


def step_of(record: Record) -> int:
    """Return the step of a record as an int."""
    return int(record["step"] or 0)


def series(records: Iterable[Record], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of metric ``name``, at the steps where it is present and finite."""
    steps: list[int] = []
    values: list[float] = []
    for record in records:
        value = record.get(name)
        if value is not None:
            steps.append(step_of(record))
            values.append(value)
    return steps, values


def mean_accuracy(record: Mapping[str, float | None]) -> float | None:
    """Return the held-out accuracy of one step: mean over the evaluation sets; None if no set was evaluated."""
    accuracies: list[float] = []
    for name, value in record.items():
        if metric_names.accuracy_set(name) is not None and value is not None:
            accuracies.append(value)
    if accuracies:
        return sum(accuracies) / len(accuracies)
    return None


def phase_table(records: Iterable[Record]) -> dict[str, list[float]]:
    """Return phase -> seconds in each record (0 if the phase did not run), the phase with the largest sum first."""
    records = list(records)
    seconds_of_phase: dict[str, list[float]] = {}
    for index, record in enumerate(records):
        for name, value in record.items():
            phase = metric_names.phase_of(name)
            if phase is not None:
                seconds = seconds_of_phase.setdefault(phase, [0.0] * len(records))
                seconds[index] = value or 0.0
    # Sorting is stable: phases with equal sums are in alphabetical order.
    alphabetical = sorted(seconds_of_phase.items())
    return dict(sorted(alphabetical, key=_total_seconds, reverse=True))


def _total_seconds(phase_and_seconds: tuple[str, list[float]]) -> float:
    return sum(phase_and_seconds[1])


class StepLines:
    """Appends JSON lines, objects with an integer ``step``, to ``path``.

    ``resume_step``: first step that this process will write; 0 for a fresh run. Lines of ``resume_step`` and later
    steps, left by a process that died after its last checkpoint, are dropped. An incomplete last line is dropped too.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        lines = read_lines(path) if path.exists() else []
        kept_lines: list[str] = []
        # An incomplete last line has no record, so there may be one line more than records.
        for line, record in zip(lines, decode_records(lines, str(path)), strict=False):
            if record["step"] < resume_step:
                kept_lines.append(line)
        if len(kept_lines) < len(lines):
            write_atomically(path, "".join(kept_lines))

    def append(self, text: str) -> None:
        """Append encoded lines with their ends. Raises OSError."""
        # A judge's answer may end with half of a surrogate pair, which UTF-8 can't encode. Replace the half: an error
        # here would end the run.
        with open(self.path, "a", encoding="utf-8", errors="replace") as file:
            write_whole("append", self.path.name, file, text)
        file_failpoint("appended", self.path.name)

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append ``lines``. Raises OSError."""
        self.append(encode_lines(lines))

    def replace_last(self, line: str, new_line: str) -> None:
        """Replace the file's last line, ``line``, by ``new_line``. Both texts include the line's end.

        The file is replaced atomically. Raises OSError, and RecordsError if the file does not end with ``line``.
        """
        line_bytes = line.encode()
        new_line_bytes = new_line.encode()
        if not self.path.is_file():
            raise RecordsError(f"{self.path}: the file is gone")
        with open(self.path, "rb") as source:
            line_start = source.seek(0, os.SEEK_END) - len(line_bytes)
            source.seek(max(line_start, 0))
            if source.read() != line_bytes:
                raise RecordsError(
                    f"{self.path}: its last record is not the last one that this run wrote"
                )
            source.seek(0)
            with atomic_file(self.path) as target:
                for position in range(0, line_start, _COPIED_BYTES):
                    target.write(source.read(min(_COPIED_BYTES, line_start - position)))
                target.write(new_line_bytes)

    def restore(self, text: str) -> None:
        """Append the lines of ``text`` that the file lacks because the disk was full. Raises OSError."""
        known_lines = set(read_lines(self.path)) if self.path.exists() else set()
        missing_lines = [line for line in split_lines(text) if _as_written(line) not in known_lines]
        if missing_lines:
            self.append("".join(missing_lines))


def _as_written(line: str) -> str:
    """Return ``line`` as ``StepLines.append`` writes it."""
    return line.encode(errors="replace").decode()


def encode_lines(lines: Sequence[Mapping[str, Any]]) -> str:
    """Encode objects as JSON lines with their ends."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read_step_lines(path: Path) -> list[dict[str, Any]]:
    """Return the parsed lines, without an incomplete last line of a killed process. Raises RecordsError."""
    return decode_records(read_lines(path), str(path))


class MetricsWriter:
    """Appends one record for each step to ``metrics.jsonl``. Rank 0 only.

    ``directory``: the run's folder, created if missing. ``resume_step``: as for ``StepLines``. The file is read once,
    at the start, so the cost of ``append`` and of ``hash`` does not grow with the number of steps. ``complete`` copies
    the file.

    Attributes:
        hash: the hash of the records in the file.
    """

    def __init__(self, directory: str | Path, resume_step: int = 0) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._lines = StepLines(directory / RECORDS_FILE, resume_step)
        # Create the file at the start: to readers, a folder without it is not the folder of a run.
        self._lines.append("")
        lines = read_lines(self._lines.path)
        self._last_line = lines[-1] if lines else ""
        self.hash = RecordsHash(decode_records(lines, str(self._lines.path)))

    def restore(self, text: str) -> None:
        """Append the records of ``text`` that the file lacks because the disk was full. Raises OSError."""
        lines = split_lines(text)
        for line, record in zip(lines, decode_records(lines, str(self._lines.path)), strict=True):
            # The record of a step that the file has may have been completed since.
            if step_of(record) > self.last_step:
                self._lines.restore(line)
                self._add(line, record)

    @property
    def last_step(self) -> int:
        """The step of the last record; -1 without a record."""
        return -1 if self.hash.last is None else step_of(self.hash.last)

    def _add(self, line: str, record: Record) -> None:
        """Note that ``record`` was written as ``line``."""
        self._last_line = line
        self.hash.add(record)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the record of ``step`` and flush. Steps must increase: one call for each step.

        ``values``: metric name -> number; NaN and infinities are written as null. Raises RecordsError if the step was
        written before, or if a value is not a number.
        """
        self.append(step, encode_record(step, values) + "\n")

    def append(self, step: int, line: str) -> None:
        """Write the encoded record ``line`` of ``step``, as ``write`` does. Raises RecordsError, OSError."""
        if step <= self.last_step:
            raise RecordsError(
                f"step {step} was written after step {self.last_step}, expected one record a step, in order"
            )
        self._lines.append(line)
        self._add(line, json.loads(line))

    def complete(
        self, step: int, values: Mapping[str, float], summed: Sequence[str] = ()
    ) -> dict[str, float]:
        """Set ``values`` in the record of ``step``, which must be the last record.

        The values of metrics in ``summed`` are added to the record's values. The file is replaced atomically. Returns
        the values of metrics that the record did not have before. Raises OSError, and RecordsError if the last record
        belongs to another step.
        """
        last_record = self.hash.last
        if last_record is None or self.last_step != step:
            raise RecordsError(
                f"{self._lines.path}: the last record is not the record of step {step}"
            )
        completed_values: dict[str, float] = {}
        for name, value in last_record.items():
            completed_values[name] = math.nan if value is None else value
        new_values: dict[str, float] = {}
        for name, value in values.items():
            if name not in completed_values:
                new_values[name] = value
            if name in summed:
                completed_values[name] = value + completed_values.get(name, 0)
            else:
                completed_values[name] = value
        completed_line = encode_record(step, completed_values) + "\n"
        self._lines.replace_last(self._last_line, completed_line)
        self._last_line = completed_line
        self.hash.last = json.loads(completed_line)
        return new_values


CHECKPOINTS_FOLDER = "checkpoints"
ROLLOUTS_FOLDER = "rollouts"
SPOOL_FOLDER = "spool"
"""Folder of the scored responses since the newest checkpoint (``loop/spool.py``)."""
_STEP = "step_"
BATCH_FILES = f"{_STEP}*.safetensors"
"""Pattern of the file names of saved batches in ``ROLLOUTS_FOLDER``."""
EXPORT_FOLDER = "hf"
_LAST_CHECKPOINT = "last_checkpoint.json"
_BEGINNING = "beginning.json"
_RECORD_FOLDERS = (TENSORBOARD_FOLDER, TRACKERS_FOLDER)
_RECORD_FILES = (
    UPLOAD_FILE,
    TEACHERS_FILE,
    SUMMARY_FILE,
    REPORT_FILE,
    ENVIRONMENT_FAULTS_FILE,
    SAMPLES_FILE,
    MASKED_TOKENS_FILE,
    RECORDS_FILE,
)
"""In the order in which ``set_aside`` moves the files."""


def step_name(step: int) -> str:
    """Return the name of a step's file or folder, such as ``step_000012``."""
    return f"{_STEP}{step:06d}"


def step_of_name(name: str) -> int:
    """Return the step of a name made by ``step_name``. Raises ValueError."""
    return int(name.removeprefix(_STEP))


def saved_batch_steps(folder: Path) -> list[int]:
    """Return the steps whose batches are saved in ``folder``, in order. Raises ValueError if no batch is saved."""
    steps = [step_of_name(path.stem) for path in folder.glob(BATCH_FILES)]
    if not steps:
        raise ValueError(f"{folder}: no saved rollout batch; start the run with rollout.save=true")
    return sorted(steps)


def saved_batch_step(folder: Path, step: int | None) -> int:
    """Return ``step``, or the last step with a saved batch if ``step`` is None.

    Raises ValueError if ``folder`` has no batch of that step, or no batch at all.
    """
    saved = saved_batch_steps(folder)
    if step is not None and step not in saved:
        raise ValueError(
            f"{folder}: no batch of step {step}; saved are {saved[0]} to {saved[-1]} ({len(saved)} batches)"
        )
    return saved[-1] if step is None else step


@dataclass(frozen=True)
class History:
    """Facts about earlier starts of a run, from the files of its folder other than checkpoints.

    Attributes:
        last_step: last step of ``metrics.jsonl``; None without a record.
        saved_step: step of the last written checkpoint; None if no checkpoint was written.
        damage: reason why one of these two steps could not be read; None if both could be read.
        counts_checkpoint: whether a record has the metric ``checkpoint/bytes``, which counts written checkpoints.
    """

    last_step: int | None
    saved_step: int | None
    damage: str | None = None
    counts_checkpoint: bool = False


def read_history(directory: str | Path) -> History:
    """Read the history of the run in ``directory``. The folder need not exist. Raises OSError."""
    directory = Path(directory)
    last_step = None
    saved_step = None
    damage = None
    counts_checkpoint = False
    try:
        if (directory / RECORDS_FILE).is_file():
            records = read_records(directory)
            last_step = max(map(step_of, records), default=None)
            counts_checkpoint = any(metric_names.CHECKPOINT_BYTES in record for record in records)
        saved_step = _last_checkpoint(directory / _LAST_CHECKPOINT)
    except RecordsError as error:
        damage = str(error)
    return History(last_step, saved_step, damage, counts_checkpoint)


def remember_checkpoint(directory: str | Path, step: int) -> None:
    """Record, in a file outside of the checkpoint, that a checkpoint of ``step`` was written."""
    write_atomically(Path(directory) / _LAST_CHECKPOINT, json.dumps({"step": step}) + "\n")


def remember_beginning(directory: str | Path, nonce: str) -> None:
    """Record that the start with the lease ``nonce`` has set earlier records aside and begun the run at step 0."""
    write_atomically(Path(directory) / _BEGINNING, json.dumps({"nonce": nonce}) + "\n")


def has_begun(directory: str | Path, nonce: str) -> bool:
    """Whether ``remember_beginning`` was called with this lease."""
    try:
        return bool(json.loads((Path(directory) / _BEGINNING).read_text())["nonce"] == nonce)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def remember_upload(directory: str | Path, repository: str, steps: int) -> None:
    """Record that the export after ``steps`` steps was uploaded to ``repository``, or that its upload failed."""
    note = {"repository": repository, "steps": steps}
    write_atomically(Path(directory) / UPLOAD_FILE, json.dumps(note) + "\n")


def set_aside(directory: str | Path, *, rollouts: bool) -> Path | None:
    """Move the records and checkpoints of earlier starts into a new folder ``earlier-<UTC time>``, and return it.

    Returns None if there is nothing to move. ``rollouts``: move saved rollout batches too. Raises OSError if a file or
    folder can't be moved, for instance a mounted folder.
    """
    directory = Path(directory)
    # Move folders first. A folder may be a mount, which cannot be moved: the error then comes before any file has been
    # moved.
    names = [CHECKPOINTS_FOLDER, *_RECORD_FOLDERS, _LAST_CHECKPOINT, *_RECORD_FILES]
    if rollouts:
        names.insert(0, ROLLOUTS_FOLDER)
    present_paths = [directory / name for name in names if (directory / name).exists()]
    if not present_paths:
        return None
    folder = _new_folder(directory)
    for path in present_paths:
        failpoint("records/set_aside")
        path.rename(folder / path.name)
    return folder


def keep_copy(directory: str | Path) -> Path:
    """Copy the records into a new folder ``earlier-<UTC time>`` and return it.

    A start calls this function before it drops the last steps from the records.
    """
    directory = Path(directory)
    folder = _new_folder(directory)
    for name in (RECORDS_FILE, SAMPLES_FILE, MASKED_TOKENS_FILE, ENVIRONMENT_FAULTS_FILE):
        if (directory / name).is_file():
            shutil.copy2(directory / name, folder / name)
    return folder


def _new_folder(directory: Path) -> Path:
    """Create the folder ``earlier-<UTC time>``; a number is appended if it exists (two starts in one second)."""
    folder = unused_path(directory / time.strftime("earlier-%Y%m%d-%H%M%S", time.gmtime()))
    folder.mkdir()
    return folder


def _last_checkpoint(path: Path) -> int | None:
    if not path.is_file():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise RecordsError(f"{path}: damaged ({error}), expected a step") from error
