"""docs/extending.md, followed literally in a copy of the package."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.patience import run_patiently
from tests.small_config import small_tree
from tests.tiny_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs" / "extending.md").read_text()
MODEL_CONFIGS = Path("examples") / "model_configs"
INSTRUCTION = re.compile(
    r"^\*\*(?P<what>New file|At the end of|In) `(?P<file>[^`]+)`"
    r"(?:,\s(?P<where>after|in place of) `(?P<line>[^`]+)`)?:\*\*\n\n```\w*\n(?P<block>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
CHECK = re.compile(r"^\*\*Check:\*\*\n\n```\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Walk:
    """One section of the guide."""

    title: str
    text: str

    @property
    def files(self) -> list[str]:
        """The files that the reader makes or changes, in order."""
        return [match["file"] for match in INSTRUCTION.finditer(self.text)]

    def follow(self, folder: Path) -> None:
        """Carry out the section's instructions in ``folder``."""
        for step in INSTRUCTION.finditer(self.text):
            path = folder / step["file"]
            if step["what"] == "New file":
                assert not path.exists(), f"{path}: the guide calls it new"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(step["block"])
            elif step["what"] == "At the end of":
                path.write_text(path.read_text() + "\n\n" + step["block"])
            else:
                before, line, after = path.read_text().partition(step["line"] + "\n")
                assert line, f"{path}: no line {step['line']!r}"
                kept = line if step["where"] == "after" else ""
                path.write_text(before + kept + step["block"] + after)

    def checks(self) -> list[list[str]]:
        """Return the section's commands, each as a list of words."""
        lines = [line for block in CHECK.findall(self.text) for line in block.splitlines()]
        return [shlex.split(line) for line in lines]


def walks() -> list[Walk]:
    """Return the sections that change files."""
    parts = GUIDE.split("\n## ")[1:]
    found = [Walk(part.split("\n")[0], part) for part in parts]
    return [walk for walk in found if walk.files]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A tiny model, its data and a configuration that names them."""
    folder = tmp_path_factory.mktemp("material")
    save_tiny_model(folder / "model")
    rows = [
        {"prompt": f"{a}+1=", "answer": str(a + 1), "solution": f"{a}+1={a + 1}"}
        for a in range(3, 9)
    ]
    for name in ("train.jsonl", "solutions.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small_tree(
        folder / "run",
        folder / "model",
        data={"train": str(folder / "train.jsonl"), "max_prompt_tokens": 32},
        rollout={"prompts_per_step": 2, "group_size": 2, "max_response_tokens": 8},
        reward={"name": "exact_integer"},
        training={"prompts_per_mini_batch": 2, "micro_batch_tokens": 256},
    )
    (folder / "CONFIG.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.mark.parametrize("walk", walks(), ids=lambda walk: walk.title)
def test_the_walk_leads_there(walk, material, tmp_path):
    # Copy the compiled files, too. Otherwise each command would compile the package again.
    for folder in ("megatron_dppo", "tools", "tests", MODEL_CONFIGS):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("CONFIG.yaml", "solutions.jsonl"):
        shutil.copy(material / name, tmp_path / name)
    assert walk.checks(), f"{walk.title}: nothing is checked"
    walk.follow(tmp_path)
    for words in walk.checks():
        done = run(words, tmp_path)
        assert done.returncode == 0, f"{words}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("walk", walks(), ids=lambda walk: walk.title)
def test_the_check_fails_without_the_walk(walk, material, tmp_path):
    """A check that passes without the walk would prove nothing."""
    shutil.copy(material / "CONFIG.yaml", tmp_path / "CONFIG.yaml")
    shutil.copytree(ROOT / MODEL_CONFIGS, tmp_path / MODEL_CONFIGS)
    assert run(walk.checks()[0], tmp_path).returncode != 0


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the guide with the package in ``folder``, or with this one if ``folder`` has none.

    ``pip`` installs into ``folder``, without the network.
    """
    path = os.pathsep.join([str(folder), str(ROOT)])
    offline = {"PIP_TARGET": str(folder), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    programs = {
        "python": [sys.executable],
        "pip": [sys.executable, "-m", "pip"],
        "megatron-dppo": [sys.executable, "-m", "megatron_dppo"],
    }
    command = [*programs.get(words[0], words[:1]), *words[1:]]
    return run_patiently(
        command, 240, cwd=folder, env={**os.environ, **offline, "PYTHONPATH": path}
    )


MOST_FILES = {"An algorithm": 1, "A metric": 2, "A reward": 1, "A model family": 2}
"""First words of a walk's title -> number of files. A metric's second file is its check, a family's the
pyproject.toml of its package."""
NEW_FILES_ALONE = (
    "An algorithm",
    "A metric",
    "A reward",
    "An environment",
    "A model family",
    "An experiment tracker",
)
"""First words of the titles of walks that change no file of the package."""


@pytest.mark.parametrize("subject", MOST_FILES)
def test_a_walk_names_few_files(subject):
    (walk,) = [walk for walk in walks() if walk.title.startswith(subject)]
    assert len(set(walk.files)) <= MOST_FILES[subject]


@pytest.mark.parametrize("subject", NEW_FILES_ALONE)
def test_a_part_of_ones_own_changes_no_file_of_the_package(subject):
    (walk,) = [walk for walk in walks() if walk.title.startswith(subject)]
    assert {step["what"] for step in INSTRUCTION.finditer(walk.text)} == {"New file"}
