"""A part that dies by a signal after its first row."""

import os
import signal

from megatron_dppo.gpu_check.part import Row

SHOWS = "what a crash leaves"
LIMIT_S = 120.0


def run(site):
    yield Row("before", "seen")
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    yield Row("after", "never")
