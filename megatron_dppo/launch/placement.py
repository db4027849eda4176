"""Placement of a run's processes: ranks, SGLang servers and their router on the hosts of an allocation.

The module reads no file and opens no socket. The same function places a run on one machine and a run on a cluster. A
*device* is a GPU or, on a host without GPUs, room for one process.

Ranks come first, host by host. The servers take the devices after the ranks, and the teachers' servers the devices
after both. One server has adjacent devices of one host, or all devices of several hosts. The router runs on the first
rank's host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from megatron_dppo.logging import aligned
from megatron_dppo.spec import Roles
from megatron_dppo.spec.placement import TeacherRole
from megatron_dppo.system.errors import RunError


class LaunchError(RunError):
    """The run can't start here and now; the message says how to change that."""


@dataclass(frozen=True)
class Host:
    """A machine of an allocation.

    Attributes:
        name: name for the launcher of commands.
        address: address for other hosts.
        devices: devices that the run may use; None: any number of processes share the cores.
        group: group of a heterogeneous Slurm job; None in any other job.
    """

    name: str
    address: str
    devices: int | None
    group: int | None = None


@dataclass(frozen=True)
class Allocation:
    """Hosts of one run. Roles fill them in this order. All hosts have the same number of devices.

    ``first_port`` is the first of the run's ports on every host. If it is None, each process takes a free port at its
    start; this is possible only on one machine.
    """

    hosts: tuple[Host, ...]
    first_port: int | None = None

    @property
    def groups(self) -> list[tuple[Host, ...]]:
        groups: dict[int | None, list[Host]] = {}
        for host in self.hosts:
            groups.setdefault(host.group, []).append(host)
        return [tuple(hosts) for hosts in groups.values()]


@dataclass(frozen=True)
class RankPlace:
    """One rank. ``device`` is the number of the rank's device on its host, and the rank's LOCAL_RANK."""

    rank: int
    host: Host
    device: int


@dataclass(frozen=True)
class ServerPlace:
    """One SGLang server on ``devices`` devices of each of ``hosts``, from ``first_device`` on.

    The server's ranks fill ``hosts`` in order. The first host answers the server's clients. ``port`` is the port
    of the first start; None: a free port. Each further start adds ``port_step``, so that it need not wait for the port
    of the previous start. ``teacher``: name of the teacher that the server serves; empty: it serves the policy.
    """

    index: int
    hosts: tuple[Host, ...]
    first_device: int
    devices: int
    port: int | None
    port_step: int = 0
    teacher: str = ""

    @property
    def host(self) -> Host:
        return self.hosts[0]

    @property
    def meeting_port(self) -> int | None:
        """Port on the first host for the rendezvous of SGLang's ranks at the server's first start.

        None for a server on one host, and for a free port.
        """
        if self.port is None or len(self.hosts) == 1:
            return None
        return self.port + 1

    @property
    def name(self) -> str:
        if self.teacher:
            return f"teacher-{self.teacher}-{self.index}"
        return f"engine{self.index}"


@dataclass(frozen=True)
class RouterPlace:
    """The servers' HTTP router. A port of None stands for a free port. ``port_step``: as in ServerPlace."""

    host: Host
    port: int | None
    metrics_port: int | None
    port_step: int = 0


@dataclass(frozen=True)
class Placement:
    """Every process of a run with its host.

    ``teachers`` are the teachers' servers. ``unused`` are hosts without a process. ``master_port`` is the port for the
    ranks' rendezvous at their first start, on the first rank's host; None: a free port. Each further start adds
    ``master_port_step``.
    """

    ranks: tuple[RankPlace, ...]
    servers: tuple[ServerPlace, ...]
    router: RouterPlace | None
    master_port: int | None
    unused: tuple[Host, ...]
    master_port_step: int = 0
    teachers: tuple[ServerPlace, ...] = ()

    def master_port_of(self, start: int) -> int | None:
        """Return the port for the ranks' rendezvous at ``start``. Starts are counted from 1."""
        if self.master_port is None:
            return None
        return self.master_port + (start - 1) * self.master_port_step

    @property
    def master_address(self) -> str:
        return self.ranks[0].host.address

    @property
    def rank_hosts(self) -> tuple[Host, ...]:
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def server_hosts(self) -> tuple[Host, ...]:
        hosts: dict[Host, None] = {}
        for server in (*self.servers, *self.teachers):
            hosts |= dict.fromkeys(server.hosts)
        return tuple(hosts)

    @property
    def ranks_per_host(self) -> int:
        return len(self.ranks) // len(self.rank_hosts)

    def table(self) -> str:
        rows = [("host", "role", "devices", "address")]
        rows += [self._rank_row(host) for host in self.rank_hosts]
        if self.router is not None:
            router_address = _address(self.router.host, self.router.port)
            rows.append((self.router.host.name, "router", "-", router_address))
        for server in (*self.servers, *self.teachers):
            devices = _span(server.first_device, server.devices)
            for host in server.hosts:
                # The first host of a server answers its clients.
                port = server.port if host == server.host else None
                rows.append((host.name, server.name, devices, _address(host, port)))
        rows += [(host.name, "(spare)", "-", host.address) for host in self.unused]
        return "\n".join(aligned(rows))

    def _rank_row(self, host: Host) -> tuple[str, str, str, str]:
        host_ranks = [rank for rank in self.ranks if rank.host == host]
        ranks = _span(host_ranks[0].rank, len(host_ranks))
        # The ranks meet at rank 0.
        master = self.master_port if host_ranks[0].rank == 0 else None
        role = f"ranks {ranks}" if len(host_ranks) > 1 else f"rank {ranks}"
        return host.name, role, _span(0, len(host_ranks)), _address(host, master)


