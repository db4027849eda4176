"""Commands that are forked from one process: how they are started, and how they end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_dppo.system.fork_server import ForkingLauncher, SharedForkServers
from megatron_dppo.system.processes import StartedProcess
from tests.messages import mentions
from tests.patience import happens, run_patiently

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "tests.unit.forked_command"


@pytest.fixture
def start(tmp_path):
    """A function that starts ``COMMAND`` with ``words``. The command writes its output to the file ``log``.

    The fixture ends all processes after the test.
    """
    launchers: dict[str, ForkingLauncher] = {}

    def start(log: str, *words: str, library: str = "numpy", **variables: str) -> StartedProcess:
        (tmp_path / "endless_library.py").write_text("import time; time.sleep(600)")
        launcher = launchers.setdefault(library, ForkingLauncher(COMMAND, [library]))
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", **variables}
        # pytest changes this variable from test to test.
        environment.pop("PYTEST_CURRENT_TEST", None)
        return launcher.start(
            [sys.executable, "-m", COMMAND, *words],
            environment=environment,
            log=tmp_path / log,
            stdin=b"a key",
        )

    yield start
    for launcher in launchers.values():
        launcher.close()


def wait_for_output(folder: Path, log: str) -> dict:
    """Wait for the JSON that the command writes to its log, and return it."""

    def is_complete() -> bool:
        return (folder / log).exists() and "}\n" in (folder / log).read_text()

    assert happens(is_complete)
    return json.loads((folder / log).read_text().splitlines()[0])


def test_commands_share_one_parent_and_nothing_else(start, tmp_path):
    first, second = start("a.log", "ends", "one"), start("b.log", "ends", "two")
    assert happens(lambda: (first.poll(), second.poll()) == (3, 3))
    one, two = wait_for_output(tmp_path, "a.log"), wait_for_output(tmp_path, "b.log")
    assert one["parent"] == two["parent"] != os.getpid()
    assert (one["arguments"], two["arguments"]) == (["ends", "one"], ["ends", "two"])
    assert one["input"] == two["input"] == "a key"
    assert one["leads_session"]
    assert two["leads_session"]
    assert one["shown"].endswith(f"-m {COMMAND} ends one")
    # The forks have different states of the random generators of Python and NumPy.
    assert not set(one["draws"]) & set(two["draws"])


def test_other_variables_have_another_parent(start, tmp_path):
    start("a.log", "ends", FORKED_KEY="1")
    start("b.log", "ends", FORKED_KEY="2")
    one, two = wait_for_output(tmp_path, "a.log"), wait_for_output(tmp_path, "b.log")
    assert (one["variable"], two["variable"]) == ("1", "2")
    assert one["parent"] != two["parent"]


def test_an_error_is_in_the_log_of_its_command(start, tmp_path):
    process = start("a.log", "fails", library="no_such_library")
    assert happens(lambda: process.poll() == 1)
    assert mentions((tmp_path / "a.log").read_text(), "ValueError")


def test_a_killed_command_takes_its_children_along_and_spares_the_others(start, tmp_path):
    killed, other = start("a.log", "waits"), start("b.log", "waits")
    child = wait_for_output(tmp_path, "a.log")["child"]
    wait_for_output(tmp_path, "b.log")
    killed.kill()
    assert killed.poll() == -signal.SIGKILL
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert other.poll() is None
    assert psutil.Process(other.pid).is_running()


def test_a_stopped_command_receives_sigterm(start, tmp_path):
    process = start("a.log", "waits")
    wait_for_output(tmp_path, "a.log")
    process.stop(60)
    assert process.poll() == -signal.SIGTERM


def test_a_command_can_be_killed_during_the_imports(start, tmp_path):
    process = start("a.log", "waits", library="endless_library")
    assert process.poll() is None
    before = time.monotonic()
    process.kill()
    assert process.poll() == -signal.SIGKILL
    assert time.monotonic() - before < 60
    assert psutil.Process(process.pid).is_running()


def test_a_dead_parent_is_replaced(start, tmp_path):
    first = start("a.log", "waits")
    parent = wait_for_output(tmp_path, "a.log")["parent"]
    os.kill(parent, signal.SIGKILL)
    assert happens(lambda: first.poll() == -signal.SIGKILL)
    start("b.log", "ends")
    assert wait_for_output(tmp_path, "b.log")["parent"] != parent


LIBRARIES = ("numpy", COMMAND)
RUN = f"""
import os, psutil, sys, time
from pathlib import Path
from megatron_dppo.system import fork_server
log = Path(sys.argv[1])
if len(sys.argv) > 2:
    sys.exit(fork_server.run_forked({COMMAND!r}, sys.argv[2:]))
