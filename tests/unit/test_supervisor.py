"""The supervisor with real child processes: every way in which a run can end, and that no process is left."""

import contextlib
import errno
import fcntl
import json
import os
import pty
import signal
import stat
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dppo.system.files import write_private
from megatron_dppo.system.lease import LeaseFiles
from tests.messages import mentions
from tests.patience import happens

ROOT = Path(__file__).resolve().parents[2]
PATIENT_S = 60.0
HEALTHY = "open(os.environ['HEALTHY'], 'w').close()\n"
SLEEP = "time.sleep(300)\n"
STAYS_UP = HEALTHY + SLEEP
OUT_OF_MEMORY = "sys.exit('out of memory')\n"
RANK = "rank = int(os.environ['RANK'])\n"
STOPS_CLEANLY = """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
note("ready")
while not asked:
    time.sleep(0.02)
note("saved")
"""


def wait_for_both_ranks(word: str) -> str:
    """Return code that waits until both ranks have noted ``word``."""
    return f"while not exists('notes') or read('notes').count({word!r}) < 2: time.sleep(0.02)\n"


class Run:
    """A supervised run in ``directory``. ``rank``, ``engine``: Python code of the processes. ``options``: other keys of
    the SPEC of ``supervised_run.py``.
    """

    def __init__(
        self,
        directory: Path,
        rank: str,
        engine: tuple[str, ...],
        *,
        other_engines: tuple[tuple[str, ...], ...] = (),
        output: int = subprocess.PIPE,
        **options: Any,
    ) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        defaults = {"world_size": 2, "router": (), "attached": (), "max_restarts": 1}
        servers = [engine, *other_engines] if engine else []
        spec = {
            **defaults,
            "directory": str(directory),
            "rank": rank,
            "servers": servers,
            **options,
        }
        self.log = directory / "supervisor.err"
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.unit.supervised_run", json.dumps(spec)],
                cwd=ROOT, stdout=output, stderr=errors, start_new_session=True,
            )  # fmt: skip

    def notes(self) -> list[str]:
        path = self.directory / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def rank_output(self, rank: int = 0) -> str:
        return (self.directory / "logs" / f"rank{rank}.out").read_text()

    def wait_until(self, condition: Callable[[], object]) -> None:
        def is_over() -> bool:
            return bool(condition()) or self.process.poll() is not None

        assert happens(is_over, PATIENT_S), self.errors()
        assert self.process.poll() is None, self.errors()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> int:
        assert happens(lambda: self.process.poll() is not None, PATIENT_S)
        code = self.process.wait()
        self.output = self.process.stdout.read().decode() if self.process.stdout else ""
        return code

    def errors(self) -> str:
        return self.log.read_text()

    def endpoint(self) -> dict | None:
        path = self.directory / "engine" / "fleet.json"
        return json.loads(path.read_text())["servers"].get("engine0") if path.exists() else None


@pytest.fixture
def start(tmp_path):
    runs = []

    def start_run(rank: str, *engine: str, **options: Any) -> Run:
        runs.append(Run(tmp_path / "run", rank, engine, **options))
        return runs[-1]

    yield start_run
    for run in runs:
        family = run.family() if run.process.poll() is None else []
        run.process.kill()
        run.process.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended with its parent
                process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process has not ended. A zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_end(processes: list[psutil.Process]) -> bool:
    """Return whether all processes end within 10 s."""
    return happens(
        lambda: not any(map(is_alive, processes)), 10, lambda: [p.pid for p in processes]
    )


def test_a_run_ends_well_and_takes_everything_with_it(start):
    rank = RANK + (
        "wait_published(); print('stray', rank, flush=True)\n"
        "from megatron_dppo.logging import shared_console\n"
        "if rank == 0: shared_console().print('hello')\n"
    )
    run = start(
        rank, HEALTHY + "subprocess.Popen(['sleep', '300'], start_new_session=True)\n" + SLEEP
    )
    run.wait_until(run.family)
    family = run.family()
    assert run.end() == 0
    assert run.output == "hello\n"
    assert (run.rank_output(0), run.rank_output(1)) == ("stray 0\nhello\n", "stray 1\n")
    assert all_end(family)
    assert run.endpoint() is None


