"""A teacher of each problem, the prompt that it sees, and tokenizers that differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.records import DataError
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.teachers import TeacherPrompts, filled
from tests.tiny_models import tiny_tokenizer
from tests.unit.config_files import DENSE, minimal

ROWS = (
    {"prompt": "1+2=", "answer": "3", "metadata": {"teacher": "a", "hint": "{prompt} is odd"}},
    {"prompt": "4+4=", "answer": "8", "metadata": {"teacher": "b", "hint": "even"}},
)


def prompts_of(
    folder: Path, rows: tuple[dict[str, Any], ...] = ROWS, **teachers: dict[str, Any]
) -> TeacherPrompts:
    """Return the teachers' prompts for problems ``rows``. ``teachers``: each teacher's keys."""
    tree: dict[str, Any] = minimal(folder, DENSE)
    tree["rollout"]["prompts_per_step"] = 1
    tree["training"]["prompts_per_mini_batch"] = 1
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder_of = {"hf_checkpoint": str(folder / "model")}
    tree["distillation"] = {"teachers": {name: folder_of | keys for name, keys in teachers.items()}}
    config = TrainConfig.model_validate(tree)
    data = RunData(config)
    return TeacherPrompts(config, data)


def test_each_problem_has_its_teacher_and_its_prompt(tmp_path: Path) -> None:
    template = {"prompt_template": "{answer}! {hint}", "max_prompt_tokens": 99}
    prompts = prompts_of(tmp_path, a={}, b=template)
    first = Problem(0, "", "", (1,), metadata={"teacher": "a"})
    second = Problem(1, "", "", (1,), metadata={"teacher": "b"})
    assert (prompts.teacher_of(first), prompts.teacher_of(second)) == ("a", "b")
    response = Trajectory(
        1,
        0,
        np.array([5, 6, 7, 8, 9], np.int32),
        np.array([False, False, True, False, True]),
        {
            "teacher_log_probs": np.array([-1, -2], np.float32),
            "routed_experts": np.zeros((4, 1, 1), np.uint8),
        },
    )
    assert prompts.seen(first, response) is response
    seen = prompts.seen(second, response)
    text = "<|im_start|>user\n8! even<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer().decode(seen.prompt_ids) == text
    assert seen.token_ids[-3:].tolist() == [7, 8, 9]
    assert np.flatnonzero(seen.loss_mask).tolist() == [seen.length - 3, seen.length - 1]
    assert seen.columns.keys() == {"teacher_log_probs"}
    assert seen.column("teacher_log_probs").tolist() == [-1, -2]
    assert [len(prompt) > 1 for prompt in prompts.examples] == [True, True]


def test_a_teacher_with_another_chat_template_is_named(tmp_path: Path) -> None:
    folders: dict[str, str] = {}
    templates = {"same": tiny_tokenizer().chat_template, "other": "{{ messages }}", "none": None}
    for name, template in templates.items():
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / name)
        folders[name] = str(tmp_path / name)
    rows = tuple(
        {"prompt": "1+2=", "answer": "3", "metadata": {"teacher": name}}
        for name in (*folders, "own")
    )
    teachers = {name: {"hf_checkpoint": folder} for name, folder in folders.items()}
    # This teacher's prompts are rendered in its own form.
    teachers["own"] = {"hf_checkpoint": folders["other"], "prompt_template": "{prompt}"}
    prompts = prompts_of(tmp_path, rows, **teachers)
    assert [warning.partition(":")[0] for warning in prompts.warnings] == [
        "teacher other",
        "teacher none",
    ]
    assert "distillation.teachers.other.prompt_template" in prompts.warnings[0]


def test_a_single_teacher_has_problems_without_a_name(tmp_path: Path) -> None:
    rows = ({"prompt": "1+2=", "answer": "3"},)
    prompts = prompts_of(tmp_path, rows, only={})
    assert prompts.teacher_of(Problem(0, "", "", (1,))) == "only"


def test_an_inserted_text_is_not_a_template() -> None:
    problem = Problem(0, "p", "a", (1,), metadata={"hint": "{answer}"})

    def place_of(prompt_ids: Sequence[int]) -> str:
        return f"line of {prompt_ids}"

    assert filled("{prompt} {hint} {} {answer}", problem, "key", place_of) == "p {answer} {} a"
    fault = r"line of \(1,\): key: got {secret}, expected one of answer, hint, prompt"
    with pytest.raises(DataError, match=fault):
        filled("{secret}", problem, "key", place_of)


def test_unknown_teachers_names_and_long_prompts_are_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl, line 2: metadata\.teacher .* got 'b'"):
        prompts_of(tmp_path, a={})
    template: dict[str, Any] = {"prompt_template": "{hint} {other}"}
    with pytest.raises(
        DataError, match=r"line 1: distillation\.teachers\.a\.prompt_template: got {other}"
    ):
        prompts_of(tmp_path, a=template, b={})
    template = {"prompt_template": "{answer}", "max_prompt_tokens": 2}
    with pytest.raises(DataError, match=r"line 1: .* tokens, expected at most 2"):
        prompts_of(tmp_path, a=template, b={})


def test_another_token_of_an_id_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    vocabulary = tree["model"]["vocab"]
    token_of = {number: token for token, number in vocabulary.items()}
    vocabulary[token_of[40]], vocabulary[token_of[41]] = 41, 40
    path.write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"teachers\.b\.hf_checkpoint: .* the id 40 to"):
        prompts_of(tmp_path, a={}, b={"hf_checkpoint": str(folder)})
    # A teacher may have more tokens than the policy.
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    prompts_of(tmp_path, a={}, b={"hf_checkpoint": str(folder)})
