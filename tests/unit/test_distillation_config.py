"""The section ``distillation`` of the configuration: what is refused, and under which key."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.config import load_config
from megatron_dppo.config.checks import PROMPT_SPARE_POSITIONS
from megatron_dppo.launch.library_checks import server_faults
from megatron_dppo.spec import RunSpec
from tests.unit.config_files import DENSE, MOE, faults_of, minimal, write_checkpoint, write_config

URL = "http://10.0.0.7:30000"


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "teacher", DENSE | {"hidden_size": 128})


def teachers(*folders: Path, **keys: str) -> str:
    """Return an override with a teacher of each folder, all with ``keys``."""
    text = "".join(f", {key}: {value}" for key, value in keys.items())
    rows = [f"t{i}: {{hf_checkpoint: {folder}{text}}}" for i, folder in enumerate(folders)]
    return f"distillation.teachers={{{', '.join(rows)}}}"


def test_a_teacher_of_another_size_is_accepted(tmp_path: Path, teacher: Path) -> None:
    assert faults_of(tmp_path, teachers(teacher)) == []
    assert faults_of(tmp_path, teachers(teacher, urls=f"[{URL}]")) == []
    reverse = ("distillation.loss=reverse", "distillation.top_k=511")
    assert faults_of(tmp_path, teachers(teacher, prompt_template="'{answer}'"), *reverse) == []


@pytest.mark.parametrize(
    ("overrides", "keys", "fault"),
    [
        (["distillation.loss=reverse"], {}, "distillation.top_k: got 0"),
        (["distillation.top_k=3"], {}, "distillation.top_k: got 3"),
        (
            ["distillation.loss=forward", "distillation.top_k=512"],
            {},
            "distillation.top_k: got 512",
        ),
        (["rollout.temperature=0.9"], {}, "rollout.temperature: got 0.9"),
        (
            ["rollout.drop_zero_variance_groups=true", "distillation.rewards=false"],
            {},
            "rollout.drop_zero_variance_groups: got true",
        ),
        ([f"engine.urls=[{URL}/]"], {"urls": f"[{URL}]"}, "distillation.teachers.t0.urls: got"),
        ([], {"urls": "[nowhere]"}, "distillation.teachers.t0.urls: got"),
        ([], {"servers": "0"}, "distillation.teachers.t0.servers: got 0"),
        ([], {"max_prompt_tokens": "9"}, "distillation.teachers.t0.max_prompt_tokens: got 9"),
        (
            ["environment.name=agent"],
            {"prompt_template": "x"},
            "distillation.teachers.t0.prompt_template: got one",
        ),
        ([], {"sglang": "{dtype: half}"}, "distillation.teachers.t0.sglang.dtype: got"),
        ([], {"sglang": "{tp_size: 3}"}, "distillation.teachers.t0.sglang.tp_size: got 3"),
        (
            [],
            {"sglang": "{speculative_algorithm: NGRAM}"},
            "distillation.teachers.t0.sglang.speculative_algorithm: got",
        ),
        (
            [],
            {"sglang": "{context_length: 1094}"},
            "distillation.teachers.t0: got sequences of 1088",
        ),
    ],
)
def test_one_fault_under_its_key(
    tmp_path: Path, teacher: Path, overrides: list[str], keys: dict[str, str], fault: str
) -> None:
    faults = faults_of(tmp_path, teachers(teacher, **keys), *overrides)
    named = [f for f in faults if not f.startswith(("environment.", "algorithm."))]
    assert named
    assert named[0].startswith(fault)


@pytest.mark.parametrize(
    ("overrides", "keys", "longest"),
    [
        # The policy's prompt is part of max_tokens.
        (["environment.max_tokens=200"], {}, 200),
        # After a prompt of one token, 199 of max_tokens are left; three turns could fill 3 x (64 + 10).
        (["environment.max_tokens=200"], {"prompt_template": "x", "max_prompt_tokens": "400"}, 599),
        (["environment.max_tokens=300"], {"prompt_template": "x", "max_prompt_tokens": "400"}, 622),
        ([], {"prompt_template": "x"}, 322),
    ],
)
def test_the_servers_of_a_teacher_have_room_for_the_sequences_that_the_check_names(
    tmp_path: Path, teacher: Path, overrides: list[str], keys: dict[str, str], longest: int
) -> None:
    episodes = [
        "environment.name=calculator", "data.max_prompt_tokens=100", "environment.max_turns=3",
        "environment.max_observation_tokens=10", "algorithm.name=pg-is", "engine.device=cpu",
    ]  # fmt: skip
    fits = longest + PROMPT_SPARE_POSITIONS
    words = [teachers(teacher, **keys, sglang=f"{{context_length: {fits}}}"), *episodes, *overrides]
    config = load_config(str(write_config(tmp_path, minimal(tmp_path))), words)
    (spec,) = RunSpec.of(config).teachers
    assert spec.servers.sequence_tokens == longest
    words[0] = teachers(teacher, **keys, sglang=f"{{context_length: {fits - 1}}}")
    (fault,) = faults_of(tmp_path, *words)
    assert fault.startswith(f"distillation.teachers.t0: got sequences of {longest} tokens")


def test_the_doctor_waits_for_a_teachers_server_as_long_as_the_run(
    tmp_path: Path, teacher: Path
) -> None:
    words = [teachers(teacher), "distillation.request_timeout_s=7"]
    config = load_config(str(write_config(tmp_path, minimal(tmp_path))), words)
    (spec,) = RunSpec.of(config).teachers
    serving = spec.serving_config(config)
    assert (serving.distillation.request_timeout_s, serving.distillation.teachers) == (7, {})


def test_a_teacher_without_the_policys_tokens_is_refused(tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", DENSE | {"vocab_size": 500})
    (fault,) = faults_of(tmp_path, teachers(small), model=MOE)
    assert fault.startswith("distillation.teachers.t0.hf_checkpoint: got a model of 500 tokens")
    (fault,) = faults_of(tmp_path, teachers(tmp_path / "none"))
    assert fault.startswith("distillation.teachers.t0.hf_checkpoint: got")


def test_keys_without_a_teacher_and_servers_twice(tmp_path: Path, teacher: Path) -> None:
    (fault,) = faults_of(tmp_path, "distillation.loss=reverse", "distillation.top_k=4")
    assert fault.startswith("distillation.teachers: got none")
    (fault,) = faults_of(tmp_path, teachers(teacher, teacher, urls=f"[{URL}]"))
    assert fault.startswith("distillation.teachers.t1.urls: got")


def test_an_algorithm_with_a_bound_over_the_step_is_refused(tmp_path: Path, teacher: Path) -> None:
    (fault,) = faults_of(tmp_path, teachers(teacher), "algorithm.name=m2po")
    assert fault.startswith("algorithm.name: got m2po with distillation.teachers")
    assert faults_of(tmp_path, teachers(teacher), "algorithm.name=pg-is") == []


def test_sglangs_own_fields_are_checked_for_a_teacher(tmp_path: Path, teacher: Path) -> None:
    words = [teachers(teacher, sglang="{max_total_tokenz: 9}")]
    config = load_config(str(write_config(tmp_path, minimal(tmp_path))), words)
    (fault,) = server_faults(config)
    assert fault.startswith("distillation.teachers.t0.sglang.max_total_tokenz: got 9")
    assert not list(server_faults(load_config(str(tmp_path / "config.yaml"), [teachers(teacher)])))
