"""Check a machine with GPUs: the first command to run there.

``megatron-dppo gpu-check [--only kernels,mask] [--directory runs/gpu_check]``. ``--day`` runs the parts in the order of
their worth within fifteen minutes, ``--nodes N`` runs the check on nodes of a Slurm cluster.

Exit codes: 0 no part failed (parts may have been skipped), 1 a part failed, 2 an option cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_dppo import __version__
from megatron_dppo.config import ConfigError, load_config
from megatron_dppo.config.machine import this_machine
from megatron_dppo.diagnostics.gpu_check import PARTS, CheckPart, CheckRow, discover
from megatron_dppo.diagnostics.gpu_check.day import SECONDS, STAGES, Stage, run_day
from megatron_dppo.diagnostics.gpu_check.runner import PartResult, run_part
from megatron_dppo.diagnostics.gpu_check.runs import RECIPE
from megatron_dppo.logging import fatal
from megatron_dppo.system.arguments import positive_count, positive_number
from megatron_dppo.system.files import rename_with_time, unused_path, write_atomically

DIRECTORY = Path("runs/gpu_check")
JSON_FILE, PAGE_FILE = "gpu_check.json", "gpu_check.md"
_HOLDS = {None: "", True: "yes", False: "**NO**"}
_PICTURES = (".png",)
_MARKS = {None: "  ", True: "ok", False: "NO"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected parts and return the process's exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    parts = discover(options.parts)
    stages: Sequence[Stage] = STAGES
    try:
        wanted_parts = chosen_parts(parts, options.only)
        if options.only is not None:
            wanted_names = [part.name for part in wanted_parts]
            stages = [stage for stage in STAGES if stage.part in wanted_names]
        load_config(RECIPE, options.set)
    except (ConfigError, ValueError) as error:
        fatal(str(error))
    if options.list:
        seconds = {stage.part: stage.seconds for stage in stages} if options.day else {}
        for name in seconds or [part.name for part in wanted_parts]:
            (part,) = (part for part in parts if part.name == name)
            print(f"{name:15} {seconds.get(name, part.limit_s):5.0f} s  {part.shows}")
        return 0
    if options.nodes is not None:
        # Import lazily: only this option needs the code of Slurm.
        from megatron_dppo.diagnostics.gpu_check.nodes import check_nodes

        return check_nodes(options, words)
    check = MachineCheck(fresh_folder(options.directory), this_machine().gpus, parts, options)
    if options.day is not None:
        check.count = len(stages)
        results = run_day(parts, check.run, options.day, stages)
    else:
        check.count = len(wanted_parts)
        results = (check.run(part, part.limit_s) for part in wanted_parts)
    return check.collect(results)


class MachineCheck:
    """A check on this machine: its folder, and the results so far. ``count``: the number of parts to run."""

    def __init__(
        self, folder: Path, gpus: int, parts: Sequence[CheckPart], options: argparse.Namespace
    ) -> None:
        self.folder = folder
        self.gpus = gpus
        self.options = options
        self.count = len(parts)
        self._names = [part.name for part in parts]
        self._results: list[PartResult] = []
        machine = f"{gpus} GPU(s)" if gpus else "no GPU: each part runs what it can"
        print(f"gpu check: {machine}; results in {folder}", flush=True)

    def run(self, part: CheckPart, limit_s: float) -> PartResult:
        """Run a part for at most ``limit_s`` seconds, or for the seconds of ``--time-limit``."""
        limit = self.options.time_limit or limit_s
        folder = unused_path(self.folder / part.name)
        if folder.name != part.name:
            # The part runs a second time.
            self.count += 1
        number = f"[{len(self._results) + 1}/{self.count}]"
        print(f"{number} {part.name}, at most {limit:.0f} s: {part.shows}", flush=True)
        result = run_part(
            part, folder, self.gpus, limit, _print_row, self.options.parts, self.options.set
        )
        # A part that runs a second time has a name of its own, which is also its folder's.
        result.name = folder.name
        return result

    def collect(self, results: Iterable[PartResult]) -> int:
        """Print each result, write all results after each, and return the exit code."""
        for result in results:
            self._results.append(result)
            reason = ""
            if result.why:
                reason = f": {result.why}"
            print(f"  {result.verdict} in {result.seconds:.0f} s{reason}", flush=True)
            self._write()
        faults = [result.name for result in self._results if result.is_fault]
        if faults:
            print(f"wrong: {', '.join(faults)}")
        else:
            print("nothing is wrong")
        print(f"read {self.folder / PAGE_FILE}; every number is in {self.folder / JSON_FILE}")
        return int(bool(faults))

    def _write(self) -> None:
        """Replace the JSON file and the page."""
        done_parts = {r.name for r in self._results}
        not_run = [name for name in self._names if name not in done_parts]
        record = {
            "version": __version__,
            "gpus": self.gpus,
            "overrides": list(self.options.set),
            "parts": [asdict(r) for r in self._results],
            "not_run": not_run,
        }
        write_atomically(self.folder / JSON_FILE, json.dumps(record, indent=1) + "\n")
        write_atomically(self.folder / PAGE_FILE, page(self._results, not_run, self.gpus))


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
        rename_with_time(directory, directory.stat().st_mtime)
    directory.mkdir(parents=True)
    return directory


def _print_row(row: CheckRow) -> None:
    expected_text = ""
    if row.expected:
        expected_text = f" (expected {row.expected})"
    print(f"  {_MARKS[row.holds]} {row.label}: {row.measured}{expected_text}", flush=True)


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
        (f"[{r.name}](#{r.name})", r.verdict, f"{r.seconds:.0f}", cell(r.shows)) for r in results
    ]
    return table(("part", "result", "seconds", "shows"), rows)


def _section(result: PartResult) -> Iterator[str]:
    yield f"## {result.name}"
    yield f"{result.shows[:1].upper()}{result.shows[1:]}. Result: {result.verdict}."
    if result.why:
        yield f"```\n{result.why}\n```"
    if result.rows:
        rows: list[tuple[str, ...]] = []
        for r in result.rows:
            rows.append((cell(r.label), cell(r.measured), cell(r.expected), _HOLDS[r.holds]))
        yield table(("what", "measured", "expected", "holds"), rows)
    for name in result.files:
        if name.endswith(_PICTURES):
            yield f"![{name}]({result.name}/{name})"
    if result.files:
        links = ", ".join(f"[{name}]({result.name}/{name})" for name in result.files)
        yield f"Files: {links}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. Its cells are texts that ``cell`` has made."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """Return ``text`` as it stands in a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo gpu-check",
        # ``nodes.node_words`` looks for whole names of options.
        allow_abbrev=False,
        description="Check this machine's GPUs. Without a GPU, each part checks what it can.",
        epilog="Exit codes: 0 no part failed, 1 a part failed, 2 an option cannot be used. See docs/gpu_check.md.",
    )
    parser.add_argument("--only", metavar="NAME,...", help="run only these parts")
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the parts and their time limits, with --day those of a day",
    )
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="default %(default)s")
    parser.add_argument(
        "--time-limit",
        type=positive_number,
        help="seconds for each part, instead of the part's own limit",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replaces one value in the configuration of each part's runs and servers, such as "
        "sglang.cuda_graph_max_bs_decode=32; may be repeated",
    )
    parser.add_argument(
        "--day",
        metavar="SECONDS",
        nargs="?",
        type=positive_number,
        const=SECONDS,
        help="run the parts in the order of their worth, and end after SECONDS (default %(const)g)",
    )
    parser.add_argument(
        "--nodes",
        metavar="N",
        type=positive_count,
        help="submit a Slurm job that runs the check on each of N nodes, and wait for it",
    )
    parser.add_argument("--site", metavar="FILE", help="with --nodes: see docs/slurm.md")
    parser.add_argument("--parts", default=PARTS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
