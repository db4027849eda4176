"""A check of gold answers before a run: each is parsed, and scored against itself."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.data.problems import ProblemSet
from megatron_dppo.data.records import DataError
from megatron_dppo.metrics.progress import progress
from megatron_dppo.rewards import (
    Reward,
    RewardForm,
    RewardInput,
    RewardUnavailableError,
    find_reward,
)
from megatron_dppo.rewards.checked_answers import BadAnswers
from megatron_dppo.rewards.verifier import Score, Verifier

_SHOWN = 3


def bad_answers(
    sets: Mapping[str, ProblemSet],
    reward: RewardConfig,
    *,
    scores: bool = True,
) -> BadAnswers:
    """Find the answers of each file that no response could match, or that a reward refuses. None if no reward needs an
    answer.

    Each reward that needs answers scores each answer; equal answers once, if the reward reads nothing else of a
    problem. Asynchronous rewards are not called, because each call may cost the service behind them.

    Args:
        sets: Path of a file -> its problems.
        reward: The run's rewards.
        scores: Whether to call rewards. False: report only missing answers.

    Raises:
        RewardUnavailableError: A score is unavailable.
        VerifierError: A reward fails in another way.
    """
    bad: dict[str, dict[int, str]] = {path: {} for path in sets}
    for term in reward.terms.values():
        row = find_reward(term.name)
        changes: dict[str, Any] = {}
        if not row.checks_itself:
            changes = {"name": row.gold_target, "options": {}}
        if not scores:
            changes["workers"] = 1
        with Verifier.of(term.model_copy(update=changes)) as verifier:
            form = verifier.form()
            if not form.needs_answer:
                continue
            for path, problems in sets.items():
                bad[path] |= dict(problems.unanswered)
            if scores and not form.is_async:
                complaints_by_path = _complaints(verifier, form, sets, row, term.timeout_s)
                for path, complaints in complaints_by_path.items():
                    bad[path] = complaints | bad[path]
    sorted_rows: dict[str, list[Any]] = {}
    for path, rows in bad.items():
        sorted_rows[path] = list(map(list, sorted(rows.items())))
    return sorted_rows


def _complaints(
    verifier: Verifier,
    form: RewardForm,
    sets: Mapping[str, ProblemSet],
    reward: Reward,
    timeout_s: float,
) -> dict[str, dict[int, str]]:
    """The errors in answers, by file and problem id."""
    sees_answers_alone = set(form.reads) <= {"response", "answer"} and not form.columns
    keys: dict[tuple[str, int], Hashable] = {}
    inputs: dict[Hashable, RewardInput] = {}
    for path, problems in sets.items():
        unanswered = dict(problems.unanswered)
        for p in problems.problems:
            if p.problem_id in unanswered:
                continue
            row_key = path, p.problem_id
            answer = reward.final(p.answer)
            keys[row_key] = answer if sees_answers_alone else row_key
            record = RewardInput.of(p, answer)
            # A separate gold function gets the final answer here; for the reward itself the verifier does the same.
            if not reward.checks_itself:
                record = reward.sees(record)
            inputs.setdefault(keys[row_key], record)
    with progress("check answers", len(inputs)) as bar:
        scores = verifier.check(list(inputs.values()), partial(bar.advance, 1))
    # A service that is down is no error of the answer, which must not be dropped because of it.
    outages = [score.unavailable for score in scores if score.unavailable is not None]
    if outages:
        raise RewardUnavailableError(
            f"the answers can't be checked: {len(outages)} of {len(scores)} rewards could not be had: {outages[0]}"
        )
    has_gold_target = reward.gold_target is not None
    complaints: dict[Hashable, str | None] = {}
    for key, score in zip(inputs, scores, strict=True):
        complaints[key] = _complaint(score, has_gold_target, timeout_s)
    complaints_by_path: dict[str, dict[int, str]] = {path: {} for path in sets}
    for (path, row), key in keys.items():
        if (complaint := complaints[key]) is not None:
            complaints_by_path[path][row] = complaint
    return complaints_by_path


def refuse_bad_answers(bad: BadAnswers, sets: Mapping[str, ProblemSet]) -> None:
    """Raise DataError if there are bad answers. The message names file and line of the first ones."""
    faults = []
    for path, rows in bad.items():
        faults += [f"{sets[path].location(path, row)}: {reason}" for row, reason in rows]
    if faults:
        more = ""
        if len(faults) > _SHOWN:
            more = f" (and {len(faults) - _SHOWN} more)"
        raise DataError(
            f"{len(faults)} answers can't be used: {'; '.join(faults[:_SHOWN])}{more}. Put them right, "
            "or leave these problems out with data.on_bad_answer=drop"
        )


def without(problems: ProblemSet, path: str, bad: BadAnswers) -> ProblemSet:
    """``problems`` of the file ``path`` without those with a bad answer. Raises DataError if none remains."""
    dropped = {row for row, _ in bad[path]}
    remaining = tuple(p for p in problems.problems if p.problem_id not in dropped)
    if not remaining:
        raise DataError(f"{path}: no problem is left whose answer can be used; {bad[path][0][1]}")
    return replace(problems, problems=remaining, bad_answers=len(dropped))


def _complaint(score: Score, must_match: bool, timeout_s: float) -> str | None:
    if score.refusal is not None:
        return score.refusal
    if score.timed_out:
        return f"its check took longer than reward.timeout_s = {timeout_s:g} s"
    if score.crashed:
        return "its check was ended by the system"
    if must_match and score.value != 1.0:
        return f"scored against itself it earns {score.value:g}, expected 1"
    return None
