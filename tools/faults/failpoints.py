#!/usr/bin/env python3
"""A failure at each named point of a run, and a check of the files and processes that the run leaves.

A run of twelve steps replays saved batches, so that each start computes the same values. A calm run shows which points
it reaches and what it leaves. A case is a point, a kind of failure and an occurrence: the first or the third time that
a start reaches the point. Cases form chains in one run directory: the first start fails at the first case, the next
start continues and fails at the second case, until a start ends the run. The chain must then have left the same as the
calm run: records and samples once and in order, whole checkpoints, equal hashes of weights, batches and export, no
process, no temporary file. A start that fails by an OSError must end with exit code 2 and one line, or continue. If a
chain has left something else, each of its cases is run alone. A delay ends no start, so one start has many delays.

    python -m tools.faults.failpoints --folder /tmp/failpoints [--points 'checkpoint/*'] [--kinds kill,torn]
    python -m tools.faults.failpoints --folder /tmp/failpoints --list

Each start is a fork of this process. This process has imported the libraries and computed nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# A run draws its report at its end. Import matplotlib here, so that the forks inherit the import.
import megatron_dppo.diagnostics.report
import megatron_dppo.metrics.trackers  # noqa: F401
from megatron_dppo.config import load_config
from megatron_dppo.data.batch_file import batch_path, load_batch
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.logging import FatalError, configure_logging, fatal
from megatron_dppo.loop import run_rank
from megatron_dppo.metrics import records
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.failpoints import KINDS, TORN, VARIABLE
from megatron_dppo.system.files import sha256_of
from megatron_dppo.system.lease import NONCE_VARIABLE
from megatron_dppo.trainer.checkpoint.directory import (
    CheckpointDirectory,
    check_content,
    read_manifest,
)
from tools.faults.material import make_material

STEPS = 12
OCCURRENCES = (1, 3)
LONGEST_CHAIN = 30
DELAYS_OF_A_START = 24
MOST_STARTS = 4
"""Largest number of starts without a failure after the last failure of a chain."""
START_LIMIT_S = 600.0
LEFT_PROCESS_S = 10.0
KILLED = -signal.SIGKILL
REFUSED = 2
_TIMES = ("time/", "checkpoint/write_s", "speed/", "weights/")


class LeftProcessError(RuntimeError):
    """A process of a start still runs after the start's end."""


@dataclass(frozen=True)
class Case:
    """One failure: the ``occurrence``-th time that a start reaches ``point``."""

    point: str
    kind: str
    occurrence: int

    @property
    def plan(self) -> str:
        return f"{self.point},{self.kind},{self.occurrence}"


@dataclass
class Result:
    """The exit code of the start that failed, and its ``faults``: the differences from the calm run.

    A case without faults passed.
    """

    case: Case
    code: int
    faults: list[str]


@dataclass
class Chain:
    """Consecutive cases in one run directory, and the differences of the finished run from the calm run.

    ``has_ended``: whether a start has ended the run.
    """

    directory: Path
    results: list[Result] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    has_ended: bool = False

    @property
    def output(self) -> Path:
        return self.directory.with_suffix(".out")

    @property
    def note(self) -> Path:
        return self.directory.with_suffix(".note")

    def text_since(self, offset: int) -> str:
        """The output of the starts after the first ``offset`` bytes."""
        return self.output.read_bytes()[offset:].decode(errors="replace")

    def printed_bytes(self) -> int:
        return self.output.stat().st_size if self.output.exists() else 0


# --- starts of a run, each in a forked process


def start(config: Path, directory: Path, failure: str | None) -> int:
    """Run the configuration once in a separate process. Return its exit code, negative for a signal.

    Raises LeftProcessError if a process of this start still runs afterwards.
    """
    output = directory.with_suffix(".out")
    child = os.fork()
    if child == 0:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.pop(VARIABLE, None)
        if failure is not None:
            os.environ[VARIABLE] = failure
        os._exit(_code_of(lambda: _run(config, directory)))
    code = _wait(child)
    _require_no_process(child)
    return code


def _run(config_file: Path, directory: Path) -> None:
    """Do the work of the supervisor and of the only rank in this process."""
    config = load_config(str(config_file), [f"run.directory={directory}"])
    try:
        with RunDirectory(directory) as run_directory:
            configure_logging(directory, 0)
            run_directory.write_config(config)
            os.environ[NONCE_VARIABLE] = run_directory.lease.fence.nonce
            run_rank(config, RunSpec.of(config))
    except RunError as error:
        fatal(str(error))
    except OSError as error:
        fatal(f"{error.filename or directory}: {error.strerror}")


