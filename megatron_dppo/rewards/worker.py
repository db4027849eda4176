"""The process that runs one reward function for a ``Verifier``, and the guard over what it starts.

``python -m megatron_dppo.rewards.worker DESCRIPTOR NAME LIMIT`` says None on its connection once it is ready, and
answers each ``(response, answer)`` with a number, or with a string: why the reward refused it (a
ValueError), or that what it returned is no score. Imports the reward and nothing heavier. Any other
exception of the reward ends the process with its traceback.

Checks run in a child. What a check starts ends with the check, whatever session or parent it took;
what the reward's module started while it was imported lives as long as the worker. The guard, its
parent, ends all of it when the child dies, or when nobody is left to read an answer.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from megatron_dppo.rewards import find_reward, score_or_refusal
from megatron_dppo.system import processes

# Address space of a worker: a number with 10^9 digits must not take the node's memory.
MEMORY_BYTES = 4 << 30
# How much later than the verifier the worker ends itself, should nobody be left to kill it.
GRACE_S = 5.0


def serve(connection: Connection, name: str, timeout_s: float) -> None:
    """Answer until nobody is left to ask."""
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C is the verifier's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt_orphans()
    function = find_reward(name).load()
    helpers = processes.child_ids()
    connection.send(None)
    while True:
        try:
            response, answer = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        # SIGALRM's default action ends the process, whatever the reward does.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
        reply = score_or_refusal(function, response, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        processes.kill_children(spared=helpers)
        connection.send(reply)


def guard(child: int, connection: Connection) -> NoReturn:
    """Wait until ``child`` ends, or whoever asks has gone; then end what is below, and end as it did."""
    ends = select.poll()
    # Without an event this tells only that the other side is closed; what it sends is the child's to read.
    ends.register(connection.fileno(), 0)
    ends.register(os.pidfd_open(child), select.POLLIN)
    ends.poll()
    ended, status = os.waitpid(child, os.WNOHANG)
    processes.kill_descendants()
    code = os.waitstatus_to_exitcode(status) if ended else 0
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def main() -> None:
    """Serve in a child, under this process as its guard."""
    descriptor, name, timeout_s = sys.argv[1:]
    connection = Connection(int(descriptor))
    # No process that the reward starts may answer.
    os.set_inheritable(connection.fileno(), False)
    guarding = os.getpid()
    processes.adopt_orphans()
    if (child := os.fork()) != 0:
        guard(child, connection)
    processes.die_with_parent(guarding)
    serve(connection, name, float(timeout_s))


if __name__ == "__main__":
    main()
