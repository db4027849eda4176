"""The core without ``cluster/`` and ``diagnostics/``: its tests name none of them, and pass in a tree without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import write_material
from tests.patience import run_patiently
from tests.ranks import ROOT
from tests.unit.test_layers import ANNEXES, imported

UNIT = ROOT / "tests" / "unit"
FAST = ("test_advantages", "test_masks", "test_packing", "test_policy_loss", "test_seal")
"""Tests of the core that take seconds."""
OTHER_FOLDERS = ("annexes", "repository")
"""Folders of ``tests/unit`` whose tests are not of the core."""
ONLY_THIS_TREE = '''"""Imports come from this tree, not from an editable installation of another one."""

import sys

sys.meta_path[:] = [
    finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")
]
'''
"""The module ``sitecustomize``, which every interpreter with the tree in PYTHONPATH imports at its start."""


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A clone without the annexes, and without the tests that are not of the core."""
    folder = tmp_path_factory.mktemp("core") / "clone"
    folder.mkdir()
    for name, left_out in (("megatron_dppo", ANNEXES), ("tests", OTHER_FOLDERS)):
        skipped = shutil.ignore_patterns("__pycache__", *left_out)
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
    for name in ("docs", "examples", "slurm", "tools"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "sitecustomize.py").write_text(ONLY_THIS_TREE)
    return folder


def run(core: Path, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(core)}
    return run_patiently([sys.executable, *words], timeout, cwd=core, env=environment)


def test_the_package_is_the_copied_one_and_has_no_annex(core):
    code = "import importlib, megatron_dppo; print(megatron_dppo.__file__)\n" + "".join(
        f"try: importlib.import_module('megatron_dppo.{name}')\nexcept ImportError: print('none')\n"
        for name in sorted(ANNEXES)
    )
    lines = run(core, "-c", code).stdout.splitlines()
    assert lines == [str(core / "megatron_dppo" / "__init__.py"), "none", "none"]


def test_the_command_offers_what_is_there(core):
    done = run(core, "-m", "megatron_dppo", "--help")
    commands = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert {"train", "convert", "fleet", "demo", "status", "logs", "stop"} <= commands
    assert not commands & {"plan", "slurm", "doctor", "watch", "report", "gpu-check"}


def test_a_command_of_an_annex_is_one_error_that_lists_the_others(core):
    done = run(core, "-m", "megatron_dppo", "doctor", "runs/demo")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "'doctor'" in line
    assert "train" in line


def test_a_start_is_checked_without_the_annexes(core, tmp_path):
    config = write_material(tmp_path)
    done = run(core, "-m", "megatron_dppo", "train", str(config), "--check")
    assert done.returncode == 0, done.stderr


def pytest_of_the_core(core: Path, *words: str, timeout: float) -> str:
    done = run(
        core, "-m", "pytest", "-p", "no:cacheprovider", "tests/unit", *words, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_every_core_test_is_collected_and_the_fast_ones_pass(core):
    output = pytest_of_the_core(core, "-k", " or ".join(FAST), timeout=300)
    assert "error" not in output


@pytest.mark.slow
@pytest.mark.timeout(10_000)
def test_every_core_test_passes(core):
    pytest_of_the_core(core, "-m", "not slow", timeout=7200)


CORE_TESTS = sorted(
    [*(ROOT / "tests").glob("*.py"), *UNIT.glob("*.py"), *(UNIT / "families").glob("*.py")]
)
"""Unit tests of the core, and helpers of all tests."""


@pytest.mark.parametrize("path", CORE_TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_core_test_names_no_module_of_an_annex_and_no_test_of_one(path):
    prefixes = [f"megatron_dppo.{name}" for name in sorted(ANNEXES)]
    prefixes += [f"tests.unit.{name}" for name in OTHER_FOLDERS]
    text = path.read_text()
    assert [prefix for prefix in prefixes if prefix in text] == []


def test_a_test_of_the_annexes_imports_one():
    """A file that needs none of them is a test of the core."""
    for path in sorted((UNIT / "annexes").glob("test_*.py")):
        if path.name == "test_annexes.py":
            continue
        owners = {".".join(name.split(".")[:2]) for name in imported(path)}
        assert owners & {f"megatron_dppo.{name}" for name in ANNEXES}, path


def test_the_core_has_no_name_of_an_annex_in_its_code():
    prefixes = [f"megatron_dppo.{name}" for name in sorted(ANNEXES)]
    for path in (ROOT / "megatron_dppo").rglob("*.py"):
        if path.relative_to(ROOT / "megatron_dppo").parts[0] not in ANNEXES:
            text = path.read_text()
            assert [prefix for prefix in prefixes if prefix in text] == [], path
