"""The core in a copy of the clone without the annexes, ``cluster/`` and ``diagnostics/``."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import write_material
from tests.patience import run_patiently
from tests.ranks import ROOT
from tests.unit.test_layers import ANNEXES

PURE = ("test_advantages", "test_masks", "test_packing", "test_policy_loss", "test_seal")
"""Tests of the core that take seconds."""


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A clone without the annexes."""
    folder = tmp_path_factory.mktemp("core") / "clone"
    folder.mkdir()
    skipped = shutil.ignore_patterns("__pycache__", *ANNEXES)
    shutil.copytree(ROOT / "megatron_dppo", folder / "megatron_dppo", symlinks=True, ignore=skipped)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("examples", "tools", "docs", "slurm"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(core: Path, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(core)}
    return run_patiently([sys.executable, *words], timeout, cwd=core, env=environment)


def core_tests(names: set[str] | None = None) -> list[str]:
    """The unit tests that import no annex and read none of its files; those of ``names`` if it is given."""
    chosen_files = []
    for path in sorted((ROOT / "tests" / "unit").glob("test_*.py")):
        text = path.read_text()
        uses_annex = any(f"megatron_dppo.{name}" in text for name in ANNEXES)
        if not uses_annex and (names is None or path.stem in names):
            chosen_files.append(f"tests/unit/{path.name}")
    return chosen_files


def test_the_command_offers_what_is_there(core):
    code = "import tests.without_annexes; from megatron_dppo.__main__ import main; main(['--help'])"
    done = run(core, "-c", code)
    commands = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert {"train", "convert", "fleet", "demo", "status", "logs", "stop"} <= commands
    assert not commands & {"plan", "slurm", "doctor", "watch", "report", "gpu-check"}


def test_a_start_is_checked_without_the_annexes(core, tmp_path):
    config = write_material(tmp_path)
    code = (
        "import sys, tests.without_annexes; from megatron_dppo.__main__ import main; "
        f"sys.exit(main(['train', {str(config)!r}, '--check']))"
    )
    done = run(core, "-c", code)
    assert done.returncode == 0, done.stderr


def test_pure_tests_of_the_core_pass_without_the_annexes(core):
    files = core_tests(set(PURE))
    assert len(files) == len(PURE)
    done = run(core, "-m", "pytest", "-q", "-p", "tests.without_annexes", "-p", "no:cacheprovider", *files)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_core_has_no_name_of_an_annex_in_its_code():
    for path in (ROOT / "megatron_dppo").rglob("*.py"):
        if path.relative_to(ROOT / "megatron_dppo").parts[0] in ANNEXES:
            continue
        texts = [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert not [t for t in texts for name in ANNEXES if f"megatron_dppo.{name}" in t], path
