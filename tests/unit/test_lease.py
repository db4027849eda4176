"""The lease on a run's folder, with real processes: which starts get it, are refused, or are fenced later."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.system.lease import (
    Beat,
    Fence,
    FencedError,
    Holder,
    Lease,
    LeaseError,
    LeaseFiles,
)
from tests.messages import mentions
from tests.patience import happens

ROOT = Path(__file__).resolve().parents[2]
TAKE_LEASE = """
import sys, time
from megatron_dppo.system.lease import Lease
from megatron_dppo.system.lease import LeaseError
folder, begin, ending = sys.argv[1], float(sys.argv[2]), sys.argv[3]
lease = Lease(folder, print, renew_s=0.05)
time.sleep(max(0, begin - time.time()))
try:
    lease.take()
except LeaseError as error:
    sys.exit(f"refused: {error}")
print("taken", lease.fence.nonce, flush=True)
if ending == "released":
    lease.release()
else:
    sys.stdin.read()
"""


class Starters:
    """Processes that take the lease on ``folder`` and print ``taken <nonce>``, or fail."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[subprocess.Popen[str]] = []

    def start(self, begin: float = 0.0, ending: str = "stays") -> subprocess.Popen[str]:
        self.all.append(
            subprocess.Popen(
                [sys.executable, "-c", TAKE_LEASE, str(self.folder), str(begin), ending],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )
        )  # fmt: skip
        return self.all[-1]

    def start_holder(self) -> subprocess.Popen[str]:
        holder = self.start()
        assert holder.stdout is not None
        assert holder.stdout.readline().startswith("taken")
        return holder


@pytest.fixture
def starters(tmp_path: Path) -> Iterator[Starters]:
    all_starters = Starters(tmp_path)
    yield all_starters
    for process in all_starters.all:
        process.kill()
        process.communicate()


def install_foreign_holder(folder: Path, **changes: Any) -> tuple[LeaseFiles, Holder]:
    """Give the lease of ``folder`` to a process on another machine."""
    holder = replace(Holder.of_this_process(), host="far", boot="another", **changes)
    files = LeaseFiles(folder)
    files.write_beat(holder, Beat(7))
    files.install(holder)
    return files, holder


def lease_of(folder: Path, lines: list[str] | None = None, patience_s: float = 0.3) -> Lease:
    return Lease(folder, (lines if lines is not None else []).append, patience_s=patience_s)


