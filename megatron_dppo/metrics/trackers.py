"""Experiment trackers: they show a run's scalars, samples and figures; ``metrics.jsonl`` stays authoritative.

``tracking.trackers`` names a row of ``TRACKERS``, an installed package's entry point in the group
``megatron_dppo.trackers``, or ``package.module:Class``. This module does not import a tracker's library: the method
``start`` imports it, in the tracker's own thread.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar, Protocol

from megatron_dppo.metrics.records import TENSORBOARD_FOLDER, TRACKERS_FOLDER
from megatron_dppo.system import plugins, secret_variables
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.system.files import Closing, write_atomically

log = logging.getLogger(__name__)

_RUN_ID = "run_id"
_LONGEST_QUEUE = 1024
"""Largest number of calls that wait for a tracker."""
FINISH_S = 30.0
"""Longest wait in seconds at a run's end, for all trackers together. Data that a tracker has not sent by then is not
sent."""


@dataclass(frozen=True)
class TrackedRun:
    """The data of a run that a tracker receives.

    Attributes:
        id: 8 hex digits. Every start that resumes the run has the same id; a run that is begun anew has a new id.
        project, name: project and name of the run in the tracker.
        directory: the run's folder.
        config: the resolved configuration as plain values.
        resume_step: first step that this start will record; 0 in a fresh run.
    """

    id: str
    project: str
    name: str
    directory: Path
    config: Mapping[str, Any]
    resume_step: int = 0

    @property
    def folder(self) -> Path:
        """Folder for a tracker's files of this run."""
        return self.directory / TRACKERS_FOLDER


class ExperimentTracker(Protocol):
    """The methods of a tracker. Its class takes no arguments.

    All calls come from one thread. Exceptions are counted, and the first exception is logged.
    """

    def start(self, run: TrackedRun) -> None:
        """Open the run, or continue the run with ``run.id``. If ``start`` raises, the class is built and
        started again before the next call of another method.
        """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Store metric name -> value, including NaN and infinities. If a step's evaluation ends after the step is
        recorded, the method is called twice for the step.
        """

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Store responses of one step, in the form of ``samples.jsonl``."""

    def figure(self, name: str, path: Path) -> None:
        """Store a PNG file."""

    def finish(self) -> None:
        """Send the buffered data, and close."""