def _code_of(action: Callable[[], None]) -> int:
    try:
        action()
    except FatalError:
        return REFUSED
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _wait(child: int) -> int:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"a start took longer than {START_LIMIT_S:.0f} s")


def _require_no_process(session: int) -> None:
    """Wait a moment for the processes of a session to end, then raise LeftProcessError."""
    deadline = time.monotonic() + LEFT_PROCESS_S
    while remaining := _processes_of(session):
        if time.monotonic() > deadline:
            for pid in remaining:
                os.kill(pid, signal.SIGKILL)
            raise LeftProcessError(f"processes {remaining} outlived their start")
        time.sleep(0.05)


def _processes_of(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
            except (ProcessLookupError, PermissionError):
                continue
    return found


def _in_child(action: Callable[[], None]) -> None:
    """Do ``action`` in a forked process: this process must not have threads of a library."""
    child = os.fork()
    if child == 0:
        os._exit(_code_of(action))
    if _wait(child):
        raise RuntimeError("the material of the run could not be made")


# --- what a run leaves behind


def history(directory: Path) -> dict[str, Any]:
    """Return everything of a finished run that must not depend on failures.

    Raises RunError, OSError, ValueError or KeyError if a file is damaged or missing.
    """
    rows = records.read_records(directory)
    found: dict[str, Any] = {
        "steps": [records.step_of(row) for row in rows],
        "samples": [
            row["step"] for row in records.read_step_lines(directory / records.SAMPLES_FILE)
        ],
        "records": [_reproducible_values(row) for row in rows],
    }
    folders = CheckpointDirectory(directory / records.CHECKPOINTS_FOLDER, 2)
    checkpoints = {}
    for stored in folders.complete():
        manifest = read_manifest(stored.path)
        check_content(stored.path, manifest["files"])
        checkpoints[stored.path.name] = manifest["state"]["weights"]
    found["checkpoints"] = checkpoints
    found["names of checkpoints"] = sorted(p.name for p in folders.directory.iterdir())
    batches = directory / records.ROLLOUTS_FOLDER
    found["batches"] = {}
    for step in records.saved_batch_steps(batches):
        load_batch(batches, step)
        found["batches"][step] = sha256_of(batch_path(batches, step))
    certificate = json.loads((directory / records.EXPORT_FOLDER / "conversion.json").read_text())
    found["export"] = certificate["tensors"]
    found["summary"] = json.loads((directory / records.SUMMARY_FILE).read_text())["steps"]
    return found


def leftovers(directory: Path) -> list[str]:
    """List the temporary files and unfinished folders below a finished run."""
    found = []
    for path in directory.rglob("*"):
        if path.relative_to(directory).parts[0].startswith("earlier-"):
            # A start without a checkpoint begins anew, and sets aside the files that it finds.
            continue
        name = path.name
        is_temporary = name.startswith(".") and (name.endswith(".partial") or "-" in name)
        if is_temporary or ".partial-" in name or ".replaced-" in name:
            found.append(str(path.relative_to(directory)))
    return sorted(found)


def _reproducible_values(row: records.Record) -> dict[str, Any]:
    """Return the values of a record that do not measure time, memory or the disk."""
    return {
        name: value
        for name, value in row.items()
        if not name.startswith(_TIMES)
        and name.split("/")[0] in ("loss", "policy", "mask", "reward", "optimizer")
    }


# --- cases


def fail_in_chain(config: Path, chain: Chain, cases: Sequence[Case]) -> bool:
    """Start the chain's run with a failure at ``cases``: one case, or several delays.

    Return whether the start reached at least one case.
    """
    printed_bytes = chain.printed_bytes()
    chain.note.unlink(missing_ok=True)
    plans = [f"{case.plan},{chain.note}" for case in cases]
    faults = []
    code = 1
    try:
        code = start(config, chain.directory, ";".join(plans))
    except (LeftProcessError, TimeoutError) as error:
        faults.append(str(error))
    text = chain.text_since(printed_bytes)
    if "Traceback" in text:
        faults.append("a traceback in the output")
    chain.has_ended = code == 0
    reached = set(chain.note.read_text().splitlines()) if chain.note.exists() else set()
    for case, plan in zip(cases, plans, strict=True):
        if plan in reached:
            case_faults = [*faults, *_end_faults(case, code, text)]
            chain.results.append(Result(case, code, case_faults))
    if not reached and code != 0:
        chain.faults.append(f"a start that did not reach {cases[0].plan} ended with code {code}")
    return bool(reached)


def finish_chain(config: Path, chain: Chain, calm: dict[str, Any]) -> None:
    """Start the run without a failure until it has ended, and compare it with the ``calm`` run."""
    try:
        for _ in range(MOST_STARTS):
            if not chain.has_ended:
                chain.has_ended = start(config, chain.directory, None) == 0
        if not chain.has_ended:
            chain.faults.append(f"{MOST_STARTS} starts after the failures did not end the run")
            return
        present = history(chain.directory)
        differing = [key for key, expected in calm.items() if present[key] != expected]
        chain.faults += [f"{key} differ from the calm run's" for key in differing]
        chain.faults += [f"left behind: {path}" for path in leftovers(chain.directory)]
    except (RunError, OSError, ValueError, KeyError, LeftProcessError) as error:
        chain.faults.append(f"{type(error).__name__}: {error}")


def _end_faults(case: Case, code: int, text: str) -> list[str]:
    """Return the faults in the end of a start that failed at ``case`` and printed ``text``."""
    expected: tuple[int, ...] = (0,)
    if case.kind in ("kill", "torn"):
        expected = (KILLED,)
    elif case.kind == "error":
        expected = (0, REFUSED)
    if code not in expected:
        return [f"the start with the failure ended with exit code {code}, expected {expected}"]
    if case.kind == "error" and code == REFUSED and "error: " not in text:
        return ["exit code 2 without a line that begins with error:"]
    return []


def _occurrence_of(case: Case) -> int:
    return case.occurrence


class Runner:
    """Runs cases in chains below ``folder``. If a chain differs from the calm run, each of its cases is run alone.

    No chain begins after ``limit_s`` seconds.
    """

    def __init__(
        self, config: Path, folder: Path, calm: dict[str, Any], limit_s: float = math.inf
    ) -> None:
        self._config = config
        self._ends_at = time.monotonic() + limit_s
        self._folder = folder
        self._calm = calm
        self._chains = 0
        self.results: list[Result] = []

    def run(self, cases: Sequence[Case]) -> None:
        """Run the cases until the time is over, and collect their results."""
        delays = [case for case in cases if case.kind == "delay"]
        for first in range(0, len(delays), DELAYS_OF_A_START):
            if time.monotonic() < self._ends_at:
                self._run_delays(delays[first : first + DELAYS_OF_A_START])
        # Run first occurrences first: a start that fails at the third occurrence gets some steps further.
        failing = [case for case in cases if case.kind != "delay"]
        waiting = deque(sorted(failing, key=_occurrence_of))
        while waiting and time.monotonic() < self._ends_at:
            self._run_chain(waiting)

    def _run_delays(self, cases: Sequence[Case]) -> None:
        chain = self._new_chain()
        fail_in_chain(self._config, chain, cases)
        self._finish(chain)

    def _run_chain(self, waiting: deque[Case]) -> None:
        """Run a chain of the next ``waiting`` cases. A case that a start did not reach waits for the next chain."""
        chain = self._new_chain()
        is_first = True
        while waiting and not chain.has_ended and len(chain.results) < LONGEST_CHAIN:
            case = waiting.popleft()
            if not fail_in_chain(self._config, chain, [case]):
                if is_first:
                    chain.results.append(Result(case, 0, ["a start at step 0 does not reach it"]))
                else:
                    waiting.appendleft(case)
                break
            is_first = False
        self._finish(chain)

    def _finish(self, chain: Chain) -> None:
        finish_chain(self._config, chain, self._calm)
        if chain.faults and len(chain.results) > 1:
            for result in chain.results:
                result.faults += self._faults_alone(result.case)
            if not any(result.faults for result in chain.results):
                chain.results[-1].faults += [f"only after others: {text}" for text in chain.faults]
        elif chain.results:
            chain.results[0].faults += chain.faults
        for result in chain.results:
            self.results.append(result)
            verdict = "; ".join(result.faults) or "passed"
            print(f"{len(self.results)} {result.case.plan}: {result.code}: {verdict}", flush=True)
        if not any(result.faults for result in chain.results):
            shutil.rmtree(chain.directory.parent)

    def _faults_alone(self, case: Case) -> list[str]:
        chain = self._new_chain()
        fail_in_chain(self._config, chain, [case])
        finish_chain(self._config, chain, self._calm)
        faults = [*chain.faults, *(fault for result in chain.results for fault in result.faults)]
        if not faults:
            shutil.rmtree(chain.directory.parent)
        return faults

    def _new_chain(self) -> Chain:
        directory = self._folder / f"chain{self._chains}" / "run"
        shutil.rmtree(directory.parent, ignore_errors=True)
        directory.parent.mkdir(parents=True)
        self._chains += 1
        return Chain(directory)


def reached_points(config: Path, folder: Path) -> tuple[Counter[str], dict[str, Any]]:
    """Do the calm run; return how often it reaches each point, and what it leaves."""
    listing, directory = folder / "points.txt", folder / "calm" / "run"
    listing.unlink(missing_ok=True)
    shutil.rmtree(directory.parent, ignore_errors=True)
    directory.parent.mkdir()
    if (code := start(config, directory, f"-,record,{listing}")) != 0:
        raise RuntimeError(f"the calm run ended with exit code {code}; see {directory}.out")
    return Counter(listing.read_text().splitlines()), history(directory)


def merged_points(reached: Counter[str]) -> tuple[Counter[str], set[str]]:
    """Return how often each point was reached, and the points with a write that can be torn."""
    points = Counter[str]()
    torn_points = set()
    for name, count in reached.items():
        point = name.removesuffix(TORN)
        points[point] += count
        if point != name:
            torn_points.add(point)
    return points, torn_points


def cases_of(
    reached: Counter[str], pattern: str, kinds: Sequence[str], occurrences: Sequence[int]
) -> list[Case]:
    """Return a case for each matching point that is reached often enough.

    At a point without a write there is no case of a torn write: it would equal a kill.
    """
    points, torn_points = merged_points(reached)
    cases = []
    for point in sorted(fnmatch.filter(points, pattern)):
        for kind in kinds:
            if kind == "torn" and point not in torn_points:
                continue
            for occurrence in occurrences:
                # The lease is renewed by the clock, so later occurrences of its points may not come.
                if occurrence <= points[point] and (occurrence == 1 or ".beat" not in point):
                    cases.append(Case(point, kind, occurrence))
    return cases


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table: one row a point, one column a kind."""
    lines = [f"| point | {' | '.join(KINDS)} |", f"|---|{'---|' * len(KINDS)}"]
    for point in sorted({result.case.point for result in results}):
        cells = []
        for kind in KINDS:
            cell_results = [r for r in results if (r.case.point, r.case.kind) == (point, kind)]
            passed = sum(not result.faults for result in cell_results)
            cells.append(f"{passed}/{len(cell_results)}" if cell_results else "")
        lines.append(f"| `{point}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = _parser().parse_args()
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    material = folder / "material"
    config = material / "config.yaml"
    if not config.exists():
        shutil.rmtree(material, ignore_errors=True)
        material.mkdir()
        _in_child(lambda: _make(material))
    reached, calm = reached_points(config, folder)
    if options.list:
        for point, count in sorted(reached.items()):
            print(f"{count:4} {point}")
        return 0
    cases = cases_of(reached, options.points, options.kinds.split(","), OCCURRENCES)
    if not cases:
        print(f"error: no case of {options.points}: --list prints the points that the run reaches")
        return REFUSED
    runner = Runner(config, folder, calm, options.limit)
    runner.run(cases[options.part :: options.parts])
    results = runner.results
    (folder / f"results-{options.part}.json").write_text(
        json.dumps([asdict(r) for r in results], indent=1)
    )
    (folder / f"table-{options.part}.md").write_text(table(results))
    failed = sum(bool(result.faults) for result in results)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(results)} cases at {len({r.case.point for r in results})} points, {failed} failed; "
        f"{used.ru_utime + used.ru_stime:.0f} s of processor time"
    )
    return 1 if failed else 0


def _make(material: Path) -> None:
    make_material(material, STEPS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/failpoints"), help="of runs and results"
    )
    parser.add_argument("--points", default="*", help="pattern of the points' names (*)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--part", type=int, default=0, help="which part of the cases, from 0 on")
    parser.add_argument(
        "--parts", type=int, default=1, help="into how many parts the cases are divided"
    )
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after which no further chain begins"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the points that a calm run reaches"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
