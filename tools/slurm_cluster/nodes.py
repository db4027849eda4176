"""Nodes of a cluster: a whole emulated machine, or only its daemon."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tools.slurm_cluster.leftovers import end_process, remove_cgroups
from tools.slurm_cluster.network import Network
from tools.slurm_cluster.shell import CommandError, run, start_daemon

_NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
_START_S = 60.0


class Node(Protocol):
    """One node of a cluster, started and stopped any number of times."""

    name: str

    def start(self) -> None:
        """Start the node's daemon (and its machine)."""

    def crash(self) -> None:
        """End the node at once, as a power cut does."""

    def stop(self) -> None:
        """End the whole node. A second call has no effect."""

    def enter(self) -> list[str]:
        """Words in front of a command that is to run on this node."""


class PlainNode:
    """A ``slurmd`` on this machine. All plain nodes share the machine's name, address, ports and ``/tmp``.

    A crash ends only the daemon: the tasks of the node continue.
    """

    def __init__(self, name: str, root: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._environment = environment
        self._pid_file = root / f"slurmd-{name}.pid"

    def start(self) -> None:
        """Start the daemon."""
        start_daemon("slurmd", "-N", self.name, environment=self._environment)

    def crash(self) -> None:
        """SIGKILL the daemon."""
        end_process(self._pid_file, signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM the daemon."""
        end_process(self._pid_file)
        remove_cgroups(self.name)

    def enter(self) -> list[str]:
        """Return no words: the node is this machine."""
        return []


@dataclass
class IsolatedNode:
    """A set of namespaces: its own host name, address, ports, processes, ``/tmp`` and ``/dev/shm``.

    Attributes:
        number: its place in the network, counted from 1.
        root: the cluster's folder.
        shared: folders below ``/tmp`` that all nodes see; everything outside ``/tmp`` is shared.
    """

    name: str
    number: int
    root: Path
    network: Network
    shared: Sequence[Path]
    environment: Mapping[str, str]

    @property
    def _pids_file(self) -> Path:
        return self.root / "node" / f"{self.name}.pid"

    def start(self) -> None:
        """Boot the machine: namespaces, cable, daemon."""
        with (self.root / "log" / f"node-{self.name}.log").open("ab") as log:
            # --fork makes the child process 1 of the node. If unshare is ended, the child ends too.
            outer = subprocess.Popen(
                [
                    "unshare",
                    *_NAMESPACES,
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                    "bash",
                    "-c",
                    self._boot_script(),
                ],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        first = self._first_process(outer)
        self._pids_file.write_text(f"{outer.pid} {first}")
        self.network.plug(self.number, first)

    def crash(self) -> None:
        """SIGKILL process 1: the kernel then ends all other processes, and the address stops answering."""
        self._end()

    def stop(self) -> None:
        """SIGKILL process 1, and remove the control groups that the daemon left in the kernel."""
        self._end()
        remove_cgroups(self.name)

    def enter(self) -> list[str]:
        """Return ``nsenter`` into all namespaces of the node."""
        _, first = self._pids()
        return ["nsenter", "-t", str(first), "-n", "-u", "-m", "-p", "-i"]

    def switch(self, *, on: bool) -> None:
        """Pull its network cable, or plug it in again."""
        self.network.switch(self.number, on=on)

    def has(self, pid: int) -> bool:
        """Whether a process runs on this node."""
        _, first = self._pids()
        try:
            return os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{first}/ns/net")
        except FileNotFoundError:
            return False

    def _pids(self) -> list[int]:
        return [int(word) for word in self._pids_file.read_text().split()]

    def _end(self) -> None:
        if not self._pids_file.exists():
            return
        for pid in reversed(self._pids()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._pids_file.unlink()

    def _first_process(self, outer: subprocess.Popen[bytes]) -> int:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if outer.poll() is not None:
                raise CommandError(f"node {self.name} did not start: see {self.root}/log")
            child_ids = children.read_text().split()
            if child_ids:
                return int(child_ids[0])
            time.sleep(0.005)
        raise CommandError(f"node {self.name} did not start within {_START_S:.0f} s")

    def _boot_script(self) -> str:
        own = self.root / "node" / f"{self.name}.tmp"
        own.mkdir(exist_ok=True)
        inside = [path for path in self.shared if path.is_relative_to("/tmp")]
        binds = [(path, own / path.relative_to("/tmp")) for path in inside]
        address = self.network.address(self.number)
        return "\n".join(
            [
                "set -e",
                f"hostname {self.name}",
                "mount --make-rprivate /",
                f"mount --bind '{self.root}/etc/hosts' /etc/hosts",
                "mount -t tmpfs -o mode=1777 shm /dev/shm",
                f"mount --bind '{own}' '{own}'",
                *(f"mkdir -p '{to}'; mount --bind '{path}' '{to}'" for path, to in binds),
                f"mount --rbind '{own}' /tmp",
                "ip link set lo up",
                "for i in $(seq 500); do ip link show eth0 >&/dev/null && break; sleep 0.01; done",
                f"ip addr add {address}/24 dev eth0; ip link set eth0 up",
                f"slurmd -N {self.name}",
                "exec sleep infinity",
            ]
        )


def can_isolate() -> bool:
    """Whether this process may make namespaces and network interfaces. Usually only root may."""
    if os.geteuid() != 0:
        return False
    probe = f"slurmp{secrets.token_hex(3)}"  # several containers may have equal process ids
    try:
        run("unshare", *_NAMESPACES, "--fork", "--kill-child", "mount", "--make-rprivate", "/")
        run("ip", "link", "add", probe, "type", "bridge")
    except CommandError:
        return False
    finally:
        run("ip", "link", "del", probe, check=False)
    return True
