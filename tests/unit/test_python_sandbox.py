"""The environment ``python``: its sandbox stops a snippet's attacks, and no snippet runs without a sandbox."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.demo.__main__ import main as demo_main
from megatron_dppo.environments import Step, Turn, check_environment
from megatron_dppo.environments.python_sandbox import _BOOT, Python, run_snippet
from megatron_dppo.environments.sandbox import (
    DENIED,
    DENIED_TO_SNIPPETS,
    SandboxError,
    denied_numbers,
    filter_program,
)
from megatron_dppo.environments.workers import EnvironmentPool, EnvironmentSpec, RemoteEnvironment
from tests.messages import mentioning
from tests.patience import Patience, family_of, happens, own_patience

pytestmark = pytest.mark.second


@pytest.fixture(scope="module")
def sandbox() -> None:
    """Skip a test that needs the sandbox if this machine cannot run it. Fail the test if ``CI`` is set."""
    try:
        Python.check_options()
    except SandboxError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


needs_sandbox = pytest.mark.usefixtures("sandbox")
THIS_FILE = Path(__file__).resolve()


def run(snippet: str, **bounds: int) -> str:
    return asyncio.run(run_snippet(snippet, **bounds))


@needs_sandbox
@pytest.mark.parametrize(
    ("snippet", "answer"),
    [
        ("print(3 * 4)\nprint(sum(range(5)))", "12\n10"),
        ("import math, json, random, fractions, datetime\nprint(math.comb(5, 2))", "10"),
        ("x = 2", ""),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("print(1)\nprint(", re.escape("SyntaxError: '(' was never closed (<snippet>, line 2)")),
        ("import sys; print(7); sys.exit(3)", re.escape("7 [exited with code 3]")),
        ("input()", "EOFError: .*"),
        ("print('\\u00e9\\u4e2d')", "\u00e9\u4e2d"),
    ],
)
def test_a_snippet_is_answered_with_what_it_prints(snippet, answer):
    assert re.fullmatch(answer, run(snippet, seconds=30))


@needs_sandbox
@pytest.mark.parametrize(
    ("attack", "answer"),
    [
        ("open('/etc/shadow').read()", "FileNotFoundError: .*"),
        (f"open({str(THIS_FILE)!r}).read()", "FileNotFoundError: .*"),
        ("import os; print(set(os.listdir('/')) - {'usr', 'lib', 'lib64', 'root', 'opt', 'home'})", r"set\(\)"),
        ("import os; print(os.listdir(os.path.expanduser('~')))", "FileNotFoundError: .*|NotADirectoryError: .*"),
        ("open('/proc/1/environ').read()", "FileNotFoundError: .*"),
        ("import os; print('SECRET' in os.environ)", "False"),
        ("import numpy", "ModuleNotFoundError: .*"),
        ("open('/file', 'w')", ".*Read-only file system.*"),
        ("import os; open(os.__file__, 'a')", ".*Read-only file system.*"),
        ("import os; os.unlink(os.__file__)", ".*Read-only file system.*"),
        ("import os; open(os.path.dirname(os.__file__) + '/site-packages/x.py', 'w')", ".*Error.*"),
        ("open('/dev/shm/x', 'w')", "FileNotFoundError: .*"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "PermissionError: .*"),
        ("import socket; socket.socket(socket.AF_UNIX)", "PermissionError: .*"),
        ("import os\nwhile True: os.fork()", "PermissionError: .*"),
        ("import threading\nthreading.Thread(target=print).start()", "RuntimeError: can't start new thread"),
        ("import subprocess; subprocess.run(['/bin/sh'])", ".*Error.*"),
        ("import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 39)", r".*SIGSYS.*"),
        ("import os; os.setuid(0)", "OSError: .*|PermissionError: .*"),
        ("import os; os.kill(1, 9); print(os.getuid())", "65534"),
        ("bytearray(10**9)", "MemoryError.*"),
        ("import mmap; [mmap.mmap(-1, 1 << 26) for _ in range(99)]", "(OSError|MemoryError): .*"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))", "ValueError: .*"),
        ("import ctypes; ctypes.string_at(0)", r".*SIGSEGV.*"),
    ],
)  # fmt: skip
def test_an_attack_meets_nothing(attack, answer, monkeypatch):
    monkeypatch.setenv("SECRET", "of this process")
    assert re.fullmatch(answer, run(attack, seconds=30), re.DOTALL)


# The numbers of system calls in /usr/include/x86_64-linux-gnu/asm/unistd_64.h and asm-generic/unistd.h.
NUMBERS = {
    "x86_64": {
        "modify_ldt": 154, "io_setup": 206, "io_submit": 209, "io_pgetevents": 333, "memfd_create": 319,
        "memfd_secret": 447, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
        "userfaultfd": 323, "kexec_load": 246, "kexec_file_load": 320, "bpf": 321, "perf_event_open": 298,
        "add_key": 248, "request_key": 249, "keyctl": 250, "ptrace": 101, "process_vm_readv": 310,
        "pidfd_getfd": 438, "kcmp": 312, "unshare": 272, "setns": 308, "mount": 165, "fsopen": 430,
        "init_module": 175, "finit_module": 313, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "move_pages": 279, "vmsplice": 278, "fork": 57, "clone": 56, "clone3": 435, "socket": 41, "shmget": 29,
        "seccomp": 317,
    },
    "aarch64": {
        "io_setup": 0, "io_submit": 2, "io_pgetevents": 292, "memfd_create": 279, "memfd_secret": 447,
        "io_uring_setup": 425, "userfaultfd": 282, "kexec_load": 104, "kexec_file_load": 294, "bpf": 280,
        "perf_event_open": 241, "add_key": 217, "request_key": 218, "keyctl": 219, "ptrace": 117,
        "process_vm_readv": 270, "unshare": 97, "setns": 268, "mount": 40, "init_module": 105,
        "open_by_handle_at": 265, "move_pages": 239, "clone": 220, "clone3": 435, "socket": 198, "shmget": 194,
    },
}  # fmt: skip
# Make each system call with six zeros. An allowed call succeeds, ends the snippet or fails with an error but EPERM.
CALLS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in {numbers}:
    print(number, libc.syscall(number, 0, 0, 0, 0, 0, 0), ctypes.get_errno(), sep=":", end=" ", flush=True)
"""


