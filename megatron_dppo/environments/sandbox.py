"""The limits of a sandbox: arguments of bubblewrap (``bwrap``) and a filter of system calls.

Two kinds of programs run in a sandbox. Snippets of ``python_sandbox`` may do nearly nothing. Commands of ``agents`` may
start processes, use the network and allocate memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import pwd
import shutil
import struct
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_dppo.system.errors import RunError

ALLOW = (
    "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container --security-opt seccomp=unconfined)"
)
_INSTALL = "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap; Fedora, RHEL: dnf install bubblewrap)"
NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--cap-drop", "ALL", "--new-session",
    "--die-with-parent",
)  # fmt: skip
"""Arguments for both kinds of programs. They make all namespaces except the network's, set the user and group to nobody
(65534), and remove all capabilities and the terminal. The program ends when its parent ends."""


class SandboxError(RunError, ValueError):
    """The sandbox is not available on this machine, or failed. No program ran outside the sandbox."""


def find_program(name: str) -> str:
    """Return the path of ``bwrap`` or ``prlimit``.

    Raises SandboxError if the program is missing, or if ``filter_program`` does not support this machine.
    """
    if sys.platform != "linux" or platform.machine() not in _AUDIT_NUMBERS:
        machines = " or ".join(_AUDIT_NUMBERS)
        raise SandboxError(f"the sandbox needs Linux on {machines}, this is {platform.platform()}")
    path = shutil.which(name)
    if path is None:
        raise SandboxError(f"no {name} here to run programs in a sandbox: {_INSTALL}")
    return path


def system_libraries() -> Iterator[str]:
    """Yield bwrap's arguments for the system's libraries, read-only."""
    for path in (Path("/usr/lib"), Path("/usr/lib64")):
        if path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    yield from root_folders("/lib", "/lib64")


def root_folders(*paths: str) -> Iterator[str]:
    """Yield bwrap's arguments for ``paths``: links into ``/usr`` on most systems, real folders on other systems."""
    for path in map(Path, paths):
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))


_SYSTEM_FILES = (
    "/etc/ld.so.cache", "/etc/alternatives", "/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf",
    "/etc/services", "/etc/passwd", "/etc/group", "/etc/localtime", "/etc/mime.types", "/opt",
    # Certificates. The folders around them also have the machine's private keys.
    "/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ssl/ca-bundle.pem", "/etc/ssl/openssl.cnf", "/etc/ca-certificates",
    "/etc/pki/tls/certs", "/etc/pki/tls/cert.pem", "/etc/pki/tls/openssl.cnf", "/etc/pki/ca-trust/extracted",
)  # fmt: skip
"""Files that programs need for libraries, certificates, names of hosts and users, and the time zone."""
_PROCESS_FOLDERS = ("/proc", "/dev")
"""Folders of processes and of their shared memory. A sandbox has its own."""
_PRIVATE_FOLDERS = (
    *_PROCESS_FOLDERS, "/sys", "/run", "/root", "/home", "/tmp", "/var/lib", "/etc/ssl/private", "/etc/pki/tls/private",
    "/etc/ssh",
)  # fmt: skip
"""Folders with keys, sockets and files of users. A sandbox shows no folder that holds one of them."""
_PRIVATE_FOLDER = "/tmp"
"""The empty folder that is the home in a command's sandbox."""


@contextlib.contextmanager
def sandboxed(
    command: Sequence[str], variables: Mapping[str, str], paths: Sequence[str] = ()
) -> Iterator[tuple[list[str], dict[str, str], int]]:
    """Yield ``command`` in a sandbox: its arguments, its variables, and a descriptor that it must inherit.

    The sandbox has the network, its own processes and an empty home. It can read these files of the machine: the
    system's programs, this Python with its packages, the current folder and ``paths``. Raises SandboxError, for example
    if the current folder contains the user's home: a program in the sandbox could then read the home.
    """
    files = list(_program_files(paths))
    sandbox = find_program("bwrap")
    with open_filter(is_snippet=False) as filter_fd:
        sandbox_command = [
            sandbox, *NAMESPACES, *files, "--chdir", os.getcwd(), "--seccomp", str(filter_fd),
            "--", *command,
        ]  # fmt: skip
        private_folders = {"HOME": _PRIVATE_FOLDER, "TMPDIR": _PRIVATE_FOLDER}
        yield sandbox_command, {**variables, **private_folders}, filter_fd


