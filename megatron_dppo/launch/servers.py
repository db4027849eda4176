"""The servers of a run and their HTTP router, each where the placement has it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dppo.config.schema import EngineConfig, TrainConfig
from megatron_dppo.engine.options import ServerHosts, ServerSections
from megatron_dppo.engine.process import ChildServer, EngineProcess, Runtime
from megatron_dppo.fleet.endpoint import FleetEndpoint, admin_key, control_host
from megatron_dppo.fleet.folder import API_KEY_VARIABLE, ROUTER, Keys
from megatron_dppo.fleet.http_router import OPEN_PATHS, HttpRouterProcess
from megatron_dppo.fleet.supervision import RestartBudget, SupervisedFleet, SupervisedServer
from megatron_dppo.launch.placement import Host, LaunchError, Placement, RouterPlace, ServerPlace
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.logging import say
from megatron_dppo.system.network import InterfaceError, free_port, is_loopback

_SEEDS_PER_START = 10_007
_SEEDS_PER_SERVER = 1_000_003


@dataclass(frozen=True)
class Grounds:
    """How servers are started.

    Attributes:
        runtime_at: at a host, or over several.
        address: where this process listens for the ranks.
        host_now: the host to start on again instead of one that may have died.
    """

    runtime_at: Callable[[Sequence[Host]], Runtime]
    address: str
    host_now: Callable[[Host], Host] = lambda host: host


@dataclass(frozen=True)
class _Maker:
    """Makes the processes of servers and router, not started."""

    config: TrainConfig
    directory: RunDirectory
    keys: Keys
    seed: int
    grounds: Grounds

    def server(self, place: ServerPlace, incarnation: int) -> ChildServer:
        assert self.keys.admin is not None
        now = self.grounds.host_now
        hosts = place.hosts if incarnation == 1 else tuple(now(host) for host in place.hosts)
        meeting = place.meeting_port
        several = None
        if meeting is not None:
            port = self._port(meeting, place.port_step, incarnation)
            several = ServerHosts({host.name: host.address for host in hosts}, port)
        return EngineProcess(
            ServerSections.of(self.config),
            port=self._port(place.port, place.port_step, incarnation),
            log_path=self.directory.server_log(place.name, incarnation),
            seed=self.seed + place.index * _SEEDS_PER_SERVER + incarnation - 1,
            api_key=self.keys.api,
            admin_api_key=self.keys.admin,
            host=hosts[0].address,
            first_device=place.first_device,
            hosts=several,
            runtime=self.grounds.runtime_at(hosts),
        )

    def router(self, place: RouterPlace, incarnation: int) -> ChildServer:
        assert self.keys.api is not None
        assert self.keys.admin is not None
        if incarnation == 1 and not is_loopback(place.host.address):
            say(
                f"the router at {place.host.address} answers without a key: {', '.join(OPEN_PATHS)}"
            )
        return HttpRouterProcess(
            self.config.engine,
            port=self._port(place.port, place.port_step, incarnation),
            metrics_port=self._port(place.metrics_port, place.port_step, incarnation),
            log_path=self.directory.server_log(ROUTER, incarnation),
            api_key=self.keys.api,
            admin_api_key=self.keys.admin,
            host=place.host.address,
            runtime=self.grounds.runtime_at([place.host]),
        )

    def _port(self, first: int | None, step: int, incarnation: int) -> int:
        if first is None:
            return free_port(self.config.engine.host)
        return first + step * (incarnation - 1)


def supervised_fleet(
    config: TrainConfig, directory: RunDirectory, placement: Placement, grounds: Grounds
) -> SupervisedFleet:
    """The run's servers and HTTP router, not started, under new keys, but for those that the
    environment has. The folder is offered to the ranks by this process."""
    engine = config.engine
    # The router hands its client's key on, so the servers of a fleet take the same one.
    api_key = os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(32)
    admin = admin_key()
    keys = Keys(api_key, admin)
    # A resumed run, or a restarted server, must not draw the samples of its beginning once more.
    seed = config.run.seed + _SEEDS_PER_START * directory.count_start()
    maker = _Maker(config, directory, keys, seed, grounds)
    folder = directory.fleet

    def supervised(name: str, make: Callable[[int], ChildServer], what: str) -> SupervisedServer:
        return SupervisedServer(name, make, folder, budget=_budget(engine), what=what)

    def server_at(place: ServerPlace) -> SupervisedServer:
        what = "the engine" if engine.started == 1 else place.name
        return supervised(place.name, lambda i: maker.server(place, i), what)

    servers = [server_at(place) for place in placement.servers]
    router, beside = None, placement.router
    if beside is not None:
        router = supervised(ROUTER, lambda i: maker.router(beside, i), "the router")
    try:
        host = control_host(config.parallel.interface, grounds.address)
        endpoint = FleetEndpoint(folder, admin, host)
    except (InterfaceError, OSError) as error:
        raise LaunchError(f"parallel.interface: the supervisor can't listen: {error}") from error
    return SupervisedFleet(servers, router, folder, keys, endpoint)


def _budget(engine: EngineConfig) -> RestartBudget:
    return RestartBudget(engine.max_restarts, engine.restart_window_s)
