"""Who runs where: the trainer's ranks, the SGLang servers and their router on the hosts of an allocation.

Pure: reads no file, opens no socket. A run on one machine and one on a cluster are placed by the same function. A
*device* is a GPU or, on a host without GPUs, room for one process.

Ranks come first, host by host; the servers take the devices after them, each on devices next to each other of one host,
or on all devices of several. The router runs beside the first rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dppo.engine.options import ServerSections
from megatron_dppo.logging import aligned
from megatron_dppo.system.errors import RunError


class LaunchError(RunError):
    """The run can't start here and now; the message says what to do about it."""


# --- hosts, and the places that processes have on them


@dataclass(frozen=True)
class Host:
    """A machine of an allocation. ``name``: as the launcher of commands knows it; ``address``: where others reach it.

    ``devices``: that the run may use; None: processes share its cores, as many as are wanted. ``group``: of a
    heterogeneous Slurm job; None in any other.
    """

    name: str
    address: str
    devices: int | None
    group: int | None = None


@dataclass(frozen=True)
class Allocation:
    """Hosts of one run, in the order in which roles fill them, all with the same number of devices.

    ``first_port``: ports count on from it on every host; None: free ones are looked for when a process
    starts, which takes a run on one machine.
    """

    hosts: tuple[Host, ...]
    first_port: int | None = None

    @property
    def groups(self) -> list[tuple[Host, ...]]:
        groups = dict.fromkeys(host.group for host in self.hosts)
        return [tuple(h for h in self.hosts if h.group == group) for group in groups]


@dataclass(frozen=True)
class RankPlace:
    """One rank. ``device``: its number on its host, which is its LOCAL_RANK."""

    rank: int
    host: Host
    device: int


@dataclass(frozen=True)
class ServerPlace:
    """One SGLang server on ``devices`` devices of each of ``hosts``, from ``first_device`` on.

    Its ranks are dealt out in order; the first host answers its clients. ``port``: of its first start; None:
    a free one. ``port_step`` is added at each further start, which then does not wait for the port of the last.
    """

    index: int
    hosts: tuple[Host, ...]
    first_device: int
    devices: int
    port: int | None
    port_step: int = 0

    @property
    def host(self) -> Host:
        return self.hosts[0]

    @property
    def meeting_port(self) -> int | None:
        """Where the ranks of a server over several hosts meet at its first start, on the first host."""
        return None if self.port is None or len(self.hosts) == 1 else self.port + 1

    @property
    def name(self) -> str:
        return f"engine{self.index}"


@dataclass(frozen=True)
class RouterPlace:
    """The servers' HTTP router. Ports are None where free ones are looked for; ``port_step`` is as a server's."""

    host: Host
    port: int | None
    metrics_port: int | None
    port_step: int = 0


@dataclass(frozen=True)
class Placement:
    """Every process of a run with its host; ``unused``: hosts that no role takes.

    ``master_port``: where the ranks meet, on the first rank's host; None: a free one.
    """

    ranks: tuple[RankPlace, ...]
    servers: tuple[ServerPlace, ...]
    router: RouterPlace | None
    master_port: int | None
    unused: tuple[Host, ...]

    @property
    def master_address(self) -> str:
        return self.ranks[0].host.address

    @property
    def rank_hosts(self) -> tuple[Host, ...]:
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def server_hosts(self) -> tuple[Host, ...]:
        return tuple(dict.fromkeys(host for server in self.servers for host in server.hosts))

    @property
    def ranks_per_host(self) -> int:
        return len(self.ranks) // len(self.rank_hosts)

    def table(self) -> str:
        rows = [("host", "role", "devices", "address")]
        rows += [self._rank_row(host) for host in self.rank_hosts]
        if self.router is not None:
            where = _address(self.router.host, self.router.port)
            rows.append((self.router.host.name, "router", "-", where))
        for server in self.servers:
            devices = _span(server.first_device, server.devices)
            ports = [server.port, *[None] * (len(server.hosts) - 1)]
            for host, port in zip(server.hosts, ports, strict=True):
                rows.append((host.name, server.name, devices, _address(host, port)))
        rows += [(host.name, "(spare)", "-", host.address) for host in self.unused]
        return "\n".join(aligned(rows))

    def _rank_row(self, host: Host) -> tuple[str, str, str, str]:
        there = [rank for rank in self.ranks if rank.host == host]
        ranks = _span(there[0].rank, len(there))
        master = self.master_port if there[0].rank == 0 else None
        role = f"ranks {ranks}" if len(there) > 1 else f"rank {ranks}"
        return host.name, role, _span(0, len(there)), _address(host, master)


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _address(host: Host, port: int | None) -> str:
    return host.address if port is None else f"{host.address}:{port}"


# Rendezvous, router, the router's metrics; the servers' ports follow.
_FIXED_PORTS = 3
# Of a server over several hosts: where it answers, and where its ranks meet.
_SPANNING_PORTS = 2


class PlacementError(LaunchError):
    """The roles do not fit on the hosts; the message says which, and what would fit."""


