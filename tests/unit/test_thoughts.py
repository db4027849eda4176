"""Thoughts: which part of a response is its answer, and whether a prompt leaves a thought open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.chat import generation_prompt
from megatron_dppo.data.thoughts import DEFAULT_MARKS, answer_part, open_thought
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.run_identity import identity_of
from megatron_dppo.loop.scorer import Scorer
from megatron_dppo.rewards.math_verify import math_verify
from megatron_dppo.rewards.trial import reward_faults
from tests.chat_templates import PUBLISHED, published_tokenizer, reader_of
from tests.tiny_models import tiny_tokenizer
from tests.unit.config_files import minimal, minimal_config

QUESTION = [{"role": "user", "content": "Think inside <think>. 3+5"}]


@pytest.mark.parametrize(("begin", "end"), DEFAULT_MARKS)
def test_only_the_text_after_a_thought_is_the_answer(begin, end):
    assert answer_part(f"{begin}42?{end}41") == "41"
    assert answer_part(f"42?{end}41") == "41"
    assert answer_part(f"41{begin}42") == "41"
    assert answer_part(f"{begin}a{begin}b{end}c{end}41") == "41"
    assert answer_part(f" {begin}42") == " "
    # The end of another thought does not end this one.
    assert answer_part(f"{begin}a</other>42", [(begin, end), ("<other>", "</other>")]) == ""
    assert answer_part("3 < 5 > 4") == "3 < 5 > 4"


CHANNELS = "<|channel|>analysis<|message|>41?<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (f"{CHANNELS}<|channel|>final<|message|>42<|return|>", "42"),
        (f"{CHANNELS}<|channel|>final <|constrain|>json<|message|>42", "42"),
        (f"{CHANNELS}<|channel|>commentary<|message|>42<|end|>", ""),
        ("<|channel|>final<|message|>42", "42"),
        ("<|channel|>analysis<|message|>final<|message|>42", ""),
        ("analysis41? Yes.assistantfinal42", "42"),
        (r"analysis\boxed{41}assistantcommentaryCallassistantfinal42", "42"),
        (r"analysisSo \boxed{42}", ""),
        (r"An analysis: final \boxed{42}", r"An analysis: final \boxed{42}"),
        ("analysis of x gives 42", "analysis of x gives 42"),
    ],
)  # fmt: skip
def test_only_the_final_channel_is_the_answer(response, answer):
    assert answer_part(response) == answer


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"analysisMaybe \boxed{41}? No, 42.assistantfinal42", 1),
        (r"analysis\boxed{42} seems right.assistantfinalIt is 41", 0),
        (r"analysisSo \boxed{42}", 0),
        (r"[THINK]\boxed{42}?[/THINK]It is 41.", 0),
        (r"<thinking>\boxed{42}?</thinking>It is 41.", 0),
        (r"<seed:think>\boxed{41}?</seed:think>\boxed{42}", 1),
    ],
)  # fmt: skip
def test_math_verify_reads_no_thought(response, score):
    assert math_verify(response, "42") == score


@pytest.mark.parametrize(
    ("prompt_end", "generated", "opened"),
    [
        ("user\n3+5<end>assistant\n<think>\n", "assistant\n<think>\n", "<think>\n"),
        ("user\n3+5<end>assistant\n<think>\nWell, ", "assistant\n<think>\nWell, ", "<think>\nWell, "),
        ("3+5<end>assistant\n<think>\n\n</think>\n\n", "assistant\n<think>\n", ""),
        ("Begin with <think>.<end>assistant\n", "assistant\n", ""),
        ("Begin with <think>. 3+5=", "", ""),
        ("Assistant: Let me see. [THINK]", "", "[THINK]"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "", "<|channel|>analysis<|message|>"),
    ],
)  # fmt: skip
def test_a_prompt_opens_a_thought_where_the_template_adds_it(prompt_end, generated, opened):
    assert open_thought(prompt_end, generated) == opened


def turn_of(tokenizer: Any, response: str, **fields: Any) -> Trajectory:
    """Return the engine's answer to the question; its text lacks special tokens."""
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response)]
    text = tokenizer.decode(ids[1], skip_special_tokens=True)
    return Trajectory.of_response(*ids, text=text, **fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_reader_knows_the_thoughts_that_a_published_template_opens(name):
    published = PUBLISHED[name]
    tokenizer = published_tokenizer(published)
    turn = turn_of(tokenizer, r"Maybe \boxed{42}<|im_end|>")
    text = reader_of(tokenizer).read(turn)
    assert text.open_thought == published.opened
    assert text.answer == ("" if published.opened else text.text)
    closed = turn_of(tokenizer, r"\boxed{41}</think>\boxed{42}<|im_end|>")
    assert reader_of(tokenizer).read(closed).answer == r"\boxed{42}"
    assert generation_prompt(tokenizer).endswith(published.opened)


def special_tokenizer(*names: str) -> Any:
    tokenizer = tiny_tokenizer(500)
    tokens: list[Any] = [AddedToken(name, special=True) for name in names]
    tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer


def test_the_reader_sees_marks_that_are_special_tokens():
    tokenizer = special_tokenizer("<think>", "</think>")
    reader = reader_of(tokenizer)
    text = reader.read(turn_of(tokenizer, r"<think>\boxed{42}</think>41<|im_end|>"))
    assert text.text == r"\boxed{42}41"
    assert text.special_text == r"<think>\boxed{42}</think>41"
    assert text.answer == "41"
    cut = turn_of(tokenizer, r"41<think>\boxed{42}", finish_reason="length")
    assert reader.read(cut).answer == "41"
    stopped = turn_of(tokenizer, "<think>1</think>41\n\nQ: 3")
    assert reader.read(stopped, stop=["\n\nQ:"]).special_text == "<think>1</think>41"


def test_the_reader_sees_channels_in_tokens_alone():
    tokenizer = special_tokenizer("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
    text = reader_of(tokenizer).read(
        turn_of(tokenizer, "<|channel|>final<|message|>42<|end|><|im_end|>")
    )
    assert (text.text, text.answer) == ("final42", "42")


PLANTED = "tests.unit.planted_rewards:shown_text"


@pytest.mark.parametrize(
    ("reads", "shown"),
    [
        (None, ["<think>\n", "\\boxed{42}</think>41"]),
        ("text", ["<think>\n", "\\boxed{42}</think>41"]),
        ("answer", ["", "41"]),
        ("special-text", ["<think>\n", "\\boxed{42}</think>41<|im_start|>"]),
    ],
)
def test_a_reward_gets_the_form_that_it_asks_for(reads, shown):
    tokenizer = published_tokenizer(PUBLISHED["qwen3_moe, thinking"])
    turn = turn_of(tokenizer, r"\boxed{42}</think>41<|im_start|><|im_end|>")
    config = RewardConfig.model_validate({"name": PLANTED, "workers": 1, "reads": reads})
    problem = Problem(0, "3+5", "42", (1,))
    with Scorer(config, reader=reader_of(tokenizer)) as scorer:
        score = scorer.submit(problem, scorer.text_of(turn)).result()
    assert score.reason == repr(shown)


@pytest.mark.parametrize("name", ["math_verify", "exact_integer"])
def test_an_unfinished_thought_earns_nothing(name):
    tokenizer = published_tokenizer(PUBLISHED["qwen3_moe, thinking"])
    problem = Problem(0, "3+5", "42", (1,))
    scores = []
    with Scorer(RewardConfig(name=name, workers=1), reader=reader_of(tokenizer)) as scorer:
        for response in ("42", "Hm.</think>42"):
            turn = turn_of(tokenizer, f"{response}<|im_end|>")
            scores.append(scorer.submit(problem, scorer.text_of(turn)).result().value)
    assert scores == [0, 1]


def test_the_scorer_of_a_run_reads_the_thoughts_that_its_prompts_open(tmp_path):
    """Runs, evaluations and rollouts build their scorer by this function."""
    tree = minimal(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = published_tokenizer(PUBLISHED["qwen3_moe, thinking"]).chat_template
    tokenizer.save_pretrained(tmp_path / "model")
    tree["data"]["apply_chat_template"] = True
    (tmp_path / "train.jsonl").write_text('{"prompt": "3+5", "answer": "42"}\n' * 8)
    tree["reward"] = {"name": "exact_integer", "workers": 1}
    config = TrainConfig.model_validate(tree)
    data = RunData(config)
    problem = data.train.problems[0]
    ids = tokenizer("42<|im_end|>", add_special_tokens=False)["input_ids"]
    unfinished = replace(Trajectory.of_response(problem.prompt_ids, ids), text="42")
    with Scorer.of(config, data) as scorer:
        score = scorer.submit(problem, scorer.text_of(unfinished)).result()
    assert score.value == 0


def test_the_marks_of_the_configuration_replace_the_default():
    tokenizer = tiny_tokenizer()
    reader = reader_of(tokenizer, marks=[["(", ")"]])
    assert reader.read(turn_of(tokenizer, "(41)42<think>3<|im_end|>")).answer == "42<think>3"


@pytest.mark.parametrize("marks", [[["<a>"]], [["<a>", ""]], [["<a>", "</a>", "b"]]])
def test_marks_that_are_no_pair_are_refused(tmp_path: Path, marks):
    with pytest.raises(ValueError, match="thought_marks"):
        minimal_config(tmp_path, data={"thought_marks": marks})


def test_the_identity_of_a_run_has_marks_and_forms_that_are_not_the_default(tmp_path: Path):
    usual = identity_of(minimal_config(tmp_path), "")
    data, reward = {"thought_marks": [["<a>", "</a>"]]}, {"reads": "text"}
    changed = identity_of(minimal_config(tmp_path, data=data, reward=reward), "")
    new_keys = {key for key in changed if changed[key] != usual.get(key)}
    assert new_keys == {"data.thought_marks", "reward (weights, options)"}


def test_the_trial_before_a_run_hands_the_open_thought_to_rewards():
    data: Any = SimpleNamespace(
        problems=[Problem(0, "3+5", "8", (1,))], location=lambda path, number: path
    )
    config = RewardConfig(name=PLANTED, workers=1)
    assert list(reward_faults("sums.jsonl", data, config, 9)) == []
    (fault,) = reward_faults("sums.jsonl", data, config, 9, "<refused>")
    assert "a thought is open" in fault
