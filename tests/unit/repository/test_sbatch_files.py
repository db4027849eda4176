"""The published batch scripts are short and alike, and every recipe fills the nodes that are published for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.recipes.verdicts import GPUS_PER_NODE, NODES
from megatron_dppo.config.loading import load_config
from megatron_dppo.launch.placement import Allocation, Host, place
from megatron_dppo.spec import Roles
from tests.patience import run_patiently

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "examples" / "recipes"
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
SUPERVISE = 'exec "${MEGATRON_DPPO_PYTHON:-.venv/bin/python}" -m megatron_dppo slurm supervise '


def test_two_recipes_have_a_script_and_one_script_takes_any_recipe():
    assert [path.stem for path in SCRIPTS] == ["qwen3_30b_a3b", "qwen3_30b_a3b_r3", "train"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_has_the_options_of_a_run_and_ends_in_the_supervisor(path):
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    for wanted in ("##SBATCH --account=", "##SBATCH --partition=", "# export MEGATRON_DPPO_SITE="):
        assert f"\n{wanted}" in text  # users who need this line uncomment it
    assert {"exclusive", "requeue"} <= options.keys()
    assert options["gpus-per-node"] == "8"
    assert options["open-mode"] == "append"
    assert options["signal"] == "B:USR1@900"
    words = '"$@"'
    if path.stem != "train":
        assert int(options["nodes"]) == NODES[path.stem]
        words = f'examples/recipes/{path.stem}.yaml "$@"'
    assert text.splitlines()[-1] == SUPERVISE + words


def test_every_recipe_has_a_number_of_nodes():
    parts_of_recipes = {"scaling"}
    assert {path.stem for path in RECIPES.glob("*.yaml")} - parts_of_recipes == NODES.keys()


@pytest.mark.parametrize("recipe", sorted(NODES))
def test_a_recipe_fills_its_nodes(recipe):
    config = load_config(RECIPES / f"{recipe}.yaml")
    roles = Roles.of(config)
    gpus = GPUS_PER_NODE.get(recipe, 8)
    hosts = tuple(Host(f"n{i}", f"n{i}", gpus) for i in range(NODES[recipe]))
    assert place(roles, Allocation(hosts)).unused == ()


def test_the_script_for_any_recipe_expects_one():
    command = ["bash", str(ROOT / "slurm" / "train.sbatch")]
    done = run_patiently(command)
    assert done.returncode != 0
    assert "expected a recipe" in done.stderr
