"""The ranks of one machine without GPUs as forks of one process (``rank_server.py``), which share their imports.

The process outlives its ranks, so a restart of the ranks imports nothing.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_dppo.launch.local import LOOPBACK, RankGroup, terminal_of
from megatron_dppo.launch.rank_server import MODULE, START, STOP
from megatron_dppo.launch.supervisor import keep_previous
from megatron_dppo.logging import TERMINAL_VARIABLE
from megatron_dppo.system.processes import feed, kill_families, kill_trees, start_process
from megatron_dppo.system.scratch import remove_shared_tensors
from megatron_dppo.system.secret_variables import split_environment

_RECEIVED_BYTES = 1 << 16


class ForkedRankGroup(RankGroup):
    """A RankGroup whose ranks one server forks.

    Args:
        module: what a rank runs, as ``python -m`` would.
        config: the file that the module is called with.
        outputs, master_port, variables, master_host, cores: as RankGroup has them.
    """

    def __init__(
        self,
        module: str,
        config: Path,
        outputs: Sequence[Path],
        master_port: int | None,
        variables: Mapping[str, str] | None = None,
        *,
        master_host: str = LOOPBACK,
        cores: int | None = None,
    ) -> None:
        command = [sys.executable, "-m", MODULE, module, str(config)]
        super().__init__(
            command, outputs, master_port, variables, master_host=master_host, cores=cores
        )
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._received = b""
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    def start(self, number: int = 1) -> None:
        for path in self._outputs:
            keep_previous(path)
        self._pids.clear()
        self._codes.clear()
        if self._server is None or self._server.poll() is not None:
            self._start_server()
        assert self._control is not None
        variables = json.dumps(self.start_variables(number))
        with suppress(OSError):
            self._control.sendall(START + variables.encode() + b"\n")

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._control = ours
        python, option, server, *words = self._command
        descriptor = str(theirs.fileno())
        self._received = b""
        command = [python, option, server, descriptor, *words, *map(str, self._outputs)]
        environment = self.environment()
        with theirs, self._outputs[0].open("wb") as file, terminal_of(0) as terminal:
            if terminal is not None:
                environment[TERMINAL_VARIABLE] = str(terminal)
            inherited = [theirs.fileno(), *([] if terminal is None else [terminal])]
            plain, secrets = split_environment(environment)
            self._server = start_process(
                command,
                output=file.fileno(),
                environment=plain,
                stdin=subprocess.PIPE,
                inherited=inherited,
            )
        feed(self._server, secrets)

    def codes(self) -> list[int | None]:
        if self._server is None:
            return []
        # Look before reading: what a server sent before its end is then in the socket.
        server_code = self._server.poll()
        self._receive()
        if server_code is not None and len(self._codes) < len(self._outputs):
            # The kernel ends the ranks with the server. Its output is the first rank's, so that one is at fault.
            self._codes.setdefault(0, server_code or 1)
        return [self._codes.get(rank) for rank in range(len(self._outputs))]

    def ask_to_stop(self) -> None:
        assert self._control is not None
        with suppress(OSError):
            self._control.sendall(STOP)

    def clear(self) -> None:
        self._receive()
        kill_trees(self._pids.values())
        remove_shared_tensors(self._pids.values())

    def kill(self) -> None:
        if self._server is None:
            return
        kill_families([self._server])
        self._receive()
        remove_shared_tensors(self._pids.values())

    def _receive(self) -> None:
        """Take note of the ranks that the server says have started or ended."""
        assert self._control is not None
        with suppress(BlockingIOError, ConnectionResetError):
            while content := self._control.recv(_RECEIVED_BYTES):
                self._received += content
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            message = json.loads(line)
            rank, pid = message["rank"], message["pid"]
            if "code" not in message:
                self._pids[rank] = pid
            elif self._pids.get(rank) == pid:
                self._codes[rank] = message["code"]


def shares_imports(ranks: int, gpus: int) -> bool:
    """Whether ranks are forked: several on a machine without GPUs. A driver's state does not survive a fork."""
    return ranks > 1 and gpus == 0
