"""Fork the ranks of one machine from a process that has imported their libraries.

    python -m megatron_dppo.launch.rank_server DESCRIPTOR MODULE CONFIG OUTPUT...

The imports of torch and Megatron-Core take seconds and hundreds of MiB. Forked ranks share their pages, and a rank
starts in milliseconds. Nothing is computed before the fork: threads of a library would be missing in the ranks.

``OUTPUT`` is the file of each rank's standard output and error; the server's own go to the first one. Over the socket
``DESCRIPTOR`` the server sends a JSON line for each rank that starts (``{"rank", "pid"}``) and ends
(``{"rank", "code"}``), and receives STOP, which it passes on to the ranks as SIGTERM. When the socket is closed the
server ends, and the kernel ends the ranks with it.
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
IMPORTS: Mapping[str, Sequence[str]] = {
    "megatron_dppo.train": ("megatron_dppo.loop.run", "megatron_dppo.loop"),
    "megatron_dppo.supervised": ("megatron_dppo.data.problems", "megatron_dppo.trainer.trainer"),
}
"""By the module that ranks run: the modules that they import."""


def main() -> int:
    """Import, fork, and wait for the ranks; in a rank, its exit code."""
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
    server = os.getpid()
    children: dict[int, int] = {}
    for rank, output in enumerate(outputs):
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_rank(rank, output, server)
            sys.argv = [module, config]
            code: int = importlib.import_module(module).main([config])
            return code
        children[os.pidfd_open(pid)] = rank
        _send(control, {"rank": rank, "pid": pid})
    _serve(control, children)
    return 0


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


def _serve(control: socket.socket, children: dict[int, int]) -> None:
    """Report the ends of ranks until all have ended. ``children``: rank by process descriptor."""
    events = select.poll()
    events.register(control, select.POLLIN)
    for descriptor in children:
        events.register(descriptor, select.POLLIN)
    while children:
        for descriptor, _ in events.poll():
            if descriptor == control.fileno():
                if not (received := control.recv(64)):
                    return
                if STOP.strip() in received:
                    _stop(children)
                continue
            events.unregister(descriptor)
            ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
            assert ended is not None
            killed = ended.si_code != os.CLD_EXITED
            code = -ended.si_status if killed else ended.si_status
            _send(control, {"rank": children.pop(descriptor), "code": code})
            os.close(descriptor)


def _stop(children: Mapping[int, int]) -> None:
    for descriptor in children:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)


def _send(control: socket.socket, message: Mapping[str, int]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
