"""The wheel: its files, and commands that run in any folder from the wheel alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest

from megatron_dppo.system import plugins
from tests.patience import run_patiently
from tests.ranks import ROOT
from tests.unit.test_layers import imported

ANYWHERE = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy: the clone gets no ``build/``, and the wheel no files of an earlier build."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("megatron_dppo", "examples"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(source / "wheels"), str(source)]
    built = run_patiently(command, 300)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (source / "wheels").iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel's files, as on ``sys.path`` of an environment."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_patiently(
        [sys.executable, *words], 240, cwd=folder, env={**ANYWHERE, "PYTHONPATH": str(installed)}
    )


def test_every_file_of_the_package_is_in_it(installed):
    package = ROOT / "megatron_dppo"
    files = {p.relative_to(package) for p in package.rglob("*") if p.is_file()}
    wanted = {p for p in files if p.suffix != ".pyc" and p.name != "README.md"}
    examples = ROOT / "examples"
    read = [*examples.glob("*/**/*.yaml"), *examples.glob("model_configs/*/config.json")]
    wanted |= {Path("examples") / p.relative_to(examples) for p in read}
    assert {Path("cluster/slurm/run.sbatch"), Path("vocab_parallel/row_stats.cpp")} <= wanted
    installed_package = installed / "megatron_dppo"
    assert {
        p.relative_to(installed_package) for p in installed_package.rglob("*") if p.is_file()
    } == wanted


def test_it_names_the_command_and_what_sglang_asks_for(installed):
    (entry_points,) = installed.glob("*.dist-info/entry_points.txt")
    parser = ConfigParser(delimiters="=")
    parser.read(entry_points)
    assert dict(parser["console_scripts"]) == {"megatron-dppo": "megatron_dppo.__main__:main"}
    assert list(parser["sglang.srt.platforms"]) == ["torch_cpu"]
    assert "sglang.srt.plugins" not in parser


def test_every_library_that_it_imports_is_declared(installed):
    """Exceptions are libraries that come with a declared one, and peers that are only measured for comparison."""
    (metadata,) = installed.glob("*.dist-info/METADATA")
    required = Parser().parse(metadata.open()).get_all("Requires-Dist")
    declared = {re.split(r"[\[<>=; ]", line)[0].replace("-", "_") for line in required}
    names = {
        name for path in (installed / "megatron_dppo").rglob("*.py") for name in imported(path)
    }
    libraries = {name.split(".")[0] for name in names} - {"megatron_dppo", *sys.stdlib_module_names}
    other_names = {"yaml": "pyyaml", "megatron": "megatron_core", "mlflow": "mlflow_skinny"}
    undeclared = {name for name in libraries if other_names.get(name, name) not in declared}
    with_declared_ones = {"triton", "sympy", "fastapi", "httpx", "latex2sympy2_extended"}
    """They come with torch (two), SGLang, huggingface_hub and math-verify."""
    peers = {"liger_kernel", "cut_cross_entropy"}
    optional_kernels = {"fla"}
    assert undeclared == with_declared_ones | peers | optional_kernels


def test_every_command_is_found_in_it(installed, tmp_path):
    code = (
        "from megatron_dppo.system import plugins\n"
        f"assert plugins.__file__.startswith({str(installed)!r}), plugins.__file__\n"
        "for entry in plugins.find_plugins(plugins.COMMANDS).values():\n"
        "    print(plugins.module_file(entry.module))"
    )
    listed = run(installed, tmp_path, "-c", code)
    assert listed.returncode == 0, listed.stderr
    origins = listed.stdout.split()
    assert len(origins) == len(plugins.find_plugins(plugins.COMMANDS))
    assert all(origin.startswith(str(installed)) for origin in origins)


def test_a_recipe_of_it_is_planned_in_any_folder(installed, tmp_path):
    recipe = installed / "megatron_dppo/examples/recipes/qwen3_30b_a3b_base_r3.yaml"
    words = ("plan", str(recipe), "--gpu", "h100", "--nodes", "4", "--json")
    planned = run(installed, tmp_path, "-m", "megatron_dppo", *words)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["fits"]


def test_the_gpu_check_runs_from_it(installed, tmp_path):
    words = ("gpu-check", "--only", "machine", "--directory", "check")
    checked = run(installed, tmp_path, "-m", "megatron_dppo", *words)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert (tmp_path / "check" / "gpu_check.md").is_file()
