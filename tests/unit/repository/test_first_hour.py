"""docs/first_hour.md: every command on the page exists, and accepts the words that the page gives it."""

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from megatron_dppo.__main__ import main
from megatron_dppo.system import plugins
from tests.patience import run_patiently
from tests.tiny_models import save_tiny_model
from tests.unit.config_files import minimal, write_config

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "first_hour.md").read_text()
BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCK.findall(PAGE) for line in block.splitlines()]
LINES += re.findall(r"`([^`\n]+)`", BLOCK.sub("", PAGE))
WORDS = [shlex.split(line, comments=True) for line in LINES]
COMMANDS = [words[1:] for words in WORDS if len(words) > 1 and words[0].endswith("megatron-dppo")]
TRAIN_COMMANDS = [words for words in COMMANDS if words[0] == "train"]
CHECK_COMMANDS = [words for words in TRAIN_COMMANDS if "--check" in words]


class ParsedError(Exception):
    """The command accepted its words."""


def test_the_page_is_read():
    assert {words[0] for words in COMMANDS} <= set(plugins.find_plugins(plugins.COMMANDS))
    assert len(COMMANDS) > 20
    assert len(CHECK_COMMANDS) == 10


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_takes_its_words(words, monkeypatch):
    def ending_after(parse):
        def parse_and_end(*arguments):
            parse(*arguments)
            raise ParsedError

        return parse_and_end

    for name in ("parse_args", "parse_intermixed_args"):
        parse = getattr(argparse.ArgumentParser, name)
        monkeypatch.setattr(argparse.ArgumentParser, name, ending_after(parse))
    with pytest.raises(ParsedError):
        main(words)


@pytest.mark.parametrize("words", TRAIN_COMMANDS, ids=" ".join)
def test_every_key_is_one(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    config = str(write_config(tmp_path, minimal(tmp_path)))
    named = [config if word == "CONFIG.yaml" else word for word in words if word != "--check"]
    assert main([*named, "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    for override in named[2:]:
        path, _, text = override.partition("=")
        value = printed
        for key in path.split("."):
            value = value[key]
        assert value == yaml.safe_load(text)


def test_the_other_targets_of_make_are_there():
    targets = {words[1] for words in WORDS if len(words) > 1 and words[0] == "make"}
    assert {"demo", "gpu-check", "setup"} <= targets
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


REWARD = "def score(response, answer):\n    return float(response == answer)\n"
ENVIRONMENT = """
class Game:
    async def reset(self, problem):
        return ""

    async def step(self, turn):
        return None

    async def close(self): ...
"""
AGENT = "async def agent(problem, session):\n    return 1.0\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all files that the page's placeholders stand for."""
    folder = tmp_path_factory.mktemp("hour")
    save_tiny_model(folder / "CHECKPOINT", max_position_embeddings=32768)
    files = {
        "my_rewards.py": REWARD,
        "my_environment.py": ENVIRONMENT,
        "my_agent.py": AGENT,
        "train.jsonl": "".join(
            json.dumps({"prompt": f"1+{i}", "answer": f"{1 + i}"}) + "\n" for i in range(8)
        ),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    generated = ["generate", "arc_1d", "--count", "8", "--out", str(folder / "FILE.jsonl")]
    assert main(["data", *generated]) == 0
    tree = minimal(folder)
    tree["model"]["hf_checkpoint"] = str(folder / "CHECKPOINT")
    tree["data"] = {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 4096}
    (folder / "CONFIG.yaml").write_text(yaml.safe_dump(tree))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("words", CHECK_COMMANDS, ids=" ".join)
def test_every_check_of_a_task_is_passed(words, folder):
    script = Path(sys.executable).with_name("megatron-dppo")
    done = run_patiently(
        [script, *words], 300, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert "a rollout batch is 32 responses and 2 optimiser steps" in done.stdout
