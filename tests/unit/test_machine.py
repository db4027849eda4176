"""Faults of a machine that lacks what a run's configuration needs."""

from __future__ import annotations

import sys

import pytest

from megatron_dppo.config.machine import Machine, this_machine
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.launch.machine_checks import machine_faults
from megatron_dppo.spec import Roles
from tests.messages import mentions
from tests.unit.config_files import minimal_config

GIB = 2**30


def machine(**values: int) -> Machine:
    return Machine(**{"cores": 2, "gpus": 0, "memory_bytes": 8 * GIB, "open_files": 1024, **values})


def faults_on(config: TrainConfig, machine: Machine) -> list[str]:
    return list(machine_faults(config, Roles.of(config), machine))


def test_a_small_run_fits_here(tmp_path):
    assert faults_on(minimal_config(tmp_path), this_machine()) == []
    assert this_machine().cores >= 1


def test_few_open_files_are_told_with_their_number(tmp_path):
    """A rank needs 128, and one for each of the 256 requests that it may have in flight."""
    assert faults_on(minimal_config(tmp_path), machine(open_files=384)) == []
    (problem,) = faults_on(minimal_config(tmp_path), machine(open_files=383))
    assert mentions(problem, "open files", 383, 384, "ulimit -n")
    replays = minimal_config(tmp_path, rollout={"replay_from": str(tmp_path)})
    assert faults_on(replays, machine(open_files=128)) == []


def test_gpus_of_ranks(tmp_path):
    settings = minimal_config(tmp_path, parallel={"world_size": 4})
    (problem,) = faults_on(settings, machine(gpus=3))
    assert mentions(problem, "GPUs", 4, 3)
    assert faults_on(settings, machine(gpus=4)) == []


def test_cores_where_there_is_no_gpu(tmp_path):
    settings = minimal_config(tmp_path, parallel={"world_size": 15}, engine={"servers": 2})
    (problem,) = faults_on(settings, machine())
    assert mentions(problem, "run.processes_per_core", 8, 17)
    assert faults_on(settings, machine(cores=3)) == []
    sections = {"parallel": {"world_size": 15}, "engine": {"servers": 2}}
    allowed = minimal_config(tmp_path, **sections, run={"processes_per_core": 9})
    assert faults_on(allowed, machine()) == []
    replayed = minimal_config(tmp_path, parallel={"world_size": 16}, rollout={"replay_from": "x"})
    assert faults_on(replayed, machine()) == []


DISK = {"strategy": "disk"}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"parallel": {"interface": "nowhere0"}}, "parallel.interface: got 'nowhere0', expected a net"),
        ({"engine": {"python": "/nowhere/python"}}, "engine.python: got '/nowhere/python', expected a"),
        ({"engine": {"python": "/bin/true"}}, "engine.python: got '/bin/true', expected a Python"),
        ({"engine": {"python": "/"}}, "engine.python: got '/', expected a Python interpreter"),
        ({"engine": {"host": "203.0.113.9"}}, "engine.host: got '203.0.113.9', expected an address of"),
        ({"engine": {"host": "no.such.host."}}, "engine.host: got 'no.such.host.', expected an address"),
        ({"weight_sync": {**DISK, "directory": "/proc"}}, "weight_sync.directory: /proc can't be written"),
        ({"weight_sync": {**DISK, "directory": "/dev/null"}}, "weight_sync.directory: /dev/null can't be"),
        ({"run": {"directory": "/proc/run", "steps": 1}}, "run.directory: /proc can't be written"),
    ],
)  # fmt: skip
def test_what_the_configuration_names_is_on_this_machine(tmp_path, sections, problem):
    (fault,) = faults_on(minimal_config(tmp_path, **sections), this_machine())
    assert fault.startswith(problem)


def test_an_interpreter_without_the_servers_packages_is_told(tmp_path):
    """With -E and -S Python ignores PYTHONPATH and site-packages. ``engine.python`` takes no options, so a script adds
    them."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd /; exec {sys.executable} -E -S "$@"\n')
    python.chmod(0o755)
    for servers, lacking in {1: "megatron_dppo, sglang", 2: "megatron_dppo, sglang, smg"}.items():
        settings = minimal_config(tmp_path, engine={"python": str(python), "servers": servers})
        (fault,) = faults_on(settings, this_machine())
        assert fault == f"engine.python: got {str(python)!r}, which lacks {lacking}"


def test_what_starts_nothing_here_needs_no_python_and_no_disk(tmp_path):
    replayed = {"replay_from": "x"}
    settings = minimal_config(
        tmp_path,
        rollout=replayed,
        engine={"python": "/nowhere", "host": "203.0.113.9"},
        weight_sync={**DISK, "directory": "/proc"},
    )
    assert faults_on(settings, this_machine()) == []
    engine = {"urls": ["http://10.0.0.1:3000"], "python": "/nowhere", "host": "203.0.113.9"}
    assert faults_on(minimal_config(tmp_path, engine=engine), this_machine()) == []
