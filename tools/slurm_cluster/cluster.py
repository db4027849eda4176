"""A cluster's life: its folder, its daemons, its nodes, its end."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_dppo.system.ports import free_port
from megatron_dppo.system.processes import held_back
from tools.slurm_cluster.clearing import clear
from tools.slurm_cluster.client import Client
from tools.slurm_cluster.leftovers import cgroups_of, processes_of
from tools.slurm_cluster.network import Network, make_network
from tools.slurm_cluster.nodes import IsolatedNode, Node, PlainNode, can_isolate
from tools.slurm_cluster.packages import clean_environment, what_is_missing
from tools.slurm_cluster.settings import Controller, NodeAddress, NodeSize, Settings
from tools.slurm_cluster.shell import CommandError, run, start_daemon
from tools.slurm_cluster.watchdog import Watchdog

_FOLDERS = ("etc", "log", "state", "spool", "munge", "dev", "node", "shared")
_START_S = 120.0
_FAKE_GPU = 240
"""A device number without a driver. No process can open such a device, but a cgroup can forbid it."""


class Cluster:
    """``slurmctld``, ``munged`` and some nodes in one new folder. A context manager.

    If this process may make namespaces, nodes are isolated: they are namespaces on a private network,
    so that a node can crash or lose its network. Otherwise nodes are plain. The cluster ends with the
    block. If the process is killed, a watchdog ends the cluster.

    Args:
        count: number of nodes.
        size: resources that each node claims to have.
        isolated: whether nodes are isolated; None: if this process may make namespaces.
        shared: folders below ``/tmp`` that all nodes see, in addition to ``cluster.shared``.

    Raises:
        CommandError: Slurm is not installed.
    """

    def __init__(
        self,
        count: int = 4,
        *,
        size: NodeSize | None = None,
        isolated: bool | None = None,
        shared: Sequence[Path] = (),
    ) -> None:
        missing = what_is_missing()
        if missing:
            raise CommandError(missing)
        # Use a short path: a socket's path has at most 107 characters. Nodes share this folder, not the rest of /tmp.
        self.root = Path(f"/tmp/slurm-{os.getpid()}-{secrets.token_hex(4)}")
        self._count = count
        self._size = size or NodeSize()
        with held_back():
            self.isolated = can_isolate() if isolated is None else isolated
        self._extra_shared = list(shared)
        self._network: Network | None = None
        self._watchdog: Watchdog | None = None
        self._nodes: dict[str, Node] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes."""
        return list(self._nodes)

    def start(self) -> None:
        """Start everything; returns when every node is idle."""
        try:
            # Delay signals: only after this block can ``stop`` or the watchdog end an interrupted start.
            with held_back():
                self._make_folders()
                self._network = make_network() if self.isolated else None
                self._make_nodes()
                self._watchdog = Watchdog(self.root, self._network, self.nodes)
            self._start_daemons()
            for node in self._nodes.values():
                node.start()
            self.wait_idle()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Cancel the jobs, end nodes and daemons, and remove the folder. Signals are delayed meanwhile.

        A second call has no effect.
        """
        with held_back():
            if self.root.exists():
                self._stop()

    def _stop(self) -> None:
        if not self.isolated and (self.root / "slurmctld.pid").exists():
            self.client.cancel_all()  # the tasks of an isolated node end with the node
        for node in self._nodes.values():
            node.stop()
        clear(self.root, self._network, self.nodes)
        if self._watchdog is not None:
            self._watchdog.dismiss()

    def address(self, node: str) -> str:
        """Address of a node."""
        return "127.0.0.1" if self._network is None else self._network.address(self._number(node))

    def _number(self, node: str) -> int:
        return self.nodes.index(node) + 1

    def is_on(self, node: str, pid: int) -> bool:
        """Whether a process runs on an isolated node."""
        return self._isolated(node).has(pid)

    # -- disturbances

    def crash(self, node: str) -> None:
        """End a node as a power cut does. Of a plain node, only the daemon ends."""
        self._nodes[node].crash()

    def boot(self, node: str) -> None:
        """Start a node that crashed."""
        self._nodes[node].start()

    def cut_network(self, node: str) -> None:
        """Pull the network cable of an isolated node."""
        self._isolated(node).switch(on=False)

    def mend_network(self, node: str) -> None:
        """Plug in the network cable again."""
        self._isolated(node).switch(on=True)

    def run_on(self, node: str, *command: str) -> str:
        """Standard output of a command on a node, outside of any job."""
        return run(*self._nodes[node].enter(), *command, environment=self.environment)

    def declare_down(self, node: str) -> None:
        """Tell the controller that a node is down. Otherwise the controller would notice only after 10-20 s."""
        self.client.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def wait_idle(self, timeout_s: float = _START_S) -> None:
        """Wait until every node is idle. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.client.node_states()
            if set(states.values()) == {"idle"}:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"nodes not idle after {timeout_s:.0f} s: {states}; {self.root}")
            time.sleep(0.05)

    def recount_gpus(self, timeout_s: float = _START_S) -> None:
        """Make the controller of idle nodes count again, so that no GPU is in use. Raises TimeoutError.

        If a job loses a node and continues on its other nodes, Slurm 22.05 never frees the job's GPUs.
        """
        if not self.client.gpus_in_use():
            return
        self.client.run("scontrol", "reconfigure")
        deadline = time.monotonic() + timeout_s
        while used := self.client.gpus_in_use():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{used} GPUs in use after {timeout_s:.0f} s; {self.root}")
            time.sleep(0.05)
        self.wait_idle(timeout_s)

    # -- making it

    def _make_folders(self) -> None:
        self.root.mkdir()
        self.root.chmod(0o755)
        for name in _FOLDERS:
            (self.root / name).mkdir()
        (self.root / "state").chmod(0o700)
        self.shared = self.root / "shared"
        self.configuration = self.root / "etc" / "slurm.conf"
        self.environment = clean_environment() | {"SLURM_CONF": str(self.configuration)}
        self.client = Client(self.environment)

    def _make_nodes(self) -> None:
        host = socket.gethostname().split(".")[0]
        # The machine's control groups have the nodes' names, so the names must be unique on the machine. Process ids
        # are not unique: another container may have a process with the same id.
        prefix = f"n{secrets.token_hex(3)}x"
        addresses = []
        for number in range(1, self._count + 1):
            name = f"{prefix}{number}"
            self._nodes[name] = self._node(name, number)
            if self._network is None:
                addresses.append(NodeAddress(name, host, "127.0.0.1", free_port("0.0.0.0")))
            else:
                addresses.append(NodeAddress(name, name, self._network.address(number), 6818))
        address = "127.0.0.1" if self._network is None else self._network.controller
        settings = Settings(
            self.root,
            Controller(host, address, free_port("0.0.0.0")),
            addresses,
            self._size,
            [self._gpu_file(i) for i in range(self._size.gpus)],
            cgroups=self._may_use_cgroups(),
        )
        for name, text in settings.files().items():
            (self.root / "etc" / name).write_text(text)

    def _node(self, name: str, number: int) -> Node:
        if self._network is None:
            return PlainNode(name, self.root, self.environment)
        shared = [self.root, *self._extra_shared]
        return IsolatedNode(name, number, self.root, self._network, shared, self.environment)

    def _gpu_file(self, index: int) -> Path:
        path = self.root / "dev" / f"nvidia{index}"
        try:
            os.mknod(path, 0o020666, os.makedev(_FAKE_GPU, index))
        except PermissionError:
            return Path(f"/dev/tty{index}")  # users other than root use existing devices
        return path

    def _may_use_cgroups(self) -> bool:
        trees = [f"/sys/fs/cgroup/{name}" for name in ("freezer", "devices")]
        return os.geteuid() == 0 and all(os.access(tree, os.W_OK) for tree in trees)

    def _start_daemons(self) -> None:
        munge = self.root / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "seed"}
        words = [f"--{option}={munge / name}" for option, name in files.items()]
        start_daemon("munged", "--force", *words, environment=self.environment)
        start_daemon("slurmctld", environment=self.environment)

    def _isolated(self, node: str) -> IsolatedNode:
        found = self._nodes[node]
        if not isinstance(found, IsolatedNode):
            raise ValueError(f"{node} is a plain node: it has no network of its own")
        return found

    def leftovers(self) -> list[str]:
        """The remains of a stopped cluster: processes, network links, control groups, its folder."""
        links = run("ip", "-o", "link", "show") if self._network else ""
        bridge = self._network.bridge if self._network else "none"
        found = [f"process {pid}" for pid in processes_of(self.configuration)]
        found += [line for line in links.splitlines() if bridge in line]
        for node in self.nodes:
            found += [str(path) for path in cgroups_of(node)]
        if self.root.exists():
            found.append(str(self.root))
        return found
