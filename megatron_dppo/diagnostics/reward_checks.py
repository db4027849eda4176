"""Check a reward function on worked solutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_dppo.config.data_schema import RewardTerm
from megatron_dppo.data.records import DataError, keys, read_records
from megatron_dppo.metrics.progress import progress
from megatron_dppo.rewards import RewardInput
from megatron_dppo.rewards.verifier import Score, Verifier


class RewardCheck(NamedTuple):
    """A worked solution, and the answer against which it is scored.

    ``expected`` is the right score: 1 if the answer is from the solution's line, 0 if it is a wrong answer.
    """

    line: int
    solution: str
    answer: str
    expected: float


def check_rewards(
    path: Path, reward: str, timeout_s: float, workers: int, passed_variables: Sequence[str] = ()
) -> int:
    """Run every check of the file, at most ``timeout_s`` seconds each; return 1 if a check failed, else 0.

    ``passed_variables``: as in RewardTerm. Raises DataError that names the line if the file cannot be used, and
    VerifierError if the reward's worker fails.
    """
    checks = read_checks(path)
    term = RewardTerm(
        name=reward,
        timeout_s=timeout_s,
        workers=workers,
        batch_size=1,
        attempts=1,
        passed_variables=list(passed_variables),
    )
    with Verifier(term) as verifier, progress("check solutions", len(checks)) as bar:
        inputs = [RewardInput(check.solution, check.answer) for check in checks]
        scores = verifier.score(inputs, lambda: bar.advance(1))
    return _report(checks, scores)


def read_checks(path: Path) -> list[RewardCheck]:
    """Return a check of each solution against the answer of its line, then the checks against a wrong answer.

    Raises DataError that names the line.
    """
    records, locations, *_ = read_records(path)
    right_checks: list[RewardCheck] = []
    for number, (record, location) in enumerate(zip(records, locations, strict=True), start=1):
        if "answer" not in record:
            raise DataError(
                f"{location}: no 'answer', expected the final answer there and a worked solution under 'solution'; "
                f"found {keys(record)}"
            )
        if isinstance(record.get("solution"), str):
            right_checks.append(RewardCheck(number, record["solution"], str(record["answer"]), 1.0))
    if not right_checks:
        raise DataError(
            f"{path}: no line has a 'solution', expected under 'solution' a text that works out the line's 'answer'; "
            f"the first line has {keys(records[0])}"
        )
    answers = [check.answer for check in right_checks]
    wrong_checks: list[RewardCheck] = []
    for check in right_checks:
        wrong_answer = _wrong_answer(check.answer, answers)
        if wrong_answer is not None:
            wrong_checks.append(check._replace(answer=wrong_answer, expected=0.0))
    return right_checks + wrong_checks


def _wrong_answer(answer: str, answers: list[str]) -> str | None:
    """Return a wrong answer: the next integer if ``answer`` is an integer, else the first different one of ``answers``.

    Returns None if ``answer`` is no integer and all ``answers`` are equal.
    """
    if answer.lstrip("+-").isdecimal():
        return str(int(answer) + 1)
    return next((other for other in answers if other != answer), None)


def _report(checks: list[RewardCheck], scores: list[Score]) -> int:
    """Print each failed check, then counts for the given answers and for the wrong answers.

    Returns 1 if a check failed, else 0. A check that the reward did not finish has failed too. It has no score, so it
    is counted apart from the scored checks.
    """
    has_failed = False
    values_by_expected: dict[float, list[float]] = {1.0: [], 0.0: []}
    unfinished_checks: dict[float, Counter[str]] = {1.0: Counter(), 0.0: Counter()}
    for check, score in zip(checks, scores, strict=True):
        cause = _cause_of_no_score(score)
        if cause is not None:
            unfinished_checks[check.expected][cause] += 1
        else:
            values_by_expected[check.expected].append(score.value)
        if cause is not None or score.value != check.expected:
            has_failed = True
            result = f"scored {score.value:g}" if cause is None else f"no score ({cause})"
            print(
                f"line {check.line}: {result} against {check.answer!r}, expected {check.expected:g}"
            )
    for expected_score, kind in ((1.0, "the given answer"), (0.0, "a wrong answer")):
        values = values_by_expected[expected_score]
        right = values.count(expected_score)
        print(f"{right} of {len(values)} solutions score {expected_score:g} against {kind}")
        for cause, count in unfinished_checks[expected_score].items():
            print(f"{count} solutions without a score against {kind}: {cause}")
    return int(has_failed)


def _cause_of_no_score(score: Score) -> str | None:
    """Return why the reward did not score a solution; None if it did."""
    if score.timed_out:
        return "timed out"
    if score.crashed:
        return "the check was killed"
    return None
