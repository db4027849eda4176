"""Fork the ranks of one machine from a process that has imported their libraries.

    python -m megatron_dppo.launch.rank_server DESCRIPTOR MODULE CONFIG OUTPUT...

The imports of torch and Megatron-Core take seconds and hundreds of MiB. Forked ranks share their pages, and a rank
starts in milliseconds. Nothing is computed before the fork: threads of a library would be missing in the ranks.

``OUTPUT`` is the file of each rank's standard output and error; the server's own go to the first one. Over the socket
``DESCRIPTOR`` the server receives lines: START, followed by a JSON object with further variables of the ranks, forks
all of them, and may come again once they have ended; STOP is passed on to the ranks as SIGTERM. The server sends a JSON
line for each rank that starts (``{"rank", "pid"}``) and ends (``{"rank", "pid", "code"}``). When the socket is closed
the server ends, and the kernel ends the ranks with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from megatron_dppo.logging import TERMINAL_VARIABLE
from megatron_dppo.system.processes import die_with_parent
from megatron_dppo.system.secret_variables import hide_secrets

MODULE = "megatron_dppo.launch.rank_server"
STOP = b"stop\n"
START = b"start "
IMPORTS: Mapping[str, Sequence[str]] = {
    "megatron_dppo.train": ("megatron_dppo.loop.run", "megatron_dppo.loop"),
    "megatron_dppo.supervised": ("megatron_dppo.data.problems", "megatron_dppo.trainer.trainer"),
}
"""By the module that ranks run: the modules that they import."""


def main() -> int:
    """Import, then fork and wait for ranks; in a rank, its exit code."""
    descriptor, module, config, *outputs = sys.argv[1:]
    # Read the keys first: the ranks inherit them as this process holds them.
    hide_secrets()
    control = socket.socket(fileno=int(descriptor))
    os.set_inheritable(control.fileno(), False)
    for name in (module, *IMPORTS.get(module, ())):
        importlib.import_module(name)
    gc.collect()
    # The collector would write to each object's page, and so copy it, in every rank.
    gc.freeze()
    rank = RankServer(control, outputs).serve()
    if rank is None:
        return 0
    sys.argv = [module, config]
    code: int = importlib.import_module(module).main([config])
    return code


class RankServer:
    """Forks the ranks as often as START asks for them. ``outputs``: as the module says."""

    def __init__(self, control: socket.socket, outputs: Sequence[str]) -> None:
        self._control = control
        self._outputs = outputs
        self._received = b""
        self._ranks: dict[int, tuple[int, int]] = {}
        """Number and process id of each running rank, by process descriptor."""

    def serve(self) -> int | None:
        """Return None when the socket is closed; in each process that is forked, the number of its rank."""
        while True:
            events = select.poll()
            for descriptor in (self._control.fileno(), *self._ranks):
                events.register(descriptor, select.POLLIN)
            for descriptor, _ in events.poll():
                if descriptor != self._control.fileno():
                    self._report_end(descriptor)
                    continue
                received = self._control.recv(1 << 16)
                if not received:
                    return None
                *lines, self._received = (self._received + received).split(b"\n")
                for line in lines:
                    if line == STOP.strip():
                        self._stop()
                    elif (rank := self._fork_all(line.removeprefix(START))) is not None:
                        return rank

    def _fork_all(self, variables: bytes) -> int | None:
        """Fork every rank; return its number in the new process, None in this one."""
        server = os.getpid()
        for rank, output in enumerate(self._outputs):
            pid = os.fork()
            if pid == 0:
                self._control.close()
                for descriptor in self._ranks:
                    os.close(descriptor)
                _become_rank(rank, output, server)
                os.environ |= json.loads(variables)
                return rank
            self._ranks[os.pidfd_open(pid)] = (rank, pid)
            self._send({"rank": rank, "pid": pid})
        return None

    def _report_end(self, descriptor: int) -> None:
        ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
        assert ended is not None
        is_killed = ended.si_code != os.CLD_EXITED
        code = -ended.si_status if is_killed else ended.si_status
        rank, pid = self._ranks.pop(descriptor)
        self._send({"rank": rank, "pid": pid, "code": code})
        os.close(descriptor)

    def _stop(self) -> None:
        for descriptor in self._ranks:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)

    def _send(self, message: Mapping[str, int]) -> None:
        self._control.sendall(json.dumps(message).encode() + b"\n")


def _become_rank(rank: int, output: str, server: int) -> None:
    """Give this process its own session, output and variables."""
    os.setsid()
    die_with_parent(server)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.close(file)
    os.close(nothing)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if rank > 0 and (terminal := os.environ.pop(TERMINAL_VARIABLE, None)) is not None:
        os.close(int(terminal))


if __name__ == "__main__":
    sys.exit(main())
