"""The launcher of the servers that a test process starts itself: all are forks of one process."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.options import free_server_port
from megatron_dppo.engine.process import LIBRARIES, MODULE, EngineProcess, Runtime
from megatron_dppo.spec import RunSpec
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


def server_of(
    config: TrainConfig,
    log_path: Path,
    key: str,
    admin_key: str,
    *,
    port: int | None = None,
    seed: int = 1,
) -> EngineProcess:
    """Return a server that the caller starts, with the shared runtime. Without ``port`` it gets a free one."""
    servers = RunSpec.of_checked(config).servers
    return EngineProcess(
        config,
        servers,
        port=port or free_server_port(servers, config.engine.host),
        log_path=log_path,
        seed=seed,
        api_key=key,
        admin_api_key=admin_key,
        runtime=shared_runtime(),
    )
