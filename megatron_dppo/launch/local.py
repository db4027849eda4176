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
from megatron_dppo.launch.engine import Engine, EngineKeeper
from megatron_dppo.launch.errors import LaunchError
from megatron_dppo.launch.ranks import RankGroup
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.supervisor import Supervisor
from megatron_dppo.logging import configure_logging
from megatron_dppo.rollout.errors import EngineStartError
from megatron_dppo.rollout.server import EngineProcess, free_port, require_free_port

_LOOPBACK = "127.0.0.1"
_SEEDS_PER_START = 10_007


def run_local(config: PolicyConfig, module: str) -> int:
    """Run ``python -m <module> <run.directory>/config.yaml`` as ``parallel.world_size`` ranks here;
    the exit code.

    Starts an engine too where the run generates and no other server is named. Raises LaunchError
    where the folder or a port that was asked for is taken.
    """
    with RunDirectory(config.run.directory) as directory:
        configure_logging(directory.path, None)
        port = _master_port()
        engine = _engine_keeper(config, directory) if _needs_engine(config) else None
        directory.write_config(resolved_yaml(config))
        ranks = RankGroup(_command(module, directory), _outputs(config, directory), port)
        return Supervisor(ranks, engine).run()


def _needs_engine(config: PolicyConfig) -> TypeGuard[TrainConfig]:
    return (
        isinstance(config, TrainConfig)
        and config.engine.url is None
        and config.rollout.replay_from is None
    )


def _command(module: str, directory: RunDirectory) -> Sequence[str]:
    return [sys.executable, "-m", module, str(directory.config)]


def _outputs(config: PolicyConfig, directory: RunDirectory) -> list[Path]:
    return [directory.rank_output(rank) for rank in range(config.parallel.world_size)]


def _engine_keeper(config: TrainConfig, directory: RunDirectory) -> EngineKeeper:
    if config.engine.port is not None:
        _require_engine_port(config.engine.host, config.engine.port)
    # A resumed run, or a restarted engine, must not draw the samples of its beginning once more.
    seed = config.run.seed + _SEEDS_PER_START * directory.count_start()
    api_key, admin_api_key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)

    def make_engine(incarnation: int) -> Engine:
        return EngineProcess(
            config,
            port=config.engine.port or free_port(config.engine.host),
            log_path=directory.engine_log(incarnation),
            seed=seed + incarnation - 1,
            api_key=api_key,
            admin_api_key=admin_api_key,
        )

    return EngineKeeper(
        make_engine,
        directory,
        keys={"api_key": api_key, "admin_api_key": admin_api_key},
        max_restarts=config.engine.max_restarts,
    )


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
