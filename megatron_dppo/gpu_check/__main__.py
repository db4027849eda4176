"""Entry point: ``megatron-dppo gpu-check [--only kernels,mask] [--directory runs/gpu_check]``.

Exit codes: 0 nothing is wrong (parts may lack something), 1 something is, 2 refused.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.config.machine import this_machine
from megatron_dppo.gpu_check.page import JSON_FILE, PAGE_FILE, write
from megatron_dppo.gpu_check.part import PARTS, Part, Row, discover
from megatron_dppo.gpu_check.runner import Result, run_part
from megatron_dppo.logging import fatal

DIRECTORY = Path("runs/gpu_check")
_MARKS = {None: "  ", True: "ok", False: "NO"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for; the process's exit code."""
    words = _parser().parse_args(arguments)
    parts = discover(words.parts)
    if words.list:
        for part in parts:
            print(f"{part.name:10} {part.limit_s:5.0f} s  {part.shows}")
        return 0
    try:
        wanted = chosen(parts, words.only)
    except ValueError as error:
        fatal(str(error))
    gpus = this_machine().gpus
    folder = fresh_folder(words.directory)
    names = [part.name for part in parts]
    found = f"{gpus} GPU(s)" if gpus else "no GPU: each part runs what it can"
    print(f"gpu check: {found}; results in {folder}", flush=True)
    results: list[Result] = []
    for number, part in enumerate(wanted, start=1):
        limit = words.time_limit or part.limit_s
        print(
            f"[{number}/{len(wanted)}] {part.name}, at most {limit:.0f} s: {part.shows}", flush=True
        )
        results.append(run_part(part, folder / part.name, gpus, limit, _say))
        _say_end(results[-1])
        done = {r.name for r in results}
        write(folder, results, [name for name in names if name not in done], gpus)
    faults = [result.name for result in results if result.is_fault]
    print(f"{'wrong: ' + ', '.join(faults) if faults else 'nothing is wrong'}")
    print(f"read {folder / PAGE_FILE}; every number is in {folder / JSON_FILE}")
    return int(bool(faults))


def chosen(parts: Sequence[Part], only: str | None) -> list[Part]:
    """The parts whose names ``only`` lists, separated by commas; None: all. Raises ValueError for an unknown name."""
    if only is None:
        return list(parts)
    asked = [name.strip() for name in only.split(",") if name.strip()]
    known = {part.name: part for part in parts}
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        raise ValueError(
            f"--only: got {', '.join(unknown) or 'no name'}, expected names of {', '.join(known)}"
        )
    return [part for part in parts if part.name in asked]


def fresh_folder(directory: Path) -> Path:
    """``directory``, made anew; what an earlier check left there is renamed, and nothing deleted."""
    if directory.exists():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(directory.stat().st_mtime))
        names = (
            f"{directory.name}-{stamp}{suffix}"
            for suffix in ("", *(f"-{i}" for i in range(2, 100)))
        )
        directory.rename(next(p for name in names if not (p := directory.with_name(name)).exists()))
    directory.mkdir(parents=True)
    return directory


def _say(row: Row) -> None:
    expected = f" (expected {row.expected})" if row.expected else ""
    print(f"  {_MARKS[row.holds]} {row.what}: {row.measured}{expected}", flush=True)


def _say_end(result: Result) -> None:
    why = f": {result.why}" if result.why else ""
    print(f"  {result.verdict} in {result.seconds:.0f} s{why}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo gpu-check",
        description="Check this machine's GPUs with this project's own parts; without a GPU, what can be.",
        epilog="Exit codes: 0 nothing is wrong, 1 something is, 2 refused. docs/gpu_check.md",
    )
    parser.add_argument("--only", metavar="NAME,...", help="these parts alone")
    parser.add_argument("--list", action="store_true", help="the parts and their time limits")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="default %(default)s")
    parser.add_argument(
        "--time-limit", type=float, help="seconds of each part, in place of its own"
    )
    parser.add_argument("--parts", default=PARTS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