def _program_files(paths: Sequence[str]) -> Iterator[str]:
    """Yield bwrap's arguments that mount the files of a command's sandbox."""
    current_folder = Path.cwd()
    if fault := _exposure(current_folder):
        raise SandboxError(
            f"the current folder {current_folder} {fault}, and a sandbox shows the current folder: "
            "expected another current folder"
        )
    for path in paths:
        if fault := _exposure(Path(path)):
            raise SandboxError(
                f"options: sandbox_paths: got {path!r}, which {fault}: expected only the files and folders that the "
                "command needs"
            )
    yield from ("--ro-bind", "/usr", "/usr")
    yield from root_folders("/lib", "/lib64", "/bin", "/sbin")
    for path in _SYSTEM_FILES:
        yield from ("--ro-bind-try", path, path)
    yield from ("--proc", "/proc", "--dev", "/dev", "--tmpfs", _PRIVATE_FOLDER)
    # Mount these folders after the empty /tmp: some of them may be in /tmp.
    for path in [sys.base_prefix, sys.prefix, *paths, str(current_folder)]:
        if not Path(path).exists():
            raise SandboxError(f"{path}: there is no such file or folder to show in the sandbox")
        resolved = os.path.realpath(path)
        yield from ("--ro-bind", resolved, resolved)
        # If a path goes through links, also mount the resolved file at the path itself. A path inside the current
        # folder does not need this: the mounted folder contains the links.
        is_inside_current = Path(path).absolute().is_relative_to(current_folder)
        if path != resolved and not is_inside_current:
            yield from ("--ro-bind", resolved, os.path.abspath(path))


def _exposure(path: Path) -> str | None:
    """Describe why a sandbox must not show ``path``; None if it may."""
    resolved = path.resolve()
    for folder in _PROCESS_FOLDERS:
        if resolved.is_relative_to(folder):
            return f"is in {folder}"
    # Other processes of this user have folders with sockets and keys in the temporary folder.
    private_folders = [*_homes(), *_PRIVATE_FOLDERS, tempfile.gettempdir()]
    for folder in private_folders:
        if Path(folder).resolve().is_relative_to(resolved):
            return f"shows all of {folder}"
    return None


def _homes() -> list[str]:
    """Return the user's home by the environment, and by the system's list of users if the user is in it."""
    homes = [str(Path.home())]
    with contextlib.suppress(KeyError):
        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    return homes


Calls = Mapping[str, Sequence[int]]
"""System call -> its numbers on x86_64 and on aarch64; without the second number if aarch64 does not have the call."""
_TABLES: Mapping[str, Calls] = tomllib.loads(
    Path(__file__).with_name("system_calls.toml").read_text(encoding="utf-8")
)
DENIED = _TABLES["denied"]
"""System calls that no program in a sandbox may make."""
DENIED_TO_SNIPPETS = {**DENIED, **_TABLES["denied_to_snippets"]}
"""System calls that a snippet may not make."""

_AUDIT_NUMBERS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64 of linux/audit.h."""
_X32 = 0x40000000
"""__X32_SYSCALL_BIT: numbers from here on are calls of the x32 ABI. They would bypass the filter."""
# Opcodes of BPF (linux/bpf_common.h): load a word, jump if equal, jump if greater or equal, return.
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
# Results of linux/seccomp.h: kill the process, return the error 1 (EPERM), allow the call.
_KILL, _REFUSE, _PASS = 0x80000000, 0x00050001, 0x7FFF0000


def denied_numbers(denied: Calls, machine: str) -> list[int]:
    """Return the numbers of the ``denied`` calls on ``machine``, x86_64 or aarch64."""
    column = list(_AUDIT_NUMBERS).index(machine)
    return sorted(numbers[column] for numbers in denied.values() if column < len(numbers))


def filter_program(denied: Calls, machine: str) -> bytes:
    """Return a filter of system calls as the kernel's classic BPF program (seccomp(2)).

    A denied call returns EPERM. Any call with the numbers of another architecture kills the process.
    """
    # An instruction is (opcode, instructions to skip if true, instructions to skip if false, operand). The operand of
    # a load is an offset in struct seccomp_data: 0 for the call's number, 4 for the architecture.
    program = [
        (_LOAD, 0, 0, 4),
        (_IF_EQUAL, 1, 0, _AUDIT_NUMBERS[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_IF_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in denied_numbers(denied, machine):
        program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    program.append((_RETURN, 0, 0, _PASS))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


@functools.cache
def _filter_of_machine(is_snippet: bool) -> bytes:
    """Return the filter for this machine."""
    denied = DENIED_TO_SNIPPETS if is_snippet else DENIED
    return filter_program(denied, platform.machine())


@contextlib.contextmanager
def open_filter(*, is_snippet: bool) -> Iterator[int]:
    """Open a descriptor of the filter for ``bwrap --seccomp``."""
    filter_fd = os.memfd_create("filter")
    try:
        os.write(filter_fd, _filter_of_machine(is_snippet))
        os.lseek(filter_fd, 0, os.SEEK_SET)
        yield filter_fd
    finally:
        os.close(filter_fd)
