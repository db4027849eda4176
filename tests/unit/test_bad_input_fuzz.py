"""Hostile configurations and data files: each is refused with exit code 2, on one screen, in seconds.

All tests run in one process, through the entry point's ``--check``, which opens everything that a start would open.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config import load_config
from megatron_dppo.config.machine import this_machine
from megatron_dppo.evaluate import main as evaluate_main
from megatron_dppo.launch.machine_checks import machine_faults
from megatron_dppo.logging import FatalError
from megatron_dppo.metrics.summary import saved_config
from megatron_dppo.rollout import main as rollout_main
from megatron_dppo.spec import Roles
from megatron_dppo.train import main
from tests.messages import mentions
from tests.small_config import small_tree
from tests.tiny_models import save_tiny_model
from tests.unit.config_files import write_config

SECONDS = 5.0
LINES = 24
CHARACTERS = 5000
MEMORY = 500 * 2**20

GOOD = '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.fixture(scope="module")
def valid_tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A valid configuration of a tiny model. The modules are imported here, so that no test measures the imports."""
    folder = tmp_path_factory.mktemp("fuzz")
    save_tiny_model(folder / "model", "qwen3_moe", vocab_size=515)
    (folder / "train.jsonl").write_text(GOOD * 8)  # A step needs 8 prompts.
    tree = small_tree(
        folder / "run",
        folder / "model",
        run={"steps": 2},
        data={"train": str(folder / "train.jsonl"), "max_prompt_tokens": 64},
        rollout={"max_response_tokens": 16},
        reward={"name": "exact_integer"},
    )
    assert main([str(write_config(folder, tree)), "--check"]) == 0
    return tree


@pytest.fixture
def valid_config(valid_tree: dict[str, Any], tmp_path: Path) -> Path:
    """The file of the valid configuration."""
    return write_config(tmp_path, valid_tree)


def resident(*, reset_peak: bool = False) -> int:
    """Return the peak memory of this process in bytes since the last reset of the peak."""
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def cpu_seconds() -> float:
    """Return the CPU time of this process and its ended children, which other load on the machine does not change."""
    return sum(os.times()[:4])


def refusal(
    path: Path, words: list[str], capsys: pytest.CaptureFixture[str], seconds: float = SECONDS
) -> str:
    """Return the error text of the entry point, after a check of its CPU time, memory and length."""
    capsys.readouterr()
    memory_before, cpu_before = resident(reset_peak=True), cpu_seconds()
    with pytest.raises(FatalError) as caught:
        main([str(path), *words, "--check"])
    cpu_time, memory = cpu_seconds() - cpu_before, resident() - memory_before
    text = capsys.readouterr().err
    assert caught.value.code == 2
    assert "Traceback" not in text
    assert len(text.splitlines()) <= LINES, text
    assert len(text) <= CHARACTERS, text
    assert cpu_time < seconds
    assert memory < MEMORY
    return text


