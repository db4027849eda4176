"""Child processes that end with their parent, descriptions of exits and logs, and ports that are held for a server."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_dppo.system import ports as system_ports
from megatron_dppo.system.ports import (
    PortTakenError,
    free_port,
    give_back_port,
    hold_port,
    require_free_port,
)
from megatron_dppo.system.processes import (
    describe_exit,
    kill_families,
    last_exception,
    quote,
    start_process,
    tail,
)
from tests.patience import happens, run_patiently

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys, time\n"
    "member = subprocess.Popen(['sleep', '300'])\n"
    "other = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
    "print(member.pid, other.pid, flush=True); time.sleep(300)",
]
"""A process with two children: the first in its process group, the second in a session of its own."""


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start(command: list[str], **options: object) -> subprocess.Popen[bytes]:
    return start_process(
        command, environment=os.environ, output=subprocess.PIPE, **options  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("dies", [True, False])
def test_a_child_ends_with_the_thread_that_started_it_or_outlives_it(dies: bool) -> None:
    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: started.append(start(SLEEP, dies_with_thread=dies)))
    thread.start()
    thread.join()
    [child] = started
    try:
        if dies:
            assert child.wait(60) == -signal.SIGKILL
        else:
            time.sleep(0.3)
            assert child.poll() is None
    finally:
        kill_families([child])


def test_the_terminal_does_not_reach_a_child_and_secrets_come_through_its_input() -> None:
    code = "import os, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read(), flush=True)"
    child = start([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert child.stdin is not None
    with child.stdin as pipe:
        pipe.write(b"secret")
    assert child.stdout is not None
    assert child.stdout.read() == b"True secret\n"
    assert child.wait(60) == 0


def test_the_whole_family_is_killed_also_twice() -> None:
    child = start(PARENT)
    assert child.stdout is not None
    pids = [int(pid) for pid in child.stdout.readline().split()]
    kill_families([child])
    assert child.poll() == -signal.SIGKILL
    assert all(has_ended(pid) for pid in pids)
    kill_families([child])


def test_the_group_of_a_child_that_died_is_killed() -> None:
    child = start(PARENT)
    assert child.stdout is not None
    group_member, session_leader = (int(pid) for pid in child.stdout.readline().split())
    try:
        child.kill()
        child.wait()
        assert not has_ended(group_member)
        kill_families([child])
        assert happens(lambda: has_ended(group_member))
    finally:
        os.kill(session_leader, signal.SIGKILL)


def test_ended_orphans_are_reaped_and_exit_codes_of_own_children_stay() -> None:
    # The orphans are adopted in a process of their own: the pytest process must not adopt those of other tests.
    program = (
        "import os, subprocess, time, psutil\n"
        "from megatron_dppo.system.processes import OrphanReaper, adopt_orphans, start_process\n"
        "adopt_orphans()\n"
        "own = start_process(['sh', '-c', 'exit 7'], environment=os.environ, output=1)\n"
        "subprocess.run(['sh', '-c', 'true & exit 0'], check=True)\n"
        "def ended():\n"
        "    children = psutil.Process().children()\n"
        "    return {c.pid for c in children if c.status() == psutil.STATUS_ZOMBIE}\n"
        "while len(ended()) < 2: time.sleep(0.01)\n"
        "reaper = OrphanReaper(every_s=0.0)\n"
        "reaper.poll()\n"
        "assert len(ended()) == 2\n"
        "reaper.poll()\n"
        "assert ended() == {own.pid}\n"
        "assert own.wait() == 7\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_exits_in_words() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV (signal 11)"
    assert "memory" in describe_exit(-signal.SIGKILL)
    explained = describe_exit(-signal.SIGKILL, "IndexError: index out of range")
    assert explained.endswith("after IndexError: index out of range")
    assert "memory" not in explained


def test_the_last_exception_of_a_log() -> None:
    first = "Traceback (most recent call last):\n  File a\n    b\nKeyError: 'a'\n"
    second = (
        "[12:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        "  File c\n    d\n    ^\ntorch.OutOfMemoryError: no room\n\n[12:01] killed\n"
    )
    assert last_exception("started\n" + first) == "KeyError: 'a'"
    assert (
        last_exception(first + "going on\n" + second + "x\n") == "torch.OutOfMemoryError: no room"
    )
    assert last_exception("started\nended") is None
    assert last_exception("Traceback (most recent call last):\n  File cut off") is None


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("one\ntwo\n\nthree\n\n")
    assert tail(log, 3) == "two\n\nthree"
    assert quote(tail(log, 3)) == "    two\n    \n    three"
    assert quote("") == "    (empty)"
    log.write_bytes(b"x" * (1 << 17) + b"\nend\n")
    assert tail(log, 1) == "end"


def test_a_taken_port_is_refused_and_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"127.0.0.1:{port}\b"):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", free_port())


def test_a_free_port_is_for_who_asks_for_it_and_for_nobody_else() -> None:
    """A server, which sets SO_REUSEADDR, may bind the held port. A socket without this option may not.

    The system, when it chooses a port for another process, avoids the held port in the same way.
    """
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for _ in range(2):  # a server, and the next one after it
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port)).close()
            with pytest.raises(PortTakenError):
                require_free_port("127.0.0.1", port)


def test_a_free_port_is_given_back_when_its_server_has_ended() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    ports = [free_port(), free_port()]
    assert len(os.listdir("/proc/self/fd")) == descriptors + 2
    give_back_port(ports[0])
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    give_back_port(ports[1])
    give_back_port(ports[1])
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_further_ports_are_free_and_held_too(monkeypatch) -> None:
    """The last port of the system's first choice is taken, so other ports must be chosen."""
    candidate = free_port(distances=(13, 233))
    give_back_port(candidate)
    choices = [candidate]

    def hold(host: str, port: int) -> socket.socket:
        if port == 0 and choices:
            port = choices.pop()
        return hold_port(host, port)

    monkeypatch.setattr(system_ports, "hold_port", hold)
    with socket.create_server(("127.0.0.1", candidate + 233)):
        port = free_port(distances=(13, 233))
    assert not choices
    assert port != candidate
    for distance in (13, 233):
        with socket.socket() as other, pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            other.bind(("127.0.0.1", port + distance))
    give_back_port(port)
    for free in (candidate, candidate + 13, port + 13, port + 233):
        with socket.socket() as other:
            other.bind(("127.0.0.1", free))


def test_one_port_of_two_addresses_is_held_on_both(monkeypatch) -> None:
    port = free_port("127.0.0.1")

    def hold(host: str, number: int) -> socket.socket:
        return hold_port(host, number or port)

    monkeypatch.setattr(system_ports, "hold_port", hold)
    assert free_port("127.0.0.2") == port
    for address in ("127.0.0.1", "127.0.0.2"):
        with socket.socket() as other, pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            other.bind((address, port))
    give_back_port(port)
    for address in ("127.0.0.1", "127.0.0.2"):
        with socket.socket() as other:
            other.bind((address, port))


def test_a_held_port_is_given_back() -> None:
    with hold_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


ENDS_NOW = """
import atexit, sys
from megatron_dppo.system.processes import end_now
class Kept:
    def __del__(self):
        print("the interpreter shut down")
kept = Kept()
atexit.register(print, "exit handler", end="")
print("buffered", end=" ")
end_now(3)
"""


def test_a_process_that_ends_now_flushes_and_runs_its_exit_handlers_alone():
    command = [sys.executable, "-c", ENDS_NOW]
    result = run_patiently(command)
    assert (result.returncode, result.stdout, result.stderr) == (3, "buffered exit handler", "")
