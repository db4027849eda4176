"""``make arena``: run rules side by side, under the claims of claims.py. Then write findings.md and its figures.

    python -m examples.arena.run [--quick] [--claim NAME ...] [--lab | --real | --only-findings] [--processes 2]
    python -m examples.arena.run --only-findings --results docs/evidence/findings/results.jsonl.gz --out docs/evidence

Every run is one line of ``results.jsonl`` and is never made again, so an interrupted arena continues with the missing
runs. The runs are made claim by claim, and seed by seed within a claim. Then each rule of the claims is run once in the
real loop, and at last the rules that no claim needs.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import multiprocessing
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO, TypeVar

import torch

from examples.arena import lab, real_loop
from examples.arena.claims import CLAIMS, QUICK_SEEDS, SETTINGS, SURVEYS, Claim, Record
from examples.arena.findings import write_findings
from examples.arena.lab import Cell
from examples.arena.tasks import TASKS
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.processes import describe_exit

RESULTS = Path("runs/arena/results.jsonl")
KEPT_RESULTS = Path("docs/evidence/findings/results.jsonl.gz")
QUICK_CLAIMS = ("mask-needed", "efficiency", "topk")


def cells_of(claims: Sequence[Claim]) -> list[Cell]:
    """Return each run of the claims once, in the order of claims and seeds."""
    cells: dict[str, Cell] = {}
    for claim in claims:
        for seed in claim.seeds:
            for side in claim.sides:
                cell = SETTINGS[side.setting].cell(side.rule, seed)
                cells[cell.key] = cell
    return list(cells.values())


def survey_cells() -> list[Cell]:
    """Return the runs that no claim needs, in the order of ``SURVEYS``, and seed by seed within a survey."""
    claim_keys = {cell.key for cell in cells_of(CLAIMS)}
    cells: list[Cell] = []
    for survey in SURVEYS:
        for seed, setting, rule in itertools.product(survey.seeds, survey.settings, survey.rules):
            cell = SETTINGS[setting].cell(rule, seed)
            if cell.key not in claim_keys:
                cells.append(cell)
    return cells


def real_cells(claims: Sequence[Claim]) -> list[Cell]:
    """Return the claims' runs in the real loop, sorted by the number of tests that need a run, the largest first."""
    uses: Counter[tuple[str, str]] = Counter()
    for claim in claims:
        for test in claim.tests:
            uses[test.first.setting, test.first.rule] += 1
            uses[test.second.setting, test.second.rule] += 1
    return [
        SETTINGS[setting].cell(rule, real_loop.SEED) for (setting, rule), _ in uses.most_common()
    ]


def read_results(path: Path) -> dict[str, Record]:
    """Return the records in a file of JSON lines (plain or ``.gz``), by ``Cell.key``. Skip a truncated line."""
    if not path.is_file():
        return {}
    records: dict[str, Record] = {}
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        record = {}
        for name, values in row["values"].items():
            record[name] = [math.nan if x is None else x for x in values]
        records[row["key"]] = record
    return records


def make_runs(cells: Sequence[Cell], results: Path, processes: int) -> None:
    """Make the runs that ``results`` lacks, each in a separate process."""
    done = read_results(results)
    missing = [cell for cell in cells if cell.key not in done]
    if not missing:
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    make_material(dict.fromkeys(cell.task for cell in missing))
    with progress("arena", len(missing)) as bar, _appended(results) as out:
        for cell, seconds, record in forked(lab.run, missing, processes):
            if isinstance(record, str):
                print(f"arena: {cell.key}: {record}", file=sys.stderr)
                continue
            _write(out, cell.key, seconds, record)
            bar.update(note=f"{cell.key} in {seconds:.0f} s")
            bar.advance()


def make_material(tasks: Iterable[str]) -> None:
    """Make the material of the tasks before their runs start: two runs side by side would make the material twice.

    Raises RuntimeError for a task whose material can't be made.
    """
    for task, _, answer in forked(_make_material, tasks, 1):
        if answer is not None:
            raise RuntimeError(f"arena: the material of {task}: {answer}")


def _make_material(task: str) -> None:
    # Threads that wait for each other take ten times as long beside other work.
    torch.set_num_threads(1)
    TASKS[task]()


A = TypeVar("A")
R = TypeVar("R")


