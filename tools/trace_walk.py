"""Trace a small real run, and write the package's files that each walk of docs/overview.md enters into the page.

    python tools/trace_walk.py --write      # a minute: a run of two steps on two ranks and a server

The run is ``megatron-dppo train`` on a random tiny model. Every process of the run records the functions of the package
that it enters (``tools/trace/sitecustomize.py``). A walk has the files that rank 0 and the processes it calls enter
while a function of rank 0 is active in the last step. A file is in the first walk that enters it. The files of
``system/``, ``config/`` and ``logging.py`` are left out, because any part of the package calls them. The stand-ins for
GPUs are left out too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_dppo.system.files import write_atomically  # noqa: E402
from tests.integration.runs import write_material  # noqa: E402

PAGE = ROOT / "docs" / "overview.md"
TRACE_FOLDER = ROOT / "tools" / "trace"
HELPERS = ("system/", "config/", "cpu/", "logging.py", "__init__.py")
_OVERRIDES = ("run.steps=2", "evaluation.every=9", "checkpoint.every=9")
"""Overrides of the traced run: two steps, without an evaluation or a checkpoint between them."""
SUPERVISOR = "supervisor"
RANK_0 = "rank 0"


@dataclass(frozen=True)
class Walk:
    """A part of a training step.

    Args:
        title: Heading of the walk on the page.
        start: Function of rank 0 whose call begins the walk, as file and qualified name.
        end: Function of rank 0 whose return ends the walk.
        processes: Kinds of process whose entries belong to the walk.
    """

    title: str
    start: str
    end: str
    processes: frozenset[str]


EVERY_PROCESS = frozenset({RANK_0, "answer parser", "reward worker", "server", "router"})
WALKS = (
    Walk(
        "A prompt becomes a scored response",
        "loop/rollout_sources.py GeneratedRollouts.collect",
        "loop/rollout_sources.py GeneratedRollouts.collect",
        EVERY_PROCESS,
    ),
    Walk(
        "A micro-batch becomes a loss",
        "trainer/step.py forward_backward",
        "trainer/step.py forward_backward",
        frozenset({RANK_0}),
    ),
    Walk(
        "A batch becomes an optimiser step",
        "loop/learning.py Learner.plan",
        "loop/learning.py Learner.learn",
        frozenset({RANK_0}),
    ),
    Walk(
        "New weights reach the server",
        "loop/engine_session.py EngineSession.update_weights",
        "loop/engine_session.py EngineSession.update_weights",
        EVERY_PROCESS,
    ),
)
_KINDS = {
    "megatron_dppo.engine.answer_parsing": "answer parser",
    "megatron_dppo.rewards": "reward worker",
    "megatron_dppo.engine.launch_server": "server",
    # The process that forks servers, and the forked servers.
    "megatron_dppo.cpu.engine.libraries": "server",
    "sglang_router": "router",
    "multiprocessing": "server",
}


@dataclass(frozen=True)
class Entry:
    """A line of a process's record.

    Args:
        seconds: Time on the system's monotonic clock. All processes share this clock.
        process: Kind of the process.
        event: ``call`` or ``return``.
        function: File of the package and qualified name.
    """

    seconds: float
    process: str
    event: str
    function: str

    @property
    def file(self) -> str:
        """The function's file, relative to the package."""
        return self.function.partition(" ")[0]


