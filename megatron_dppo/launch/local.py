"""A configured run on this machine: which processes it takes, and the supervisor over them."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.schema import PolicyConfig, TrainConfig
from megatron_dppo.engine.child_server import free_port, require_free_port
from megatron_dppo.engine.errors import EngineStartError
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.fleet.fleet_keeper import FleetKeeper
from megatron_dppo.fleet.folder import API_KEY_VARIABLE, ROUTER, Keys
from megatron_dppo.fleet.keeper import Engine, EngineKeeper
from megatron_dppo.fleet.router_process import RouterProcess
from megatron_dppo.launch.errors import LaunchError
from megatron_dppo.launch.ranks import RankGroup
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.supervisor import Supervisor
from megatron_dppo.logging import configure_logging

_LOOPBACK = "127.0.0.1"
_SEEDS_PER_START = 10_007


def run_local(config: PolicyConfig, module: str) -> int:
    """Run ``python -m <module> <run.directory>/config.yaml`` as ``parallel.world_size`` ranks here;
    the exit code.

    Starts its servers and their router too, where the run generates. Raises LaunchError where the
    folder or a port that was asked for is taken.
    """
    with RunDirectory(config.run.directory) as directory:
        configure_logging(directory.path, None)
        port = _master_port()
        fleet = fleet_keeper(config, directory) if _generates(config) else None
        directory.write_config(resolved_yaml(config))
        ranks = RankGroup(_command(module, directory), _outputs(config, directory), port)
        return Supervisor(ranks, fleet).run()


def _generates(config: PolicyConfig) -> TypeGuard[TrainConfig]:
    return isinstance(config, TrainConfig) and config.rollout.replay_from is None


def _command(module: str, directory: RunDirectory) -> Sequence[str]:
    return [sys.executable, "-m", module, str(directory.config)]


def _outputs(config: PolicyConfig, directory: RunDirectory) -> list[Path]:
    return [directory.rank_output(rank) for rank in range(config.parallel.world_size)]


def fleet_keeper(config: TrainConfig, directory: RunDirectory) -> FleetKeeper:
    """The run's servers and router, not started, under new keys, but for the API key where the
    environment has one. Raises LaunchError for a taken port."""
    engine = config.engine
    if engine.port is not None:
        for index in range(engine.started):
            _require_engine_port(engine.host, engine.port + index)
    # A resumed run, or a restarted server, must not draw the samples of its beginning once more.
    seed = config.run.seed + _SEEDS_PER_START * directory.count_start()
    # The router hands its client's key on, so the servers of a fleet take the same one.
    api_key = os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(32)
    admin_key = secrets.token_urlsafe(32)
    folder = directory.fleet
    given: set[int] = set()

    def new_port() -> int:
        """A free one, and no other's who has not bound it yet."""
        while (port := free_port(engine.host)) in given:
            continue
        given.add(port)
        return port

    def keeper_of(index: int) -> EngineKeeper:
        name = f"engine{index}"

        def make(incarnation: int) -> Engine:
            return EngineProcess(
                config,
                port=new_port() if engine.port is None else engine.port + index,
                log_path=directory.server_log(name, incarnation),
                seed=seed + index * (engine.max_restarts + 1) + incarnation - 1,
                api_key=api_key,
                admin_api_key=admin_key,
                index=index,
            )

        what = "the engine" if engine.started == 1 else name
        return EngineKeeper(name, make, folder, max_restarts=engine.max_restarts, what=what)

    def make_router(incarnation: int) -> Engine:
        return RouterProcess(
            config,
            port=new_port(),
            metrics_port=new_port(),
            log_path=directory.server_log(ROUTER, incarnation),
            api_key=api_key,
            admin_api_key=admin_key,
        )

    servers = [keeper_of(index) for index in range(engine.started)]
    router = None
    if engine.uses_router:
        router = EngineKeeper(
            ROUTER, make_router, folder, max_restarts=engine.max_restarts, what="the router"
        )
    return FleetKeeper(servers, router, folder, Keys(api_key, admin_key))


def _master_port() -> int:
    """Where the ranks meet: MASTER_PORT of the environment, else a free one."""
    pinned = os.environ.get("MASTER_PORT")
    if pinned is None:
        return free_port(_LOOPBACK)
    if not pinned.isdigit():
        raise LaunchError(f"MASTER_PORT: got {pinned!r}, expected a port number")
    if not _is_free(int(pinned)):
        raise LaunchError(f"MASTER_PORT: {pinned} is taken; unset it for a free one")
    return int(pinned)


def _require_engine_port(host: str, port: int) -> None:
    try:
        require_free_port(host, port)
    except EngineStartError as error:
        raise LaunchError(str(error)) from error


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError:
            return False
    return True