def _by_set(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the samples by the name of their set (``training``, or a held-out set)."""
    samples_of_set: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        samples_of_set.setdefault(sample["set"], []).append(sample)
    return samples_of_set


def _rows(samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of a table, with a reward's components as JSON."""
    columns = list(samples[0])
    rows: list[list[Any]] = []
    for sample in samples:
        row: list[Any] = []
        for column in columns:
            value = sample[column]
            if isinstance(value, Mapping):
                value = json.dumps(value)
            row.append(value)
        rows.append(row)
    return columns, rows


class TensorBoardTracker:
    """TensorBoard: event files in ``<run>/tensorboard``. If a resumed run records steps again, their earlier events are
    hidden."""

    package: ClassVar = "tensorboard"

    def start(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.directory / TENSORBOARD_FOLDER)
        self._step = run.resume_step
        self._events = SummaryWriter(folder, purge_step=run.resume_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for name, group in _by_set(samples).items():
            # TensorBoard renders Markdown. Lines indented by four spaces are code there, so HTML in a response is shown
            # as text.
            text = json.dumps(group, indent=1, ensure_ascii=False).replace("\n", "\n    ")
            self._events.add_text(f"samples/{name}", f"    {text}", step)

    def figure(self, name: str, path: Path) -> None:
        from matplotlib.image import imread

        self._events.add_image(name, imread(path), self._step, dataformats="HWC")

    def finish(self) -> None:
        self._events.close()


class _LogTracker:
    """Base of trackers whose library has one method ``log`` for all data, and classes for tables and images."""

    _library: Any
    _run: Any

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, values)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for name, group in _by_set(samples).items():
            columns, rows = _rows(group)
            table = self._library.Table(columns=columns, data=rows, allow_mixed_types=True)
            self._log(step, {f"samples/{name}": table})

    def figure(self, name: str, path: Path) -> None:
        self._run.log({name: self._library.Image(str(path))})

    def finish(self) -> None:
        self._run.finish()


class WandbTracker(_LogTracker):
    """Weights & Biases. ``WANDB_MODE=offline`` writes into ``<run>/trackers/wandb``, for ``wandb sync``."""

    package: ClassVar = "wandb"

    def start(self, run: TrackedRun) -> None:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        self._library = wandb
        key = os.environ.get("WANDB_API_KEY")
        # The library starts a process with a copy of os.environ. Every process of this user could read the copy.
        with secret_variables.withheld():
            self._run = wandb.init(
                project=run.project,
                name=run.name,
                id=run.id,
                resume="allow",
                dir=str(run.folder),
                config=dict(run.config),
                settings=wandb.Settings(console="off", silent=True, api_key=key),
            )
        # Record the step as a metric and make it the axis: wandb's own step must grow, but a resumed run repeats steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values})


class TrackioTracker(_LogTracker):
    """Trackio: a local database (``TRACKIO_DIR``), or the Hugging Face Space that Trackio's own variables name."""

    package: ClassVar = "trackio"

    def start(self, run: TrackedRun) -> None:
        import trackio

        self._library = trackio
        self._run = trackio.init(
            project=run.project,
            # Trackio identifies runs only by their names.
            name=f"{run.name}-{run.id}",
            config=json.loads(json.dumps(run.config, default=str)),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )


class MlflowTracker:
    """MLflow, at ``MLFLOW_TRACKING_URI`` or the library's default. Samples and figures are artifacts."""

    package: ClassVar = "mlflow"
    _ID_TAG = "megatron_dppo.run_id"
    # Limits of MLflow: characters of a parameter's value, and parameters and metrics of one log_batch.
    _LONGEST_VALUE = 500
    _MOST_PARAMETERS = 100
    _MOST_METRICS = 1000

    def start(self, run: TrackedRun) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        experiment_id = self._experiment_id(run.project)
        # MLflow makes its own ids, so store the run's id as a tag.
        earlier_runs = self._client.search_runs(
            [experiment_id], f"tags.`{self._ID_TAG}` = '{run.id}'"
        )
        if earlier_runs:
            self._id = earlier_runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(
            experiment_id, run_name=run.name, tags={self._ID_TAG: run.id}
        ).info.run_id
        self._log_parameters(run.config)

    def _experiment_id(self, project: str) -> str:
        """Return the id of the experiment with the project's name. Create the experiment if it does not exist."""
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            return str(self._client.create_experiment(project))
        return str(experiment.experiment_id)

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        rows: list[Param] = []
        for section, table in config.items():
            if isinstance(table, dict):
                for key, value in table.items():
                    text = str(value)[: self._LONGEST_VALUE]
                    rows.append(Param(f"{section}.{key}", text))
        for start in range(0, len(rows), self._MOST_PARAMETERS):
            part = rows[start : start + self._MOST_PARAMETERS]
            self._client.log_batch(self._id, params=part)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        time_ms = int(time.time() * 1000)
        rows: list[Metric] = []
        for name, value in values.items():
            rows.append(Metric(name, float(value), time_ms, step))
        for start in range(0, len(rows), self._MOST_METRICS):
            self._client.log_batch(self._id, metrics=rows[start : start + self._MOST_METRICS])

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for name, group in _by_set(samples).items():
            self._client.log_dict(self._id, list(group), f"samples/{name}/step_{step:06}.json")

    def figure(self, name: str, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), "figures")

    def finish(self) -> None:
        self._client.set_terminated(self._id)


_BuiltIn = type[TensorBoardTracker | WandbTracker | TrackioTracker | MlflowTracker]
# The trackers of this package are rows here, not entry points. A clone on the path has no entry points. The entry
# points of an editable installation lack a row that was added later.
TRACKERS: dict[str, _BuiltIn] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}


def find_trackers(names: Sequence[str]) -> dict[str, Callable[[], ExperimentTracker]]:
    """Return name -> class. Raises ValueError for an unknown or repeated name, or if a package is missing."""
    repeated_names = sorted({name for name in names if names.count(name) > 1})
    if repeated_names:
        raise ValueError(f"got {repeated_names[0]!r} twice, expected each tracker once")
    return {name: _tracker_class(name) for name in names}


def _tracker_class(name: str) -> Callable[[], ExperimentTracker]:
    if name in TRACKERS:
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            install_command = f"pip install 'megatron-dppo[{name}]'"
            raise ValueError(
                f"{name!r} needs the package {package}, which is not installed: {install_command}"
            )
        return TRACKERS[name]
    tracker_class: Callable[[], ExperimentTracker] = plugins.import_part(
        "tracker", name, plugins.TRACKERS, TRACKERS, "package.module:Class"
    )
    try:
        inspect.signature(tracker_class).bind()
    # TypeError: the object can't be called, or needs arguments. ValueError: Python can't inspect it.
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"got {name!r}, expected a class that is made without arguments: {error}"
        ) from error
    missing_methods: list[str] = []
    # Methods can be checked on a class only, not on a function that returns a tracker.
    if isinstance(tracker_class, type):
        for method in ("start", "scalars"):
            if not hasattr(tracker_class, method):
                missing_methods.append(method)
    if missing_methods:
        raise ValueError(f"got {name!r}, expected a class with a method {missing_methods[0]}")
    return tracker_class