def _span(first_number: int, count: int) -> str:
    if count == 1:
        return str(first_number)
    return f"{first_number}-{first_number + count - 1}"


def _address(host: Host, port: int | None) -> str:
    if port is None:
        return host.address
    return f"{host.address}:{port}"


_FIXED_PORTS = 3
"""Number of ports before the servers' ports: for the ranks' rendezvous, the router, and the router's metrics."""
_SPANNING_PORTS = 2
"""Number of ports of a server over several hosts: one for its clients, and one for the rendezvous of its ranks."""


class PlacementError(LaunchError):
    """The roles do not fit on the hosts. The message says which roles, and what would fit."""


def hosts_needed(roles: Roles, devices: int) -> int:
    """Return how many hosts with ``devices`` devices the roles fill.

    Raises PlacementError if the roles can't be divided among hosts of this size.
    """
    _require_fit(roles, devices)
    end_hosts = [span.end_host for span in _spans(roles, devices)]
    return max([ceil(roles.ranks / devices), *end_hosts])


@dataclass(frozen=True)
class _ServerSpan:
    """The devices of one server, counted over all hosts of ``host_devices`` devices: ``devices`` from ``first`` on."""

    teacher: str
    index: int
    first: int
    devices: int
    host_devices: int

    @property
    def first_host(self) -> int:
        return self.first // self.host_devices

    @property
    def end_host(self) -> int:
        """Number of the host after the server's last host."""
        return ceil((self.first + self.devices) / self.host_devices)

    @property
    def ports(self) -> int:
        """Number of the server's ports."""
        return _SPANNING_PORTS if self.devices > self.host_devices else 1


def _spans(roles: Roles, devices: int) -> list[_ServerSpan]:
    """Return the devices of each server: the run's own servers, then the servers of each teacher."""
    groups = [TeacherRole("", roles.servers, roles.server_devices), *roles.teachers]
    spans: list[_ServerSpan] = []
    first = roles.first_server_device
    for group in groups:
        if group.name:
            # Servers that share the ranks' devices may end before the last rank.
            first = max(first, roles.ranks)
        for index in range(group.servers):
            if first % devices + min(group.server_devices, devices) > devices:
                # The rest of this host is too small for the server: go on with the next host.
                first += devices - first % devices
            spans.append(_ServerSpan(group.name, index, first, group.server_devices, devices))
            first += group.server_devices
    return spans


