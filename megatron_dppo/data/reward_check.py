"""``megatron-dppo data check-rewards``: a reward against a data set's own solutions.

The worked solution of a line must score 1 against the line's answer, and 0 against a wrong answer
(the answer plus one if it is an integer, else another line's answer). The failed lines and
the counts are printed.
"""

from __future__ import annotations

from pathlib import Path

from rich.progress import track

from megatron_dppo.data.json_lines import DataError, parse_lines
from megatron_dppo.rewards import Score, Verifier

CHUNK = 64
"""Number of checks between two updates of the progress bar."""


def read_solutions(path: Path) -> list[tuple[int, str, str]]:
    """(line number, solution, answer) of every line with both. Raises DataError naming the line, OSError."""
    records, places = parse_lines(path, path.read_bytes())
    rows = []
    for number, (record, where) in enumerate(zip(records, places, strict=True), start=1):
        if "answer" not in record:
            raise DataError(f"{where}: no 'answer'")
        if isinstance(record.get("solution"), str):
            rows.append((number, record["solution"], str(record["answer"])))
    if not rows:
        raise DataError(f"{path}: no line has a 'solution'")
    return rows


def wrong_answer(answer: str, others: list[str]) -> str | None:
    """An answer that is certainly wrong; None if no other line has a different one."""
    if answer.lstrip("+-").isdecimal():
        return str(int(answer) + 1)
    return next((other for other in others if other != answer), None)


def check_rewards(path: Path, reward: str, timeout_s: float, workers: int) -> int:
    """Check every line, at most ``timeout_s`` seconds each; the exit code: 1 where a check failed, else 0.

    Raises DataError naming the line where ``path`` can't be used, VerifierError where the reward's worker fails.
    """
    rows = read_solutions(path)
    verifier = Verifier(reward, timeout_s, workers)
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
