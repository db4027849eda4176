"""The core in a copy of the clone without the annexes, ``cluster/`` and ``diagnostics/``."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.runs import write_material
from tests.patience import run_patiently
from tests.ranks import ROOT
from tests.unit.test_layers import ANNEXES, imported

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


def first_party_files(path: Path) -> set[Path]:
    """The files of tests/, tools/ and examples/ that ``path`` imports, directly or by other such files, and itself."""
    files: set[Path] = set()
    remaining_files = [path]
    while remaining_files:
        file = remaining_files.pop()
        if file in files:
            continue
        files.add(file)
        for name in imported(file):
            module = ROOT.joinpath(*name.split("."))
            if name.split(".")[0] in ("tests", "tools", "examples"):
                candidates = (
                    module.with_suffix(".py"),
                    module / "__init__.py",
                    module.parent.with_suffix(".py"),
                )
                remaining_files += [candidate for candidate in candidates if candidate.is_file()]
    return files


def uses_annex(path: Path) -> bool:
    """Whether a test file, or a file of this repository that it imports, names a module of an annex."""
    texts = [file.read_text() for file in first_party_files(path)]
    return any(f"megatron_dppo.{name}" in text for text in texts for name in ANNEXES)


def core_tests() -> list[str]:
    """The unit tests of the core: those that use no annex, except this file, which copies the core."""
    paths = sorted((ROOT / "tests" / "unit").glob("test_*.py"))
    return [
        f"tests/unit/{path.name}"
        for path in paths
        if path.name != Path(__file__).name and not uses_annex(path)
    ]


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


def run_tests(core: Path, files: Sequence[str], timeout: float) -> None:
    plugins = ("-p", "tests.without_annexes", "-p", "no:cacheprovider")
    done = run(core, "-m", "pytest", "-q", "-m", "not slow", *plugins, *files, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:]


def test_pure_tests_of_the_core_pass_without_the_annexes(core):
    run_tests(core, [f"tests/unit/{name}.py" for name in PURE], timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_unit_test_of_the_core_passes_without_the_annexes(core):
    run_tests(core, core_tests(), timeout=1800)


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
