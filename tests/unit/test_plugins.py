"""Entry points: those of this package, and those of a user's package that the tests install."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from megatron_dppo.__main__ import main
from megatron_dppo.config import load_config
from megatron_dppo.config.machine import this_machine
from megatron_dppo.launch.start_checks import check_start
from megatron_dppo.metrics.records import SAMPLES_FILE, StepLines
from megatron_dppo.metrics.samples import Sample
from megatron_dppo.system import plugins
from tests.integration.runs import write_material
from tests.messages import mentions
from tests.patience import run_patiently
from tests.ranks import ROOT

pytestmark = pytest.mark.second


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


def plant(folder, owner: str, entries: str, module: str = "") -> None:
    """Write a distribution with a module and a file of entry points."""
    info = folder / f"{owner}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {owner}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)
    (folder / f"{owner}.py").write_text(module)


FAULTY_COMMANDS = {
    "takes a command's name": ("status = rogue", ""),
    "malformed value": ("extra = no module: at all", ""),
    "no value": ("extra", ""),
    "raises": ("extra = rogue", "raise RuntimeError('planted')"),
    "no Python": ("extra = rogue", "def ("),
    "exits": ("extra = rogue", "raise SystemExit(3)"),
    "no main": ("extra = rogue", "x = 1"),
}


@pytest.mark.parametrize("name", FAULTY_COMMANDS)
def test_a_faulty_command_of_another_package_ends_no_other_command(
    name, tmp_path, monkeypatch, capsys
):
    entry, module = FAULTY_COMMANDS[name]
    plant(tmp_path, "rogue", f"[{plugins.COMMANDS}]\n{entry}\n", module)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--help"]) == 0
    capsys.readouterr()
    assert main(["extra"]) == 2
    error = capsys.readouterr().err
    assert "rogue" in error
    assert "Traceback" not in error
    assert len(error.splitlines()) <= 2
    with pytest.raises(SystemExit) as end:
        main(["status", "--help"])
    assert end.value.code == 0


def test_a_faulty_start_check_of_another_package_is_a_fault_of_the_start(tmp_path, monkeypatch):
    plant(
        tmp_path,
        "rogue",
        f"[{plugins.START_CHECKS}]\nmine = rogue:check\n",
        "raise OSError('planted')",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rogue", raising=False)
    config = load_config(write_material(tmp_path))
    faults = check_start(config, this_machine()).faults
    assert any(mentions(fault, "mine", "rogue", "planted") for fault in faults)


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
    parts = [
        *("reward.name=brief", "environment.name=guess", "tracking.trackers=[csv]"),
        *("algorithm.name=factor", "algorithm.options.factor=3", "tracking.metrics=[halved]"),
    ]
    turns = ["environment.max_turns=2", "environment.max_observation_tokens=8"]
    result = run(environment, *words, *parts, *turns)
    assert result.returncode == 0, result.stderr
    assert "GiB free in" in result.stdout
    bare_environment = {**environment, "PYTHONPATH": str(ROOT)}
    result = run(bare_environment, *words, *parts, *turns)
    assert result.returncode == 2
    for name in ("brief", "guess", "csv", "factor", "halved"):
        assert f"{name!r}" in result.stderr
