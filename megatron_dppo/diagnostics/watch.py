"""Show a run as a live page in the browser.

``megatron-dppo watch RUN`` serves one page on this machine's loopback interface, during the run and afterwards.

The program only reads the run's folder. The folder need not exist yet. The program takes no path from a request. Every
address begins with a key. Each start makes a new key, so other users of this machine don't know the key. The program
loads no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import math
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from aiohttp import web

from megatron_dppo.diagnostics.pages import render_page
from megatron_dppo.diagnostics.samples import KINDS
from megatron_dppo.fleet.record import ENGINE_FOLDER, FleetRecord, states_of
from megatron_dppo.launch.logs import important_lines
from megatron_dppo.launch.run_state import require_run, state_text
from megatron_dppo.logging import fatal
from megatron_dppo.metrics import records
from megatron_dppo.metrics.records import Record, phase_table, read_records, series, step_of
from megatron_dppo.metrics.row import Metric
from megatron_dppo.metrics.samples import about, printable, read_samples
from megatron_dppo.metrics.step_table import NormalityCheck
from megatron_dppo.metrics.summary import RunInfo, add_metrics_of, environment_faults, saved_config
from megatron_dppo.metrics.table import METRICS, accuracy_set
from megatron_dppo.system.arguments import port_or_zero
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.http_server import HttpServer
from megatron_dppo.system.lease import LEASE_FILE

HOST = "127.0.0.1"
PORT = 8350
MOST_POINTS = 800
"""Largest number of points of a curve; longer curves keep the smallest and the largest value of each stretch."""
MOST_SAMPLES = 18
MOST_SHOWN_STEPS = 40
"""Number of the last steps whose phases are shown, and whose masked tokens are counted together."""
_MOST_TOKENS = 20
_MOST_LINES = 30
_MOST_FAULTS = 10
Json = dict[str, Any]


def thinned(
    steps: list[int], values: list[float], max_points: int = MOST_POINTS
) -> list[list[float]]:
    """Thin a curve to at most ``max_points`` points: the first, the last, and two points of each stretch between them.

    The two points have the smallest and the largest value of the stretch.
    """
    points = list(zip(steps, values, strict=True))
    if len(points) > max_points:
        inner_points = points[1:-1]
        # Each stretch keeps at most two points.
        stretches = (max_points - 2) // 2
        cuts = [len(inner_points) * i // stretches for i in range(stretches + 1)]
        kept_points = [points[0]]
        for start, end in pairwise(cuts):
            stretch = inner_points[start:end]
            if stretch:
                extremes = {min(stretch, key=itemgetter(1)), max(stretch, key=itemgetter(1))}
                kept_points += sorted(extremes)
        points = [*kept_points, points[-1]]
    return [[step for step, _ in points], [value for _, value in points]]


_STATE_S = 5.0
"""Seconds after which ``RunView.version`` determines the state of the run's processes again."""