def run_id(directory: Path) -> str:
    """Return the id by which trackers know the run in ``directory``. Make the id if it is missing. Raises OSError."""
    path = directory / TRACKERS_FOLDER / _RUN_ID
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, secrets.token_hex(4) + "\n")
    return path.read_text(encoding="utf-8").strip()


def _open(tracker: ExperimentTracker) -> None:
    """Do nothing. ``_Channel`` starts a tracker before its first call. This call is the first, so it opens the run."""


class _Channel:
    """A tracker in a separate thread, behind a bounded queue, so that it cannot stop or delay the run."""

    def __init__(
        self, name: str, build: Callable[[], ExperimentTracker], run: TrackedRun, max_calls: int
    ) -> None:
        self.name = name
        self.lost_calls = 0
        self._build = build
        self._run = run
        self._tracker: ExperimentTracker | None = None
        self._queue: queue.Queue[Callable[[ExperimentTracker], None] | None] = queue.Queue(
            max_calls
        )
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()
        self.put(_open)

    def put(self, call: Callable[[ExperimentTracker], None]) -> None:
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._lose(f"{self._queue.maxsize} calls wait for it")

    def _lose(self, reason: str) -> None:
        """Count a lost call, and log the first lost call."""
        self.lost_calls += 1
        if self.lost_calls == 1:
            text = "tracker %s: %s; the run goes on, and metrics.jsonl has everything"
            log.warning(text, self.name, reason)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            self._try(call)
        if self._tracker is not None:
            self._try(methodcaller("finish"))

    def _try(self, call: Callable[[ExperimentTracker], None]) -> None:
        try:
            failpoint("trackers/call")
            if self._tracker is None:
                tracker = self._build()
                tracker.start(self._run)
                self._tracker = tracker
            call(self._tracker)
        # A library may raise an error of any type, and it must not end the run.
        except Exception as error:
            self._lose(f"{type(error).__name__}: {error}")

    def ask_to_finish(self) -> None:
        """Let the thread finish the tracker after the calls in the queue, and end."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            # Drop the oldest call to make room, unless the thread has taken all calls meanwhile.
            with suppress(queue.Empty):
                self._queue.get_nowait()
                self._lose("its queue is full at the end")
            self._queue.put_nowait(None)

    def wait(self, deadline: float) -> None:
        """Wait for the thread's end until ``deadline`` (``time.monotonic``)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            # The queue has the lost calls and the final None. The None counts for the call that is at work.
            self.lost_calls += self._queue.qsize()
            log.warning(
                "tracker %s: still at work after %.0f s, and left behind", self.name, FINISH_S
            )
        if self.lost_calls:
            log.warning("tracker %s: %d calls were lost in this start", self.name, self.lost_calls)


class Trackers(Closing):
    """All trackers of a run, on the rank that records. A call does not wait for a tracker or raise its errors."""

    def __init__(
        self,
        builders: Mapping[str, Callable[[], ExperimentTracker]],
        run: TrackedRun,
        *,
        longest_queue: int = _LONGEST_QUEUE,
    ) -> None:
        self._channels: list[_Channel] = []
        for name, build in builders.items():
            self._channels.append(_Channel(name, build, run, longest_queue))
        self._is_closed = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        # Copy the values: the caller may change its dict before a tracker's thread reads it.
        self._put(methodcaller("scalars", step, dict(values)))

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._put(methodcaller("samples", step, samples))

    def figure(self, name: str, path: Path) -> None:
        self._put(methodcaller("figure", name, path))

    def _put(self, call: Callable[[ExperimentTracker], None]) -> None:
        for channel in self._channels:
            channel.put(call)

    def lost(self) -> dict[str, int]:
        """Return tracker -> number of calls that failed or found a full queue."""
        return {channel.name: channel.lost_calls for channel in self._channels}

    def close(self) -> None:
        """Finish all trackers; wait for at most ``FINISH_S`` seconds. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for channel in self._channels:
            channel.ask_to_finish()
        deadline = time.monotonic() + FINISH_S
        for channel in self._channels:
            channel.wait(deadline)
