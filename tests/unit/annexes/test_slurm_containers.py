"""The exact srun command lines of ranks and servers, without a container and in each kind of container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_dppo.cluster.slurm.site import ContainerConfig, SiteConfig
from megatron_dppo.engine.process import EngineProcess, Runtime
from megatron_dppo.launch.local import rank_command
from megatron_dppo.launch.placement import Allocation, Host, place
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.srun import SrunLauncher, SrunRanks
from megatron_dppo.spec import Roles, RunSpec
from tests.patience import happens, run_patiently
from tests.unit.test_engine_server import run_config

HOSTS = tuple(Host(f"n{i}", f"10.0.0.{i}", 8) for i in (1, 2))
COMMON = "--overlap --export=ALL --mpi=none --cpu-bind=none --kill-on-bad-exit=1 --wait=0"
PYXIS = (
    "--container-image={image} --container-mounts=/here:/here,/data:/data "
    "--container-workdir=/here --no-container-mount-home"
)
APPTAINER = "apptainer exec --nv --pwd=/here --bind=/here:/here --bind=/data:/data {image}"


def container(kind: str) -> ContainerConfig:
    if kind == "none":
        return ContainerConfig()
    images = {"image": "train.sqsh", "server_image": "serve.sqsh"}
    return ContainerConfig.model_validate({"kind": kind, **images, "mounts": ["/data:/data"]})


def around(kind: str, image: str) -> str:
    """Return the words between srun's own options and the program."""
    return {"none": "", "pyxis": PYXIS, "apptainer": APPTAINER}[kind].format(image=image)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run's directory, and an ``srun`` on the path that prints its words."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\ncat > /dev/null\nfor word; do echo "$word"; done\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "logs").mkdir()
    return RunDirectory(tmp_path)


def read_words(path: Path, last: str) -> list[str]:
    """Wait for the ``last`` word that the fake srun writes to ``path``, and return all its words."""
    assert happens(lambda: path.read_text().splitlines()[-1:] == [last]), path.read_text()
    return [line for line in path.read_text().splitlines() if not line.startswith("---")]


@pytest.mark.parametrize("kind", ["none", "pyxis", "apptainer"])
def test_the_step_of_the_ranks(run: RunDirectory, kind: str) -> None:
    container_config = container(kind)
    python = "/env/bin/python" if kind == "none" else container_config.interpreter
    site = SiteConfig(container=container_config, srun_flags=["--gres=none"])
    form = site.form("/here", server=False)
    command = rank_command("megatron_dppo.train", run, python)
    SrunRanks(command, run, place(Roles(16), Allocation(HOSTS, 21000)), form, {}).start()
    program = f"{python} -m megatron_dppo.train {run.config}"
    assert (
        read_words(run.step_messages, str(run.config))
        == (
            f"{COMMON} --job-name=trainer --nodes=2 --ntasks=16 --ntasks-per-node=8 --distribution=block "
            f"--nodelist=n1,n2 --input=all --output={run.path}/logs/rank%t.out --open-mode=append "
            f"--gres=none {around(kind, 'train.sqsh')} {program}"
        ).split()
    )


@pytest.mark.parametrize("kind", ["none", "pyxis", "apptainer"])
def test_the_step_of_a_server_with_a_python_of_its_own(run: RunDirectory, kind: str) -> None:
    log = run.server_log("engine0", 1)
    form = SiteConfig(container=container(kind)).form("/here", server=True)
    launcher = SrunLauncher(HOSTS[1:], "server", form)
    config = run_config(run.path)
    server = EngineProcess(
        config,
        RunSpec.of_checked(config).servers,
        port=21003,
        log_path=log,
        seed=1,
        api_key="secret",
        admin_api_key="secret",
        host="10.0.0.2",
        runtime=Runtime(launcher, "/engine/bin/python"),
    )
    server.start()
    program = f"/engine/bin/python -m megatron_dppo.engine.launch_server --config {run.path}/logs/engine0-1.yaml"
    srun_words = read_words(log, f"{run.path}/logs/engine0-1.yaml")
    assert (
        srun_words
        == (
            f"{COMMON} --job-name=server --nodes=1 --ntasks=1 --ntasks-per-node=1 --distribution=block "
            f"--nodelist=n2 --input=all --output={log} --open-mode=append {around(kind, 'serve.sqsh')} {program}"
        ).split()
    )
    assert "secret" not in " ".join(srun_words)
    server.stop()


def test_a_prologue_runs_before_the_command_and_hands_it_its_standard_input(tmp_path: Path) -> None:
    lines = "export A='x y'\ncat\nB=1"
    prefix = SiteConfig(prologue=lines).form("/here", server=False).prefix
    words = [*prefix, "sh", "-c", "echo $A $1 $(cat)", "0", "a b"]
    result = run_patiently(words, text_input="keys")
    assert (result.returncode, result.stdout) == (0, "x y a b keys\n")
    failing = SiteConfig(prologue="module load nothing-of-that-name\ntrue").form("/", server=True)
    result = run_patiently([*failing.prefix, "touch", tmp_path / "ran"])
    assert result.returncode
    assert "prologue: failed: module load nothing-of-that-name" in result.stderr
    assert not (tmp_path / "ran").exists()


def test_a_prologue_comes_before_apptainer_and_inside_of_pyxis() -> None:
    for kind, before in (("apptainer", "apptainer"), ("pyxis", None), ("none", None)):
        site = SiteConfig(prologue="true", container=container(kind))
        prefix = site.form("/here", server=False).prefix
        assert prefix[:2] == ("bash", "--login")
        assert (prefix[5:] or (None,))[0] == before
    assert SiteConfig(prologue=" \n").form("/here", server=False).prefix == ()
