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


Calls = Mapping[str, tuple[int | None, int | None]]
"""System call -> its number on x86_64 and on aarch64; None if the machine does not have it."""

DENIED: Calls = {
    # Access to other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    # Namespaces and mounts.
    "unshare": (272, 97), "setns": (308, 268), "pivot_root": (155, 41), "chroot": (161, 51), "mount": (165, 40),
    "umount2": (166, 39), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "statmount": (457, 457), "listmount": (458, 458),
    # Keys: no namespace separates them.
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # Kernel interfaces with a history of security holes, or that bypass this filter.
    "io_setup": (206, 0), "io_destroy": (207, 1), "io_submit": (209, 2), "io_cancel": (210, 3),
    "io_getevents": (208, 4), "io_pgetevents": (333, 292), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "modify_ldt": (154, None),
    "personality": (135, 92), "vmsplice": (278, 75), "remap_file_pages": (216, 234), "uselib": (134, None),
    "lookup_dcookie": (212, 18), "fanotify_init": (300, 262), "memfd_secret": (447, 447),
    "lsm_get_self_attr": (459, 459), "lsm_set_self_attr": (460, 460), "lsm_list_modules": (461, 461),
    # Placement of memory, also of other processes.
    "migrate_pages": (256, 238), "move_pages": (279, 239), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    # The machine: another kernel, modules, clocks, names, ports, swap.
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None),
    "nfsservctl": (180, 42), "vhangup": (153, 58), "sysfs": (139, None), "ustat": (136, None),
    "_sysctl": (156, None),
}  # fmt: skip
"""System calls that no program in a sandbox may make."""

DENIED_TO_SNIPPETS: Calls = {
    **DENIED,
    # Processes and threads.
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "clone3": (435, 435),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    # Sockets.
    "socket": (41, 198), "socketpair": (53, 199),
    # Memory that the limit of a process does not count, or that outlives the process.
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "memfd_create": (319, 279), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "timer_create": (222, 107),
    # Further filters and rules: they take the kernel's memory.
    "seccomp": (317, 277), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}  # fmt: skip
"""System calls that a snippet may not make: a snippet has one process, one thread, and only the memory of its address
space."""

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
    machine_numbers = [numbers[column] for numbers in denied.values()]
    return sorted(number for number in machine_numbers if number is not None)


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
