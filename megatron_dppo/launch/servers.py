"""The servers of a run and their HTTP router, each where the placement has it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_dppo.engine.options import ServerHosts, ServerSections
from megatron_dppo.engine.process import ChildServer, EngineProcess, Runtime
from megatron_dppo.fleet.endpoint import admin_key, control_host
from megatron_dppo.fleet.http_router import OPEN_PATHS, HttpRouterProcess
from megatron_dppo.fleet.record import API_KEY_VARIABLE, ROUTER, Keys
from megatron_dppo.fleet.supervision import RestartBudget, SupervisedFleet, SupervisedServer
from megatron_dppo.launch.placement import Host, LaunchError, Placement, RouterPlace, ServerPlace
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.logging import say
from megatron_dppo.system.network import InterfaceError, free_port, is_loopback

_SEEDS_PER_START = 10_007
_SEEDS_PER_SERVER = 1_000_003


@dataclass(frozen=True)
class Grounds:
    """How servers are started: ``runtime_at`` a host, or over several. ``address``: where this process listens for
    the ranks. ``host_now``: the host to start on again instead of one that may have died."""

    runtime_at: Callable[[Sequence[Host]], Runtime]
    address: str
    host_now: Callable[[Host], Host] = lambda host: host


@dataclass(frozen=True)
class _Maker:
    sections: ServerSections
    directory: RunDirectory
    keys: Keys
    seed: int
    grounds: Grounds

    def server(self, server: ServerPlace, incarnation: int) -> ChildServer:
        assert self.keys.admin is not None
        hosts = server.hosts
        if incarnation > 1:
            hosts = tuple(self.grounds.host_now(host) for host in hosts)
        several = None
        if server.meeting_port is not None:
            port = self._port(server.meeting_port, server.port_step, incarnation)
            several = ServerHosts({host.name: host.address for host in hosts}, port)
        return EngineProcess(
            self.sections,
            port=self._port(server.port, server.port_step, incarnation),
            log_path=self.directory.server_log(server.name, incarnation),
            seed=self.seed + server.index * _SEEDS_PER_SERVER + incarnation - 1,
            api_key=self.keys.api,
            admin_api_key=self.keys.admin,
            host=hosts[0].address,
            first_device=server.first_device,
            hosts=several,
            runtime=self.grounds.runtime_at(hosts),
        )

    def router(self, router: RouterPlace, incarnation: int) -> ChildServer:
        assert self.keys.api is not None
        assert self.keys.admin is not None
        if incarnation == 1 and not is_loopback(router.host.address):
            say(
                f"the router at {router.host.address} answers without a key: {', '.join(OPEN_PATHS)}"
            )
        return HttpRouterProcess(
            self.sections.engine,
            port=self._port(router.port, router.port_step, incarnation),
            metrics_port=self._port(router.metrics_port, router.port_step, incarnation),
            log_path=self.directory.server_log(ROUTER, incarnation),
            api_key=self.keys.api,
            admin_api_key=self.keys.admin,
            host=router.host.address,
            runtime=self.grounds.runtime_at([router.host]),
        )

    def _port(self, first: int | None, step: int, incarnation: int) -> int:
        if first is None:
            return free_port(self.sections.engine.host)
        return first + step * (incarnation - 1)


def supervised_fleet(
    sections: ServerSections,
    directory: RunDirectory,
    placement: Placement,
    grounds: Grounds,
    *,
    seed: int,
    interface: str | None,
) -> SupervisedFleet:
    """The run's servers and HTTP router, not started, under new keys, but for those that the
    environment has. The record of them is offered to the ranks by this process, on ``interface``."""
    engine = sections.engine
    # The router hands its client's key on, so the servers of a fleet take the same one.
    api_key = os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(32)
    keys = Keys(api_key, admin_key())
    # A resumed run, or a restarted server, must not draw the samples of its beginning once more.
    seed += _SEEDS_PER_START * directory.count_start()
    maker = _Maker(sections, directory, keys, seed, grounds)

    def supervised(
        name: str, make: Callable[[int], ChildServer], title: str, **gate: Callable[[], bool]
    ) -> SupervisedServer:
        budget = RestartBudget(engine.max_restarts, engine.restart_window_s)
        return SupervisedServer(name, make, directory.fleet, budget=budget, title=title, **gate)

    # A colocated trainer says when it has left the devices.
    directory.fleet.allow_starts(engine.placement == "separate")
    servers = [
        supervised(
            server.name,
            partial(maker.server, server),
            "the engine" if engine.started == 1 else server.name,
            may_start=lambda: directory.fleet.starts_allowed,
        )
        for server in placement.servers
    ]
    router = None
    if placement.router is not None:
        router = supervised(ROUTER, partial(maker.router, placement.router), "the router")
    try:
        host = control_host(interface, grounds.address)
        return SupervisedFleet(servers, router, directory.fleet, keys, host)
    except (InterfaceError, OSError) as error:
        raise LaunchError(f"parallel.interface: the supervisor can't listen: {error}") from error
