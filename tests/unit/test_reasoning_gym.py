"""reasoning-gym's tasks with the real package: right answers to generated problems earn the full score, through a file
and the verifier. Without the package the tests are skipped; if ``CI`` is set, they fail."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.extras import LACKS_REASONING_GYM

if LACKS_REASONING_GYM:
    pytest.skip("reasoning-gym is not installed: make setup said why", allow_module_level=True)

from megatron_dppo.data.problems import PromptForm, load_problems
from megatron_dppo.rewards import RewardInput
from megatron_dppo.rewards import reasoning_gym as gym
from megatron_dppo.rewards.json_values import from_json, to_json
from megatron_dppo.rewards.verifier import VerifierError
from tests.messages import mentioning
from tests.tiny_models import tiny_tokenizer
from tests.verifiers import verifier_of

pytestmark = pytest.mark.second

WITHOUT_ANSWER = {
    "boxnet": "a plan for robots: none is generated",
    "graph_color": "any valid colouring: the generator's is in its metadata",
    "propositional_logic": "any conclusion that follows: the generator's is in its metadata",
    "rubiks_cube": "any moves that solve it: the generator's are in its metadata",
    "rush_hour": "any moves that free the car: none is generated",
}
"""Tasks whose entries have no answer in the package, and the reason."""


def answer_in_metadata(entry: dict[str, Any]) -> str | None:
    """Return a right answer from the metadata of an entry without an answer, or None."""
    if "possible_answer" in entry:
        return json.dumps(entry["possible_answer"])
    return entry.get("example_answer") or entry.get("example_correct_answer")


def test_every_task_scores_its_own_answers(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    lines = [line for task in gym.tasks() for line in gym.problems(task, 1, 5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = load_problems(
        path, tiny_tokenizer(), max_prompt_tokens=10**6, form=PromptForm(apply_chat_template=False)
    )
    assert len(found.problems) == len(gym.tasks()) == 105
    inputs, expected, tasks = [], [], []
    for problem in found.problems:
        task = problem.metadata["task"]
        answer = problem.answer or answer_in_metadata(from_json(problem.metadata["entry"]))
        assert bool(problem.answer) != (task in WITHOUT_ANSWER), task
        right_responses = [(f"<answer>{answer}</answer>", 1.0)] if answer else []
        for response, value in [*right_responses, ("I don't know.", 0.0)]:
            inputs.append(RewardInput.of(problem, response))
            expected.append(value)
            tasks.append(task)
    with verifier_of("reasoning_gym", timeout_s=60.0, workers=2) as verifier:
        scores = verifier.score(inputs)
    wrong = defaultdict(list)
    for task, value, score in zip(tasks, expected, scores, strict=True):
        if score.value != value:
            wrong[task].append((score.value, value))
    assert dict(wrong) == {}
    assert expected.count(1.0) == 105 - len({"boxnet", "rush_hour"})


@pytest.mark.parametrize(
    ("answer_in", "response", "value", "reason"),
    [
        (
            "tag",
            "<answer>1</answer> no: <answer> 3 4 </answer>",
            1.0,
            "answer '3 4', checked by task arc_1d",
        ),
        ("tag", "3 4", 0.0, "no answer in a tag"),
        ("box", r"\boxed{3 4}", 1.0, "answer '3 4', checked by task arc_1d"),
        ("box", "<answer>3 4</answer>", 0.0, "no answer in a box"),
        ("whole", "3 4", 1.0, "answer '3 4', checked by task arc_1d"),
    ],
)
def test_where_the_answer_stands(answer_in: str, response: str, value: float, reason: str) -> None:
    metadata = {"task": "arc_1d", "config": {}, "entry": {}}
    result = gym.score(RewardInput(response, "3 4", metadata=metadata), answer_in=answer_in)
    assert (result.value, result.reason) == (value, reason)


@pytest.mark.parametrize(
    ("task", "answer", "error"),
    [
        ("prime_factorization", "2 x 3", "ValueError: "),
        ("game_of_life", '{"a": 1}', "KeyError: "),
        ("coin_flip", "1e400", "OverflowError: "),
    ],
)
def test_an_answer_that_a_check_fails_on_is_wrong(task: str, answer: str, error: str) -> None:
    """The answer comes from a response, so an error in its check must not end the run."""
    (line,) = gym.problems(task, 1, 5)
    text = f"<answer>{answer}</answer>"
    result = gym.score(RewardInput(text, line["answer"], line["problem"], (), line["metadata"]))
    assert result.value == 0.0
    assert result.reason.startswith(f"the task's check raised an error for the answer: {error}")


def test_what_is_no_task_is_named() -> None:
    with pytest.raises(ValueError, match=mentioning("'arc'", "ab", "acre")):
        next(gym.problems("arc", 1, 1))
    with pytest.raises(ValueError, match=mentioning("sudoku", "{'holes': 3}")):
        next(gym.problems("sudoku", 1, 1, {"holes": 3}))
    with pytest.raises(ValueError, match=mentioning("difficulty")):
        gym.score(RewardInput("<answer>1</answer>", metadata={"difficulty": 3}))
    with (
        verifier_of("reasoning_gym", 60.0, 1, options={"answer_in": "braces"}) as verifier,
        pytest.raises(
            VerifierError, match=mentioning("answer_in", "'braces'", "tag", "box", "whole")
        ),
    ):
        verifier.score([RewardInput("1")])


def test_metadata_comes_back_as_it_was() -> None:
    value = {"grid": ((1, 2), [3]), "by number": {1: "a", (2, 3): None}, "text": "é", "x": 1.5}
    assert from_json(json.loads(json.dumps(to_json(value)))) == value
    with pytest.raises(ValueError, match="holds a set"):
        to_json({"a": {1}})
