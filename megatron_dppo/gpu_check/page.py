"""The results as one JSON file and one page of Markdown with its pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_dppo.gpu_check.runner import Result
from megatron_dppo.system.files import write_atomically

JSON_FILE, PAGE_FILE = "gpu_check.json", "gpu_check.md"
_HOLDS = {None: "", True: "yes", False: "**NO**"}
_PICTURES = (".png",)


def write(folder: Path, results: Sequence[Result], not_run: Sequence[str], gpus: int) -> None:
    """Replace both files. ``not_run``: names of the parts that are still to come, or were not asked for."""
    told = {"gpus": gpus, "parts": [asdict(r) for r in results], "not_run": list(not_run)}
    write_atomically(folder / JSON_FILE, json.dumps(told, indent=1) + "\n")
    write_atomically(folder / PAGE_FILE, page(results, not_run, gpus))


def page(results: Sequence[Result], not_run: Sequence[str], gpus: int) -> str:
    """Markdown: a table of the parts, then a section of each."""
    here = (
        f"on a machine with {gpus} GPU{'s' * (gpus != 1)}" if gpus else "on a machine without a GPU"
    )
    blocks = [f"# GPU check {here}", _summary(results)]
    if not_run:
        blocks.append(f"Not run: {', '.join(not_run)}.")
    for result in results:
        blocks += _section(result)
    return "\n\n".join(blocks) + "\n"


def _summary(results: Sequence[Result]) -> str:
    rows = [
        (f"[{r.name}](#{r.name})", r.verdict, f"{r.seconds:.0f}", _cell(r.shows)) for r in results
    ]
    return _table(("part", "result", "seconds", "shows"), rows)


def _section(result: Result) -> Iterator[str]:
    yield f"## {result.name}"
    yield f"{result.shows[:1].upper()}{result.shows[1:]}. Result: {result.verdict}."
    if result.why:
        yield f"```\n{result.why}\n```"
    if result.rows:
        rows = [
            tuple(map(_cell, (r.what, r.measured, r.expected, _HOLDS[r.holds])))
            for r in result.rows
        ]
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
