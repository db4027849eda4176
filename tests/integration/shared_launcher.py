"""The launcher of the servers that a test process starts itself: all are forks of one process."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dppo.engine.process import LIBRARIES, MODULE, Runtime
from megatron_dppo.system.fork_server import ForkingLauncher
from megatron_dppo.system.processes import StartedProcess


class _SharedLauncher(ForkingLauncher):
    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: bytes
    ) -> StartedProcess:
        # pytest changes this variable from test to test. Servers with different variables would not share a fork
        # server.
        plain = {n: value for n, value in environment.items() if n != "PYTEST_CURRENT_TEST"}
        return super().start(command, environment=plain, log=log, stdin=stdin)


@functools.cache
def shared_runtime() -> Runtime:
    """The runtime of servers that are started from the main thread. Their fork server ends with this process."""
    return Runtime(_SharedLauncher(MODULE, [LIBRARIES]))
