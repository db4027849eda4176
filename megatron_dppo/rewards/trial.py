"""A trial of a run's rewards before the run, with unusual responses to one problem.

A policy produces empty, truncated and very long responses sooner or later. A reward that fails for an empty response,
for example, would end the run in the step with the first empty response.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dppo.config.data_schema import RewardConfig, RewardTerm
from megatron_dppo.data.problems import ProblemSet
from megatron_dppo.data.thoughts import TurnText
from megatron_dppo.rewards import RewardInput, find_reward, form_read_by
from megatron_dppo.rewards.verifier import Verifier, VerifierError, require

_MAX_CHARACTERS = 50_000
"""Largest number of characters of the long response."""
_CHARACTERS_PER_TOKEN = 4


def reward_faults(
    path: str,
    problem_set: ProblemSet,
    reward: RewardConfig,
    response_tokens: int,
    open_thought: str = "",
) -> Iterator[str]:
    """Yield the errors of the run's rewards for an empty, a truncated and a long response to the first problem.

    The trial skips rewards that read solutions (``exact_integer``, ``math_verify``), because the check of gold answers
    calls these rewards before a start. The trial also skips asynchronous rewards, because each call may cost money. A
    call that takes too long is no error.

    Args:
        path: Path of the problems' file.
        problem_set: The file's problems, at least one.
        reward: The run's rewards.
        response_tokens: Largest number of tokens of a response in the run.
        open_thought: As in RewardInput, for the first problem.
    """
    long_length = min(_MAX_CHARACTERS, _CHARACTERS_PER_TOKEN * response_tokens)
    for name, term in reward.terms.items():
        scored = (p for p in problem_set.problems if name in reward.names_for(p.metadata))
        problem = next(scored, None)
        if problem is None or find_reward(term.name).reads_solutions:
            continue
        half_answer = problem.answer[: len(problem.answer) // 2]
        responses = {
            "an empty response": "",
            "a truncated response": f"The answer is \\boxed{{{half_answer}",
            "a long response": ("so " * long_length)[:long_length],
        }
        for kind, response in responses.items():
            text = TurnText(response, response, open_thought, response)
            fault = _fault(term, RewardInput.of_text(problem, text, form_read_by(term)))
            if fault is not None:
                place = problem_set.location(path, problem.problem_id)
                yield f"reward {name}: {kind} to {place}: {fault}"
                break


def _fault(term: RewardTerm, record: RewardInput) -> str | None:
    """The error of a reward for one response; None without an error, or for an asynchronous reward."""
    with Verifier(term.model_copy(update={"workers": 1, "attempts": 1})) as verifier:
        try:
            if not verifier.form().is_async:
                require(verifier.check([record]), [record])
        except VerifierError as error:
            return str(error)
    return None