def test_what_the_engine_publishes(start):
    run = start(RANK + "note(os.environ['MEGATRON_DPPO_STARTED_KEYS'])\n" + SLEEP, STAYS_UP)
    run.wait_until(lambda: run.endpoint() and len(run.notes()) == 2)
    endpoint = run.endpoint()
    assert endpoint["url"] == "http://stand-in/engine0/1"
    assert endpoint["incarnation"] == 1
    assert endpoint["pid"] in [p.pid for p in run.family()]
    assert [json.loads(note) for note in run.notes()] == [{"api": "a", "admin": "b"}] * 2
    engine = run.directory / "engine"
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [engine, *engine.rglob("*")]}
    assert modes == {"engine": 0o700, "fleet.json": 0o600, "endpoint.json": 0o600}


def test_ranks_are_told_their_place(start):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    run = start(RANK + f"note(' '.join(os.environ[n] for n in {names!r}))", world_size=2)
    assert run.end() == 0
    assert sorted(run.notes()) == ["0 0 2 2 127.0.0.1 1", "1 1 2 2 127.0.0.1 1"]


def test_a_rank_that_raises_ends_the_run_and_is_named(start):
    """Rank 1 is the cause but slow to exit. The other ranks fail because of it, exit first, and share a line."""
    rank = RANK + (
        "if rank == 1:\n"
        "    print('ValueError: cause', file=sys.stderr, flush=True)\n"
        "    note('failed'); time.sleep(0.5); sys.exit(3)\n"
        "wait_for('notes'); time.sleep(0.1)\n"
        "sys.exit('connection closed by peer')\n"
    )
    run = start(rank, STAYS_UP, world_size=4)
    assert run.end() == 1
    errors = run.errors()
    assert mentions(errors, "rank 1", 3, "    ValueError: cause", "failed too")
    (followers,) = [line for line in errors.splitlines() if "failed too" in line]
    assert all(f"{rank}" in followers for rank in (0, 2, 3))


LOGS = (
    "from megatron_dppo.logging import configure_logging, fatal\n"
    "configure_logging(os.path.dirname(os.path.abspath(path_of('notes'))), rank)\n"
)


def test_the_rank_that_failed_first_is_the_cause_though_it_was_the_last_to_speak(start):
    """Rank 1 fails first and still logs while it shuts down. Rank 0 fails because of it and exits first."""
    rank = RANK + LOGS + (
        "import atexit\n"
        "def close(): time.sleep(3); print('closing', flush=True)\n"
        "if rank == 1:\n"
        "    atexit.register(close)\n"
        "    note('failed'); raise ValueError('cause')\n"
        "wait_for('logs/rank1.failed'); time.sleep(0.1)\n"
        "fatal('EngineLostError: connection closed by peer')\n"
    )  # fmt: skip
    run = start(rank, STAYS_UP)
    assert run.end() == 1
    errors = run.errors()
    assert mentions(errors, "rank 1", "ValueError: cause", "rank 0 failed")


def test_a_full_disk_under_the_console_and_the_logs_ends_no_run(start, tmp_path):
    """The terminal, rank 0's standard output and its log are on /dev/full. Only standard error can be written."""
    rank = "rank = 0\n" + LOGS + (
        "import logging\n"
        "from megatron_dppo.logging import shared_console\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "log = logging.getLogger('megatron_dppo.test')\n"
        "for i in range(100): log.info('line %d', i); shared_console().print(f'row {i}')\n"
        "note('done')\n"
    )  # fmt: skip
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "rank0.log").symlink_to("/dev/full")
    with open("/dev/full", "wb") as full:
        run = start(rank, world_size=1, output=full.fileno())
    assert run.end() == 0
    assert run.notes() == ["done"]
    [line] = run.rank_output().splitlines()
    assert mentions(line, "rank0.log", os.strerror(errno.ENOSPC))


