"""``make arena``: rules side by side, under the claims of claims.py; then docs/evidence/findings.md and its figures.

    python -m examples.arena.run [--quick] [--claim NAME ...] [--lab | --real | --only-findings] [--processes 2]
    python -m examples.arena.run --only-findings --results docs/evidence/findings/results.jsonl.gz --out docs/evidence

Every run is one line of ``results.jsonl``, which is never made again: an interrupted arena goes on where it was. The
runs of a claim come before those of the next, seed by seed; then each of the claims' runs is made once in the real
loop, and at last the rules that no claim needs.
"""

from __future__ import annotations

import argparse
import gzip
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
from examples.arena.claims import (
    CLAIMS,
    QUICK_SEEDS,
    SETTINGS,
    SURVEYS,
    Claim,
    Record,
)
from examples.arena.findings import write_findings
from examples.arena.lab import Cell
from examples.arena.tasks import TASKS
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.processes import describe_exit

RESULTS = Path("runs/arena/results.jsonl")
KEPT = Path("docs/evidence/findings/results.jsonl.gz")
QUICK_CLAIMS = ("mask-needed", "efficiency", "topk")


def cells_of(claims: Sequence[Claim]) -> list[Cell]:
    """Each run once, in the order of claims and seeds."""
    cells = {
        cell.key: cell
        for claim in claims
        for seed in claim.seeds
        for side in claim.sides
        for cell in [SETTINGS[side.setting].cell(side.rule, seed)]
    }
    return list(cells.values())


def others() -> list[Cell]:
    """The runs that no claim needs, in the order of ``SURVEYS``, all rules at one seed before the next."""
    of_claims = {cell.key for cell in cells_of(CLAIMS)}
    cells = [
        SETTINGS[setting].cell(rule, seed)
        for survey in SURVEYS
        for seed in survey.seeds
        for setting in survey.settings
        for rule in survey.rules
    ]
    return [cell for cell in cells if cell.key not in of_claims]


def real_cells(claims: Sequence[Claim]) -> list[Cell]:
    """The claims' runs in the real loop; first those that most tests need."""
    sides = Counter(
        (side.setting, side.rule)
        for claim in claims
        for test in claim.tests
        for side in (test.first, test.second)
    )
    return [SETTINGS[s].cell(r, real_loop.SEED) for (s, r), _ in sides.most_common()]


def read_results(path: Path) -> dict[str, Record]:
    """By ``Cell.key``, from lines of JSON, of ``.gz`` too; a line that was cut off is left out."""
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
        records[row["key"]] = {
            name: [math.nan if x is None else x for x in values]
            for name, values in row["values"].items()
        }
    return records


def make_runs(cells: Sequence[Cell], results: Path, processes: int) -> None:
    """Those that ``results`` lacks, each in a process of its own."""
    done = read_results(results)
    missing = [cell for cell in cells if cell.key not in done]
    if not missing:
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    make_material(dict.fromkeys(cell.task for cell in missing))
    with progress("arena", len(missing)) as bar, _appended(results) as out:
        for cell, seconds, record in _forked(lab.run, missing, processes):
            if isinstance(record, str):
                print(f"arena: {cell.key}: {record}", file=sys.stderr)
                continue
            _write(out, cell.key, seconds, record)
            bar.update(note=f"{cell.key} in {seconds:.0f} s")
            bar.advance()


def make_material(tasks: Iterable[str]) -> None:
    """Of one task after another: two runs side by side would both make it. Raises RuntimeError where one fails."""
    for task, _, answer in _forked(_make_material, tasks, 1):
        if answer is not None:
            raise RuntimeError(f"arena: the material of {task}: {answer}")


def _make_material(task: str) -> None:
    # Threads that wait for each other take ten times as long beside other work.
    torch.set_num_threads(1)
    TASKS[task]()


A = TypeVar("A")
R = TypeVar("R")


def _forked(
    act: Callable[[A], R], values: Iterable[A], processes: int
) -> Iterator[tuple[A, float, R | str]]:
    """``act`` of each value in a process of its own, ``processes`` at a time: the value, seconds of the processor, and
    the answer as soon as it is there, or in words what ended it."""
    # What a fork shares must not have computed anything: neither threads nor Megatron-Core's groups outlive it.
    fork = multiprocessing.get_context("fork")
    waiting, running = deque(values), dict[Connection, tuple[BaseProcess, A]]()
    while waiting or running:
        while waiting and len(running) < processes:
            value = waiting.popleft()
            receiver, sender = fork.Pipe(duplex=False)
            with sender:
                process = fork.Process(target=_send, args=(sender, act, value), daemon=True)
                process.start()
            running[receiver] = process, value
        wait(running)
        for receiver in [r for r in running if r.poll()]:
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
    """What ends it is told, too: a run is made again next time."""
    began = time.process_time()
    try:
        answer = act(value)
    except Exception as error:
        answer = repr(error)
    sender.send((round(time.process_time() - began, 1), answer))


def make_real_runs(cells: Sequence[Cell], results: Path) -> None:
    """Those that ``results`` lacks, one after another: a run has the whole machine. One that fails is told of, and made
    again next time."""
    done = read_results(results)
    missing = [cell for cell in cells if real_loop.real_key(cell) not in done]
    if not missing:
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    with progress("real loop", len(missing)) as bar, _appended(results) as out:
        for cell in missing:
            began = time.monotonic()
            try:
                record = real_loop.run(cell)
            except (RuntimeError, OSError, ValueError) as error:
                print(f"arena: {error}", file=sys.stderr)
                continue
            seconds = round(time.monotonic() - began, 1)
            _write(out, real_loop.real_key(cell), seconds, record)
            bar.update(note=f"{cell.key} in {seconds:.0f} s")
            bar.advance()


def _appended(results: Path) -> TextIO:
    """Open to append lines, the first of them not to one that was cut off."""
    out = results.open("a", encoding="utf-8")
    if results.stat().st_size and not results.read_bytes().endswith(b"\n"):
        out.write("\n")
    return out


def _write(out: TextIO, key: str, seconds: float, record: Record) -> None:
    values = {n: [x if math.isfinite(x) else None for x in v] for n, v in record.items()}
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
        choices=[c.name for c in CLAIMS],
        help="only this one (may be repeated)",
    )
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--lab", action="store_true", help="the claims' runs in the lab alone")
    parts.add_argument("--real", action="store_true", help="the runs in the real loop alone")
    parts.add_argument("--only-findings", action="store_true", help="draw what is there")
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
            f"{results}: no such file; those that are kept: --results {KEPT} --out docs/evidence"
        )
    if results.suffix == ".gz" and not options.only_findings:
        parser.error(f"{results}: runs are added to lines of JSON, not to .gz; gunzip it first")
    chosen = options.claim or (QUICK_CLAIMS if options.quick else None)
    claims = [c for c in CLAIMS if chosen is None or c.name in chosen]
    if options.quick:
        claims = [replace(claim, seeds=QUICK_SEEDS) for claim in claims]
    if not options.only_findings:
        if not options.real:
            make_runs(cells_of(claims), results, options.processes)
        if not (options.quick or options.lab):
            make_real_runs(real_cells(claims), results)
        if not (options.real or options.lab or chosen):
            make_runs(others(), results, options.processes)
    print(write_findings(claims, read_results(results), options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
