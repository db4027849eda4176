"""The servers of a run, those of its teachers and the HTTP router, each at its place, under supervision."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.options import ServerHosts, free_server_port
from megatron_dppo.engine.process import ChildServer, EngineProcess, Runtime
from megatron_dppo.fleet.endpoint import admin_key, control_host
from megatron_dppo.fleet.http_router import OPEN_PATHS, HttpRouterProcess
from megatron_dppo.fleet.record import API_KEY_VARIABLE, ROUTER, Keys
from megatron_dppo.fleet.supervision import (
    RestartBudget,
    ServerGroup,
    SupervisedFleet,
    SupervisedServer,
)
from megatron_dppo.launch.placement import Host, LaunchError, Placement, RouterPlace, ServerPlace
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.logging import say
from megatron_dppo.spec import RunSpec, ServersSpec
from megatron_dppo.system.interfaces import InterfaceError
from megatron_dppo.system.network import is_loopback

_SEEDS_PER_START = 10_007
"""Distance between the seeds of two starts of a run. It is larger than the number of a server's restarts in a start."""
_SEEDS_PER_SERVER = 1_000_003
"""Distance between the seeds of two servers."""


def _same_host(host: Host) -> Host:
    return host


@dataclass(frozen=True)
class ServerStarts:
    """How servers are started.

    Attributes:
        runtime_at: returns the runtime of a server on one host or over several hosts.
        address: this process listens for the ranks at this address.
        host_now: takes a host of the placement and returns the host for a restart: the same host, or another host if
            the host of the placement has died.
    """

    runtime_at: Callable[[Sequence[Host]], Runtime]
    address: str
    host_now: Callable[[Host], Host] = _same_host


@dataclass(frozen=True)
class _ServerMaker:
    """Makes the processes of servers and of the router, without starting them."""

    config: TrainConfig
    servers: ServersSpec
    directory: RunDirectory
    keys: Keys
    seed: int
    starts: ServerStarts

    def server(self, server: ServerPlace, incarnation: int) -> ChildServer:
        assert self.keys.admin is not None
        hosts = server.hosts
        if incarnation > 1:
            hosts = tuple(self.starts.host_now(host) for host in hosts)
        host: str | ServerHosts = hosts[0].address
        if server.meeting_port is not None:
            port = self._port(server.meeting_port, server.port_step, incarnation)
            host = ServerHosts({host.name: host.address for host in hosts}, port)
        return EngineProcess(
            self.config,
            self.servers,
            port=self._port(server.port, server.port_step, incarnation),
            log_path=self.directory.server_log(server.name, incarnation),
            seed=self.seed + server.index * _SEEDS_PER_SERVER + incarnation - 1,
            api_key=self.keys.api,
            admin_api_key=self.keys.admin,
            host=host,
            first_device=server.first_device,
            runtime=self.starts.runtime_at(hosts),
        )

    def router(self, router: RouterPlace, incarnation: int) -> ChildServer:
        assert self.keys.api is not None
        assert self.keys.admin is not None
        if incarnation == 1 and not is_loopback(router.host.address):
            say(
                f"the router at {router.host.address} answers without a key: {', '.join(OPEN_PATHS)}"
            )
        return HttpRouterProcess(
            self.config.engine,
            port=self._port(router.port, router.port_step, incarnation),
            metrics_port=self._port(router.metrics_port, router.port_step, incarnation),
            log_path=self.directory.server_log(ROUTER, incarnation),
            api_key=self.keys.api,
            admin_api_key=self.keys.admin,
            host=router.host.address,
            runtime=self.starts.runtime_at([router.host]),
        )

    def _port(self, first_port: int | None, step: int, incarnation: int) -> int:
        if first_port is None:
            return free_server_port(self.servers, self.config.engine.host)
        return first_port + step * (incarnation - 1)


def supervised_fleet(
    config: TrainConfig,
    spec: RunSpec,
    directory: RunDirectory,
    placement: Placement,
    starts: ServerStarts,
) -> SupervisedFleet:
    """Return the run's servers, those of its teachers and the HTTP router, not started.

    The function makes the keys that the environment does not have. This process offers the server registry to the
    ranks, on ``parallel.interface``.
    """
    engine = config.engine
    # The router forwards its client's key, so the servers of a fleet share one key.
    api_key = os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(32)
    keys = Keys(api_key, admin_key())
    # A resumed run, or a restarted server, must not sample with the same seeds again.
    seed = config.run.seed + _SEEDS_PER_START * directory.count_start()
    maker = _ServerMaker(config, spec.servers, directory, keys, seed, starts)

    # A colocated trainer allows servers to start once it has left the devices.
    directory.fleet.allow_starts(not spec.roles.colocated)
    new_budget = partial(RestartBudget, engine.max_restarts, engine.restart_window_s)
    servers: list[SupervisedServer] = []
    for server in placement.servers:
        title = "the engine" if spec.servers.started == 1 else server.name
        servers.append(
            SupervisedServer(
                server.name,
                partial(maker.server, server),
                directory.fleet,
                budget=new_budget(),
                title=title,
                may_start=directory.fleet.begin_start,
            )
        )
    teachers: list[ServerGroup] = []
    for teacher in spec.teachers:
        serving = teacher.serving_config(config)
        teacher_maker = replace(maker, config=serving, servers=teacher.servers)
        group = [
            SupervisedServer(
                server.name,
                partial(teacher_maker.server, server),
                directory.fleet,
                budget=new_budget(),
                title=server.name,
                teacher=teacher.name,
            )
            for server in placement.teachers
            if server.teacher == teacher.name
        ]
        teachers.append(ServerGroup(group, partial(len, teacher.servers.urls)))
    router = None
    if placement.router is not None:
        router = SupervisedServer(
            ROUTER,
            partial(maker.router, placement.router),
            directory.fleet,
            budget=new_budget(),
            title="the router",
        )
    try:
        host = control_host(config.parallel.interface, starts.address)
        return SupervisedFleet(servers, router, directory.fleet, keys, host, teachers)
    except (InterfaceError, OSError) as error:
        raise LaunchError(f"parallel.interface: the supervisor can't listen: {error}") from error