def test_a_console_on_a_full_disk_leaves_the_exit_code_as_it_is():
    """Python exits with 120 if it cannot flush its output buffers at the end."""
    code = (
        "from megatron_dppo.logging import configure_logging, shared_console\n"
        "import logging; configure_logging(None, None)\n"
        "logging.getLogger('megatron_dppo').info('a line'); shared_console().print('a row')\n"
    )
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_killed_rank_ends_the_run_at_once(start):
    rank = RANK + "subprocess.Popen(['sleep', '300']); note(f'{rank} {os.getpid()}')\n" + SLEEP
    run = start(rank, STAYS_UP)
    run.wait_until(lambda: len(run.notes()) == 2 and run.endpoint())
    family, pids = run.family(), dict(line.split() for line in run.notes())
    assert len(family) == 5  # two ranks with a child each, and the engine
    os.kill(int(pids["1"]), signal.SIGKILL)
    # The other rank and the engine would sleep for minutes.
    assert run.end() == 1
    assert mentions(run.errors(), "rank 1", "SIGKILL")
    assert "rank 0 failed" not in run.errors()
    assert all_end(family)


RANK_AND_START = RANK + "start = int(os.environ['MEGATRON_DPPO_START'])\n"
KILL_ITSELF = "os.kill(os.getpid(), signal.SIGKILL)\n"


