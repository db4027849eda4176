"""The command ``megatron-dppo``: its table, and that it hands over what it is given."""

import subprocess
import sys
import tomllib

import pytest

from megatron_dppo import __version__
from megatron_dppo.__main__ import COMMANDS, main
from tests.ranks import ROOT

HEAVY = ("torch", "numpy", "yaml", "rich", "pydantic")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_dppo", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_help_names_every_command_and_imports_nothing_heavy():
    code = (
        "import sys; from megatron_dppo.__main__ import main; assert main(['--help']) == 0; "
        f"sys.exit(any(name in sys.modules for name in {HEAVY!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [name for name in COMMANDS if f"\n  {name} " not in done.stdout] == []


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
    assert "expected one of train, supervised, demo" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown_and_the_exit_code_says_refused(capsys):
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: megatron-dppo COMMAND")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_of_its_own_under_its_name(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: megatron-dppo {name} ")


def test_the_exit_code_is_the_commands():
    refused = run("train", "nowhere.yaml")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert "nowhere.yaml" in refused.stderr
    assert run("plan", "--help").returncode == 0
