#!/usr/bin/env python3
"""A failure at each named point of a run, and a check of what the run left behind.

A run of four steps replays saved batches, so that each of its starts computes the same. A calm run shows which points
it reaches and what it leaves. Then, for each point, kind of failure and occurrence, a run fails there once, and starts
without a failure follow until it has ended. What it leaves must be what the calm run left: records once and in order,
whole checkpoints, the same hashes of weights, batches and export, no process, no temporary file. A start that fails by
an OSError must end with exit code 2 and one line, or go on.

    python -m tools.faults.failpoints --folder /tmp/failpoints [--points 'checkpoint/*'] [--kinds kill,torn]
    python -m tools.faults.failpoints --folder /tmp/failpoints --list

Each start is a fork of this process, which has imported the libraries and computed nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.config import load_config, resolved_yaml
from megatron_dppo.data.batch_file import batch_path, load_batch
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.logging import FatalError, configure_logging, fatal
from megatron_dppo.loop import run_rank
from megatron_dppo.metrics import records
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.failpoints import KINDS, VARIABLE
from megatron_dppo.system.files import sha256_of
from megatron_dppo.system.lease import NONCE_VARIABLE
from megatron_dppo.trainer.checkpoint.directory import (
    CheckpointDirectory,
    check_content,
    read_manifest,
)
from tools.faults.material import make_material

STEPS = 4
OCCURRENCES = (1, 3)
MOST_STARTS = 4
START_LIMIT_S = 600.0
LEFT_PROCESS_S = 10.0
KILLED = -signal.SIGKILL
REFUSED = 2
RECORDED = ("steps", "samples", "records", "summary", "batches")
_TIMES = ("time/", "checkpoint/write_s", "speed/", "weights/")


class LeftProcessError(RuntimeError):
    """A process of a start is still there after its end."""


@dataclass(frozen=True)
class Case:
    """One failure: the ``occurrence``-th time that ``point`` is reached."""

    point: str
    kind: str
    occurrence: int

    @property
    def variable(self) -> str:
        return f"{self.point},{self.kind},{self.occurrence}"


@dataclass(frozen=True)
class Result:
    """The exit codes of a case's starts, and each difference from the calm run; without one the case passed."""

    case: Case
    codes: list[int]
    faults: list[str]
    seconds: float


# --- starts of a run, each in a forked process


