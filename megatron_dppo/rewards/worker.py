"""The process that runs one reward function for a ``Verifier``, and the guard over what it starts.

``python -m megatron_dppo.rewards.worker NAME LIMIT`` reads one JSON ``[response, answer]`` a line
on standard input and answers each with one JSON number on what was standard output, or with a
string: why the reward refused it (a ValueError), or that what it returned is no score. Prints of
the reward's libraries go to standard error. Imports the reward and nothing heavier. Any other
exception of the reward ends the process with its traceback.

Checks run in a child. What a check starts ends with the check, whatever session or parent it took;
what the reward's module started while it was imported lives as long as the worker. The guard, its
parent, ends all of it when the child dies, or when nobody is left to read an answer.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
from typing import NoReturn

from megatron_dppo.rewards.registry import find_reward, score_or_refusal
from megatron_dppo.system.processes import (
    adopt_orphans,
    child_ids,
    die_with_parent,
    kill_children,
    kill_descendants,
)

MEMORY_BYTES = 4 << 30
"""Address space of a worker: a number with 10^9 digits must not take the node's memory."""
GRACE_S = 5.0
"""How much later than the verifier the worker ends itself, should nobody be left to kill it."""


def serve(name: str, timeout_s: float) -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the verifier's to handle
    adopt_orphans()
    function = find_reward(name).load()
    helpers = child_ids()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        response, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)  # SIGALRM's default action: die
        reply = score_or_refusal(function, response, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        kill_children(spared=helpers)
        print(json.dumps(reply), file=answers, flush=True)


def guard(child: int) -> NoReturn:
    """Wait until ``child`` ends, or whoever asks has gone; then end what is below, and end as it did."""
    os.dup2(2, 1)  # the child alone answers: its end is the end of the answers
    ends = select.poll()
    ends.register(
        sys.stdin.fileno(), 0
    )  # of a pipe's reading end this tells that the other is closed
    ends.register(os.pidfd_open(child), select.POLLIN)
    ends.poll()
    ended, status = os.waitpid(child, os.WNOHANG)
    kill_descendants()
    code = os.waitstatus_to_exitcode(status) if ended else 0
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def main() -> None:
    """Serve in a child, under this process as its guard."""
    guarding = os.getpid()
    adopt_orphans()
    if (child := os.fork()) != 0:
        guard(child)
    die_with_parent(guarding)
    serve(sys.argv[1], float(sys.argv[2]))


if __name__ == "__main__":
    main()
