"""Check of a reward against a data set's own solutions.

    python tools/check_rewards.py DATA.jsonl [--reward math_verify] [--timeout 10] [--workers 2]

The worked solution of a line must score 1 against the line's answer, and 0 against a wrong answer
(the answer plus one if it is an integer, else another line's answer). Prints the failed lines and
the counts. Exit code: 0, 1 if a check failed, 2 if the file cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.progress import track

from megatron_dppo.rewards import Score, Verifier

CHUNK = 64
"""Number of checks between two updates of the progress bar."""


def read_solutions(path: Path) -> list[tuple[int, str, str]]:
    """(line number, solution, answer) of every line with both. Raises ValueError naming the line."""
    rows = []
    for number, line in enumerate(path.read_text("utf-8-sig").rstrip().split("\n"), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(record, dict) or "answer" not in record:
            raise ValueError(f"{path}, line {number}: no 'answer'")
        if isinstance(record.get("solution"), str):
            rows.append((number, record["solution"], str(record["answer"])))
    if not rows:
        raise ValueError(f"{path}: no line has a 'solution'")
    return rows


def wrong_answer(answer: str, others: list[str]) -> str | None:
    """An answer that is certainly wrong; None if no other line has a different one."""
    if answer.lstrip("+-").isdecimal():
        return str(int(answer) + 1)
    return next((other for other in others if other != answer), None)


def main(arguments: list[str]) -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--reward", default="math_verify")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for one check")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    try:
        rows = read_solutions(options.data)
        verifier = Verifier(options.reward, options.timeout, options.workers)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    answers = [answer for _, _, answer in rows]
    checks = [(number, solution, answer, 1.0) for number, solution, answer in rows]
    for number, solution, answer in rows:
        wrong = wrong_answer(answer, answers)
        if wrong is not None:
            checks.append((number, solution, wrong, 0.0))
    scores: list[Score] = []
    with verifier:
        for start in track(range(0, len(checks), CHUNK), description="checking"):
            chunk = checks[start : start + CHUNK]
            scores += verifier.score([(solution, answer) for _, solution, answer, _ in chunk])
    return report(checks, scores)


def report(checks: list[tuple[int, str, str, float]], scores: list[Score]) -> int:
    """Print each failed check and the counts of both kinds; returns 1 if a check failed, else 0."""
    failed = 0
    for (number, _, answer, expected), score in zip(checks, scores, strict=True):
        if score.value != expected or score.timed_out or score.crashed:
            failed += 1
            print(f"line {number}: scored {score} against {answer!r}, expected {expected:g}")
    for expected, kind in ((1.0, "the given answer"), (0.0, "a wrong answer")):
        of_kind = [s for c, s in zip(checks, scores, strict=True) if c[3] == expected]
        right = sum(s.value == expected for s in of_kind)
        print(f"{right} of {len(of_kind)} solutions score {expected:g} against {kind}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
