"""Check a machine with GPUs: the first command to run there.

``megatron-dppo gpu-check [--only kernels,mask] [--directory runs/gpu_check]``.

Exit codes: 0 no part failed (parts may have been skipped), 1 a part failed, 2 an option cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_dppo.config.machine import this_machine
from megatron_dppo.diagnostics.gpu_check import PARTS, CheckPart, CheckRow, discover
from megatron_dppo.diagnostics.gpu_check.runner import PartResult, run_part
from megatron_dppo.logging import fatal
from megatron_dppo.system.arguments import positive_number
from megatron_dppo.system.files import unused_path, write_atomically

DIRECTORY = Path("runs/gpu_check")
JSON_FILE, PAGE_FILE = "gpu_check.json", "gpu_check.md"
_HOLDS = {None: "", True: "yes", False: "**NO**"}
_PICTURES = (".png",)
_MARKS = {None: "  ", True: "ok", False: "NO"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected parts and return the process's exit code."""
    options = _parser().parse_args(arguments)
    parts = discover(options.parts)
    if options.list:
        for part in parts:
            print(f"{part.name:10} {part.limit_s:5.0f} s  {part.shows}")
        return 0
    try:
        wanted_parts = chosen_parts(parts, options.only)
    except ValueError as error:
        fatal(str(error))
    gpus = this_machine().gpus
    folder = fresh_folder(options.directory)
    names = [part.name for part in parts]
    machine = "no GPU: each part runs what it can"
    if gpus:
        machine = f"{gpus} GPU(s)"
    print(f"gpu check: {machine}; results in {folder}", flush=True)
    results: list[PartResult] = []
    for number, part in enumerate(wanted_parts, start=1):
        limit = options.time_limit or part.limit_s
        print(
            f"[{number}/{len(wanted_parts)}] {part.name}, at most {limit:.0f} s: {part.shows}",
            flush=True,
        )
        result = run_part(part, folder / part.name, gpus, limit, _print_row, options.parts)
        results.append(result)
        _print_end(result)
        done_parts = {r.name for r in results}
        write(folder, results, [name for name in names if name not in done_parts], gpus)
    faults = [result.name for result in results if result.is_fault]
    if faults:
        print(f"wrong: {', '.join(faults)}")
    else:
        print("nothing is wrong")
    print(f"read {folder / PAGE_FILE}; every number is in {folder / JSON_FILE}")
    return int(bool(faults))


def chosen_parts(parts: Sequence[CheckPart], only: str | None) -> list[CheckPart]:
    """Return the parts whose names ``only`` lists, separated by commas; all parts if ``only`` is None.

    Raises ValueError for an unknown name.
    """
    if only is None:
        return list(parts)
    chosen_names = [name.strip() for name in only.split(",") if name.strip()]
    names = [part.name for part in parts]
    unknown = [name for name in chosen_names if name not in names]
    if unknown or not chosen_names:
        raise ValueError(
            f"--only: got {', '.join(unknown) or 'no name'}, expected names of {', '.join(names)}"
        )
    return [part for part in parts if part.name in chosen_names]


def fresh_folder(directory: Path) -> Path:
    """Create ``directory`` and return it. The folder of an earlier check is renamed, not deleted."""
    if directory.exists():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(directory.stat().st_mtime))
        directory.rename(unused_path(directory.with_name(f"{directory.name}-{stamp}")))
    directory.mkdir(parents=True)
    return directory


def _print_row(row: CheckRow) -> None:
    expected_text = ""
    if row.expected:
        expected_text = f" (expected {row.expected})"
    print(f"  {_MARKS[row.holds]} {row.label}: {row.measured}{expected_text}", flush=True)


def _print_end(result: PartResult) -> None:
    reason = ""
    if result.why:
        reason = f": {result.why}"
    print(f"  {result.verdict} in {result.seconds:.0f} s{reason}", flush=True)


def write(folder: Path, results: Sequence[PartResult], not_run: Sequence[str], gpus: int) -> None:
    """Replace the JSON file and the page. ``not_run``: names of parts that have not run yet, or were not selected."""
    record = {"gpus": gpus, "parts": [asdict(r) for r in results], "not_run": list(not_run)}
    write_atomically(folder / JSON_FILE, json.dumps(record, indent=1) + "\n")
    write_atomically(folder / PAGE_FILE, page(results, not_run, gpus))


def page(results: Sequence[PartResult], not_run: Sequence[str], gpus: int) -> str:
    """Return the page in Markdown: a table of all parts, then a section for each."""
    machine = "a machine without a GPU"
    if gpus == 1:
        machine = "a machine with 1 GPU"
    elif gpus > 1:
        machine = f"a machine with {gpus} GPUs"
    blocks = [f"# GPU check on {machine}", _summary(results)]
    if not_run:
        blocks.append(f"Not run: {', '.join(not_run)}.")
    for result in results:
        blocks += _section(result)
    return "\n\n".join(blocks) + "\n"


def _summary(results: Sequence[PartResult]) -> str:
    rows = [
        (f"[{r.name}](#{r.name})", r.verdict, f"{r.seconds:.0f}", _cell(r.shows)) for r in results
    ]
    return _table(("part", "result", "seconds", "shows"), rows)


def _section(result: PartResult) -> Iterator[str]:
    yield f"## {result.name}"
    yield f"{result.shows[:1].upper()}{result.shows[1:]}. Result: {result.verdict}."
    if result.why:
        yield f"```\n{result.why}\n```"
    if result.rows:
        rows: list[tuple[str, ...]] = []
        for r in result.rows:
            rows.append((_cell(r.label), _cell(r.measured), _cell(r.expected), _HOLDS[r.holds]))
        yield _table(("what", "measured", "expected", "holds"), rows)
    for name in result.files:
        if name.endswith(_PICTURES):
            yield f"![{name}]({result.name}/{name})"
    if result.files:
        links = ", ".join(f"[{name}]({result.name}/{name})" for name in result.files)
        yield f"Files: {links}."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo gpu-check",
        description="Check this machine's GPUs. Without a GPU, each part checks what it can.",
        epilog="Exit codes: 0 no part failed, 1 a part failed, 2 an option cannot be used. See docs/gpu_check.md.",
    )
    parser.add_argument("--only", metavar="NAME,...", help="run only these parts")
    parser.add_argument("--list", action="store_true", help="list the parts and their time limits")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="default %(default)s")
    parser.add_argument(
        "--time-limit",
        type=positive_number,
        help="seconds for each part, instead of the part's own limit",
    )
    parser.add_argument("--parts", default=PARTS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