@needs_sandbox
def test_each_denied_call_fails_in_the_sandbox():
    numbers = {*NUMBERS["x86_64"].values(), *denied_numbers(DENIED_TO_SNIPPETS, "x86_64")}
    printed = run(CALLS.format(numbers=sorted(numbers)), seconds=30, longest_output=10_000)
    assert printed.split() == [f"{number}:-1:1" for number in sorted(numbers)]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_denied_calls_have_the_numbers_of_each_machine(machine):
    assert set(NUMBERS[machine].values()) <= set(denied_numbers(DENIED_TO_SNIPPETS, machine))
    # An instruction has eight bytes. A jump spans 255 instructions at most, so each call has a return of its own.
    denied = len(denied_numbers(DENIED, machine))
    assert len(filter_program(DENIED, machine)) == 8 * (6 + 2 * denied + 1)


def _sandbox_processes() -> list[psutil.Process]:
    """Return all sandboxes and the interpreters in them. Those of other programs end within seconds, too."""
    running = psutil.process_iter(["name", "cmdline"])
    return [p for p in running if p.info["name"] == "bwrap" or _BOOT in (p.info["cmdline"] or ())]


@needs_sandbox
@pytest.mark.parametrize(
    ("snippet", "answer"),
    [
        ("while True: pass", r"^\[(did not end within 2 s|used up 1 s of CPU time)\]$"),
        ("import time; time.sleep(1000)", r"^\[did not end within 2 s\]$"),
        ("while True: print('x' * 1000)", r"^x{50} \[cut after 50 bytes\]$"),
    ],
)
def test_what_does_not_end_is_ended_and_leaves_nothing(snippet, answer):
    # Far below the 1000 s for which a snippet sleeps.
    patience = own_patience(300)
    assert re.search(answer, run(snippet, seconds=1, longest_output=50))
    assert not patience.is_exhausted()
    processes = _sandbox_processes()
    assert happens(lambda: not any(process.is_running() for process in processes))