def with_setting(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return ``tree`` with another value of a key, of a section, or, with an empty key, with further sections."""
    section, _, name = key.partition(".")
    if not section:
        return tree | value
    return tree | {section: {**tree.get(section, {}), name: value} if name else value}


def drafts(count: int) -> tuple[str, Any, str]:
    table = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": count}
    return "sglang", table, "sglang.speculative_num_draft_tokens"


DEEP: Any = 0
for _ in range(200):
    DEEP = [DEEP]

CONFIGURATIONS: dict[str, tuple[str, Any] | tuple[str, Any, str]] = {
    "a seed of 2^64": ("run.seed", 2**64),
    "a seed of 2^31": ("run.seed", 2**31),
    "a NUL in the directory": ("run.directory", "a\0b"),
    "a NUL in the data": ("data.train", "a\0b"),
    "a NUL in the model": ("model.hf_checkpoint", "a\0b"),
    "a line end in the directory": ("run.directory", "a\nb"),
    "an escape in the host": ("engine.host", "\x1b[2J"),
    "a long path": ("run.directory", "x" * 100_000),
    "a long data path": ("data.train", "x" * 100_000),
    "a file as the model": ("model.hf_checkpoint", "/dev/null"),
    "a folder as data": ("data.train", "/proc/sys"),
    "a device as data": ("data.train", "/dev/zero"),
    "a port beyond": ("engine.urls", ["http://a:99999"]),
    "port 0": ("engine.urls", ["http://a:0"]),
    "a worded port": ("engine.urls", ["http://a:b"]),
    "half an address": ("engine.urls", ["http://[::1"]),
    "a server's port beyond": ("engine.port", 65536),
    "servers past the last port": ("engine", {"port": 65535, "servers": 4}, "engine.port"),
    "a huge world": ("parallel.world_size", 10**30, "parallel"),
    "a huge group": ("rollout.group_size", 10**30),
    "a group of 1e12": ("rollout.group_size", 10**12),
    "prompts of 1e12": ("rollout.prompts_per_step", 10**12),
    "samples of 1e12": ("evaluation.samples_per_prompt", 10**12),
    "workers of 1e12": ("reward.workers", 10**12),
    "servers of 1e12": ("engine.servers", 10**12),
    "a bucket of 1e12 MiB": ("weight_sync.bucket_mib", 10**12),
    "a wait of 1e300 s": ("engine.hang_timeout_s", 1e300),
    "a wait of 1e12 s": ("weight_sync.timeout_s", 10**12),
    "a true staleness": ("rollout.max_staleness", True),
    "a staleness of 1.0": ("rollout.max_staleness", 1.0),
    "a true count": ("run.steps", True),
    "a true rate": ("optimizer.lr", True),
    "a true time": ("reward.timeout_s", True),
    "a true list item": ("profile.ranks", [False]),
    "a true option": ("algorithm", {"options": {"tv_threshold": True}}),
    "a true size of a library": ("megatron.moe_router_num_groups", True, "megatron"),
    "a true size of the engine": ("sglang.max_running_requests", True, "sglang"),
    "a true split": ("sglang.tp_size", True),
    "a long base": ("base", "x" * 5000),
    "a NUL in the base": ("base", "a\0b"),
    "a long prompt template": ("data.prompt_template", "x" * 10**6),
    "a huge response": ("rollout.max_response_tokens", 10**18, "max_response_tokens"),
    "an infinite rate": ("optimizer.lr", float("inf")),
    "no number": ("optimizer.lr", float("nan")),
    "a deep list": ("rollout.stop_token_ids", DEEP),
    "a deep table": ("megatron.num_layers", DEEP, "megatron"),
    "a penalty of 1e308": ("algorithm.length_penalty", 1e308),
    "a penalty of 1e30": ("algorithm.length_penalty", 1e30),
    "a KL factor of 1e308": ("algorithm.reference_kl", 1e308),
    "a rate of 1e308": ("optimizer.lr", 1e308),
    "a variable with its value": ("reward.passed_variables", ["A=B"]),
    "an empty variable": ("environment.passed_variables", [""]),
    "a variable with a space": ("engine.passed_variables", ["A B"]),
    "a million drafts": drafts(10**6),
    "no drafts": drafts(-1),
    "an expert split that is no number": ("sglang.ep_size", float("nan")),
    "an endless split": ("sglang.tp_size", float("inf")),
    "an engine split of 3": ("sglang.tp_size", 3),
    "an engine split of 0": ("sglang.tp_size", -1),
    "a worded split": ("sglang.tp_size", "two"),
    "a reward of no module": ("reward.name", "no.such:thing", "reward.name: the reward"),
    "a reward of no function": ("reward.name", "json:thing", "reward.name: the reward"),
    "a reward of two colons": ("reward.name", "a:b:c", "reward.name: the reward"),
    "a set with a strange name": ("data.evaluation", {"a/b": "x"}),
    "ten thousand unknown keys": ("", {f"key{i}": i for i in range(10_000)}, "unknown key"),
}
"""Name -> a key, its value, and what the refusal names if that is not the key."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_hostile_configurations(name, valid_tree, tmp_path, capsys):
    key, value, *named = CONFIGURATIONS[name]
    tree = with_setting(valid_tree, key, value)
    assert (named or [key])[0] in refusal(write_config(tmp_path, tree), [], capsys)


def test_a_variable_that_is_not_set_is_a_fault_of_the_machine(valid_config, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    second = "{name: exact_integer, passed_variables: [NO_SUCH_KEY]}"
    config = load_config(valid_config, [f"reward.further.second={second}"])
    key = "reward.further.second.passed_variables"
    assert any(
        mentions(f, key, "NO_SUCH_KEY")
        for f in machine_faults(config, Roles.of(config), this_machine())
    )
    monkeypatch.setenv("NO_SUCH_KEY", "x")
    assert not any(
        mentions(f, key) for f in machine_faults(config, Roles.of(config), this_machine())
    )


@pytest.mark.parametrize("command", [evaluate_main, rollout_main])
@pytest.mark.parametrize("words", [["engine.servers=0"], ["engine.urls=[http://a:1]"]])
def test_commands_with_servers_of_their_own_refuse_a_run_without_one(
    command, words, valid_config, valid_tree, tmp_path, capsys
):
    held_out = f"data.evaluation.held_out={valid_tree['data']['train']}"
    with pytest.raises(FatalError):
        command([str(valid_config), held_out, *words, "--out", str(tmp_path / "out")])
    assert "engine.servers: got" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"- 1\n- 2\n",
    "not UTF-8": b"\xff\xfe\x00",
    "binary": bytes(range(256)) * 100,
    "a tab": b"run:\n\tsteps: 1\n",
    "an unclosed flow": b"run: {steps: 1",
    "a deep flow": b"run: " + b"[" * 5000,
    "a tag": b"run: !!python/object/apply:os.system ['true']\n",
    "a truth value that is none": b"run: {steps: !!bool maybe}",
    "a nothing that is something": b"run: {steps: !!null 3}",
    "a time that is none": b"run: {steps: !!timestamp foo}",
    "a time": b"run: {steps: !!timestamp 2024-01-01}",
    "bytes": b"run: {directory: !!binary '%%%'}",
    "a set": b"run: !!set {a, b}",
    "ordered pairs": b"run: !!omap [a, 1]",
    "a list as a table": b"run: !!map [a]",
    "a text as a table": b"run: !!map ab",
    "a table as a list": b"run: {steps: !!seq {a: 1}}",
    "a list as a number": b"run: {steps: !!int [1]}",
    "a word as a number": b"run: {seed: !!float x}",
    "an anchor of itself": b"run: &a\n  steps: *a\n",
    "two documents": b"run: {}\n---\nrun: {}\n",
    "a long number": b"run: {directory: x, steps: " + b"9" * 5000 + b"}\n",
    "keys that are no text": b"? [1, 2]\n: 3\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_yaml(name, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_bytes(TEXTS[name])
    refusal(path, [], capsys)


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 5000, "a\0b"])
def test_hostile_paths_of_the_configuration(name, capsys):
    refusal(Path(name), [], capsys)


