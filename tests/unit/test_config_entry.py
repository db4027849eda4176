"""``megatron-dppo train``: the configurations that it refuses before anything starts, and its error messages.

Most tests call ``main`` in this process, which imports the libraries only once. Without ``--check``, ``main`` starts
the child process that checks everything, as it does for a user.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.train import main
from tests.messages import mentions
from tests.patience import run_patiently
from tests.tiny_models import save_tiny_model
from tests.unit.config_files import minimal, write_config

pytestmark = pytest.mark.second

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("entry")
    tree = minimal(folder)
    save_tiny_model(folder / "model", "qwen3_moe")
    (folder / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 8)
    return write_config(folder, tree)


@pytest.fixture
def train(config, capfd, monkeypatch):
    def run(*arguments, **environment):
        capfd.readouterr()
        command = [str(config), *arguments]
        with monkeypatch.context() as patched:
            patched.chdir(ROOT)
            for name, value in environment.items():
                patched.setenv(name, value)
            try:
                code: Any = main(command)
            except SystemExit as exit_request:
                code = exit_request.code
        output = capfd.readouterr()
        return subprocess.CompletedProcess(command, code, output.out, output.err)

    return run


def test_check_describes_the_layout_in_a_line(train):
    result = train("--check", "parallel.world_size=2", "parallel.tensor=2")
    assert result.returncode == 0, result.stderr
    layout, *_ = result.stdout.splitlines()
    assert layout == (
        "2 ranks: TP 2 x CP 1 x PP 1 x VPP 1 x DP 1, experts EP 1 x ETP 2 x expert DP 1, sequence "
        "parallel; "
        "vocabulary 512; a rollout batch is 32 responses and 2 optimiser steps"
    )


def test_a_start_is_refused_before_anything_starts_without_a_traceback(train, config):
    result = train("algorithm.name=dpo", "reward.name=vibes", "rollout.top_p=0.9")
    assert result.returncode == 2
    assert "3 faults" in result.stderr
    assert "algorithm: unknown algorithm 'dpo'; known: " in result.stderr
    assert "reward.name: unknown reward 'vibes'" in result.stderr
    assert "rollout.top_p: got 0.9, expected 1" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not (config.parent / "run").exists()


def test_all_problems_are_told_at_once(train):
    result = train(
        "--check",
        "rollout.top_p=0.9",
        "algorithm.name=dpo",
        "megatron.moe_grouped_gem=true",
        "sglang.mem_fraction=0.5",
    )
    assert result.returncode == 2
    assert "config.yaml: 4 faults\n" in result.stderr
    for problem in (
        "rollout.top_p: got 0.9, expected 1",
        "algorithm: unknown algorithm 'dpo'",
        "megatron.moe_grouped_gem: got true (bool), not a field",
        "sglang.mem_fraction: got 0.5 (float), not a field",
    ):
        assert f"\n  {problem}" in result.stderr
    assert result.stdout == ""


def test_faults_of_the_machine_stand_beside_one_of_the_servers_table(train):
    words = ["sglang.no_such_option=1", "parallel.world_size=64", "run.processes_per_core=1"]
    result = train("--check", *words)
    assert result.returncode == 2
    assert mentions(result.stderr, "sglang.no_such_option", "run.processes_per_core")


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["--check"], "mem_fraction_static"),
        (["--check", "rollout.top_pp=1"], "tp_size"),
        ([], "tp_size"),
    ],
)
def test_a_size_of_servers_that_is_no_number_is_named(train, words, size):
    result = train(*words, f"sglang.{size}=two")
    assert result.returncode == 2
    assert mentions(result.stderr, f"sglang.{size}", "'two'")


def test_data_checkpoints_and_configuration_are_told_of_at_once(train, config):
    data, directory = config.parent / "some_bad.jsonl", config.parent / "lost"
    directory.mkdir()
    (directory / "last_checkpoint.json").write_text('{"step": 20}')
    data.write_text('{"prompt": "1+1", "answer": "$"}\n{"prompt": "1+1", "answer": "2"}\n')
    result = train("--check", "rollout.top_p=0.9", "algorithm.name=dpo", f"data.train={data}")
    assert "config.yaml: 3 faults\n" in result.stderr
    for problem in (
        "rollout.top_p: got 0.9, expected 1",
        "algorithm: unknown algorithm 'dpo'",
        f"data: 1 answers can't be used: {data}, line 1: ",
    ):
        assert f"\n  {problem}" in result.stderr
    result = train(
        "--check", "rollout.top_p=0.9", f"run.directory={directory}", "reward.name=vibes"
    )
    # The unknown reward hides neither the fault of rollout.top_p nor the fault of the run's folder.
    assert "config.yaml: 3 faults\n" in result.stderr
    assert "'vibes'" in result.stderr
    result = train("--check", "rollout.top_p=0.9", f"run.directory={directory}")
    assert "config.yaml: 2 faults\n" in result.stderr
    assert "\n  run.resume: " in result.stderr


def test_a_supervised_run_is_refused_before_it_starts(config):
    data = config.parent / "train.jsonl"
    path = config.parent / "supervised.yaml"
    path.write_text(
        f"run: {{directory: {config.parent / 'warm'}, steps: 1}}\n"
        f"model: {{hf_checkpoint: {config.parent / 'model'}}}\n"
        f"data: {{train: {data}}}\n"
        "training: {sequences_per_step: 1, micro_batch_tokens: 64}\n"
        "optimizer: {lr: 1.0e-4}\n"
        "megatron: {attention_backend: flush}\n"
    )
    result = run_in_new_process(["-m", "megatron_dppo.supervised", str(path)])
    assert result.returncode == 2
    assert mentions(result.stderr, "megatron.attention_backend", "'flush'")
    assert not (config.parent / "warm").exists()


def test_carrying_fewer_log_probs_than_the_algorithm_needs_is_refused(train):
    result = train("--check", "algorithm.name=dppo-topk-tv", "rollout.topk_log_probs=4")
    assert result.returncode == 2
    assert mentions(result.stderr, "rollout.topk_log_probs is 4", 0, 20)


def test_exact_divergences_are_refused_above_what_the_engine_can_say(train, config, tmp_path):
    model = tmp_path / "large"
    shutil.copytree(config.parent / "model", model)
    facts = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**facts, "vocab_size": 4097}))
    (model / "model.safetensors").unlink()
    words = ("--check", f"model.hf_checkpoint={model}")
    result = train(*words, "algorithm.name=dppo-exact-kl")
    assert result.returncode == 2
    assert mentions(result.stderr, 4097, 32776)
    assert train(*words, "algorithm.name=recomputed-exact-kl").returncode == 0


def test_print_config(train, config):
    result = train("--print-config", "run.seed=7")
    assert result.returncode == 0
    assert "  seed: 7\n" in result.stdout
    assert "temperature: 1.0\n" in result.stdout


def test_a_launcher_of_another_world_is_refused(train):
    result = train(RANK="0", WORLD_SIZE="4")
    assert result.returncode == 2
    assert mentions(result.stderr, "parallel.world_size", 1, "WORLD_SIZE", 4)


def run_in_new_process(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with ``words`` in a new process: a start configures the logging of its process."""
    return run_patiently([sys.executable, *words], cwd=ROOT, env={**os.environ, **environment})