def start(config: Path, directory: Path, failure: str | None) -> int:
    """Run the configuration once in a process of its own; its exit code, negative for a signal.

    Raises LeftProcessError where a process of this start is still there afterwards.
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
            run_directory.write_config(resolved_yaml(config))
            os.environ[NONCE_VARIABLE] = run_directory.lease.fence.nonce
            run_rank(config)
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
    """Compute in a forked process: threads of a library must not exist in this one."""
    child = os.fork()
    if child == 0:
        os._exit(_code_of(action))
    if _wait(child):
        raise RuntimeError("the material of the run could not be made")


# --- what a run leaves behind


def history(directory: Path) -> dict[str, Any]:
    """Return everything of a finished run that must not depend on failures, with damage as text."""
    rows = records.read_records(directory)
    found: dict[str, Any] = {
        "steps": [records.step_of(row) for row in rows],
        "samples": [
            row["step"] for row in records.read_step_lines(directory / records.SAMPLES_FILE)
        ],
        "records": [_stable(row) for row in rows],
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
    for step in records.saved_steps(batches):
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
            # A start without a checkpoint begins anew, and sets aside what it finds.
            continue
        name = path.name
        is_temporary = name.startswith(".") and (name.endswith(".partial") or "-" in name)
        if is_temporary or ".partial-" in name or ".replaced-" in name:
            found.append(str(path.relative_to(directory)))
    return sorted(found)


def _stable(row: records.Record) -> dict[str, Any]:
    """Return the values of a record that do not measure time, memory or the disk."""
    return {
        name: value
        for name, value in row.items()
        if not name.startswith(_TIMES)
        and name.split("/")[0] in ("loss", "policy", "mask", "reward", "optimizer")
    }


# --- cases


def try_case(config: Path, folder: Path, case: Case, calm: dict[str, Any]) -> Result:
    """Let a run fail as ``case`` says, start it until it has ended, and compare what it left with the ``calm`` run."""
    name = f"{case.point.replace('/', '_')}-{case.kind}-{case.occurrence}"
    directory = folder / name / "run"
    directory.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    codes, faults = [], []
    try:
        codes.append(start(config, directory, case.variable))
        faults += _first_end_faults(case, codes[0])
        while codes[-1] != 0 and len(codes) < MOST_STARTS:
            codes.append(start(config, directory, None))
        if codes[-1] != 0:
            faults.append(f"the start after the failure ended with exit code {codes[-1]}")
        else:
            present = history(directory)
            lost = RECORDED if codes[0] == REFUSED and _is_record(case) else ()
            for key, expected in calm.items():
                if present[key] != expected and key not in lost:
                    faults.append(f"{key} differ from the calm run's")
            faults += [f"left behind: {path}" for path in leftovers(directory)]
        text = directory.with_suffix(".out").read_text(errors="replace")
        if "Traceback" in text:
            faults.append("a traceback in the output")
        if case.kind == "error" and codes[0] == REFUSED and "error: " not in text:
            faults.append("exit code 2 without a line that begins with error:")
    except (RunError, OSError, ValueError, KeyError, LeftProcessError) as error:
        faults.append(f"{type(error).__name__}: {error}")
    if not faults:
        shutil.rmtree(directory.parent, ignore_errors=True)
    return Result(case, codes, faults, time.monotonic() - began)


def _is_record(case: Case) -> bool:
    """Whether the failure is that of a record or a saved batch: the full disk loses it, and the run stops after the
    step.
    """
    return case.point.startswith("append") or "step_#.safetensors" in case.point


def _first_end_faults(case: Case, code: int) -> list[str]:
    expected: tuple[int, ...] = (0,)
    if case.kind in ("kill", "torn"):
        expected = (KILLED,)
    elif case.kind == "error":
        expected = (0, REFUSED)
    if code in expected:
        return []
    return [f"the start with the failure ended with exit code {code}, expected {expected}"]


def reached_points(config: Path, folder: Path) -> tuple[Counter[str], dict[str, Any]]:
    """Do the calm run; return how often it reaches each point, and what it leaves."""
    listing, directory = folder / "points.txt", folder / "calm" / "run"
    listing.unlink(missing_ok=True)
    shutil.rmtree(directory.parent, ignore_errors=True)
    directory.parent.mkdir()
    if (code := start(config, directory, f"-,record,{listing}")) != 0:
        raise RuntimeError(f"the calm run ended with exit code {code}; see {directory}.out")
    return Counter(listing.read_text().splitlines()), history(directory)


def cases_of(
    points: Counter[str], pattern: str, kinds: Sequence[str], occurrences: Sequence[int]
) -> list[Case]:
    """Return a case for each matching point that is reached often enough."""
    cases = []
    for point in sorted(fnmatch.filter(points, pattern)):
        for kind in kinds:
            for occurrence in occurrences:
                # The lease is renewed by time, so its later occurrences may not come.
                if occurrence <= points[point] and (occurrence == 1 or ".beat" not in point):
                    cases.append(Case(point, kind, occurrence))
    return cases


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table: one row a point, one column a kind."""
    lines = [f"| point | {' | '.join(KINDS)} |", f"|---|{'---|' * len(KINDS)}"]
    for point in sorted({result.case.point for result in results}):
        cells = []
        for kind in KINDS:
            of_cell = [r for r in results if (r.case.point, r.case.kind) == (point, kind)]
            passed = sum(not result.faults for result in of_cell)
            cells.append(f"{passed}/{len(of_cell)}" if of_cell else "")
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
        _in_child(lambda: _made(material))
    points, calm = reached_points(config, folder)
    if options.list:
        for point, count in sorted(points.items()):
            print(f"{count:4} {point}")
        return 0
    cases = cases_of(points, options.points, options.kinds.split(","), OCCURRENCES)
    cases = cases[options.part :: options.parts]
    results = []
    for number, case in enumerate(cases, 1):
        result = try_case(config, folder, case, calm)
        results.append(result)
        verdict = "; ".join(result.faults) or "passed"
        print(
            f"{number}/{len(cases)} {case.variable}: exit codes {result.codes}, "
            f"{result.seconds:.0f} s: {verdict}",
            flush=True,
        )
    (folder / f"results-{options.part}.json").write_text(
        json.dumps([asdict(r) for r in results], indent=1)
    )
    (folder / f"table-{options.part}.md").write_text(table(results))
    failed = sum(bool(result.faults) for result in results)
    print(f"{len(results)} cases at {len({r.case.point for r in results})} points, {failed} failed")
    return 1 if failed else 0


def _made(material: Path) -> None:
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
        "--list", action="store_true", help="print the points that a calm run reaches"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