def test_the_file_says_who_holds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "blue")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    with Lease(tmp_path) as lease:
        content = json.loads((tmp_path / "lease.json").read_text())
        lease.fence.check()
    assert content["pid"] == os.getpid()
    assert content["host"] == socket.gethostname()
    assert content["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (content["job"], content["attempt"]) == ("12@blue", 3)
    assert content["nonce"] == lease.fence.nonce


def test_a_living_holder_is_named_and_not_touched(starters: Starters) -> None:
    holder = starters.start_holder()
    before = (starters.folder / "lease.json").read_text()
    message = (
        f"in use by the run of process {holder.pid} on {socket.gethostname()}; "
        rf"end that one \(kill {holder.pid}, on {socket.gethostname()}\)"
    )
    with pytest.raises(LeaseError, match=message):
        Lease(starters.folder).take()
    assert (starters.folder / "lease.json").read_text() == before


def test_a_killed_holder_is_succeeded_at_once(starters: Starters) -> None:
    holder = starters.start_holder()
    holder.send_signal(signal.SIGKILL)
    lines: list[str] = []
    lease = lease_of(starters.folder, lines, patience_s=60)
    while holder.returncode is None and not _is_zombie(holder.pid):
        time.sleep(0.01)
    lease.take()  # the holder is a zombie by now: nobody has waited for it
    lease.release()
    assert lines == []


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_another_process_under_the_holders_id_is_not_the_holder(tmp_path: Path) -> None:
    """The lease names this process's id, but an earlier start time: that process has ended."""
    this_process = Holder.of_this_process()
    LeaseFiles(tmp_path).install(
        replace(this_process, nonce="0" * 16, pid_start=this_process.pid_start - 1)
    )
    with Lease(tmp_path) as lease:
        lease.fence.check()


@pytest.mark.parametrize("before", ["nobody", "released", "killed"])
def test_of_racing_starts_exactly_one_wins(starters: Starters, before: str) -> None:
    if before == "released":
        starters.start(ending="released").communicate()
    elif before == "killed":
        starters.start_holder().kill()
        starters.all[0].wait()
    begin = time.time() + 1.0
    racers = [starters.start(begin) for _ in range(6)]
    winners = []
    for process in racers:
        assert process.stdout is not None
        line = process.stdout.readline()
        if line.startswith("taken"):
            winners.append(line.split()[1])
    assert len(winners) == 1
    assert json.loads((starters.folder / "lease.json").read_text())["nonce"] == winners[0]
    refusals = [process.communicate()[1] for process in racers]  # closes the winner's input
    assert sum(text.startswith("refused: ") for text in refusals) == 5


def test_a_holder_elsewhere_is_succeeded_when_its_heartbeat_stands_still(tmp_path: Path) -> None:
    _, holder = install_foreign_holder(tmp_path)
    LeaseFiles(tmp_path).write_beat(holder, Beat(7))
    lines: list[str] = []
    lease = lease_of(tmp_path, lines)
    began = time.monotonic()
    lease.take()
    assert time.monotonic() - began >= 0.3
    lease.release()
    assert len(lines) == 1
    assert mentions(lines[0], os.getpid(), "far", 7, "0 s")


def test_a_holder_elsewhere_whose_heartbeat_changes_is_refused(tmp_path: Path) -> None:
    """One change is enough, even if it comes just before the patience ends."""
    files, holder = install_foreign_holder(tmp_path)

    def announce(line: str) -> None:
        files.write_beat(holder, Beat(8))

    with pytest.raises(LeaseError, match="far"):
        Lease(tmp_path, announce, patience_s=0.0).take()
    assert files.holder() == holder


def test_a_holder_elsewhere_that_gave_back_is_succeeded_at_once(tmp_path: Path) -> None:
    files, holder = install_foreign_holder(tmp_path)
    files.write_beat(holder, Beat(8, ended=True))
    lines: list[str] = []
    with lease_of(tmp_path, lines, patience_s=60):
        assert lines == []


@pytest.mark.parametrize(
    ("job", "attempt", "at_once"), [("12", 0, True), ("12", 1, False), ("13", 0, False)]
)
def test_an_earlier_attempt_of_the_same_job_is_succeeded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, attempt: int, at_once: bool
) -> None:
    install_foreign_holder(tmp_path, job=job, attempt=attempt)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    lines: list[str] = []
    with lease_of(tmp_path, lines):
        assert (lines == []) is at_once


def test_a_start_that_died_between_its_claim_and_the_lease_is_succeeded(tmp_path: Path) -> None:
    this_process = Holder.of_this_process()
    dead = replace(this_process, nonce="0" * 16, pid_start=this_process.pid_start - 1)
    dead_claimant = replace(dead, nonce="1" * 16)
    files = LeaseFiles(tmp_path)
    files.install(dead)
    assert files.claim(dead, dead_claimant)
    assert not files.claim(dead, this_process)
    with Lease(tmp_path) as lease:
        lease.fence.check()
        # The files of earlier starts are gone. The only file is the holder's own beat.
        assert [p.name for p in (tmp_path / "lease").iterdir()] == [f"{lease.fence.nonce}.beat"]