def forked(
    act: Callable[[A], R], values: Iterable[A], processes: int
) -> Iterator[tuple[A, float, R | str]]:
    """Call ``act`` with each value in a separate process, ``processes`` at a time.

    As soon as a process has ended, yield its value, its processor seconds, and the answer of ``act``. If the process
    failed, yield the reason as text instead of the answer.
    """
    # This process must not have computed anything with torch: a fork does not inherit threads and process groups.
    fork = multiprocessing.get_context("fork")
    waiting = deque(values)
    running: dict[Connection, tuple[BaseProcess, A]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            value = waiting.popleft()
            receiver, sender = fork.Pipe(duplex=False)
            with sender:
                process = fork.Process(target=_send, args=(sender, act, value), daemon=True)
                process.start()
            running[receiver] = process, value
        wait(running)
        ready_receivers = [receiver for receiver in running if receiver.poll()]
        for receiver in ready_receivers:
            child, value = running.pop(receiver)
            with receiver:
                try:
                    seconds, answer = receiver.recv()
                except EOFError:
                    child.join()
                    seconds, answer = math.nan, describe_exit(child.exitcode or 0)
            child.join()
            yield value, seconds, answer


def _send(sender: Connection, act: Callable[[A], object], value: A) -> None:
    """Send the processor seconds of ``act`` and its answer, or the text of its error."""
    start_time = time.process_time()
    try:
        answer = act(value)
    except Exception as error:
        answer = repr(error)
    sender.send((round(time.process_time() - start_time, 1), answer))


def make_real_runs(cells: Sequence[Cell], results: Path) -> None:
    """Make the runs that ``results`` lacks, one after another, because each uses the whole machine.

    The function prints the error of a failed run and stores nothing for it, so the next call makes the run again.
    """
    done = read_results(results)
    missing = [cell for cell in cells if real_loop.real_key(cell) not in done]
    if not missing:
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    with progress("real loop", len(missing)) as bar, _appended(results) as out:
        for cell in missing:
            start_time = time.monotonic()
            try:
                record = real_loop.run(cell)
            except (RuntimeError, OSError, ValueError) as error:
                print(f"arena: {error}", file=sys.stderr)
                continue
            seconds = round(time.monotonic() - start_time, 1)
            _write(out, real_loop.real_key(cell), seconds, record)
            bar.update(note=f"{cell.key} in {seconds:.0f} s")
            bar.advance()


def _appended(results: Path) -> TextIO:
    """Open the file to append lines; end a truncated last line first."""
    out = results.open("a", encoding="utf-8")
    if results.stat().st_size and not results.read_bytes().endswith(b"\n"):
        out.write("\n")
    return out


def _write(out: TextIO, key: str, seconds: float, record: Record) -> None:
    values = {}
    for name, numbers in record.items():
        values[name] = [x if math.isfinite(x) else None for x in numbers]
    out.write(json.dumps({"key": key, "seconds": seconds, "values": values}) + "\n")
    out.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.arena.run", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="few claims, three seeds: within 20 minutes"
    )
    parser.add_argument(
        "--claim",
        action="append",
        metavar="NAME",
        choices=[claim.name for claim in CLAIMS],
        help="only the claim NAME (may be repeated)",
    )
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--lab", action="store_true", help="the claims' runs in the lab alone")
    parts.add_argument("--real", action="store_true", help="the runs in the real loop alone")
    parts.add_argument(
        "--only-findings", action="store_true", help="only write the page and its figures"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="runs at a time, of one core each (default: 2)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS.parent,
        help="folder of findings.md (default: runs/arena)",
    )
    options = parser.parse_args(arguments)
    results: Path = options.results
    if options.only_findings and not results.is_file():
        parser.error(
            f"{results}: no such file; those that are kept: --results {KEPT_RESULTS} --out docs/evidence"
        )
    if results.suffix == ".gz" and not options.only_findings:
        parser.error(f"{results}: runs are added to lines of JSON, not to .gz; gunzip it first")
    chosen_names = options.claim
    if not chosen_names and options.quick:
        chosen_names = QUICK_CLAIMS
    claims = list(CLAIMS)
    if chosen_names:
        claims = [claim for claim in CLAIMS if claim.name in chosen_names]
    if options.quick:
        claims = [replace(claim, seeds=QUICK_SEEDS) for claim in claims]
    if not options.only_findings:
        if not options.real:
            make_runs(cells_of(claims), results, options.processes)
        if not (options.quick or options.lab):
            make_real_runs(real_cells(claims), results)
        if not (options.real or options.lab or chosen_names):
            make_runs(survey_cells(), results, options.processes)
    print(write_findings(claims, read_results(results), options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
