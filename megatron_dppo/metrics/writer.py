"""Writer of a run's metrics: ``metrics.jsonl`` and TensorBoard events. Rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_dppo.metrics.records import (
    RECORDS_FILE,
    RecordsError,
    decode_records,
    encode_record,
    read_lines,
    step_of,
)
from megatron_dppo.system.files import Closing, write_atomically

TENSORBOARD_FOLDER = "tensorboard"


class MetricsWriter(Closing):
    """Appends one record for each step to both files.

    Args:
        directory: of the run; created if missing.
        resume_step: first step that this process will write; 0 for a fresh run. Records of this and
            later steps (left by a process that died after its last checkpoint) and an incomplete
            last line are dropped, so that each step is recorded once. TensorBoard hides them.
    """

    def __init__(self, directory: str | Path, resume_step: int = 0) -> None:
        # Imported here: reading records must not import torch.
        from torch.utils.tensorboard import SummaryWriter

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._last_step = self._truncate(directory / RECORDS_FILE, resume_step)
        self._file = open(directory / RECORDS_FILE, "a", encoding="utf-8")  # noqa: SIM115
        self._events = SummaryWriter(str(directory / TENSORBOARD_FOLDER), purge_step=resume_step)

    @staticmethod
    def _truncate(path: Path, resume_step: int) -> int:
        """Keep only records before ``resume_step``; returns the last kept step, or -1."""
        if not path.exists():
            return -1
        lines = read_lines(path)
        steps = [step_of(record) for record in decode_records(lines, str(path))]
        kept = [line for line, step in zip(lines, steps, strict=False) if step < resume_step]
        if len(kept) < len(lines):
            write_atomically(path, "".join(kept))
        return max((step for step in steps if step < resume_step), default=-1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the record of ``step`` and flush. Steps must increase: one call for each step.

        Args:
            step: number of the step.
            values: metric name -> number; NaN and infinities are written as null.

        Raises:
            RecordsError: the step was written before, or a value is not a number.
        """
        if step <= self._last_step:
            raise RecordsError(
                f"step {step} was written after step {self._last_step}, "
                f"expected one record a step, in order"
            )
        self._file.write(encode_record(step, values) + "\n")
        self._file.flush()
        self._last_step = step
        for name, value in values.items():
            if name != "step":
                self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """Close both files; later writes fail."""
        self._file.close()
        self._events.close()