def test_ranks_of_an_earlier_start_under_the_same_lease_are_fenced(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        lease.fence_other_starts(1)
        first, second = (Fence(tmp_path, lease.fence.nonce, start) for start in (1, 2))
        first.check()
        lease.fence_other_starts(2)
        second.check()
        lease.fence.check()
        with pytest.raises(FencedError, match=r"start 2.*start 1"):
            first.check()
        (tmp_path / "lease" / f"{lease.fence.nonce}.start").unlink()
        with pytest.raises(FencedError):
            second.check()


def test_a_living_claimant_is_the_one_in_the_way(tmp_path: Path, starters: Starters) -> None:
    """The holder has ended. A process that lives has claimed its lease, and has not taken it yet."""
    this_process = Holder.of_this_process()
    files = LeaseFiles(tmp_path)
    files.install(replace(this_process, nonce="0" * 16, pid_start=this_process.pid_start - 1))
    files.claim(files.holder(), replace(this_process, nonce="1" * 16))
    with pytest.raises(LeaseError, match=f"process {this_process.pid} "):
        Lease(tmp_path).take()


def test_a_claim_on_a_lease_that_was_replaced_meanwhile_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a race of two starts, the slow one claims the lease after the winner has removed its own claim. So the second
    claim succeeds too, but the slow start finds the winner and gives up."""
    this_process = Holder.of_this_process()
    dead = replace(this_process, nonce="0" * 16, pid_start=this_process.pid_start - 1)
    winner = replace(this_process, nonce="1" * 16)
    LeaseFiles(tmp_path).install(dead)
    claim = LeaseFiles.claim

    def slow_claim(files: LeaseFiles, last: Holder | None, successor: Holder) -> bool:
        if last == dead:
            claim(files, dead, winner)
            files.install(winner)
        return claim(files, last, successor)

    monkeypatch.setattr(LeaseFiles, "claim", slow_claim)
    with pytest.raises(LeaseError, match="use"):
        Lease(tmp_path).take()
    assert LeaseFiles(tmp_path).holder() == winner


def test_a_succeeded_start_is_fenced_and_its_heartbeat_changes_nothing(tmp_path: Path) -> None:
    first = Lease(tmp_path, renew_s=0.02)
    first.take()
    first.fence.check()
    files = LeaseFiles(tmp_path)
    second = replace(
        Holder.of_this_process(), nonce="2" * 16, host="b", pid=88, job="12", attempt=1
    )
    files.install(second)
    assert happens(lambda: first.loss)
    message = (
        "another start of this run took over: process 88 on b (Slurm job 12, attempt 1); "
        "this one stops here"
    )
    assert first.loss == message
    own_beat = tmp_path / "lease" / f"{first.fence.nonce}.beat"
    own_beat.unlink(missing_ok=True)  # the first start's last beat may come after the takeover
    first.release()
    with pytest.raises(FencedError, match=r"\b88 on b\b"):
        first.fence.check()
    assert files.holder() == second
    assert not own_beat.exists()
    assert files.beat(second) == Beat()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"nonce": "../../../etc"}', json.dumps({"nonce": 3}), "\udcff"]
)
def test_a_damaged_lease_is_refused_and_fences(tmp_path: Path, content: str) -> None:
    (tmp_path / "lease.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(LeaseError, match=r"lease.json"):
        Lease(tmp_path).take()
    with pytest.raises(FencedError, match="tell"):
        Fence(tmp_path, "0" * 16).check()


@pytest.mark.parametrize("content", [b"\xff\n", "\u00b2".encode(), b"", b"-1"])
def test_a_damaged_number_of_a_start_fences(tmp_path: Path, content: bytes) -> None:
    lease = Lease(tmp_path)
    lease.take()
    lease.fence_other_starts(1)
    try:
        (start_file,) = (tmp_path / "lease").glob("*.start")
        start_file.write_bytes(content)
        with pytest.raises(FencedError, match="tell"):
            Fence(tmp_path, lease.fence.nonce, 1).check()
    finally:
        lease.release()


@pytest.mark.parametrize("name", ["lease.json", "lease/first.next/holder.json"])
def test_a_folder_in_a_files_place_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(LeaseError, match="json"):
        Lease(tmp_path).take()


@pytest.mark.parametrize("name", ["lease", "lease/first.next"])
def test_a_file_in_a_folders_place_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    with pytest.raises(LeaseError, match=rf"{name}.*: "):
        Lease(tmp_path).take()


def test_a_nonce_never_becomes_a_path(tmp_path: Path) -> None:
    content = {**asdict(Holder.of_this_process()), "nonce": "../../secret"}
    (tmp_path / "lease.json").write_text(json.dumps(content))
    with pytest.raises(LeaseError, match="nonce"):
        LeaseFiles(tmp_path).holder()


def test_without_its_file_nobody_holds_the_run(tmp_path: Path) -> None:
    with pytest.raises(FencedError, match=r"lease.json"):
        Fence(tmp_path, "0" * 16).check()
