"""A trial of a run's rewards before the run: responses as a policy gives them sooner or later, to one problem.

A reward that fails on an empty response, say, ends a run in the step in which the first of them comes.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dppo.config.data_schema import RewardConfig, RewardTerm
from megatron_dppo.data.problems import ProblemSet
from megatron_dppo.data.records import shorten
from megatron_dppo.rewards import RewardInput, find_reward
from megatron_dppo.rewards.verifier import Verifier, VerifierError, require

_LONGEST = 50_000
"""Characters of the long response."""
_CHARACTERS_OF_A_TOKEN = 4


def reward_faults(
    path: str, problem_set: ProblemSet, reward: RewardConfig, response_tokens: int
) -> Iterator[str]:
    """What the run's rewards raise, or refuse, for an empty, a truncated and a long response to the first problem.

    The two that are compared with every answer before a start, ``exact_integer`` and ``math_verify``, are not tried,
    nor are asynchronous ones: each call may cost the service behind it. A call that takes too long is no fault.

    Args:
        path: of the problems' file.
        problem_set: its problems, at least one.
        reward: all rewards.
        response_tokens: of the longest response of the run.
    """
    problem = problem_set.problems[0]
    half = problem.answer[: len(problem.answer) // 2]
    responses = {
        "an empty response": "",
        "a truncated response": f"The answer is \\boxed{{{half}",
        "a long response": ("so " * _LONGEST)[: min(_LONGEST, _CHARACTERS_OF_A_TOKEN * response_tokens)],
    }  # fmt: skip
    for name, term in reward.terms.items():
        if find_reward(term.name).reads_solutions:
            continue
        for kind, response in responses.items():
            fault = _fault(term, problem.reward_input(response))
            if fault is not None:
                where = problem_set.location(path, problem.problem_id)
                answer = shorten(problem.answer)
                yield f"reward {name}: {kind} to {where}, whose answer is {answer}: {fault}"
                break


def _fault(term: RewardTerm, given: RewardInput) -> str | None:
    with Verifier.of(term.model_copy(update={"workers": 1, "attempts": 1})) as verifier:
        try:
            if not verifier.form().is_async:
                require(verifier.check([given]), [given])
        except VerifierError as error:
            return str(error)
    return None
