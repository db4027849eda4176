"""Slurm steps: their command lines, their ranks, and srun's messages about their ends."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron_dppo.cluster.slurm.commands import allocation_variables
from megatron_dppo.launch.placement import Host
from megatron_dppo.launch.srun import (
    SrunLauncher,
    SrunProcess,
    StepForm,
    adopt_slurm_rank,
    ended_tasks,
    port_base,
    step_environment,
    tasks_per_node,
)
from megatron_dppo.loop.ending import StopFlag
from megatron_dppo.system.lease import FencedError
from megatron_dppo.system.processes import (
    STOP_FILE_VARIABLE,
    StartedProcess,
    ask_to_stop,
    start_fed,
    withdraw_stop,
)
from tests.patience import happens

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "MASTER_ADDR": "10.0.0.1",
}


def test_a_task_of_a_step_is_a_rank():
    environment = dict(STEP)
    adopt_slurm_rank(environment)
    assert {name: environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
    }
    assert environment["LOCAL_WORLD_SIZE"] == "2"
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "21679")
    assert int(environment["OMP_NUM_THREADS"]) >= 1


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "0"},
        {"SLURM_STEP_ID": ""},  # a batch script
        {"SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {"SLURM_STEP_NUM_TASKS": "1"},  # perhaps a shell under srun --pty
    ],
)
def test_what_is_no_rank_of_a_step_is_left_alone(change):
    environment = STEP | change
    adopt_slurm_rank(environment)
    assert environment == STEP | change


def test_a_single_rank_of_our_own_step_is_one():
    environment = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    environment |= {"MEGATRON_DPPO_RANKS": "slurm", "MASTER_PORT": "9"}
    adopt_slurm_rank(environment)
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")
    assert environment["MASTER_PORT"] == "9"


def test_numbers_of_tasks_and_ports():
    assert tasks_per_node("8(x2),4") == [8, 8, 4]
    assert tasks_per_node("1") == [1]
    assert port_base("1") == 21_097
    assert port_base("93") == 21_000 + 93 * 97 - 9_000
    assert all(21_000 <= port_base(str(job)) < 30_000 for job in range(0, 10**6, 997))


def test_the_command_line_of_a_step():
    form = StepForm(("--container-image=i",), ("apptainer", "exec"))
    hosts = [Host("n1", "10.0.0.1", 8), Host("n2", "10.0.0.2", 8)]
    words = form.command(
        ["python", "-m", "x"], name="trainer", hosts=hosts, tasks_per_host=8,
        output="logs/rank%t.out", stdin=False,
    )  # fmt: skip
    assert words[0] == "srun"
    assert words[-6:] == ["--container-image=i", "apptainer", "exec", "python", "-m", "x"]
    for flag in (
        "--overlap", "--export=ALL", "--kill-on-bad-exit=1", "--nodes=2", "--ntasks=16",
        "--ntasks-per-node=8", "--nodelist=n1,n2", "--input=none", "--output=logs/rank%t.out",
    ):  # fmt: skip
        assert flag in words


def has_exited(step: StartedProcess) -> bool:
    return step.poll() is not None


def test_a_server_over_two_hosts_is_one_step(tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nfor word; do echo "$word"; done\ncat\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = [Host("n1", "10.0.0.1", 8), Host("n2", "10.0.0.2", 8)]
    log = tmp_path / "log"
    for count, label in ((1, 0), (2, 1)):
        launcher = SrunLauncher(hosts[:count], "server", StepForm(("--x",)))
        step = launcher.start(["python"], environment=os.environ, log=log, stdin=b"keys\n")
        assert happens(partial(has_exited, step))
        words = log.read_text().splitlines()
        assert words.count("--label") == label
        log.unlink()
    for flag in ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n2", "--x"):
        assert flag in words
    assert words[-2:] == ["python", "keys"]


def test_sbatchs_numbers_are_no_options_of_a_step():
    before = {"SLURM_NTASKS_PER_NODE": "8", "SLURM_EXPORT_ENV": "NONE", "SLURM_JOB_ID": "7"}
    assert step_environment(before) == {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    "name",
    [
        *("SRUN_CPUS_PER_TASK", "SRUN_CONTAINER", "SLURM_CONSTRAINT", "SLURM_WORKING_DIR"),
        *("SLURM_THREAD_SPEC", "SLURM_CORE_SPEC", "SLURM_HOSTFILE", "SLURM_GRES", "SLURM_NETWORK"),
        *("SLURM_TASK_PROLOG", "SLURM_UNBUFFEREDIO", "SLURMD_DEBUG", "SLURM_OPTION_OF_2030"),
        "SLURM_MEM_PER_CPU_HET_GROUP_1",
    ],
)
def test_no_option_of_srun_reaches_a_step(name):
    facts = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_CONF", "SLURM_RESTART_COUNT"), "7"),
        **{"SLURM_JOB_NODELIST_HET_GROUP_1": "n1", "NCCL_DEBUG": "INFO", "PATH": "/bin"},
    }
    assert step_environment({name: "1", **facts}) == facts


def test_a_job_inherits_nothing_of_the_allocation_that_it_is_submitted_from():
    outside = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_TIME_FORMAT": "relative", "HOME": "/root"}
    inside = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "100", "SLURM_GPUS_PER_NODE": "8"}
    assert allocation_variables(outside) == []
    assert allocation_variables({**outside, **inside}) == list(inside)


def test_whose_end_srun_saw_in_which_order():
    text = (
        "srun: error: n2: task 3: Exited with exit code 42\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
        "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
        "srun: error: n1: tasks 0-1: Killed\n"
        "srun: error: n2: tasks 2,4: Exited with exit code 1\n"
    )
    assert list(ended_tasks(text)) == [(3, 42), (0, 137), (1, 137), (2, 1), (4, 1)]
    assert list(ended_tasks("srun: Job step created\n")) == []


def test_a_stop_file_stops_as_the_signal_does(tmp_path: Path, monkeypatch):
    path = tmp_path / "stop"
    monkeypatch.setenv(STOP_FILE_VARIABLE, str(path))
    monkeypatch.setattr("megatron_dppo.system.processes._STOP_LOOK_S", 0.0)
    flag = StopFlag()
    assert not flag()
    withdraw_stop(path)
    assert not flag()
    ask_to_stop(path)
    assert flag()
    path.unlink()
    assert flag()


def test_a_step_of_a_heterogeneous_job_names_its_group():
    hosts = [Host("n2", "10.0.0.2", 8, 1)]
    words = StepForm().command(
        ["true"],
        name="server",
        hosts=hosts,
        tasks_per_host=1,
        output="o",
        stdin=True,
        tolerant=True,
    )
    assert words[:2] == ["srun", "--het-group=1"]
    assert {"--input=all", "--kill-on-bad-exit=0"} <= set(words)


def taken_over() -> None:
    raise FencedError("another start of this run took over")


EXITS_7_ON_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), sys.exit(7)))
print(sys.stdin.read(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("fence", "code"), [(lambda: None, 7), (taken_over, -9)])
def test_an_srun_of_a_start_that_was_succeeded_says_nothing_to_slurm(
    tmp_path, monkeypatch, fence, code
):
    """Slurm may have given the step's number to a step of the next attempt, which srun would then end."""
    srun = tmp_path / "srun"
    srun.write_text(f"#!{sys.executable}\n{EXITS_7_ON_SIGTERM}")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    form, log = StepForm(fence=fence), tmp_path / "log"
    launcher = SrunLauncher([Host("n1", "10.0.0.1", 8)], "server", form)
    step = launcher.start(["python"], environment=os.environ, log=log, stdin=b"keys")
    assert happens(lambda: log.read_text().endswith("\n"))
    step.stop(20)
    assert step.poll() == code


@pytest.mark.parametrize(
    ("kind", "how", "code"),
    [
        (StartedProcess, "stop", 7),
        (StartedProcess, "kill", -9),
        (SrunProcess, "stop", 7),
        (SrunProcess, "kill", 7),  # srun must live to end its tasks
        (partial(SrunProcess, fence=taken_over), "stop", -9),  # the tasks are another attempt's
        (partial(SrunProcess, fence=taken_over), "kill", -9),
    ],
)
def test_a_step_is_ended_through_its_srun_and_a_command_by_force(tmp_path, kind, how, code):
    log = tmp_path / "log"
    command = [sys.executable, "-c", EXITS_7_ON_SIGTERM]
    process = kind(start_fed(command, environment=os.environ, log=log, stdin=b"keys"))
    assert happens(lambda: log.read_text().endswith("\n"))
    process.stop(20) if how == "stop" else process.kill()
    assert process.poll() == code
    assert log.read_text() == "keys\n" + ("told\n" if code == 7 else "")
    process.kill()