def test_ranks_start_again_after_a_death_and_the_servers_keep_running(start):
    rank = RANK_AND_START + (
        "note(f'{start} {rank} {wait_published()[\"pid\"]}')\n"
        "if start == 1:\n"
        "    wait_for('engine0-healthy1')\n"
        "    if rank == 1: child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "    if rank == 1: note(f'orphan {child.pid}')\n"
        "    while rank == 1 and '1 0 ' not in read('notes'): time.sleep(0.02)\n"
        "    if rank == 1: " + KILL_ITSELF + "    " + SLEEP
    )  # fmt: skip
    run = start(rank, STAYS_UP, rank_restarts=1)
    assert run.end() == 0
    places = [line.split() for line in run.notes() if not line.startswith("orphan")]
    assert sorted(place[:2] for place in places) == [["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]
    assert len({engine for *_, engine in places}) == 1
    assert not (run.directory / "engine0-healthy2").exists()
    (orphan,) = [int(line.split()[1]) for line in run.notes() if line.startswith("orphan")]
    assert not psutil.pid_exists(orphan)
    assert "restart 1 of 1" in run.errors()


def test_restarts_of_ranks_are_bounded(start):
    run = start(
        RANK_AND_START + "if rank == 0: note(str(start)); " + KILL_ITSELF + SLEEP,
        STAYS_UP,
        rank_restarts=2,
    )
    assert run.end() == 1
    assert run.notes() == ["1", "2", "3"]
    assert "run.max_restarts" in run.errors()


@pytest.mark.parametrize(
    ("ending", "starts", "code"),
    [
        ("if start == 1: sys.exit(2)", 1, 1),
        ("if start == 1: sys.exit(1)", 1, 1),
        ("train()\nif start == 1: sys.exit(1)", 2, 0),
        ("train(); sys.exit(1)", 3, 1),
    ],
)
def test_which_errors_of_a_rank_start_the_ranks_again(start, ending, starts, code):
    """A refusal (exit code 2), an error before any training and a second error without progress end the run."""
    define_train = "def train(): open(path_of('trained'), 'w').close()\n"
    rank = RANK_AND_START + define_train + f"note(str(start))\n{ending}\n"
    run = start(rank, STAYS_UP, world_size=1, rank_restarts=9)
    assert run.end() == code
    assert run.notes() == [str(number + 1) for number in range(starts)]


def test_a_stop_before_the_ranks_start_again_ends_the_run(start):
    run = start(RANK + "note('up')\n" + KILL_ITSELF, STAYS_UP, rank_restarts=1, rank_pause_s=300.0)
    run.wait_until(lambda: "restart 1 of 1" in run.errors())
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert "up" in run.notes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_stops_cleanly(start, number, code):
    run = start(RANK + STOPS_CLEANLY, STAYS_UP)
    run.wait_until(lambda: len(run.notes()) == 2)
    family = run.family()
    run.process.send_signal(number)
    assert run.end() == code
    assert run.notes() == ["ready", "ready", "saved", "saved"]
    assert "stopping:" in run.errors()
    assert all_end(family)


def test_a_lost_server_is_ended_while_the_run_stops_and_not_started_again(start):
    """A colocated trainer waits for its devices before it saves, so the supervisor must still end a lost server."""
    # The rank first waits until the server is published: a stop during its start would end it and never publish it.
    report = "report_lost(1)\nwhile published(): time.sleep(0.02)\n"
    run = start("wait_published()\n" + STOPS_CLEANLY + report, STAYS_UP, world_size=1)
    run.wait_until(lambda: len(run.notes()) == 1)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert not (run.directory / "engine0-healthy2").exists()


def test_a_stop_before_the_ranks_listen(start):
    run = start(RANK + "note('up')\n" + SLEEP, SLEEP)
    run.wait_until(lambda: len(run.notes()) == 2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert "before the training began" in run.errors()


IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, lambda *_: note('deaf'))\nnote('up')\n" + SLEEP


def test_a_second_signal_ends_at_once(start):
    run = start(IGNORES_SIGTERM, STAYS_UP)
    run.wait_until(lambda: len(run.notes()) == 2)
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    run.wait_until(lambda: run.notes().count("deaf") == 2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert all_end(family)


def test_an_error_during_a_clean_stop_is_a_failure(start):
    run = start(RANK + STOPS_CLEANLY + "sys.exit('disk full')\n")
    run.wait_until(lambda: len(run.notes()) == 2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 1
    assert "    disk full" in run.errors()


def test_children_die_with_a_killed_supervisor(start):
    run = start(RANK + "note('up')\n" + SLEEP, STAYS_UP)
    run.wait_until(lambda: len(run.notes()) == 2 and run.endpoint())
    family = run.family()
    assert len(family) == 3
    run.process.kill()
    assert all_end(family)


def test_after_a_kill_the_next_run_takes_the_directory_over(start):
    first = start(RANK + "note('up')\n" + SLEEP, STAYS_UP)
    first.wait_until(first.endpoint)
    first.process.kill()
    first.process.wait()
    assert first.endpoint() is not None  # a stale endpoint is left
    second = start("note('stale' if published() else 'clean')")
    assert second.end() == 0
    assert second.notes()[-2:] == ["clean", "clean"]


def test_a_directory_in_use_is_refused(start):
    first = start(RANK + "note('up')\n" + SLEEP)
    first.wait_until(lambda: len(first.notes()) == 2)
    second = Run(first.directory, "note('never')", ())
    assert second.end() == 1
    assert mentions(second.errors(), first.process.pid)
    assert first.process.poll() is None
    assert "never" not in first.notes()


def test_another_start_that_takes_over_ends_the_run_and_keeps_what_it_published(start):
    rank = RANK + "note(os.environ['MEGATRON_DPPO_LEASE'])\n" + SLEEP
    run = start(rank, STAYS_UP)
    run.wait_until(lambda: len(run.notes()) == 2 and run.endpoint())
    family, files = run.family(), LeaseFiles(run.directory)
    holder = files.holder()
    assert run.notes() == [holder.nonce] * 2
    files.install(replace(holder, nonce="2" * 16, host="b", pid=88, job="12", attempt=1))
    other_endpoint = {**run.endpoint(), "url": "http://b:1"}
    write_private(
        run.directory / "engine" / "fleet.json",
        json.dumps({"servers": {"engine0": other_endpoint}}),
    )
    assert run.end() == 1
    assert mentions(run.errors(), "process 88", "b", "job 12", "attempt 1")
    assert run.endpoint() == other_endpoint
    assert all_end(family)


def test_a_dead_engine_is_started_again(start):
    wait = "wait_published()\n"
    rank = "wait_for('engine0-healthy2')\n" + wait + "note(json.dumps(published()))"
    crash = HEALTHY + wait + "print('segfault!', flush=True); os.kill(os.getpid(), 11)"
    run = start(rank, crash, STAYS_UP, world_size=1)
    assert run.end() == 0
    endpoint = json.loads(run.notes()[0])
    assert endpoint["incarnation"] == 2
    assert endpoint["url"] == "http://stand-in/engine0/2"
    assert mentions(run.errors(), "engine0", "SIGSEGV", "    segfault!")
    assert "restart 1 of 1" in run.errors()


def test_restarts_are_bounded(start):
    run = start(RANK + SLEEP, HEALTHY + "wait_published(); sys.exit('exhausted')", max_restarts=2)
    run.wait_until(run.family)
    family = run.family()
    assert run.end() == 1
    assert (run.directory / "engine0-healthy3").exists()
    assert not (run.directory / "engine0-healthy4").exists()
    assert mentions(run.errors(), "engine0", "2 restarts", 3600, "engine.max_restarts")
    assert run.errors().count("    exhausted") == 3
    assert all_end(family)


def test_a_hung_engine_is_replaced_when_it_is_reported_lost(start):
    rank = (
        "wait_published(); report_lost(1)\n"
        "wait_for('engine0-healthy2'); wait_published()\n"
        "note(json.dumps(published()))"
    )
    hang = HEALTHY + "note(f'pid {os.getpid()}'); os.kill(os.getpid(), signal.SIGSTOP)"
    run = start(rank, hang, STAYS_UP, world_size=1)
    assert run.end() == 0
    pid, endpoint = run.notes()
    assert json.loads(endpoint)["incarnation"] == 2
    assert not psutil.pid_exists(int(pid.split()[1]))
    assert mentions(run.errors(), "engine0", "reported lost", "restart 1 of 1")


def test_a_report_on_an_earlier_engine_is_dropped(start):
    rank = "wait_published(); report_lost(0)\ntime.sleep(0.3); note(json.dumps(published()))"
    run = start(rank, STAYS_UP, world_size=1)
    assert run.end() == 0
    assert json.loads(run.notes()[0])["incarnation"] == 1
    assert "restart" not in run.errors()


def test_replacements_of_hung_engines_are_bounded(start):
    rank = (
        "for i in (1, 2):\n"
        "    wait_for(f'engine0-healthy{i}'); wait_published(); report_lost(i)\n" + SLEEP
    )
    run = start(rank, STAYS_UP, world_size=1)
    assert run.end() == 1
    assert not (run.directory / "engine0-healthy3").exists()
    assert mentions(run.errors(), "engine0", "1 restarts", 3600, "engine.max_restarts")


def test_an_engine_that_never_starts_is_not_tried_again(start):
    run = start(RANK + SLEEP, "sys.exit('modelless')", max_restarts=3)
    assert run.end() == 1
    assert mentions(run.errors(), "engine0", "modelless")
    assert not (run.directory / "logs" / "engine0-2.log").exists()


def test_a_first_start_that_failed_beside_one_that_works_is_repeated(start):
    """engine0 fails first. It is started again when engine1, which starts later, works."""
    rank = "wait_published(); note(json.dumps(published()))"
    start_late = "wait_for('failed'); time.sleep(0.5)\n" + STAYS_UP
    fail = "open(path_of('failed'), 'w').close(); sys.exit('a blip')"
    run = start(rank, fail, STAYS_UP, other_engines=((start_late,),), world_size=1, max_restarts=1)
    assert run.end() == 0
    assert json.loads(run.notes()[0])["incarnation"] == 2
    errors = run.errors()
    assert errors.count("engine0 did not start: exited with 1") == 1
    assert errors.index("engine1 ready") < errors.index("restart 1 of 1")
    assert "going on" not in errors


def test_first_starts_that_all_fail_end_the_run(start):
    fail_late = "wait_for('failed'); time.sleep(0.5); sys.exit('no such model')"
    fail = "open(path_of('failed'), 'w').close(); sys.exit('no such model')"
    run = start(RANK + SLEEP, fail, other_engines=((fail_late,),), max_restarts=3)
    assert run.end() == 1
    errors = run.errors()
    assert errors.index("engine0 did not start") < errors.index("engine1 did not start")
    assert "restart" not in errors


def test_servers_are_kept_one_by_one(start):
    """engine0 dies until its restarts are used up, engine1 hangs once, and the run goes on with engine1 and engine2."""
    rank = (
        "wait_published('engine1'); report_lost(1, 'engine1')\n"
        "wait_for('engine1-healthy2'); wait_published('engine1')\n"
        "wait_published('engine2')\n"
        "wait_for('done')\n"
        "note(json.dumps(published('engine1'))); note(json.dumps(published('engine2')))"
    )
    die = HEALTHY + "wait_published(); sys.exit('out of memory')"
    run = start(
        rank, die, other_engines=((STAYS_UP,), (STAYS_UP,)), world_size=1, max_restarts=1
    )  # fmt: skip
    run.wait_until(lambda: "going on with the other servers, 2" in run.errors())
    (run.directory / "done").touch()
    assert run.end() == 0
    second, third = (json.loads(note) for note in run.notes())
    assert (second["url"], second["incarnation"]) == ("http://stand-in/engine1/2", 2)
    assert (third["url"], third["incarnation"]) == ("http://stand-in/engine2/1", 1)
    assert mentions(run.errors(), "engine0", "1 restarts", "engine.max_restarts")


def test_the_run_ends_with_its_last_server(start):
    die = HEALTHY + OUT_OF_MEMORY
    run = start(RANK + SLEEP, die, other_engines=((die,),), max_restarts=0)
    assert run.end() == 1
    assert "going on with the other servers, 1" in run.errors()
    assert run.errors().count("giving up after 0 restarts") == 2


def test_a_checkpoint_comes_first_where_the_last_server_is_given_up(start):
    run = start(
        RANK + STOPS_CLEANLY, HEALTHY + wait_for_both_ranks("ready") + OUT_OF_MEMORY, max_restarts=0
    )
    run.wait_until(run.family)
    family = run.family()
    assert run.end() == 1
    assert run.notes() == ["ready", "ready", "saved", "saved"]
    errors = run.errors()
    assert errors.index("giving up after 0 restarts") < errors.index(
        "no server is left: the trainer"
    )
    assert all_end(family)


def test_ctrl_c_ends_at_once_where_the_last_server_is_given_up(start):
    die = HEALTHY + wait_for_both_ranks("up") + OUT_OF_MEMORY
    run = start(IGNORES_SIGTERM, die, max_restarts=0)
    run.wait_until(lambda: run.notes().count("deaf") == 2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 1


def test_an_attached_server_is_one_left(start):
    rank = "wait_for('done')"
    run = start(rank, "sys.exit('bad flag')", attached=("http://elsewhere:1",), max_restarts=0)
    run.wait_until(lambda: "going on with the other servers, 1" in run.errors())
    (run.directory / "done").touch()
    assert run.end() == 0
    servers = json.loads((run.directory / "engine" / "fleet.json").read_text())["servers"]
    assert list(servers) == ["http-elsewhere-1"]


def test_a_dead_router_is_started_again_and_in_the_end_done_without(start):
    rank = "wait_for('router-healthy2')\nwait_for('done')"
    exit_when_published = HEALTHY + "wait_published('router'); wait_published()\n"
    run = start(rank, STAYS_UP, router=(exit_when_published,), max_restarts=1)
    run.wait_until(lambda: "going on without a router" in run.errors())
    record = json.loads((run.directory / "engine" / "fleet.json").read_text())
    assert "router" not in record["servers"]
    assert run.endpoint()
    (run.directory / "done").touch()
    assert run.end() == 0
    assert "restart 1 of 1" in run.errors()


def test_rank_0_draws_on_the_terminal_and_its_file_is_plain(start):
    """Progress bars go only to the terminal, at its width; console lines to both; library output only to the file."""
    code = (
        "from megatron_dppo.logging import shared_console\n"
        "from megatron_dppo.metrics.progress import progress\n"
        "console = shared_console()\n"
        "print('stray', flush=True)\n"
        "with progress('generate', 3) as bar:\n"
        "    bar.advance(3); time.sleep(0.3)\n"
        "console.print(f'step 7 {console.size.width}', style='green')\n"
    )
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 123, 0, 0))
    run = start(code, world_size=1, output=terminal)
    os.close(terminal)
    terminal_output = b""
    try:
        while chunk := os.read(controller, 1 << 16):
            terminal_output += chunk
    except OSError:
        pass  # The process has closed the other end of the terminal.
    assert run.end() == 0
    assert b"generate" in terminal_output
    assert b"3/3" in terminal_output
    assert b"stray" not in terminal_output
    assert b"\x1b[32mstep 7 123\x1b[0m" in terminal_output
    assert run.rank_output() == "stray\nstep 7 123\n"


def test_a_run_outlives_the_reader_of_its_output(start):
    code = (
        "from megatron_dppo.logging import shared_console\n"
        "wait_for('closed'); shared_console().print('unread'); note('went on')\n"
    )
    read_end, write_end = os.pipe()
    run = start(code, world_size=1, output=write_end)
    os.close(write_end)
    os.close(read_end)
    (run.directory / "closed").touch()
    assert run.end() == 0
    assert run.notes() == ["went on"]
    assert run.rank_output() == "unread\n"