@pytest.mark.parametrize(
    "word",
    ["run.seed=99999999999999999999", "run..x=1", "=", "a.b.c.d=1", "run=1", "run.steps=[", "x=\0"],
)
def test_hostile_overrides(word, valid_config, capsys):
    refusal(valid_config, [word], capsys)


@pytest.mark.parametrize("content", [b"[" * 5000, b"[]", b"{", b"run: !!int x", b"\xff"])
def test_an_altered_configuration_of_a_run_is_a_value_error(content, tmp_path):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError):
        saved_config(tmp_path)


def answer(text: str) -> bytes:
    return b'{"prompt": "1+1=", "answer": %s}\n' % text.encode()


DATA: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "the file is empty"),
    "an answer that is no integer": (answer('"two"'), "line 2: the answer is 'two'"),
    "an answer of 10 MB": (answer('"' + "a" * 10**7 + '"'), "line 2: the answer is"),
    "a number of 5000 digits": (answer("9" * 5000), "line 2: "),
    "a lone surrogate": (answer(r'"\ud800"'), "line 2: holds half of a surrogate pair"),
    "deep nesting": (answer("[" * 10**5 + "]" * 10**5), "line 2: nested too deeply"),
    "a prompt of 10 MB alone": (b"", "all 1 prompts are longer than max_prompt_tokens=64"),
    "half a line of 10 MB": (b'{"prompt": "' + b"a" * 10**7, "line 2: not JSON"),
    "a line of 10 MB of brackets": (b"[" * 10**7, "line 2: "),
    "a thousand bad lines": (answer("true") * 1000, "line 2: 'answer' is true"),
    "a thousand bad answers": (answer('"x"') * 1000, "1000 answers can't be used"),
    "zeros": (b"\0" * 10**6, "line 2: not JSON"),
    "keys without end": (json.dumps({str(i): i for i in range(10**5)}).encode(), "and more"),
}


