"""Gold answers before they are needed: extracted, parsed and scored against themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_dppo.config.schema import RewardConfig
from megatron_dppo.data.json_lines import DataError
from megatron_dppo.data.problems import ProblemSet
from megatron_dppo.metrics.progress import progress
from megatron_dppo.rewards import Score, Verifier, find_reward
from megatron_dppo.rewards.checked_answers import BadAnswers
from megatron_dppo.rewards.gold import gold_answer

_SHOWN = 3
_CHUNK = 64
"""Answers between two movements of the progress bar."""


def extracted(problems: ProblemSet, reward: str) -> ProblemSet:
    """``problems`` with the final answers of worked solutions, where ``reward`` is one of the table's."""
    if not find_reward(reward).reads_solutions:
        return problems
    rows = tuple(replace(p, answer=gold_answer(p.answer)) for p in problems.problems)
    return replace(problems, problems=rows)


def bad_answers(sets: Mapping[str, ProblemSet], reward: RewardConfig) -> BadAnswers:
    """The answers of each file that no response could match, or that the reward refuses.

    Each different answer is checked once, by ``reward.workers`` processes. Raises VerifierError where
    the reward fails in another way.
    """
    answers = sorted({p.answer for problems in sets.values() for p in problems.problems})
    must_match = find_reward(reward.name).reads_solutions
    with Verifier(_checking(reward.name), reward.timeout_s, reward.workers) as verifier:
        scores: list[Score] = []
        with progress("check answers", len(answers)) as bar:
            for start in range(0, len(answers), _CHUNK):
                chunk = answers[start : start + _CHUNK]
                scores += verifier.check([(answer, answer) for answer in chunk])
                bar.advance(len(chunk))
    complaints = {
        answer: _complaint(score, must_match, reward.timeout_s)
        for answer, score in zip(answers, scores, strict=True)
    }
    found = {
        path: [(p.problem_id, complaints[p.answer]) for p in problems.problems]
        for path, problems in sets.items()
    }
    return {
        path: [list(row) for row in sorted([*rows, *sets[path].unanswered]) if row[1]]
        for path, rows in found.items()
    }


def refuse_bad_answers(bad: BadAnswers, sets: Mapping[str, ProblemSet]) -> None:
    """Raise DataError naming file and line of the first ones in ``sets``, where there are any."""
    places = [
        f"{path}, {sets[path].place(row)}: {why}" for path, rows in bad.items() for row, why in rows
    ]
    if places:
        more = f" (and {len(places) - _SHOWN} more)" if len(places) > _SHOWN else ""
        raise DataError(
            f"{len(places)} answers can't be used: {'; '.join(places[:_SHOWN])}{more}. Put them right, "
            "or leave these problems out with data.on_bad_answer=drop"
        )


def without(problems: ProblemSet, path: str, bad: BadAnswers) -> ProblemSet:
    """``problems`` of the file ``path`` less those with a bad answer. Raises DataError where none is left."""
    dropped = {row for row, _ in bad[path]}
    kept = tuple(p for p in problems.problems if p.problem_id not in dropped)
    if not kept:
        raise DataError(f"{path}: no problem is left whose answer can be used; {bad[path][0][1]}")
    return replace(problems, problems=kept, bad_answers=len(dropped))


def _checking(name: str) -> str:
    """The name of the reward that checks the answers of the one called ``name``."""
    reward = find_reward(name)
    return name if reward.gold_target in (None, reward.target) else str(reward.gold_target)


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