@dataclass(frozen=True)
class Roles:
    """What a run is made of: ranks, a device each, and SGLang servers to start.

    ``first_device``: of the first server, counted over all hosts; None: the one after the ranks.
    ``port``: of the first server, where the configuration names one.
    """

    ranks: int
    servers: int = 0
    server_devices: int = 1
    first_device: int | None = None
    port: int | None = None
    router: bool = False

    @classmethod
    def of(cls, ranks: int, sections: ServerSections | None) -> Roles:
        if sections is None:
            return cls(ranks)
        engine, table = sections.engine, sections.sglang
        # With attention in data parallel SGLang's replicas share the devices of tp_size; otherwise each has its own.
        replicas = 1 if table.get("enable_dp_attention") else table.get("dp_size") or 1
        size = int((table.get("tp_size") or 1) * (table.get("pp_size") or 1) * replicas)
        first = table.get("base_gpu_id")
        if engine.placement == "colocated":
            first = 0
        return cls(ranks, engine.started, size, first, engine.port, engine.uses_router)

    def hosts_needed(self, devices: int) -> int:
        """Hosts of ``devices`` devices that these roles fill. Raises PlacementError where the roles
        can't be cut into such hosts."""
        _require_fit(self, devices)
        first = self.ranks if self.first_device is None else self.first_device
        free = -first % devices // self.server_devices
        beyond = max(0, self.servers - free)
        if self.server_devices > devices:
            more = self.servers * (self.server_devices // devices)
        else:
            more = -(-beyond // (devices // self.server_devices))
        return max(-(-self.ranks // devices), -(-first // devices) + more)

    def ports(self, devices: int) -> int:
        return _SPANNING_PORTS if self.server_devices > devices else 1


def place(roles: Roles, allocation: Allocation) -> Placement:
    """Give every process of a run its host and devices.

    Raises PlacementError where the roles do not fit on the hosts, with what would.
    """
    hosts = allocation.hosts
    if not hosts:
        raise PlacementError("got no hosts, expected at least one")
    room = hosts[0].devices
    devices = _room_for_all(roles) if room is None else room
    roles = _in_groups(roles, allocation, devices)
    needed = roles.hosts_needed(devices)
    if needed > len(hosts):
        raise PlacementError(_too_few(roles, hosts, devices, needed))
    ranks = tuple(
        RankPlace(rank, hosts[rank // devices], rank % devices) for rank in range(roles.ranks)
    )
    base = allocation.first_port
    router = None
    if roles.router:
        router = RouterPlace(hosts[0], None, None)
        if base is not None:
            router = RouterPlace(hosts[0], base + 1, base + 2, _ports(roles, devices))
    servers = _servers(roles, hosts, devices, base)
    used = {rank.host for rank in ranks} | {host for server in servers for host in server.hosts}
    unused = tuple(host for host in hosts if host not in used)
    return Placement(ranks, servers, router, base, unused)


def _in_groups(roles: Roles, allocation: Allocation, devices: int) -> Roles:
    first, *others = allocation.groups
    if not others:
        return roles
    room = len(first) * devices
    if roles.ranks > room:
        raise PlacementError(
            f"the first group of the job has {room} devices, {roles.ranks} ranks need as many"
        )
    if roles.first_device is not None:
        raise PlacementError(
            "sglang.base_gpu_id: the servers of a heterogeneous job begin on its second group; leave "
            "it out"
        )
    # On the second group's first host, also where the ranks leave devices of the first group free.
    return replace(roles, first_device=room)


def _servers(
    roles: Roles, hosts: tuple[Host, ...], devices: int, base: int | None
) -> tuple[ServerPlace, ...]:
    size = min(roles.server_devices, devices)
    count = roles.server_devices // size
    first_port, step = roles.port, 0
    if first_port is None and base is not None:
        first_port, step = base + _FIXED_PORTS, _ports(roles, devices)
    device = roles.ranks if roles.first_device is None else roles.first_device
    servers = []
    for index in range(roles.servers):
        # The rest of this host is too small.
        if device % devices + size > devices:
            device += devices - device % devices
        port = None if first_port is None else first_port + index * roles.ports(devices)
        host = device // devices
        span = hosts[host : host + count]
        servers.append(ServerPlace(index, span, device % devices, size, port, step))
        device += roles.server_devices
    return tuple(servers)


def _ports(roles: Roles, devices: int) -> int:
    """Ports of a whole run, whose servers and router take as many further ones when they start again."""
    return _FIXED_PORTS + roles.servers * roles.ports(devices)


def _room_for_all(roles: Roles) -> int:
    """Devices of one host that takes every process."""
    first = roles.ranks if roles.first_device is None else roles.first_device
    return max(roles.ranks, first + roles.servers * roles.server_devices)


def _require_fit(roles: Roles, devices: int) -> None:
    if roles.ranks > devices and roles.ranks % devices:
        fits = roles.ranks - roles.ranks % devices
        raise PlacementError(
            f"parallel.world_size: got {roles.ranks} ranks on hosts of {devices} devices, expected "
            f"at most {devices} or a multiple of it, such as {fits} or {fits + devices}"
        )
    size = roles.server_devices
    if roles.servers and size > devices and size % devices:
        fits = size - size % devices
        raise PlacementError(
            f"sglang.tp_size: got {size} devices for a server on hosts of {devices}, expected at most "
            f"{devices} or a multiple of it, such as {fits} or {fits + devices}"
        )


def _too_few(roles: Roles, hosts: tuple[Host, ...], devices: int, needed: int) -> str:
    ranks = f"{roles.ranks} ranks" if roles.ranks > 1 else "1 rank"
    size = f" of {roles.server_devices}" if roles.server_devices > 1 else ""
    servers = f" and {roles.servers} servers{size}" if roles.servers else ""
    room = f"{len(hosts)} hosts" if len(hosts) > 1 else "one host"
    fewer = [
        count
        for count in range(roles.servers - 1, 0, -1)
        if Roles(roles.ranks, count, roles.server_devices, roles.first_device).hosts_needed(devices)
        <= len(hosts)
    ]
    ways = [f"{needed} hosts of {devices}"]
    ways += [f"engine.servers={fewer[0]}"] if fewer else []
    if roles.servers and roles.first_device is None and roles.ranks <= devices * len(hosts):
        ways.append("sglang.base_gpu_id=0, by which servers share the ranks' devices")
    return f"devices: {ranks}{servers} do not fit on {room} of {devices}; what fits: {', or '.join(ways)}"
