"""Write a run's output on rank 0: console table, metric files, samples, report and summary."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import RunConfig, TrackingConfig
from megatron_dppo.metrics import records
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.masked_tokens import MaskedToken
from megatron_dppo.metrics.samples import TRAINING, Sample, console_lines
from megatron_dppo.metrics.step_table import StepTable
from megatron_dppo.metrics.summary import RunInfo, write_summary
from megatron_dppo.metrics.trackers import TrackedRun, Trackers, find_trackers, run_id
from megatron_dppo.system import plugins
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import Closing
from megatron_dppo.trainer.collectives import first_failure

log = logging.getLogger(__name__)


_MAX_REASONS = 20
"""Largest number of reasons in a step's row of environment faults; further reasons are counted together."""
OTHER_REASONS = "other reasons"
_UNWRITTEN = "unwritten"
"""Key in the result of ``Recorder.mark``. Its value maps a file's name to the lines that could not be written, e.g. to
a full disk."""
COUNTS = (metric_names.WEIGHT_UPDATES, metric_names.WEIGHT_UPDATES_VERIFIED)
"""Metrics that are added up if a row receives values twice. In all other metrics the later value replaces the earlier
value."""


class RecordingError(RunError):
    """The run's records cannot be written, e.g. because the disk is full."""


class MetricsRecorder(Closing):
    """Writes the metrics row of each step on rank 0; does nothing on other ranks.

    If a write within a step fails, ``failure`` holds the error, and nothing more is written. A checkpoint of the step
    is saved, and then all ranks end the run together. The checkpoint has the lines that were not written (``mark``). A
    start that resumes from the checkpoint writes these lines. If the failed write left an incomplete last line in a
    file, a resumed run drops the incomplete line.

    Args:
        run: the run's folder and length.
        rank: global rank.
        first_step: the step of the checkpoint that the run resumes from; 0 for a new run.
        fence: called before each change of a file; raises once another start of the run has taken over.
        mark: what ``mark`` returned for the checkpoint that the run resumes from; records that differ from it cause a
            warning.
        tracking: the experiment trackers that also receive the metrics; default: TensorBoard.
        config: the run's configuration; the trackers receive it.
    """

    _line_files: tuple[str, ...] = ()
    """Names of the files with lines of a step, beside the metrics."""

    def __init__(
        self,
        run: RunConfig,
        rank: int,
        first_step: int,
        *,
        fence: Callable[[], None] | None = None,
        mark: Mapping[str, Any] | None = None,
        tracking: TrackingConfig | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.failure: RecordingError | None = None
        self._fence = fence
        self._run = run
        self._first_step = first_step
        self._unwritten: dict[str, str] = {}
        """Encoded lines since the failure, by the name of their file."""
        self._stack = ExitStack()
        self._writer: records.MetricsWriter | None = None
        self._lines: dict[str, records.StepLines] = {}
        """The files of ``_line_files``, by name."""
        self._trackers: Trackers | None = None
        if rank == 0:
            # A new run also writes the record of step 0.
            resume_step = first_step + 1 if first_step else 0
            self._open(resume_step, mark or {})
            self._trackers = self._stack.enter_context(
                opened_trackers(run, tracking or TrackingConfig(), config or {}, resume_step)
            )

    def _open(self, resume_step: int, mark: Mapping[str, Any]) -> None:
        """Open the files for steps from ``resume_step`` on; log a warning if records of a resumed run are missing."""
        directory = self._run.directory
        with self._writing("records"):
            self._writer = records.MetricsWriter(directory, resume_step=resume_step)
            for name in self._line_files:
                self._lines[name] = records.StepLines(Path(directory) / name, resume_step)
            self._restore(mark.get(_UNWRITTEN, {}))
            rows = records.read_records(directory)
            self._compare(rows, mark)
        if len(rows) < resume_step:
            log.warning(
                "%s/%s holds %d of the %d records before step %d; report and summary will lack them",
                directory,
                records.RECORDS_FILE,
                len(rows),
                resume_step,
                resume_step,
            )

    def _restore(self, unwritten: Mapping[str, str]) -> None:
        """Write the lines that an earlier start could not write and kept in the checkpoint. Raises OSError."""
        for name, text in unwritten.items():
            if name == records.RECORDS_FILE:
                assert self._writer is not None
                self._writer.restore(text)
            if name in self._lines:
                self._lines[name].restore(text)
        if unwritten:
            files = ", ".join(sorted(unwritten))
            log.info("lines that an earlier start could not write are written now: %s", files)

    def _compare(self, rows: Sequence[records.Record], mark: Mapping[str, Any]) -> None:
        """Log a warning if the records, ``rows``, were altered since the checkpoint.

        Reports show altered records; training ignores them.
        """
        if "sha256" not in mark or not rows:
            return
        if records.sha256_until(rows, mark["step"]) != mark["sha256"]:
            log.warning(
                "%s/%s was altered since the checkpoint: its records up to step %d differ from the written ones; "
                "training continues from the checkpoint, report and summary show the altered records",
                self._run.directory,
                records.RECORDS_FILE,
                mark["step"],
            )

    def close(self) -> None:
        self._stack.close()

    def mark(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of ``step`` stores about the records: a step, and the hash of the records up to it.

        After a failed write, the mark also holds the lines that the files lack.
        """
        unwritten: dict[str, Any] = {}
        if self._unwritten:
            unwritten[_UNWRITTEN] = dict(self._unwritten)
        if self._writer is None:
            return unwritten
        records_hash = self._writer.hash.copy()
        unwritten_rows = records.split_lines(self._unwritten.get(records.RECORDS_FILE, ""))
        for record in records.decode_records(unwritten_rows, records.RECORDS_FILE):
            records_hash.add(record)
        step = self._last_final_step(step, records_hash.last)
        return {"step": step, "sha256": records_hash.until(step), **unwritten}

    def _last_final_step(self, step: int, last: records.Record | None) -> int:
        """Return the last step whose record no later start changes. ``last``: the last record, of ``step``."""
        return step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the record of ``step`` with ``values``; step 0 is before training."""
        if self._writer is not None:
            line = records.encode_record(step, values) + "\n"
            write = partial(self._writer.append, step, line)
            self._write_or_keep("metrics", records.RECORDS_FILE, line, write)
            if self._trackers is not None:
                self._trackers.scalars(step, values)

    def check(self) -> None:
        """Raise RecordingError, on every rank, if rank 0 could not write a record. Collective."""
        reason = first_failure(None if self.failure is None else str(self.failure))
        if reason is not None:
            raise RecordingError(reason)

    def _write_or_keep(self, content: str, name: str, text: str, write: Callable[[], None]) -> None:
        """Call ``write`` to append ``text`` to the file ``name``; keep ``text`` if this or an earlier write failed."""
        if self.failure is None:
            with self._keeping_failure(content):
                write()
        if self.failure is not None:
            self._unwritten[name] = self._unwritten.get(name, "") + text

    @contextmanager
    def _writing(self, content: str) -> Iterator[None]:
        """Wrap each change of files. Raises RecordingError, whose text begins with ``content``, if the block fails."""
        if self._fence is not None:
            self._fence()
        try:
            yield
        except OSError as error:
            directory = self._run.directory
            raise RecordingError(f"{content} in {directory}: {error.strerror}") from error

    @contextmanager
    def _keeping_failure(self, content: str) -> Iterator[None]:
        """Wrap a change of files within a step, and keep the error in ``failure``.

        If only rank 0 raised the error, the other ranks would wait in a collective.
        """
        try:
            with self._writing(content):
                yield
        except RecordingError as error:
            self.failure = error


class Recorder(MetricsRecorder):
    """Records a run of reinforcement learning: metrics, samples, masked tokens, the console's table and the report.

    Args:
        run, rank, first_step: as in MetricsRecorder, which receives further ``options``.
        info: the run's description in report and summary.
        evaluates: whether the run has held-out sets and an engine to evaluate them.
        text_of: token ids -> text, for ``masked_tokens.jsonl``.
    """

    _line_files = (
        records.MASKED_TOKENS_FILE,
        records.SAMPLES_FILE,
        records.ENVIRONMENT_FAULTS_FILE,
    )

    def __init__(
        self,
        run: RunConfig,
        info: RunInfo,
        rank: int,
        first_step: int,
        *,
        evaluates: bool,
        text_of: Callable[[Sequence[int]], str] = str,
        **options: Any,
    ) -> None:
        super().__init__(run, rank, first_step, **options)
        self._info = info
        self._evaluates = evaluates
        self._text_of = text_of
        self._carried_counts: dict[str, float] = {}
        self._console = StepTable(info.dtype, run.steps)

    def lacks_evaluation(self, since: int) -> bool:
        """Return whether the last record lacks an evaluation that this start of the run should add.

        This holds if the last record is the record of the checkpoint's step, and no record from step ``since`` on has
        an evaluation. The earlier start was then stopped before the evaluation that is due after step ``since``.
        """
        if self._writer is None or not self._evaluates:
            return False
        rows = records.read_records(self._run.directory)
        if not rows or records.step_of(rows[-1]) != self._first_step:
            return False
        later_rows = [row for row in rows if records.step_of(row) >= since]
        return all(records.mean_accuracy(row) is None for row in later_rows)

    def complete(self, step: int, values: Mapping[str, float]) -> None:
        """Add later ``values`` to the last record, the record of ``step``. Values of ``COUNTS`` are summed.

        Logs a warning if the record was deleted during the run.
        """
        if self._writer is not None and self.failure is None:
            with self._keeping_failure("metrics"):
                try:
                    new_values = self._writer.complete(step, values, COUNTS)
                    if self._trackers is not None:
                        self._trackers.scalars(step, new_values)
                except records.RecordsError as error:
                    log.warning(
                        "report and summary will lack the evaluation of step %d: %s", step, error
                    )
        accuracies: dict[str, float] = {}
        for name, value in values.items():
            if metric_names.accuracy_set(name) is not None:
                accuracies[name] = value
        self._console.print_step(step, accuracies)

    def _last_final_step(self, step: int, last: records.Record | None) -> int:
        """Return the step before the last record if it has no evaluation: a later start may add one to it."""
        if last is not None and self._evaluates and records.mean_accuracy(last) is None:
            return min(step, records.step_of(last) - 1)
        return step

    def carry_over(self, values: Mapping[str, float]) -> None:
        """Keep the counts in ``values`` for the next record.

        Two counts of a resumed run would be lost otherwise: the count of its start, because a start has no record, and
        the count of a repeated step, because the step keeps its earlier record.
        """
        self._carried_counts = {name: values[name] for name in COUNTS if name in values}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the record of ``step`` with ``values``; step 0 is before training."""
        figures = dict(values)
        for name, count in self._carried_counts.items():
            figures[name] = figures.get(name, 0) + count
        self._carried_counts = {}
        super().write(step, {**figures, "weight_version": step})
        self._console.print_step(step, figures)

    def write_masked_tokens(self, step: int, tokens: Sequence[MaskedToken]) -> None:
        """Write the tokens that the step's mask blocked most often."""
        rows = [{**token, "text": self._text_of([token["id"]])} for token in tokens]
        self._append(records.MASKED_TOKENS_FILE, [{"step": step, "tokens": rows}], "masked tokens")

    def write_environment_faults(self, step: int, environment: str, faults: Counter[str]) -> None:
        """Write the environment's ``faults`` since the last call: reason -> count."""
        if not faults:
            return
        counts = Counter[str]()
        for fault, count in faults.most_common():
            reason = fault.removeprefix(f"{environment}: ")
            if len(counts) >= _MAX_REASONS:
                reason = OTHER_REASONS
            counts[reason] += count
        line = {"step": step, "environment": environment, "faults": counts}
        self._append(records.ENVIRONMENT_FAULTS_FILE, [line], "faults of environments")

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """Write ``samples``. Every ``show_sample_every`` training steps, also print one sample."""
        lines = [sample.to_json() for sample in samples]
        self._append(records.SAMPLES_FILE, lines, "samples")
        if samples and self._trackers is not None:
            self._trackers.samples(samples[0].step, lines)
        every = self._run.show_sample_every
        training_samples = [sample for sample in samples if sample.set == TRAINING]
        if training_samples and every and training_samples[0].step % every == 0:
            # The samples of a step are of different kinds, e.g. right and wrong. Print the kinds in turn.
            times_printed = training_samples[0].step // every
            index = times_printed % len(training_samples)
            self._console.note(console_lines(training_samples[index]))

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]], content: str) -> None:
        """Append ``lines`` to the file ``name``; do nothing on ranks other than 0, which have no file.

        ``content``: what the lines are, for errors.
        """
        file = self._lines.get(name)
        if file is not None:
            text = records.encode_lines(lines)
            self._write_or_keep(content, name, text, partial(file.append, text))

    def finish(self, hf_export_max_logprob_diff: float | None) -> None:
        """Write ``report.png`` and ``summary.json``, and finish the trackers."""
        if self._writer is None:
            return
        directory = self._run.directory
        with self._writing("report and summary"):
            if not any(records.step_of(record) for record in records.read_records(directory)):
                log.warning("no report and no summary: no trained step is recorded")
                return
            reports = draw_reports(Path(directory))
            summary = write_summary(
                directory, self._info, hf_export_max_logprob_diff=hf_export_max_logprob_diff
            )
        if self._trackers is not None:
            for name, report in reports.items():
                self._trackers.figure(name, report)
        self._stack.close()
        faults = summary.environment_faults
        if faults:
            most_frequent = faults[0]
            environment = most_frequent.environment
            total = sum(fault.count for fault in faults if fault.environment == environment)
            log.warning(
                "the environment %s failed %d times, most often (%d times): %s; all reasons are in %s",
                environment,
                total,
                most_frequent.count,
                most_frequent.reason,
                Path(directory) / records.SUMMARY_FILE,
            )
        report_text = ", ".join(map(str, reports.values())) or "not drawn: no package registers one"
        log.info("done: %d steps; report in %s", summary.steps, report_text)