@pytest.mark.parametrize("name", DATA)
def test_hostile_data(name, valid_config, tmp_path, capsys):
    content, expected = DATA[name]
    data = GOOD.encode() + content
    if name == "an empty file":
        data = b""
    if name == "a prompt of 10 MB alone":
        data = json.dumps({"prompt": "1" * 10**7, "answer": 1}).encode()
    (tmp_path / "train.jsonl").write_bytes(data)
    assert expected in refusal(valid_config, [f"data.train={tmp_path}/train.jsonl"], capsys)


def test_a_long_answer_and_a_long_prompt_are_let_pass(valid_config, tmp_path):
    long = json.dumps({"prompt": "1" * 10**7, "answer": 1}) + "\n"
    (tmp_path / "train.jsonl").write_text(GOOD * 8 + long + answer("9" * 400).decode())
    assert main([str(valid_config), f"data.train={tmp_path}/train.jsonl", "--check"]) == 0


MODEL_FILES: dict[str, tuple[str, bytes]] = {
    "config that is a list": ("config.json", b"[]"),
    "config that is not JSON": ("config.json", b"{"),
    "config that is not UTF-8": ("config.json", b"\xff\xfe"),
    "config of deep lists": ("config.json", b"[" * 10**5),
    "config without a family": ("config.json", b"{}"),
    "index that is a list": ("model.safetensors.index.json", b"[]"),
    "index that is not JSON": ("model.safetensors.index.json", b"{"),
    "index without a map": ("model.safetensors.index.json", b"{}"),
    "index of numbers": ("model.safetensors.index.json", b'{"weight_map": {"a": 1}}'),
    "index with a long name": (
        "model.safetensors.index.json",
        b'{"weight_map": {"a": "' + b"x" * 5000 + b'"}}',
    ),
    "weights cut short": ("model.safetensors", b"\x08" + bytes(7) + b'{"a": {}'),
    "weights of another model": ("model.safetensors", b"\x02" + bytes(7) + b"{}"),
    "an end that is no id": ("generation_config.json", b'{"eos_token_id": -1}'),
    "certificate that is a list": ("conversion.json", b"[]"),
    "tokenizer that is a list": ("tokenizer.json", b"[]"),
    "tokenizer that is not JSON": ("tokenizer.json", b"{"),
    "tokenizer of deep lists": ("tokenizer.json", b"[" * 10**5),
    "tokenizer of no model": ("tokenizer.json", b"{}"),
    "template that fails": ("chat_template.jinja", b"{{ nothing.at.all }}"),
    "template that is no template": ("chat_template.jinja", b"{% if %}"),
}


@pytest.mark.parametrize("name", MODEL_FILES)
def test_hostile_model_folders(name, valid_config, tmp_path, capsys):
    file, content = MODEL_FILES[name]
    save_tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=515)
    (tmp_path / "model" / file).write_bytes(content)
    text = refusal(valid_config, [f"model.hf_checkpoint={tmp_path}/model"], capsys)
    assert str(tmp_path) in text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("attention_dropout", "x", "transformers refuses it"), ("num_experts_per_tok", 99, "is 99")],
)
def test_a_value_of_a_model_that_cannot_be(key, value, words, valid_config, tmp_path, capsys):
    save_tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=515)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    text = refusal(valid_config, [f"model.hf_checkpoint={tmp_path}/model"], capsys)
    assert mentions(text, f"model.hf_checkpoint: {file}", words)
    assert key in text
