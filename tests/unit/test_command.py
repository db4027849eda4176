"""The command ``megatron-dppo``: its table of commands, and that it passes arguments and exit codes on."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence

import pytest

from megatron_dppo import __version__
from megatron_dppo.__main__ import main
from megatron_dppo.system import plugins
from tests.integration.runs import write_material
from tests.patience import run_patiently
from tests.ranks import ROOT

COMMANDS = plugins.find_plugins(plugins.COMMANDS)
HEAVY = ("torch", "numpy", "yaml", "rich", "pydantic")
EXTRAS = (
    *("datasets", "gem", "mlflow", "openai", "openenv", "reasoning_gym"),
    *("sglang", "smg", "trackio", "verifiers", "wandb"),
)
"""Modules that only the runs import whose configuration needs them. Servers import theirs in other processes."""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_dppo", *words]
    return run_patiently(command, 120)


def imported_by(statement: str, names: Sequence[str]) -> tuple[list[str], str]:
    """Return which of ``names`` a fresh interpreter has imported after ``statement``, and the statement's output."""
    code = f"import sys; {statement}; print(*(n for n in {tuple(names)!r} if n in sys.modules))"
    result = run_patiently([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    *output, imported = result.stdout.splitlines()
    return imported.split(), "\n".join(output)


def test_help_names_every_command_and_imports_nothing_heavy():
    statement = "from megatron_dppo.__main__ import main; assert main(['--help']) == 0"
    imported, output = imported_by(statement, [*HEAVY, *EXTRAS])
    assert imported == []
    assert [name for name in COMMANDS if f"\n  {name} " not in output] == []


def test_the_package_alone_imports_nothing_heavy_and_a_check_no_extra(tmp_path):
    """A check of a start reads model, data and checkpoints, for which it needs torch."""
    assert imported_by("import megatron_dppo", [*HEAVY, *EXTRAS])[0] == []
    path = write_material(tmp_path)
    statement = f"from megatron_dppo.__main__ import main; assert main(['train', {str(path)!r}, '--check']) == 0"
    assert imported_by(statement, ["torch", *EXTRAS])[0] == ["torch"]


def test_the_plan_of_a_conversion_reads_a_config_without_torch():
    config = ROOT / "examples" / "model_configs" / "qwen3-1.7b-base"
    words = ["convert", "plan", "--hf-config", str(config)]
    statement = f"from megatron_dppo.__main__ import main; assert main({words!r}) == 0"
    imported, output = imported_by(statement, ["torch"])
    assert imported == []
    # 1,720,574,976 parameters in bfloat16.
    assert "One update moves 3.441 GB into the engine." in output


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-dppo {__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["megatron-dppo"] == "megatron_dppo.__main__:main"


def test_an_unknown_command_is_refused_in_a_line_with_the_nearest_name(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == (
        "error: megatron-dppo: no command 'trian'; did you mean 'train'?\n"
    )
    assert main(["zebra"]) == 2
    assert "expected one of train, supervised, evaluate, rollout" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown_and_the_exit_code_says_refused(capsys):
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: megatron-dppo COMMAND")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_of_its_own_under_its_name(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: megatron-dppo {name} ")


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "megatron_dppo"],
        ["-c", "import sys; from megatron_dppo.__main__ import main; sys.exit(main())"],
    ],
)
def test_no_command_imports_a_library_from_the_current_folder(tmp_path, words):
    for library in ("psutil", "rich", "yaml"):
        (tmp_path / f"{library}.py").write_text("raise SystemExit('planted')\n")
    command = [sys.executable, *words, "status", str(tmp_path)]
    result = run_patiently(command, 120, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert result.returncode == 2
    assert str(tmp_path) in result.stderr
    assert "planted" not in result.stderr + result.stdout


def test_the_exit_code_is_the_commands():
    result = run("train", "nowhere.yaml")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "nowhere.yaml" in result.stderr
    assert run("status", "--help").returncode == 0
