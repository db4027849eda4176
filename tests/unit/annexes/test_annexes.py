"""The annexes as a whole: what they register, and which of them load without torch."""

import subprocess
import sys

import pytest

from megatron_dppo.system import plugins
from tests.unit import test_config_entry

config = test_config_entry.config
train = test_config_entry.train


@pytest.mark.parametrize("group", [plugins.START_CHECKS, plugins.RUN_REPORTS])
def test_every_entry_point_of_an_annex_can_be_imported(group):
    entries = plugins.find_plugins(group)
    assert entries
    for entry in entries.values():
        plugins.load_plugin(entry)


@pytest.mark.parametrize(
    "module",
    [
        "cluster.planner.search",
        "cluster.plan",
        "cluster.preflight.__main__",
        "cluster.slurm.supervise",
        "diagnostics.watch",
        "diagnostics.report",
        "diagnostics.gpu_check.__main__",
    ],
)
def test_light_modules_load_no_torch(module):
    code = f"import sys, megatron_dppo.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_planner_adds_the_memory_to_the_check_of_a_run(train):
    answer = train("--check", "parallel.world_size=2", "parallel.tensor=2")
    assert answer.returncode == 0, answer.stderr
    _, memory = answer.stdout.splitlines()
    assert memory.startswith("memory: 2 ranks, each of weights 0.182 MiB")