def read_entries(folder: Path) -> list[Entry]:
    """The entries of all processes, in order of time."""
    entries: list[Entry] = []
    for path in folder.glob("*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines()
        kind = kind_of([line for line in lines if line.startswith("# ")][-1])
        for line in lines:
            if line.startswith("# "):
                continue
            seconds, event, function = line.split(" ", 2)
            entries.append(Entry(float(seconds), kind, event, function))
    return sorted(entries, key=attrgetter("seconds"))


def kind_of(header: str) -> str:
    """The kind of the process with this header, ``# RANK COMMAND LINE``."""
    _, rank, command = header.split(" ", 2)
    if "megatron_dppo.train" in command and rank:
        return f"rank {rank}"
    if "-m megatron_dppo.train" in command:
        return SUPERVISOR
    return next((kind for word, kind in _KINDS.items() if word in command), command)


def files_of(walk: Walk, entries: Sequence[Entry]) -> list[str]:
    """The files that ``walk`` enters in the last step, each at its first entry."""
    begin, end = _last_span(walk, entries)
    inside = (entry for entry in entries if begin <= entry.seconds <= end)
    return list(dict.fromkeys(_subjects(walk, inside)))


def all_walks(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """The files of every walk by its title, each file in the first walk that enters it."""
    walks: dict[str, list[str]] = {}
    seen: set[str] = set()
    for walk in WALKS:
        files = [file for file in files_of(walk, entries) if file not in seen]
        walks[walk.title] = files
        seen.update(files)
    return walks


def _last_span(walk: Walk, entries: Sequence[Entry]) -> tuple[float, float]:
    """Return the times of two entries: the last return of ``walk.end``, and before it the last call of ``walk.start``.

    The time of the call comes first.
    """
    starts: list[float] = []
    ends: list[float] = []
    for entry in entries:
        if entry.process != RANK_0:
            continue
        if entry.event == "call" and entry.function == walk.start:
            starts.append(entry.seconds)
        elif entry.event == "return" and entry.function == walk.end:
            ends.append(entry.seconds)
    if not ends or not starts:
        raise ValueError(f"the trace of rank 0 lacks {walk.start} or {walk.end}")
    return max(seconds for seconds in starts if seconds < ends[-1]), ends[-1]


def _subjects(walk: Walk, entries: Iterable[Entry]) -> Iterator[str]:
    for entry in entries:
        is_helper = entry.file.startswith(HELPERS[:-1]) or entry.file == HELPERS[-1]
        if entry.process in walk.processes and not is_helper:
            yield f"megatron_dppo/{entry.file}"


def trace_run(folder: Path) -> list[Entry]:
    """Run two steps with every process traced. Raises RuntimeError if the run fails."""
    config = write_material(folder)
    record = folder / "trace"
    record.mkdir()
    bounds = {walk.start for walk in WALKS} | {walk.end for walk in WALKS}
    variables = {
        "PYTHONPATH": os.pathsep.join([str(TRACE_FOLDER), str(ROOT)]),
        "TRACE_WALK_FOLDER": str(record),
        "TRACE_WALK_BOUNDS": ";".join(sorted(bounds)),
    }
    command = [sys.executable, "-m", "megatron_dppo.train", str(config), *_OVERRIDES]
    done = subprocess.run(command, env=os.environ | variables, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}")
    return read_entries(record)


def walks_on(page: str) -> dict[str, list[str]]:
    """Return the files of each walk on ``page``, by the walk's title."""
    walks: dict[str, list[str]] = {}
    for walk in WALKS:
        _, rest = page.split(f"### {walk.title}\n\n```\n")
        walks[walk.title] = rest.partition("```\n")[0].splitlines()
    return walks


def differences(
    traced: Mapping[str, Sequence[str]],
    written: Mapping[str, Sequence[str]],
    entries: Sequence[Entry] = (),
) -> list[str]:
    """Return a line for each file that only one of two results enters.

    The order and the walk of a file are not compared: they depend on the moments at which background threads run. For
    the same reason a file of ``written`` that the trace enters outside of all walks, in ``entries``, is no difference.
    """
    traced_files = {file for files in traced.values() for file in files}
    written_files = {file for files in written.values() for file in files}
    entered_files = traced_files | {f"megatron_dppo/{entry.file}" for entry in entries}
    lines = [f"{file}: entered, not in the walks" for file in traced_files - written_files]
    lines += [f"{file}: in the walks, not entered" for file in written_files - entered_files]
    return sorted(lines)


def page_with(walks: Mapping[str, Sequence[str]], page: str) -> str:
    """Return ``page`` with the lists of ``walks``, which ``walks_on`` reads. A file's docstring describes the file."""
    for title, files in walks.items():
        heading, rest = page.split(f"### {title}\n\n```\n")
        _, rest = rest.split("```\n", 1)
        lines = "".join(f"{file}\n" for file in files)
        page = f"{heading}### {title}\n\n```\n{lines}```\n{rest}"
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the walks, or write them into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/overview.md")
    parser.add_argument("--from", dest="record", type=Path, help="a folder of records to read")
    options = parser.parse_args(arguments)
    if options.record is not None:
        entries = read_entries(options.record)
    else:
        with tempfile.TemporaryDirectory(prefix="walk-") as folder:
            entries = trace_run(Path(folder))
    walks = all_walks(entries)
    if options.write:
        write_atomically(PAGE, page_with(walks, PAGE.read_text(encoding="utf-8")))
    else:
        print(yaml.safe_dump(walks, sort_keys=False), end="")


if __name__ == "__main__":
    main()
