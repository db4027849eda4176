"""The process that runs one reward function for a ``Verifier``.

``python -m megatron_dppo.rewards.worker NAME LIMIT`` reads one JSON ``[response, answer]`` a line
on standard input and answers each with one JSON number on what was standard output, or with a
string: why the reward refused it (a ValueError), or that what it returned is no score. Prints of
the reward's libraries go to standard error. Imports the reward and nothing heavier. Any other
exception of the reward ends the process with its traceback.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

from megatron_dppo.rewards.registry import find_reward, score_or_refusal

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
    function = find_reward(name).load()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        response, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)  # SIGALRM's default action: die
        reply = score_or_refusal(function, response, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