def opened_trackers(
    run: RunConfig, tracking: TrackingConfig, config: Mapping[str, Any], resume_step: int
) -> Trackers:
    """Return the trackers that ``tracking`` names, for steps from ``resume_step`` on.

    ``config``: the run's configuration, which the trackers receive. Raises RecordingError if a tracker can't be found
    or opened.
    """
    directory = Path(run.directory)
    try:
        builders = find_trackers(tracking.trackers)
        tracked_run = TrackedRun(
            run_id(directory),
            tracking.project,
            tracking.name or directory.resolve().name,
            directory,
            config,
            resume_step,
        )
    except (ValueError, OSError) as error:
        raise RecordingError(f"tracking.trackers: {error}") from error
    return Trackers(builders, tracked_run)


def draw_reports(directory: Path) -> dict[str, Path]:
    """Draw the run in ``directory`` with every registered report (``system/plugins.py``); return the files by name.

    A report that cannot be imported costs a warning: the run is done.
    """
    reports: dict[str, Path] = {}
    drawers, faults = plugins.sound_plugins(plugins.RUN_REPORTS)
    for name, entry in drawers.items():
        try:
            draw_report = plugins.load_plugin(entry)
        except plugins.PluginError as error:
            faults.append(str(error))
            continue
        reports[name] = draw_report(directory)
    for fault in faults:
        log.warning("%s", fault)
    return reports
