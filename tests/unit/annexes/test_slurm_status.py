"""The output of ``status`` and ``logs`` for a folder of files that are written here."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.__main__ import main as console_main
from megatron_dppo.cluster.slurm.__main__ import main
from megatron_dppo.launch.attempts import Attempt, AttemptBook
from megatron_dppo.launch.logs import important_lines, log_lines
from megatron_dppo.launch.placement import LaunchError
from megatron_dppo.launch.run_state import UNKNOWN, JobState, describe_job, job_state, require_run
from megatron_dppo.launch.status import status_lines
from megatron_dppo.launch.stop_run import stop
from megatron_dppo.metrics.records import RECORDS_FILE, encode_record, remember_checkpoint

FIRST = Attempt("7", 0, "n1", ("n1", "n2"), started=100.0)
FAILED = replace(
    FIRST,
    why="failed",
    ended=160.0,
    detail="rank 3 exited\nwith code 42",
    excluded=(("n2", "DOWN"),),
)
SECOND = replace(FIRST, attempt=1, started=200.0)


@pytest.mark.parametrize(
    ("job", "attempts", "expected"),
    [
        (JobState("7", "PENDING", "Resources"), [], "job 7 waits (Resources)"),
        (
            JobState("7", "PENDING", "BeginTime"),
            [FAILED],
            "job 7 waits (BeginTime), to start again after: failed",
        ),
        (JobState("7", "RUNNING"), [FAILED, SECOND], "job 7 is running on n1, start 2"),
        (JobState("7", UNKNOWN, "no answer"), [FIRST], "job 7: Slurm can't be asked: no answer"),
        (JobState("7", None), [], "job 7 is gone and never started"),
        (JobState("7", None), [FAILED], "ended: failed; submit it again to resume"),
        (JobState("7", None), [FIRST], "ended: vanished; submit it again to resume"),
        (JobState("7", None), [replace(FIRST, why="done")], "ended: done"),
    ],
)
def test_the_state_in_a_line(job, attempts, expected):
    assert describe_job(job, attempts) == expected


def make_squeue_fail(folder: Path, error: str) -> None:
    """Write a ``squeue`` that fails with ``error``."""
    (folder / "squeue").write_text(f"#!/bin/sh\necho '{error}' >&2\nexit 1\n")
    (folder / "squeue").chmod(0o755)


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> Path:
    """The folder of a run whose job has ended: Slurm does not know it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    make_squeue_fail(tmp_path, "slurm_load_jobs error: Invalid job id specified")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "supervisor.log").write_text(
        "2026-01-01 10:00:00.000 [supervisor] INFO m: started\n"
        "2026-01-01 10:00:02.000 [supervisor] ERROR m: rank 3 exited\n    Traceback\n"
    )
    (logs / "rank0.log").write_text(
        "2026-01-01 10:00:01.000 [rank0] WARNING m: odd\n"
        "2026-01-01 10:00:01.000 [rank0] WARNING py.warnings: /a/b.py:7: FutureWarning: soon\n"
    )
    (logs / "engine0-1.log").write_text("a\nb\n")
    (tmp_path / RECORDS_FILE).write_text(
        encode_record(4, {"reward/mean": 0.25, "eval/sums/accuracy": 0.5})
        + "\n"
        + encode_record(5, {"reward/mean": 0.375, "rollout/tokens_per_second": 1234.4})
        + "\n"
    )
    remember_checkpoint(tmp_path, 4)
    book = AttemptBook(tmp_path)
    book.begin(FIRST)
    book.end(FAILED)
    return tmp_path


def test_the_whole_status(run: Path):
    lines = list(status_lines(run))
    assert lines[0] == f"run: {run}"
    assert lines[1] == "state: ended: failed; submit it again to resume"
    assert lines[2].startswith("step: 5, reward 0.375")
    assert lines[2].endswith("tokens/s 1,234")
    assert lines[3] == "last checkpoint: step 4"
    assert lines[4] == "starts:"
    assert lines[5].startswith("  7-0  ")
    assert lines[5].endswith(
        "n1  failed after 60 s, checkpoint 0 -> 4, left out n2 (DOWN), rank 3 exited with code 42"
    )
    assert lines[6:] == [
        "log lines that matter:",
        "  2026-01-01 10:00:01.000 [rank0] WARNING m: odd",
        "  2026-01-01 10:00:02.000 [supervisor] ERROR m: rank 3 exited",
    ]


def test_a_run_whose_job_can_not_be_asked_for_is_not_called_ended(run: Path):
    make_squeue_fail(run, "Unable to contact slurm controller (connect failure)")
    text = "\n".join(status_lines(run))
    assert "job 7: " in text
    assert "squeue" in text
    assert "Unable to contact slurm controller" in text
    assert "ended" not in text
    assert "vanished" not in text
    assert job_state(run, AttemptBook(run).all()).state == UNKNOWN


