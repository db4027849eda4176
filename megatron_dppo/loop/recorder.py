"""Recorder of a run: console table, metric files, and at the end report and summary. Rank 0 only."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.metrics import names
from megatron_dppo.metrics.file_names import MASKED_TOKENS_FILE, SAMPLES_FILE
from megatron_dppo.metrics.masked_tokens import MaskedToken, with_text
from megatron_dppo.metrics.records import (
    RECORDS_FILE,
    Record,
    RecordsError,
    encode_record,
    mean_accuracy,
    read_records,
    sha256_until,
    step_of,
)
from megatron_dppo.metrics.report import write_report
from megatron_dppo.metrics.run_info import RunInfo
from megatron_dppo.metrics.samples import TRAINING, Sample, console_lines
from megatron_dppo.metrics.step_lines import StepLines
from megatron_dppo.metrics.step_table import StepTable
from megatron_dppo.metrics.summary import write_summary
from megatron_dppo.metrics.writer import MetricsWriter
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import Closing, write_atomically

log = logging.getLogger(__name__)

COUNTS = (names.WEIGHT_UPDATES, names.WEIGHT_UPDATES_VERIFIED)


class RecordingError(RunError):
    """The run's records cannot be written, e.g. because the disk is full."""


class Recorder(Closing):
    """Writes the metrics of each step; does nothing on ranks other than 0. A context manager.

    Args:
        config: of the run.
        rank: global rank.
        first_step: the last step that is recorded already; 0 for a fresh run.
        text_of: token ids -> text, for ``masked_tokens.jsonl``.
        fence: called before each change of a file; raises once another start of the run has taken over.
        mark: of the checkpoint that the run goes on from, see ``mark``; records that differ are told of.
    """

    def __init__(
        self,
        config: TrainConfig,
        rank: int,
        first_step: int,
        *,
        text_of: Callable[[Sequence[int]], str] = str,
        fence: Callable[[], None] = lambda: None,
        mark: Mapping[str, Any] | None = None,
    ) -> None:
        self._fence = fence
        self._config = config
        self._info = RunInfo.of_config(config.model_dump())
        self._carried: dict[str, float] = {}
        self._stack = ExitStack()
        self._writer: MetricsWriter | None = None
        self._masked: StepLines | None = None
        self._samples: StepLines | None = None
        self._text_of = text_of
        if rank == 0:
            self._open(first_step + 1 if first_step else 0, mark or {})
        self._console = StepTable(config.model.dtype, config.run.steps)

    def _open(self, resume_step: int, mark: Mapping[str, Any]) -> None:
        """Open the files; a resumed run whose records are gone says so and goes on."""
        self._fence()
        where = self._config.run.directory
        try:
            writer = MetricsWriter(where, resume_step=resume_step)
            self._writer = self._stack.enter_context(writer)
            self._masked = StepLines(Path(where) / MASKED_TOKENS_FILE, resume_step)
            self._samples = StepLines(Path(where) / SAMPLES_FILE, resume_step)
            recorded = len(read_records(where))
            self._compare(mark)
        except OSError as error:
            raise RecordingError(f"records in {where}: {error.strerror}") from error
        if recorded < resume_step:
            log.warning(
                "%s/%s holds %d of the %d records before step %d; report and summary will lack them",
                where,
                RECORDS_FILE,
                recorded,
                resume_step,
                resume_step,
            )

    def _compare(self, mark: Mapping[str, Any]) -> None:
        """Warn where the records are there and not those that were written: they are shown, nothing trains on them."""
        records = read_records(self._config.run.directory)
        if not mark or not records:
            return
        if sha256_until(records, mark["step"]) != mark["sha256"]:
            log.warning(
                "%s/%s was altered since the checkpoint: its records up to step %d are not those that were "
                "written; training goes on from the checkpoint alone, report and summary show what is there",
                self._config.run.directory,
                RECORDS_FILE,
                mark["step"],
            )

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def lacks_last_evaluation(self) -> bool:
        """Whether the run's last step is recorded without its evaluation (stopped in between)."""
        if self._writer is None or not self._config.data.evaluation:
            return False
        records = read_records(self._config.run.directory)
        if not records:
            return False
        last = records[-1]
        return step_of(last) == self._config.run.steps and mean_accuracy(last) is None

    def complete(self, values: Mapping[str, float]) -> None:
        """Add ``values`` that a stop prevented to the last record; counts are summed."""
        if self._writer is None:
            return
        self._fence()
        records = read_records(self._config.run.directory)
        last = records[-1]
        for name, value in values.items():
            before = last.get(name) if name in COUNTS else None
            last[name] = value + (before or 0)
        lines = [encode_record(step_of(r), _finite(r)) + "\n" for r in records]
        write_atomically(Path(self._config.run.directory) / RECORDS_FILE, "".join(lines))

    def mark(self, step: int) -> dict[str, Any]:
        """What a checkpoint of ``step`` remembers of the records: until which step, and their hash.

        Where the last one lacks its evaluation, which a later start may add, until the one before it.
        """
        try:
            records = read_records(self._config.run.directory)
        except RecordsError:  # it was taken away, or damaged, under the run: no reason not to save
            return {}
        last = records[-1] if records else {}
        if self._config.data.evaluation and mean_accuracy(last) is None:
            step = min(step, step_of(last) - 1) if records else step
        return {"step": step, "sha256": sha256_until(records, step)}

    def carry_over(self, values: Mapping[str, float]) -> None:
        """Keep the counts in ``values`` for the next record: a resumed run writes no record of its
        start.
        """
        self._carried = {k: values[k] for k in COUNTS if k in values}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record ``values`` of ``step`` (0: before training). Raises RecordingError."""
        record = dict(values)
        for name, count in self._carried.items():
            record[name] = record.get(name, 0) + count
        self._carried = {}
        if self._writer is not None:
            self._fence()
            try:
                self._writer.write(step, {**record, "weight_version": step})
            except OSError as error:
                where = self._config.run.directory
                raise RecordingError(f"metrics in {where}: {error.strerror}") from error
        self._console.step(step, record)

    def write_masked_tokens(self, step: int, tokens: Sequence[MaskedToken]) -> None:
        """Record the tokens that the step's mask blocked most often. Raises RecordingError."""

        def lines() -> list[dict[str, Any]]:
            named = with_text(tokens, lambda token: self._text_of([token]))
            return [{"step": step, "tokens": named}]

        self._append(self._masked, lines, "masked tokens")

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """Record ``samples``, and show one of a training step every few steps. Raises RecordingError."""
        self._append(self._samples, lambda: [sample.to_json() for sample in samples], "samples")
        every = self._config.run.show_sample_every
        trained = [sample for sample in samples if sample.set == TRAINING]
        if trained and every and trained[0].step % every == 0:
            turn = trained[0].step // every  # the first is a right one, the second a wrong one, ...
            self._console.note(console_lines(trained[turn % len(trained)]))

    def _append(
        self, file: StepLines | None, lines: Callable[[], Sequence[Mapping[str, Any]]], called: str
    ) -> None:
        """``lines``: made on the rank that writes, and where no other start has taken over."""
        if file is None:
            return
        self._fence()
        try:
            file.write(lines())
        except OSError as error:
            where = self._config.run.directory
            raise RecordingError(f"{called} in {where}: {error.strerror}") from error

    def finish(self, hf_export_max_logprob_diff: float | None) -> None:
        """Close the files and write ``report.png`` and ``summary.json``."""
        if self._writer is None:
            return
        self._stack.close()
        self._fence()
        if not any(step_of(record) for record in read_records(self._config.run.directory)):
            log.warning("no report and no summary: no trained step is recorded")
            return
        where = self._config.run.directory
        try:
            report = write_report(where)
            summary = write_summary(
                where, self._info, hf_export_max_logprob_diff=hf_export_max_logprob_diff
            )
        except OSError as error:
            raise RecordingError(f"report and summary in {where}: {error.strerror}") from error
        log.info("done: %d steps; report in %s", summary.steps, report)


def _finite(record: Record) -> dict[str, float]:
    """A record with None (not finite) turned into NaN, so that it can be encoded again."""
    return {name: math.nan if value is None else value for name, value in record.items()}
