"""Entry points: those of this package, and those of a user's package that the tests install."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from megatron_dppo.metrics.records import SAMPLES_FILE, StepLines
from megatron_dppo.metrics.samples import Sample
from megatron_dppo.system import plugins
from tests.integration.runs import write_material
from tests.patience import run_patiently
from tests.ranks import ROOT


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Install the package in ``examples/plugin``, and return the environment variables with which Python finds it."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "examples" / "plugin", folder / "source")
    installed = folder / "installed"
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
        *("--no-build-isolation", "--target", str(installed), str(source)),
    ]
    run_patiently(command, 120, check=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)])}


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_dppo", *words]
    return run_patiently(command, 240, env=environment)


def test_every_command_of_this_package_can_be_imported():
    commands = plugins.find_plugins(plugins.COMMANDS)
    assert "train" in commands
    for entry in commands.values():
        plugins.load_plugin(entry)


def test_a_plugin_that_cannot_be_imported_is_named():
    entry = EntryPoint("mine", "no_such_module:thing", plugins.START_CHECKS)
    with pytest.raises(ValueError, match="no_such_module:thing"):
        plugins.load_plugin(entry)


def test_two_packages_that_register_one_name_are_refused(tmp_path, monkeypatch):
    for owner in ("first", "second"):
        folder = tmp_path / f"{owner}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {owner}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{plugins.REWARDS}]\nsame = {owner}:reward\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"'same'.*(first and second|second and first)"):
        plugins.find_plugins(plugins.REWARDS)


def test_a_module_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "planted_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "part.py").write_text('"""Do something.\n\nMore."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.module_file("planted_package.part") == package / "part.py"
    assert plugins.module_file("planted_package.missing") is None
    assert plugins.help_line(EntryPoint("x", "planted_package.part", "g")) == "Do something"


def test_a_command_of_another_package_runs(environment, tmp_path):
    assert "\n  lengths     Print the response lengths" in run(environment, "--help").stdout
    lines = [
        Sample(3, "training", 0, k, "p", "r", "1", 1.0, "", False, tokens).to_json()
        for k, tokens in enumerate((4, 9, 6))
    ]
    StepLines(tmp_path / SAMPLES_FILE, 0).write(lines)
    result = run(environment, "lengths", str(tmp_path))
    assert (result.returncode, result.stdout) == (0, "step 3: 4 to 9 tokens, median 6\n")


def test_a_start_finds_the_parts_of_another_package(environment, tmp_path):
    config = write_material(tmp_path)
    words = ["train", str(config), "--check"]
    parts = ["reward.name=brief", "environment.name=guess", "tracking.trackers=[csv]"]
    turns = ["environment.max_turns=2", "environment.max_observation_tokens=8"]
    result = run(environment, *words, *parts, *turns)
    assert result.returncode == 0, result.stderr
    assert "GiB free in" in result.stdout
    bare_environment = {**environment, "PYTHONPATH": str(ROOT)}
    result = run(bare_environment, *words, *parts, *turns)
    assert result.returncode == 2
    for name in ("brief", "guess", "csv"):
        assert f"{name!r}" in result.stderr