@needs_sandbox
def test_cpu_time_that_is_used_up_is_no_memory_that_ran_out():
    """The kernel sends a signal at the soft limit of CPU time and kills at the hard limit. To save time, the snippet
    lowers the soft limit to 1 s.
    """
    limits = "import resource as r\nprint(r.getrlimit(r.RLIMIT_CPU), flush=True)\n"
    burn = "r.setrlimit(r.RLIMIT_CPU, (1, 61))\nwhile True: pass"
    assert run(limits + burn, seconds=60) == "(60, 61) [used up 60 s of CPU time]"


@needs_sandbox
def test_a_turn_with_a_snippet_is_answered_and_another_one_is_the_last():
    async def steps() -> list[Step]:
        environment = Python(seconds=2)
        await environment.reset(None)
        texts = ["I compute:\n```python\nprint(6 * 7)\n```\n", "```python\nprint(1)", "It is 42."]
        return [await environment.step(Turn(text, ())) for text in texts]

    assert asyncio.run(steps()) == [Step("42"), Step("1"), Step(done=True, is_scored=True)]


@asynccontextmanager
async def open_environment() -> AsyncIterator[RemoteEnvironment]:
    """Yield the environment, which runs in a worker process, after its reset."""
    pool = EnvironmentPool(EnvironmentSpec("python", {"begin": "{", "end": "}"}, 60.0), 1)
    try:
        environment = await pool.open()
        await environment.reset(Problem(1, "7*8-5", "51", (1,)))
        yield environment
    finally:
        pool.close()


@needs_sandbox
def test_it_works_in_a_process_of_environments():
    async def ask() -> Step:
        async with open_environment() as environment:
            return await environment.step(Turn("{ print ( 7 * 8 ) }", (1, 2)))

    assert asyncio.run(ask()) == Step("56")


@needs_sandbox
def test_snippets_leave_no_process_behind():
    """Not even a zombie, which keeps its process id until its parent waits for it."""

    async def ask() -> None:
        async with open_environment() as environment:
            before = len(psutil.Process().children(recursive=True))
            for i in range(6):
                assert await environment.step(Turn(f"{{ print({i}) }}", (1, 2))) == Step(str(i))
            patience = Patience(60.0, lambda: family_of(os.getpid()))
            while len(psutil.Process().children(recursive=True)) > before:
                assert not patience.is_exhausted()
                await asyncio.sleep(0.1)

    asyncio.run(ask())


@needs_sandbox
def test_more_snippets_than_cores_are_all_answered():
    async def many() -> list[str]:
        return await asyncio.gather(*(run_snippet(f"print({i} ** 2)") for i in range(12)))

    assert asyncio.run(many()) == [str(i**2) for i in range(12)]


def test_without_bubblewrap_a_run_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=mentioning("bwrap", "apt-get install bubblewrap")):
        check_environment("python", {})
    with pytest.raises(SandboxError, match="bubblewrap"):
        run("print(1)")
    # The demo checks this before it makes its material, which takes minutes.
    assert demo_main(["--task", "python"]) == 2
    assert "apt-get install bubblewrap" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_where_bubblewrap_may_not_nothing_is_run(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace'\nexit 1\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        ValueError, match=mentioning("bwrap: No permissions", "user.max_user_namespaces")
    ):
        check_environment("python", {})


def test_options_that_bound_nothing_are_refused():
    with pytest.raises(ValueError, match="bounds of 1 or more"):
        check_environment("python", {"seconds": 0})
    with pytest.raises(ValueError, match="marks that are not empty"):
        Python(end="")
    with pytest.raises(ValueError, match=mentioning("options", "'<'", "python")):
        check_environment("python", {"seconds": "5"})