def test_merged_logs_have_the_asked_number_of_lines(run: Path):
    records = [f"2026-01-01 10:00:00.000 [rank0] INFO m: {n}" for n in range(1000)]
    (run / "logs" / "rank0.log").write_text("\n".join(records) + "\n")
    assert log_lines(run, None, 900)[0] == records[-898]


def test_the_end_of_a_record_without_its_time_is_not_the_newest(run: Path):
    records = [f"2026-01-01 10:00:00.000 [rank0] INFO m: {n}" for n in range(399)]
    (run / "logs" / "rank0.log").write_text("\n".join(["lost", "rest", *records]) + "\n")
    lines = log_lines(run, None, 400)
    assert lines[-1] == "    Traceback"
    assert "rest" not in lines


def test_logs_by_time_and_by_name(run: Path):
    assert log_lines(run, None, 4) == [
        "2026-01-01 10:00:01.000 [rank0] WARNING m: odd",
        "2026-01-01 10:00:01.000 [rank0] WARNING py.warnings: /a/b.py:7: FutureWarning: soon",
        "2026-01-01 10:00:02.000 [supervisor] ERROR m: rank 3 exited",
        "    Traceback",
    ]
    assert log_lines(run, "engine0", 1) == [f"# {run}/logs/engine0-1.log", "b"]
    for number in (1, 12):  # the newest log is another rank's
        (run / "logs" / f"rank{number}.log").write_text(f"of rank {number}\n")
    assert log_lines(run, "rank1", 1) == [f"# {run}/logs/rank1.log", "of rank 1"]
    with pytest.raises(LaunchError, match=r"'rank7'; .*engine0-1.log, "):
        log_lines(run, "rank7", 1)
    assert important_lines(run, 1) == [
        "2026-01-01 10:00:02.000 [supervisor] ERROR m: rank 3 exited"
    ]


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_what_is_no_path_is_told_in_a_line(name: str):
    with pytest.raises(
        LaunchError, match=r"^'(x+\.\.\.|a.*) \(str\): |expected the folder of a run"
    ):
        require_run(name)


def test_a_folder_that_is_no_run_is_refused_and_left_alone(tmp_path: Path):
    with pytest.raises(LaunchError, match=r"\(run.directory\)"):
        require_run(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def local(run: Path):
    """The folder of a run without Slurm, and the process of this machine that holds its lease."""
    for path in (run / "attempts").iterdir():
        path.unlink()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield run, process
    process.kill()
    process.communicate()


HOLDER = """
import sys, time
from megatron_dppo.system.lease import Lease
with Lease(sys.argv[1]):
    print("held", flush=True)
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        pass
"""


def test_a_run_without_slurm_has_a_status_and_can_be_stopped(local, capsys):
    run, process = local
    assert console_main(["status", str(run)]) == 0
    output = capsys.readouterr().out
    assert f"state: runs as process {process.pid} on {socket.gethostname()}, since " in output
    assert "step: 5, reward 0.375" in output
    assert "rank 3 exited" in output
    assert console_main(["logs", str(run), "engine0"]) == 0
    assert capsys.readouterr().out == f"# {run}/logs/engine0-1.log\na\nb\n"
    assert console_main(["stop", str(run)]) == 0
    assert process.wait(60) == 0
    # ``watch`` returns when the run has ended, so at once here. Slurm's commands are the same.
    assert main(["watch", str(run), "--every=0.1"]) == 0
    assert "state: ended; the same command resumes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["stop", str(run)])
    assert "no process" in capsys.readouterr().err


def test_a_killed_run_without_slurm_vanished_and_one_elsewhere_can_not_be_asked(local):
    run, process = local
    lease = json.loads((run / "lease.json").read_text())
    (run / "lease.json").write_text(json.dumps({**lease, "host": "elsewhere"}))
    text = "\n".join(status_lines(run))
    assert f"state: started as process {process.pid} on elsewhere, " in text
    assert "which can't be asked from here" in text
    with pytest.raises(LaunchError, match="elsewhere"):
        stop(run)
    (run / "lease.json").write_text(json.dumps(lease))
    process.kill()
    process.wait()
    assert "state: ended: vanished; the same command resumes" in list(status_lines(run))


def test_the_folder_of_a_job_that_waits_is_slurms_whoever_held_it_before(local):
    run, _ = local
    (run / "squeue").write_text("#!/bin/sh\necho PENDING Resources\n")
    (run / "job").write_text("8\n")
    assert "state: job 8 waits (Resources)" in list(status_lines(run))