class RunView:
    """The current state of the run in ``directory``, read from its files."""

    def __init__(self, directory: Path) -> None:
        # An absolute path: ``add_metrics_of`` changes the current folder for a moment.
        self.directory = directory.absolute()
        # Several threads answer requests, so each of the next two tuples is replaced as a whole.

        # Stamp of the metrics file when it was read, and the rows of the file.
        self._read: tuple[object, list[Record]] = (None, [])
        # Time and result of the last check of the run's processes.
        self._seen = (-math.inf, "")

    def version(self) -> str:
        """Return a text that changes whenever a displayed file of the run, or the state of its processes, changes."""
        names = (
            records.RECORDS_FILE,
            records.SAMPLES_FILE,
            records.MASKED_TOKENS_FILE,
            LEASE_FILE,
            records.CONFIG_FILE,
            records.SUMMARY_FILE,
            "engine/fleet.json",
            "logs/supervisor.log",
            "logs/rank0.log",
            records.ENVIRONMENT_FAULTS_FILE,
        )
        current_time = time.monotonic()
        if current_time - self._seen[0] > _STATE_S:
            # Check the processes at most every ``_STATE_S`` seconds: the check may need a call of Slurm.
            self._seen = (current_time, self._state())
        stamps = [*(_stamp(self.directory / name) for name in names), self._seen[1]]
        return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]

    def records(self) -> list[Record]:
        """Read the rows of ``metrics.jsonl``; no rows without the file. Raises RecordsError if the file is damaged."""
        path = self.directory / records.RECORDS_FILE
        stamp = _stamp(path)
        if stamp is None:
            return []
        if stamp != self._read[0]:
            self._read = (stamp, read_records(self.directory))
        return self._read[1]

    def state(self, _: Json) -> Json:
        """Return everything that the page shows except curves and samples."""
        add_metrics_of(self.directory)
        recorded = self.records()
        metrics = _names(recorded)
        rows = _rows()
        faults: list[tuple[str, int, str]] = []
        for fault in environment_faults(self.directory)[:_MOST_FAULTS]:
            faults.append((fault.environment, fault.count, printable(fault.reason)))
        return {
            "version": self.version(),
            "folder": str(self.directory),
            "title": self._title(),
            "state": self._state(),
            "step": step_of(recorded[-1]) if recorded else None,
            "steps": self._steps(),
            "names": [[name, rows[name].meaning if name in rows else ""] for name in metrics],
            "axes": _axes(metrics),
            "bounds": self._bounds(metrics),
            "phases": self._phases(recorded),
            "masked": self._masked(),
            "fleet": self._fleet(),
            "unusual": self._unusual(recorded),
            "faults": faults,
            "lines": important_lines(self.directory, _MOST_LINES),
        }

    def curves(self, query: Json) -> Json:
        """Return the curves of the requested metrics: name -> steps and values."""
        recorded = self.records()
        return {name: thinned(*series(recorded, name)) for name in query.get("name", [])}

    def samples(self, query: Json) -> Json:
        """Return the newest samples of the requested kind and set, and the names of all sets."""
        kind = query.get("kind", [""])[0]
        selected_set = query.get("set", [""])[0]
        if _stamp(self.directory / records.SAMPLES_FILE) is None:
            return {"sets": [], "samples": []}
        sets: set[str] = set()
        selected_samples: list[Json] = []
        # The newest step comes first, so the first matches are the newest.
        for sample in read_samples(self.directory):
            sets.add(sample.set)
            is_of_kind = kind not in KINDS or KINDS[kind].includes(sample)
            if selected_set not in ("", sample.set) or not is_of_kind:
                continue
            if len(selected_samples) < MOST_SAMPLES:
                selected_samples.append(
                    {
                        "about": about(sample),
                        "prompt": printable(sample.prompt),
                        "response": printable(sample.response),
                        "right": sample.reward > 0,
                    }
                )
        return {"sets": sorted(sets), "samples": selected_samples}

    def _title(self) -> str:
        info = self._info()
        if info:
            return " | ".join(info.parts)
        return self.directory.resolve().name

    def _info(self) -> RunInfo | None:
        """Read the run's configuration; None if it cannot be read."""
        try:
            return RunInfo.of_run(self.directory)
        except ValueError:
            return None

    def _steps(self) -> int | None:
        """Read the configured number of steps; None if it cannot be read."""
        try:
            config = saved_config(self.directory)
            return None if config is None else int(config["run"]["steps"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _state(self) -> str:
        if not self.directory.is_dir():
            return "waiting: this folder does not exist yet"
        try:
            return state_text(require_run(str(self.directory)))
        except (RunError, OSError):
            if self.records():
                return "no start of this run is noted; the page shows the folder's content"
            return "waiting: no start of a run is noted in this folder"

    def _phases(self, recorded: Sequence[Record]) -> Json:
        # Leave out step 0, the work before training: the start of the servers would dwarf every step. Show step 0
        # only while there is no other step.
        training_records = [record for record in recorded if step_of(record) > 0]
        last_records = (training_records or recorded)[-MOST_SHOWN_STEPS:]
        return {
            "steps": [step_of(record) for record in last_records],
            "seconds": phase_table(last_records),
        }

    def _masked(self) -> list[list[Any]]:
        """Return the tokens that the mask blocked most often in the last steps, most often first.

        A token's entry has its text, its id, and how often the mask blocked a rise and a fall of its probability.
        """
        path = self.directory / records.MASKED_TOKENS_FILE
        if _stamp(path) is None:
            return []
        raised = Counter[int]()
        lowered = Counter[int]()
        texts = {}
        try:
            for line in records.read_step_lines(path)[-MOST_SHOWN_STEPS:]:
                for token in line["tokens"]:
                    texts[token["id"]] = printable(str(token["text"]))
                    raised[token["id"]] += token["raised"]
                    lowered[token["id"]] += token["lowered"]
        except (KeyError, TypeError) as error:
            raise records.RecordsError(
                f"{path}: expected in each line tokens with id, text, raised and lowered: {error!r}"
            ) from error
        most_masked = (raised + lowered).most_common(_MOST_TOKENS)
        return [[texts[i], i, raised[i], lowered[i]] for i, _ in most_masked]

    def _fleet(self) -> Json:
        if not (self.directory / ENGINE_FOLDER).is_dir():
            return {"version": None, "servers": []}
        try:
            record = FleetRecord(self.directory)
        except (RunError, OSError) as error:
            return {"version": None, "servers": [["", "", f"can't be read: {error}"]]}
        status = record.status()
        servers = states_of([*record.servers(), *record.teachers()], status)
        rows = [[server.name, server.url, state] for server, state in servers]
        router = record.router()
        if router:
            rows.append([router.name, router.url, ""])
        start = record.ranks_start or 1
        if start > 1:
            rows.append(["ranks", "", f"start {start}: a rank died {start - 1} times"])
        return {"version": status.get("version"), "servers": rows}

    def _bounds(self, metrics: Sequence[str]) -> dict[str, float]:
        """Return the upper end of each metric's normal range in the run's dtype, if the range has an upper end."""
        info = self._info()
        dtype = info.dtype if info else "float32"
        rows = _rows()
        bounds: dict[str, float] = {}
        for name in metrics:
            normal = rows[name].normal if name in rows else None
            if normal is not None and math.isfinite(normal.upper(dtype)):
                bounds[name] = normal.upper(dtype)
        return bounds

    def _unusual(self, recorded: Sequence[Record]) -> list[list[Any]]:
        """Return, for each metric that left its normal range, the newest finding: step, finding, and what to check."""
        info = self._info()
        check = NormalityCheck(info.dtype if info else "float32")
        newest: dict[str, list[Any]] = {}
        for record in recorded:
            values = {name: value for name, value in record.items() if value is not None}
            for name, finding in check.compare(values).items():
                normal = METRICS[name].normal
                newest[name] = [step_of(record), finding, normal.why if normal else ""]
        return sorted(newest.values(), key=itemgetter(0), reverse=True)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return modification time and size of a file, by which a change of the file is noticed; None without the file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _rows() -> dict[str, Metric]:
    """Return the rows of the table of metrics, by the metric's name in metrics.jsonl."""
    return {row.recorded_as or name: row for name, row in METRICS.items()}


def _names(recorded: Sequence[Record]) -> list[str]:
    """Return the names of all metrics, in alphabetical order, but times last."""
    metrics: set[str] = set()
    for record in recorded:
        metrics |= record.keys()
    metrics.discard("step")
    times = {name for name in metrics if name.startswith("time/")}
    return [*sorted(metrics - times), *sorted(times)]


def _axes(metrics: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the axis range of each metric that is a share."""
    rows = _rows()
    axes: dict[str, Any] = {}
    for name in metrics:
        axis = rows[name].axis() if name in rows else None
        if axis is not None:
            axes[name] = axis
    return axes | {name: (0.0, 1.0) for name in metrics if accuracy_set(name) is not None}


class WatchServer(HttpServer):
    """A server that listens on ``HOST`` only. ``page`` is the page's address with the key."""

    def __init__(self, directory: Path, port: int) -> None:
        self._key = secrets.token_urlsafe(16)
        self._nonce = secrets.token_urlsafe(16)
        self._view = RunView(directory)
        self._routes: dict[str, Callable[[Json], Json]] = {
            "state": self._view.state,
            "curves": self._view.curves,
            "samples": self._view.samples,
        }
        application = web.Application()
        application.router.add_get("/{key}/{route}", self._answer)
        application.router.add_get("/{key}/", self._answer)
        super().__init__(application, HOST, port)
        self.page = f"{self.url}/{self._key}/"

    async def _answer(self, request: web.Request) -> web.Response:
        route = request.match_info.get("route", "")
        has_key = hmac.compare_digest(
            request.match_info["key"].encode(errors="surrogateescape"), self._key.encode()
        )
        if not has_key or route not in ("", *self._routes):
            raise web.HTTPNotFound
        content_policy = (
            "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
            f"script-src 'nonce-{self._nonce}'"
        )
        headers = {
            "Cache-Control": "no-store",
            "Content-Security-Policy": content_policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        if not route:
            page = render_page("watch.html", nonce=self._nonce)
            return web.Response(text=page, content_type="text/html", headers=headers)
        query = {name: request.query.getall(name) for name in request.query}
        content = await asyncio.to_thread(self._content, route, query)
        return web.json_response(content, headers=headers)

    def _content(self, route: str, query: Json) -> Json:
        try:
            if route == "state" and query.get("version", [""])[0] == self._view.version():
                return {"unchanged": True}
            return self._routes[route](query)
        # A file may be damaged, have content that no run wrote, or be moved by a new start at this moment. The page
        # shows the error.
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C; exits with status 2 and a message if the port is taken."""
    parser = argparse.ArgumentParser(
        prog="megatron-dppo watch", description="A page of a run in the browser, live."
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a run's directory; may not exist yet"
    )
    parser.add_argument(
        "--port", type=port_or_zero, default=PORT, help=f"port on {HOST} ({PORT}); 0: a free one"
    )
    options = parser.parse_args(arguments)
    try:
        server = WatchServer(options.run, options.port)
    except (OSError, OverflowError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            # The exception's own text would repeat the address.
            reason = os.strerror(error.errno or 0)
        fatal(f"--port {options.port}: {reason}; --port 0 takes a free one")
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"watching {options.run}: {server.page} (Ctrl-C ends it)", flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
