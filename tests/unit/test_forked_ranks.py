"""Ranks that are forked from one process: how they start, end, and are told apart."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_dppo.launch import node_ranks
from megatron_dppo.launch.forked_ranks import ForkedRankGroup, shares_imports
from megatron_dppo.logging import failure_mark
from megatron_dppo.system.secret_variables import split_environment
from tests.messages import mentions
from tests.patience import family_of, happens

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start_group(tmp_path, monkeypatch):
    """A function that starts three ranks, which end as ``how`` says. The fixture kills them after the test."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_TOKEN", "hf-4711")
    groups = []

    def start(how: str) -> ForkedRankGroup:
        config = tmp_path / "config"
        config.write_text(how)
        outputs = [tmp_path / f"rank{rank}.out" for rank in range(3)]
        command = [sys.executable, "-m", "tests.unit.forked_rank", str(config)]
        group = ForkedRankGroup(command, outputs, 1, cores=1)
        group.start()
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.kill()


def outputs_of(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("rank?.out"))]


def test_each_rank_has_its_variables_its_output_and_the_keys(start_group, tmp_path):
    group = start_group("ends")
    assert happens(group.ended)
    assert group.codes() == [0, 0, 0]
    expected = [f"{rank} {rank} 3 hf-4711 False True True\n" for rank in range(3)]
    assert outputs_of(tmp_path) == expected


def test_a_killed_rank_is_the_failure(start_group):
    group = start_group("killed")
    assert happens(lambda: group.failures(0.0))
    (failure,) = group.failures(0.0)
    assert (failure.rank, failure.code) == (1, -signal.SIGKILL)


def test_ranks_start_again_from_the_same_process(start_group, tmp_path):
    group = start_group("killed once")
    server = group._server.process.pid
    assert happens(lambda: group.failures(0.0) and all(outputs_of(tmp_path)))
    first_pids = {rank.pid for rank in group._ranks}
    group.clear()
    group.start(2)
    assert happens(group.ended)
    assert group.codes() == [0, 0, 0]
    assert group._server.process.pid == server
    assert len(outputs_of(tmp_path)) == 3
    assert not first_pids & {rank.pid for rank in group._ranks}
    assert not any(psutil.pid_exists(pid) for pid in first_pids)


def test_an_error_of_a_rank_is_in_its_output(start_group, tmp_path):
    group = start_group("raises")
    assert happens(lambda: group.failures(0.0))
    (failure,) = group.failures(0.0)
    assert (failure.rank, failure.code) == (1, 1)
    assert mentions(failure.output.read_text(), "ValueError")


def test_ranks_are_cleared_during_the_imports(tmp_path, monkeypatch):
    (tmp_path / "endless_library.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    outputs = [tmp_path / f"rank{rank}.out" for rank in range(3)]
    command = [sys.executable, "-m", "endless_library"]
    group = ForkedRankGroup(command, outputs, 1, cores=1)
    group.start()
    try:
        group.clear()
        assert group.codes() == [-signal.SIGKILL] * 3
    finally:
        group.kill()


def test_a_stop_reaches_every_rank(start_group, tmp_path):
    group = start_group("waits")
    assert happens(lambda: all(outputs_of(tmp_path)) and len(outputs_of(tmp_path)) == 3)
    group.ask_to_stop()
    assert happens(lambda: None not in group.codes())
    assert group.codes() == [-signal.SIGTERM] * 3


def test_a_dead_server_takes_its_ranks_along(start_group, tmp_path):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    group = start_group("server")
    assert happens(lambda: group.failures(0.0))
    (failure,) = group.failures(0.0)
    assert (failure.rank, failure.code) == (0, -signal.SIGKILL)
    group.kill()
    children = psutil.Process().children(recursive=True)
    remaining = [child for child in children if child.pid not in before]
    assert not [child for child in remaining if child.status() != psutil.STATUS_ZOMBIE]


def test_kill_ends_every_process(start_group, tmp_path):
    group = start_group("waits")
    assert happens(lambda: len(outputs_of(tmp_path)) == 3)
    pids = family_of(group._server.process.pid)
    group.kill()
    assert happens(lambda: not any(psutil.pid_exists(pid) for pid in pids if pid != os.getpid()))


def test_ranks_share_imports_where_there_are_several_and_no_gpu():
    assert shares_imports(2, 0)
    assert not shares_imports(1, 0)
    assert not shares_imports(2, 2)


def run_host(tmp_path, number: int, how: str) -> subprocess.CompletedProcess:
    """Run host ``number`` of two hosts, each with two ranks."""
    config = tmp_path / "config"
    config.write_text(how)
    variables = {"NODE_RANK": str(number), "WORLD_SIZE": "4", "PYTHONPATH": str(ROOT)}
    plain, secrets = split_environment({**os.environ, **variables, "HF_TOKEN": "hf-4711"})
    command = [sys.executable, "-m", node_ranks.MODULE, "2", "tests.unit.forked_rank", str(config)]
    return subprocess.run([*command, str(tmp_path)], env=plain, input=secrets, check=False)


def test_a_host_of_several_forks_its_own_ranks(tmp_path):
    assert run_host(tmp_path, 1, "ends").returncode == 0
    expected = [f"{rank} {rank - 2} 4 hf-4711 False True True\n" for rank in (2, 3)]
    assert outputs_of(tmp_path) == expected


def test_a_host_ends_with_its_first_rank_that_fails_and_marks_it(tmp_path):
    assert run_host(tmp_path, 0, "killed").returncode == 128 + signal.SIGKILL
    assert failure_mark(tmp_path / "rank1.out").exists()
    assert not failure_mark(tmp_path / "rank0.out").exists()