def test_a_port_in_use_is_refused(config):
    # The second start leaves out the check by a child process, which finds nothing in this configuration.
    code_without_check = (
        "import sys; from megatron_dppo import train; train.check_in_child = lambda *_: 0; "
        "sys.exit(train.main())"
    )
    with socket.socket() as busy_socket:
        busy_socket.bind(("127.0.0.1", 0))
        busy_socket.listen()
        port = busy_socket.getsockname()[1]
        result = run_in_new_process(
            ["-m", "megatron_dppo.train", str(config), f"engine.port={port}"]
        )
        assert result.returncode == 2
        assert f"engine.port: cannot bind 127.0.0.1:{port}" in result.stderr
        result = run_in_new_process(["-c", code_without_check, str(config)], MASTER_PORT=str(port))
        assert result.returncode == 2
        assert f"MASTER_PORT: cannot bind 127.0.0.1:{port}" in result.stderr


def test_help_says_what_ctrl_c_does(train):
    result = train("--help")
    assert result.returncode == 0
    assert "Ctrl-C once" in result.stdout


def test_check_sees_answers_that_nothing_matches_and_checkpoints_that_are_gone(train, config):
    data, directory = config.parent / "bad.jsonl", config.parent / "trained"
    data.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+1", "answer": "$"}\n')
    directory.mkdir()
    (directory / "last_checkpoint.json").write_text('{"step": 20}')
    result = train("--check", f"data.train={data}")
    assert result.returncode == 2
    assert f"data: 1 answers can't be used: {data}, line 2: " in result.stderr
    result = train("--check", f"run.directory={directory}")
    assert result.returncode == 2
    assert mentions(result.stderr, "run.resume", 20)
    assert "run.resume=never" in result.stderr


def test_check_needs_no_weights_and_a_start_does(train, config):
    (weights,) = (config.parent / "model").glob("*.safetensors")
    moved_weights = weights.rename(weights.with_suffix(".away"))
    try:
        result = train("--check")
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("1 ranks: TP 1")
        assert mentions(result.stdout.splitlines()[-1], "machine", "model.hf_checkpoint", "weights")
        result = train(f"run.directory={config.parent / 'weightless'}")
        assert result.returncode == 2
        assert mentions(result.stderr, "model.hf_checkpoint", "weights")
    finally:
        moved_weights.rename(weights)


def test_few_open_files_are_refused_with_their_number(config):
    command = f"ulimit -n 100; {sys.executable} -m megatron_dppo.train {config}"
    result = run_patiently(["bash", "-c", command], cwd=ROOT)
    assert result.returncode == 2
    assert mentions(result.stderr, "open files", 100, 384)
    assert len(result.stderr.splitlines()) == 2


