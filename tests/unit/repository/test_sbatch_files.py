"""The published batch scripts are short and alike, and request the nodes that their recipes fill."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_dppo.config.loading import load_config
from megatron_dppo.engine.options import ServerSections
from megatron_dppo.launch.placement import Allocation, Host, Roles, place

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
RECIPES = {path.stem for path in (ROOT / "examples" / "recipes").glob("*.yaml")} - {"scaling"}
END = (
    'exec "${MEGATRON_DPPO_PYTHON:-.venv/bin/python}" -m megatron_dppo slurm supervise '
    'examples/recipes/%s.yaml "$@"'
)


def test_every_recipe_has_one():
    assert {path.stem for path in SCRIPTS} == RECIPES


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_asks_for_what_its_recipe_fills_and_ends_in_the_supervisor(path):
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", END % path.stem]
    for wanted in ("##SBATCH --account=", "##SBATCH --partition=", "# export MEGATRON_DPPO_SITE="):
        assert f"\n{wanted}" in text  # users who need this line uncomment it
    config = load_config(ROOT / "examples" / "recipes" / f"{path.stem}.yaml")
    roles = Roles.of(config.parallel.world_size, ServerSections.needed_by(config))
    nodes, gpus = int(options["nodes"]), int(options["gpus-per-node"])
    hosts = tuple(Host(f"n{i}", f"n{i}", gpus) for i in range(nodes))
    assert place(roles, Allocation(hosts)).unused == ()
    assert {"exclusive", "requeue"} <= options.keys()
    assert options["open-mode"] == "append"
    assert options["signal"] == "B:USR1@900"