def place(roles: Roles, allocation: Allocation) -> Placement:
    """Assign a host and devices to every process of a run.

    Raises PlacementError if the roles do not fit on the hosts. The message says what would fit.
    """
    hosts = allocation.hosts
    if not hosts:
        raise PlacementError("got no hosts, expected at least one")
    devices = hosts[0].devices
    if devices is None:
        devices = _devices_for_all(roles)
    roles = _with_servers_on_second_group(roles, allocation, devices)
    needed_hosts = hosts_needed(roles, devices)
    if needed_hosts > len(hosts):
        raise PlacementError(_too_few(roles, hosts, devices, needed_hosts))
    ranks = tuple(
        RankPlace(rank, hosts[rank // devices], rank % devices) for rank in range(roles.ranks)
    )
    master_port = allocation.first_port
    port_step = _ports_of_run(roles, devices)
    router = None
    if roles.router:
        router = RouterPlace(hosts[0], None, None)
        if master_port is not None:
            router = RouterPlace(hosts[0], master_port + 1, master_port + 2, port_step)
    servers = _servers(roles, hosts, devices, master_port)
    used = {rank.host for rank in ranks}
    for server in servers:
        used |= set(server.hosts)
    unused = tuple(host for host in hosts if host not in used)
    own_servers = tuple(server for server in servers if not server.teacher)
    return Placement(
        ranks, own_servers, router, master_port, unused, port_step, servers[len(own_servers) :]
    )


def _with_servers_on_second_group(roles: Roles, allocation: Allocation, devices: int) -> Roles:
    """Return the roles with the servers on the second group of a heterogeneous job; unchanged in any other job."""
    first_group, *other_groups = allocation.groups
    if not other_groups:
        return roles
    group_devices = len(first_group) * devices
    if roles.ranks > group_devices:
        raise PlacementError(
            f"parallel.world_size: got {roles.ranks} ranks, expected at most {group_devices}, the devices of the "
            "job's first group"
        )
    if roles.first_device is not None:
        raise PlacementError(
            "sglang.base_gpu_id: the servers of a heterogeneous job begin on its second group; leave "
            "it out"
        )
    # The servers start on the second group's first host, even if the ranks leave devices of the first group free.
    return replace(roles, first_device=group_devices)


def _servers(
    roles: Roles, hosts: tuple[Host, ...], devices: int, master_port: int | None
) -> tuple[ServerPlace, ...]:
    run_port = None
    if master_port is not None:
        run_port = master_port + _FIXED_PORTS
    servers: list[ServerPlace] = []
    for span in _spans(roles, devices):
        port = run_port
        port_step = 0 if run_port is None else _ports_of_run(roles, devices)
        if roles.port is not None and not span.teacher:
            # A port of the configuration is the same at every start.
            port = roles.port + span.index * span.ports
            port_step = 0
        if run_port is not None:
            run_port += span.ports
        servers.append(
            ServerPlace(
                span.index,
                hosts[span.first_host : span.end_host],
                span.first % devices,
                min(span.devices, devices),
                port,
                port_step,
                span.teacher,
            )
        )
    return tuple(servers)


def _ports_of_run(roles: Roles, devices: int) -> int:
    """Return the number of ports of a run; a restarted process has its first port plus a multiple of this number."""
    return _FIXED_PORTS + sum(span.ports for span in _spans(roles, devices))


def _devices_for_all(roles: Roles) -> int:
    """Return the number of devices that a single host needs if it runs every process."""
    end = max(roles.ranks, roles.first_server_device + roles.servers * roles.server_devices)
    return end + sum(teacher.servers * teacher.server_devices for teacher in roles.teachers)


def _require_fit(roles: Roles, devices: int) -> None:
    sizes = {"parallel.world_size": (roles.ranks, "ranks")}
    if roles.servers:
        sizes["sglang.tp_size"] = (roles.server_devices, "devices for a server")
    for teacher in roles.teachers:
        key = f"distillation.teachers.{teacher.name}.sglang.tp_size"
        sizes[key] = (teacher.server_devices, "devices for a server")
    for key, (size, unit) in sizes.items():
        if size > devices and size % devices:
            fits = size - size % devices
            raise PlacementError(
                f"{key}: got {size} {unit} on hosts of {devices} devices, expected at most {devices} or a multiple of "
                f"it, such as {fits} or {fits + devices}"
            )


def _too_few(roles: Roles, hosts: tuple[Host, ...], devices: int, needed_hosts: int) -> str:
    """Return the text of the error that the roles need ``needed_hosts`` hosts. It also says what would fit."""
    ranks = f"{roles.ranks} ranks" if roles.ranks > 1 else "1 rank"
    size = ""
    if roles.server_devices > 1:
        size = f" of {roles.server_devices}"
    servers = ""
    if roles.servers:
        servers = f" and {roles.servers} servers{size}"
    for teacher in roles.teachers:
        servers += (
            f" and {teacher.servers} of {teacher.server_devices} for the teacher {teacher.name}"
        )
    present_hosts = f"{len(hosts)} hosts" if len(hosts) > 1 else "one host"
    ways = [f"{needed_hosts} hosts of {devices}"]
    for count in range(roles.servers - 1, 0, -1):
        if hosts_needed(replace(roles, servers=count), devices) <= len(hosts):
            ways.append(f"engine.servers={count}")
            break
    if roles.servers and roles.first_device is None and roles.ranks <= devices * len(hosts):
        ways.append("sglang.base_gpu_id=0, by which servers share the ranks' devices")
    return f"devices: {ranks}{servers} do not fit on {present_hosts} of {devices}; what fits: {', or '.join(ways)}"
