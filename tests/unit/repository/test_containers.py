"""Both recipes of an image take the same steps, the docs name the image's Python, and hooks run pinned programs."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from megatron_dppo.cluster.slurm.site import ContainerConfig
from tests.ranks import ROOT

FOLDER = ROOT / "tools" / "containers"
PLACE = "/opt/megatron_dppo"


def instructions(recipe: Path) -> list[tuple[str, str]]:
    """Return the name and the words of each instruction of a Dockerfile. Continued lines are joined."""
    text = recipe.read_text().replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and line[0] != "#"]
    return [(name, words.strip()) for name, _, words in lines]


def section(recipe: Path, name: str) -> list[str]:
    """Return the commands of a section of an Apptainer recipe. Continued lines are joined."""
    text = recipe.read_text().replace("\\\n", " ")
    body = re.search(rf"^%{name}\n((?:    .*\n|\n)+)", text, re.MULTILINE)[1]
    return [line.strip() for line in body.splitlines() if line.strip()]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_both_recipes_take_the_same_steps_from_the_same_image(kind):
    docker = instructions(FOLDER / f"Dockerfile.{kind}")
    base, runs = dict(docker)["FROM"], [words for name, words in docker if name == "RUN"]
    apptainer = FOLDER / f"{kind}.def"
    assert f"From: {base}\n" in apptainer.read_text()
    steps = [step for words in runs for step in words.split(" && ")]
    steps = [" ".join(step.split()) for step in steps]
    post_steps = [" ".join(step.split()) for step in section(apptainer, "post")]
    # Apptainer has these commands in place of Docker's WORKDIR and ENV.
    place_and_variables = (f"cd {PLACE}", "export ")
    assert [step for step in post_steps if not step.startswith(place_and_variables)] == steps
    assert ("COPY", f". {PLACE}") in docker
    assert any(PLACE in step for step in section(apptainer, "setup"))
    variables = dict(words.split("=", 1) for name, words in docker if name == "ENV")
    exported = [step.removeprefix("export ") for step in section(apptainer, "environment")]
    assert dict(step.split("=", 1) for step in exported) == variables


def test_the_docs_site_file_names_the_images_interpreter():
    block = re.search(r"^container: (\{.*\})$", (ROOT / "docs/slurm.md").read_text(), re.MULTILINE)
    container = ContainerConfig.model_validate(yaml.safe_load(block[1]))
    variables = dict(instructions(FOLDER / "Dockerfile.gpu")[-4:])["ENV"]
    assert container.python == f"{variables.removeprefix('PATH=').split(':')[0]}/python"


def test_hooks_run_pinned_programs_of_the_environment():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pins = (ROOT / "tools/environment/dev.txt").read_text()
    programs = [shlex.split(hook["entry"]) for repo in hooks for hook in repo["hooks"]]
    assert all(repo["repo"] == "local" for repo in hooks)
    assert [program[:2] for program in programs] == [[".venv/bin/python", "-m"]] * 3
    assert all(f"\n{program[2]}==" in pins for program in programs)