def test_a_finished_run_has_nothing_to_do(train, config):
    directory = config.parent / "finished"
    words = (f"run.directory={directory}", "run.steps=2")
    (directory / "hf").mkdir(parents=True)
    (directory / "config.yaml").write_text(train("--print-config", *words).stdout)
    (directory / "metrics.jsonl").write_text('{"step": 2}\n')
    (directory / "summary.json").write_text('{"steps": 2}')
    result = train(*words)
    assert result.returncode == 0
    assert mentions(result.stdout, directory, 2)
    assert not (directory / "logs").exists()


FAULTY_REWARDS = "tests.unit.planted_rewards"


@pytest.mark.parametrize(
    ("reward", "kind", "error"),
    [
        ("last_line", "an empty response", "IndexError"),
        ("boxed", "a truncated response", "substring not found"),
        ("short_only", "a long response", "too long"),
    ],
)
def test_check_tries_a_reward_with_what_a_policy_says(train, config, reward, kind, error):
    """A faulty reward would end the run hours later. Before the start, the check names the data row, the response and
    the reward's own frames."""
    result = train("--check", f"reward.name={FAULTY_REWARDS}:{reward}")
    assert result.returncode == 2
    assert kind in result.stderr
    assert re.search(error, result.stderr)
    assert f"{config.parent / 'train.jsonl'}, line 1" in result.stderr
    assert "planted_rewards.py" in result.stderr
    assert "verifier.py" not in result.stderr


def test_check_names_the_faults_of_every_stage(train, config):
    """The stages: values, names of rewards and environments, data, and the checkpoint to resume from."""
    data, directory = config.parent / "no_prompt.jsonl", config.parent / "trained_before"
    data.write_text('{"prompt": 5, "answer": "2"}\n')
    words = ["environment.name=os:getcwd", "reward.name=nope", f"data.train={data}"]
    result = train("--check", *words)
    assert result.returncode == 2
    assert "environment.name: " in result.stderr
    assert "reward.name: " in result.stderr
    assert f"{data}, line 1" in result.stderr
    directory.mkdir()
    (directory / "last_checkpoint.json").write_text('{"step": 20}')
    words = [f"reward.name={FAULTY_REWARDS}:last_line", f"run.directory={directory}"]
    result = train("--check", *words)
    assert mentions(result.stderr, "last_line", "empty")
    assert "run.resume: " in result.stderr


def keys_of_faults(stderr: str) -> list[str]:
    """Return the key or place with which each fault in the error message begins."""
    lines = [line.strip() for line in stderr.splitlines() if line.startswith(" ")]
    return [line.partition(": ")[0] for line in lines if ": " in line]


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["rollout.top_pp=1"], ["rollout.top_pp"]),
        (["rollout.group_size=some", "run.steps="], ["rollout.group_size", "run.steps"]),
        (["run.directory=x/{no.such}", "optimizer.lr=fast"], ["run.directory", "optimizer.lr"]),
        (["engine.host=a\x1bb"], ["engine.host"]),
        (["training=5", "optimizer="], ["training", "optimizer"]),
    ],
)
def test_check_looks_at_the_rest_of_a_file_with_values_that_are_none(train, config, words, keys):
    """Beside values of the wrong type, the check finds faults of the algorithm's name, the data and the libraries'
    tables."""
    data = config.parent / "no_prompt.jsonl"
    data.write_text('{"prompt": 5, "answer": "2"}\n')
    other_overrides = [f"data.train={data}", "algorithm.name=dpo", "sglang.no_such_option=1"]
    result = train("--check", *words, *other_overrides)
    assert result.returncode == 2
    found_keys = keys_of_faults(result.stderr)
    assert {key for key in found_keys if key in keys} == set(keys)
    assert {"algorithm", "data", "sglang.no_such_option"} < set(found_keys)
    # A start checks the values first, and stops at their faults.
    assert not set(keys_of_faults(train(*words, *other_overrides).stderr)) & {"algorithm", "data"}


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        # Without its options this reward could not be called.
        (["reward.name=reward_model", "reward.options=5"], {"reward.options"}),
        # The stand-in, the default 1, is not a multiple of the parallel sizes.
        (["parallel.world_size=two", "parallel.tensor=2"], {"parallel.world_size"}),
        # The stand-in for the prompts of a step is smaller than the four prompts of a mini-batch.
        (["rollout.prompts_per_step=many"], {"rollout.prompts_per_step"}),
        (["model.hf_checkpoint=5"], {"model.hf_checkpoint"}),
        (["data.train=5"], {"data.train"}),
        # The algorithm needs rollout.topk_log_probs, which the mistyped key was meant to set.
        (["rollout.top_log_probs=4", "algorithm.name=dppo-topk-tv"], {"rollout.top_log_probs"}),
    ],
)
def test_check_says_nothing_of_what_depends_on_a_value_that_is_none(train, words, keys):
    result = train("--check", *words)
    assert result.returncode == 2
    assert set(keys_of_faults(result.stderr)) == keys, result.stderr