launcher = fork_server.ForkingLauncher({COMMAND!r}, {LIBRARIES!r})
command = [sys.executable, "-m", {COMMAND!r}, "waits"]
launcher.start(command, environment=os.environ | {{"API_KEY": "4711"}}, log=log, stdin=b"a key")
while not log.read_text().endswith("\\n"):
    time.sleep(0.05)
(forks,) = (p for p in launcher._servers.values())
print(forks.process.pid, psutil.Process(forks.process.pid).ppid())
launcher.close()
"""


@pytest.fixture
def shared():
    """Fork servers of this process, and the variables with which they were started."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_CURRENT_TEST", None)
    servers = SharedForkServers()
    # The second start has the same libraries and, but for its number, the same variables: it adds no server.
    for start in ("1", "2"):
        variables = {**environment, "MEGATRON_DPPO_START": start}
        servers.add(LIBRARIES, variables, sys.__stdout__.fileno())
    servers.wait_until_ready()
    yield servers, environment
    servers.close()


def run(shared, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    servers, environment = shared
    return run_patiently(
        [sys.executable, "-c", RUN, *words],
        pass_fds=servers.descriptors,
        env={**environment, **servers.variables, **variables},
    )


def test_the_fork_servers_of_several_runs_are_forks_of_a_shared_one(shared, tmp_path):
    (parent,) = (server.process.pid for server in shared[0]._servers)
    for name, is_shared in (("a.log", True), ("b.log", True), ("c.log", False)):
        variables = {"MEGATRON_DPPO_START": name, "FORKED_KEY": name}
        if not is_shared:
            # Libraries read this variable when they are imported, so the shared server must not be used.
            variables["OMP_NUM_THREADS"] = "3"
        process = run(shared, str(tmp_path / name), **variables)
        assert process.returncode == 0, process.stderr
        forks, parent_of_forks = map(int, process.stdout.split())
        output = wait_for_output(tmp_path, name)
        assert output["parent"] == forks
        assert (parent_of_forks == parent) == is_shared
        assert (output["input"], output["variable"]) == ("a key", name)
        assert output["shown"].endswith(f"-m {COMMAND} waits")
        assert not is_running(output["child"])
        assert not is_running(forks)
        assert is_running(parent)


def test_a_command_runs_as_a_fork_of_a_shared_server(shared, tmp_path):
    (parent,) = (server.process.pid for server in shared[0]._servers)
    process = run(shared, str(tmp_path), "ends", "one", FORKED_KEY="1")
    output = json.loads(process.stdout)
    assert process.returncode == 3
    assert (output["parent"], output["arguments"]) == (parent, ["ends", "one"])
    # A key reaches the command on its standard input.
    assert json.loads(output["input"])["FORKED_KEY"] == "1"
    # No shared server has this module path, so no command runs.
    elsewhere = run(shared, str(tmp_path), "ends", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert (elsewhere.returncode, elsewhere.stdout) == (0, "")
    failed = run(shared, str(tmp_path), "fails")
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["variable"] is None
    assert "ValueError: this command fails" in failed.stderr


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
