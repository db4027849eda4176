"""A configured run on this machine: which processes it takes, and the supervisor over them."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.schema import EngineConfig, PolicyConfig, TrainConfig
from megatron_dppo.engine.child_server import ChildServer
from megatron_dppo.engine.options import ServerSections
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.fleet.folder import API_KEY_VARIABLE, ROUTER, Keys
from megatron_dppo.fleet.http_router_process import HttpRouterProcess
from megatron_dppo.fleet.restarts import RestartBudget
from megatron_dppo.fleet.supervision import SupervisedFleet, SupervisedServer
from megatron_dppo.launch.errors import LaunchError
from megatron_dppo.launch.ranks import RankGroup
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.supervisor import Supervisor
from megatron_dppo.logging import configure_logging
from megatron_dppo.system.ports import FreePorts, PortTakenError, free_port, require_free_port

_LOOPBACK = "127.0.0.1"
_SEEDS_PER_START = 10_007
_SEEDS_PER_SERVER = 1_000_003


def run_local(config: PolicyConfig, module: str) -> int:
    """Run ``python -m <module> <run.directory>/config.yaml`` as ``parallel.world_size`` ranks here;
    the exit code.

    Starts its servers and their router too, where the run generates. Raises LaunchError where the
    folder or a port that was asked for is taken.
    """
    with RunDirectory(config.run.directory) as directory:
        configure_logging(directory.path, None)
        port = _master_port()
        fleet = supervised_fleet(config, directory) if _generates(config) else None
        directory.write_config(resolved_yaml(config))
        ranks = RankGroup(_command(module, directory), _outputs(config, directory), port)
        return Supervisor(ranks, fleet).run()


def _generates(config: PolicyConfig) -> TypeGuard[TrainConfig]:
    return isinstance(config, TrainConfig) and config.rollout.replay_from is None


def _command(module: str, directory: RunDirectory) -> Sequence[str]:
    return [sys.executable, "-m", module, str(directory.config)]


def _outputs(config: PolicyConfig, directory: RunDirectory) -> list[Path]:
    return [directory.rank_output(rank) for rank in range(config.parallel.world_size)]


def supervised_fleet(config: TrainConfig, directory: RunDirectory) -> SupervisedFleet:
    """The run's servers and HTTP router, not started, under new keys, but for the API key where the
    environment has one. Raises LaunchError for a taken port."""
    engine = config.engine
    if engine.port is not None:
        for index in range(engine.started):
            _require_free("engine.port", engine.host, engine.port + index)
    # A resumed run, or a restarted server, must not draw the samples of its beginning once more.
    seed = config.run.seed + _SEEDS_PER_START * directory.count_start()
    # The router hands its client's key on, so the servers of a fleet take the same one.
    api_key = os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(32)
    admin_key = secrets.token_urlsafe(32)
    folder = directory.fleet
    ports = FreePorts(engine.host)
    sections = ServerSections.of(config)

    def server_of(index: int) -> SupervisedServer:
        name = f"engine{index}"

        def make(incarnation: int) -> ChildServer:
            return EngineProcess(
                sections,
                port=ports.next() if engine.port is None else engine.port + index,
                log_path=directory.server_log(name, incarnation),
                seed=seed + index * _SEEDS_PER_SERVER + incarnation - 1,
                api_key=api_key,
                admin_api_key=admin_key,
                index=index,
            )

        what = "the engine" if engine.started == 1 else name
        return SupervisedServer(name, make, folder, budget=_budget(engine), what=what)

    def make_router(incarnation: int) -> ChildServer:
        return HttpRouterProcess(
            engine,
            port=ports.next(),
            metrics_port=ports.next(),
            log_path=directory.server_log(ROUTER, incarnation),
            api_key=api_key,
            admin_api_key=admin_key,
        )

    servers = [server_of(index) for index in range(engine.started)]
    router = None
    if engine.uses_router:
        budget = _budget(engine)
        router = SupervisedServer(ROUTER, make_router, folder, budget=budget, what="the router")
    return SupervisedFleet(servers, router, folder, Keys(api_key, admin_key))


def _budget(engine: EngineConfig) -> RestartBudget:
    return RestartBudget(engine.max_restarts, engine.restart_window_s)


def _master_port() -> int:
    """Where the ranks meet: MASTER_PORT of the environment, else a free one."""
    pinned = os.environ.get("MASTER_PORT")
    if pinned is None:
        return free_port(_LOOPBACK)
    if not pinned.isdigit():
        raise LaunchError(f"MASTER_PORT: got {pinned!r}, expected a port number")
    _require_free("MASTER_PORT", _LOOPBACK, int(pinned))
    return int(pinned)


def _require_free(key: str, host: str, port: int) -> None:
    try:
        require_free_port(host, port)
    except PortTakenError as error:
        raise LaunchError(
            f"{key}: {error}; leave {key} out for a free one, or end what listens there"
        ) from error
