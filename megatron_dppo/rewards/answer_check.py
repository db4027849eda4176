"""A check of gold answers before a run: each answer is parsed, and scored as a response to its own problem."""

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
from megatron_dppo.system.text import first_of

_SHOWN = 3
"""Largest number of bad answers that an error message lists."""


def bad_answers(
    sets: Mapping[str, ProblemSet], reward: RewardConfig, *, scores: bool = True
) -> BadAnswers:
    """Find the answers of each file that no response could match, or that a reward refuses.

    Each reward that needs answers scores each answer. Equal answers are scored once if the reward reads nothing else of
    a problem. Asynchronous rewards are not called, because each call may cost money. If no reward needs answers, no
    answer is bad.

    Args:
        sets: Path of a file -> its problems.
        reward: The run's rewards.
        scores: Whether to call rewards. False: report only missing answers.

    Raises:
        RewardUnavailableError: A score is unavailable.
        VerifierError: A reward fails in another way.
    """
    # Path -> problem id -> the error. The first error of an answer is kept.
    errors_of: dict[str, dict[int, str]] = {path: {} for path in sets}
    for name, term in reward.terms.items():
        scored_sets: dict[str, ProblemSet] = {}
        for path, problems in sets.items():
            scored_sets[path] = _scored_by(name, reward, problems)
        term_reward = find_reward(term.name)
        changes: dict[str, Any] = {}
        if not term_reward.checks_itself:
            # The reward has a separate function for gold answers (``gold_target``). Call this function instead of the
            # reward, and without the reward's options.
            changes = {"name": term_reward.gold_target, "options": {}}
        if not scores:
            # One worker is enough to read the signature of the function.
            changes["workers"] = 1
        with Verifier(term.model_copy(update=changes)) as verifier:
            form = verifier.form()
            if not form.needs_answer:
                continue
            for path, problems in scored_sets.items():
                errors_of[path] |= dict(problems.unanswered)
            if scores and not form.is_async:
                new_errors_of = _answer_errors(
                    verifier, form, scored_sets, term_reward, term.timeout_s
                )
                for path, new_errors in new_errors_of.items():
                    errors_of[path] = new_errors | errors_of[path]
    bad: BadAnswers = {}
    for path, errors in errors_of.items():
        bad[path] = [[problem_id, error] for problem_id, error in sorted(errors.items())]
    return bad


def _scored_by(name: str, reward: RewardConfig, problems: ProblemSet) -> ProblemSet:
    """The problems that a reward scores: all of them, unless ``reward.column`` selects them."""
    if reward.column is None:
        return problems
    scored = tuple(p for p in problems.problems if name in reward.names_for(p.metadata))
    ids = {problem.problem_id for problem in scored}
    unanswered = tuple(entry for entry in problems.unanswered if entry[0] in ids)
    return replace(problems, problems=scored, unanswered=unanswered)


def _answer_errors(
    verifier: Verifier,
    form: RewardForm,
    sets: Mapping[str, ProblemSet],
    reward: Reward,
    timeout_s: float,
) -> dict[str, dict[int, str]]:
    """The errors in answers: path of a file -> problem id -> the error."""
    reads_only_answers = set(form.reads) <= {"response", "answer"} and not form.columns
    # Each problem has the key of its input. Problems with equal inputs share a key, so the input is scored once.
    input_keys: dict[tuple[str, int], Hashable] = {}
    inputs: dict[Hashable, RewardInput] = {}
    for path, problems in sets.items():
        unanswered = dict(problems.unanswered)
        for problem in problems.problems:
            if problem.problem_id in unanswered:
                continue
            problem_key = path, problem.problem_id
            final_answer = reward.final(problem.answer)
            input_key: Hashable = final_answer if reads_only_answers else problem_key
            input_keys[problem_key] = input_key
            # The final answer is the response. The record's answer is still the problem's whole answer.
            record = RewardInput.of(problem, final_answer)
            # The verifier of a reward replaces the whole answer by the final answer; the verifier of a separate gold
            # function does not.
            if not reward.checks_itself:
                record = reward.with_final_answer(record)
            inputs.setdefault(input_key, record)
    with progress("check answers", len(inputs)) as bar:
        scores = verifier.check(list(inputs.values()), partial(bar.advance, 1))
    # If a service is down, the answer is not at fault, and must not be dropped.
    outages = [score.unavailable for score in scores if score.unavailable is not None]
    if outages:
        raise RewardUnavailableError(
            f"the answers can't be checked: {len(outages)} of {len(scores)} rewards are unavailable: {outages[0]}"
        )
    # A gold function, separate or not, scores 1 for a good answer. Other rewards may give a good answer any score.
    must_match = reward.gold_target is not None
    error_of_input: dict[Hashable, str | None] = {}
    for input_key, score in zip(inputs, scores, strict=True):
        error_of_input[input_key] = _answer_error(score, must_match, timeout_s)
    errors_of: dict[str, dict[int, str]] = {path: {} for path in sets}
    for (path, problem_id), input_key in input_keys.items():
        error = error_of_input[input_key]
        if error is not None:
            errors_of[path][problem_id] = error
    return errors_of


def refuse_bad_answers(bad: BadAnswers, sets: Mapping[str, ProblemSet]) -> None:
    """Raise DataError if there are bad answers. The message has file and line of the first bad answers."""
    faults: list[str] = []
    for path, errors in bad.items():
        for problem_id, error in errors:
            faults.append(f"{sets[path].location(path, problem_id)}: {error}")
    if faults:
        raise DataError(
            f"{len(faults)} answers can't be used: {first_of(faults, _SHOWN)}. Put them right, "
            "or leave these problems out with data.on_bad_answer=drop"
        )


def without(problems: ProblemSet, path: str, bad: BadAnswers) -> ProblemSet:
    """``problems`` of the file ``path`` without the problems with a bad answer. Raises DataError if none remains."""
    dropped_ids = {problem_id for problem_id, _ in bad[path]}
    remaining = tuple(p for p in problems.problems if p.problem_id not in dropped_ids)
    if not remaining:
        _, first_error = bad[path][0]
        raise DataError(f"{path}: no problem is left whose answer can be used; {first_error}")
    return replace(problems, problems=remaining, bad_answers=len(dropped_ids))


def _answer_error(score: Score, must_match: bool, timeout_s: float) -> str | None:
    """The error of an answer with this score; None for a good answer. ``must_match``: whether the score must be 1."""
    if score.refusal is not None:
        return score.refusal
    if score.timed_out:
        return f"its check took longer than reward.timeout_s = {timeout_s:g} s"
    if score.crashed:
        return "its check was ended by the system"
    if must_match and score.value != 1.0:
        return f"scored against itself it earns {score.value:g}, expected 1"
    return None
