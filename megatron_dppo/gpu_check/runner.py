"""Runs a part in a child process with a time limit: a crash or a hang of one leaves the others alone.

The child, ``python -m megatron_dppo.gpu_check.runner PACKAGE NAME FOLDER GPUS``, writes every row to ``rows.jsonl`` as
it is found, so that a crash loses none of those before it. The last line is ``{"end": true}``, or ``{"lacks": "..."}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_dppo.gpu_check.part import PARTS, Bench, CheckPart, LackingError, Row, discover
from megatron_dppo.system.processes import describe_exit, kill_families, start_process, tail

LOG, ROWS = "log.txt", "rows.jsonl"
_POLL_S = 0.05
_QUOTED_LINES = 12
PartVerdict = Literal["good", "bad", "lacking", "crashed", "timed out"]


@dataclass
class PartResult:
    """What one part came to.

    ``verdict``: ``good``, or ``bad`` where a row does not hold. ``why``: what it lacks, or how it ended with the end of
    its log. ``files``: what it left in its folder.
    """

    name: str
    shows: str
    verdict: PartVerdict = "good"
    why: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong; what is lacking is not."""
        return self.verdict in ("bad", "crashed", "timed out")


def run_part(
    part: CheckPart, folder: Path, gpus: int, limit_s: float, tell: Callable[[Row], None],
    package: str = PARTS,
) -> PartResult:  # fmt: skip
    """Run ``part`` of ``package`` in ``folder``, which must be empty, for at most ``limit_s`` seconds.

    ``tell`` hears of every row.
    """
    folder.mkdir(parents=True)
    result = PartResult(part.name, part.shows)
    began = time.monotonic()
    with open(folder / LOG, "wb") as log:
        command = [sys.executable, "-m", "megatron_dppo.gpu_check.runner"]
        child = start_process(
            [*command, package, part.name, str(folder.resolve()), str(gpus)],
            environment=os.environ,
            output=log.fileno(),
        )
    lines = _Lines(folder / ROWS)
    try:
        while child.poll() is None and time.monotonic() - began < limit_s:
            _take(lines, result, tell)
            time.sleep(_POLL_S)
        code = child.poll()
    finally:
        kill_families([child])
    _take(lines, result, tell)
    _judge(result, code, limit_s, folder)
    result.seconds = time.monotonic() - began
    result.files = sorted(p.name for p in folder.iterdir() if p.name not in (LOG, ROWS))
    return result


def _take(lines: _Lines, result: PartResult, tell: Callable[[Row], None]) -> None:
    for line in lines.new():
        if "lacks" in line:
            result.verdict, result.why = "lacking", str(line["lacks"])
        elif "end" not in line:
            row = Row(**line)
            result.rows.append(row)
            tell(row)


def _judge(result: PartResult, code: int | None, limit_s: float, folder: Path) -> None:
    if code is None:
        result.verdict, how = "timed out", f"did not end within {limit_s:.0f} s"
    elif code:
        result.verdict, how = "crashed", describe_exit(code)
    else:
        if any(row.holds is False for row in result.rows):
            result.verdict = "bad"
        return
    result.why = f"{how}\n{tail(folder / LOG, _QUOTED_LINES)}".rstrip()


class _Lines:
    """The whole lines of a growing file of JSON, each read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new(self) -> Iterator[dict]:
        """Those that came since the last call; none where the file is not there yet."""
        # The child has not come so far.
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from map(json.loads, whole.splitlines())


def main(package: str, name: str, folder: str, gpus: str) -> None:
    """The child: run the part, also where it turns out to lack something."""
    part = next(p for p in discover(package) if p.name == name)
    with open(Path(folder, ROWS), "w", encoding="utf-8") as file:

        def write(line: Mapping[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            for row in part.run(Bench(Path(folder), int(gpus))):
                write(asdict(row))
        except LackingError as lacking:
            write({"lacks": str(lacking)})
        else:
            write({"end": True})


if __name__ == "__main__":
    main(*sys.argv[1:])
