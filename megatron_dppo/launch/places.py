"""Hosts of an allocation, and the places that a run's processes have on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A machine of an allocation.

    Attributes:
        name: as the launcher of commands knows it.
        address: where the other hosts reach it.
        devices: that the run may use; None: processes share its cores, as many as are wanted.
        group: of a heterogeneous Slurm job, to which the host belongs; None in any other.
    """

    name: str
    address: str
    devices: int | None
    group: int | None = None


@dataclass(frozen=True)
class Allocation:
    """Hosts of one run, all with the same number of devices.

    Attributes:
        hosts: in the order in which roles fill them.
        first_port: ports count on from it on every host; None: free ones are looked for when a
            process starts, which takes a run on one machine.
    """

    hosts: tuple[Host, ...]
    first_port: int | None = None

    @property
    def groups(self) -> list[tuple[Host, ...]]:
        """The hosts by group, in order."""
        known = dict.fromkeys(host.group for host in self.hosts)
        return [tuple(h for h in self.hosts if h.group == group) for group in known]


@dataclass(frozen=True)
class RankPlace:
    """One rank. ``device``: its number on its host, which is its LOCAL_RANK."""

    rank: int
    host: Host
    device: int


@dataclass(frozen=True)
class ServerPlace:
    """One SGLang server.

    Attributes:
        index: in the fleet.
        hosts: where it runs, its ranks dealt out in order; the first one answers its clients.
        first_device: on each host; the others follow.
        devices: how many of each host.
        port: of its first start; None: a free one.
        port_step: added at each further start, which then does not wait for the port of the last.
    """

    index: int
    hosts: tuple[Host, ...]
    first_device: int
    devices: int
    port: int | None
    port_step: int = 0

    @property
    def host(self) -> Host:
        """Where clients reach it."""
        return self.hosts[0]

    @property
    def meeting_port(self) -> int | None:
        """Where the ranks of a server over several hosts meet at its first start, on the first host."""
        return None if self.port is None or len(self.hosts) == 1 else self.port + 1

    @property
    def name(self) -> str:
        """Under which it is published."""
        return f"engine{self.index}"


@dataclass(frozen=True)
class RouterPlace:
    """The servers' HTTP router. Ports are None where free ones are looked for; ``port_step`` is as a
    server's."""

    host: Host
    port: int | None
    metrics_port: int | None
    port_step: int = 0


@dataclass(frozen=True)
class Placement:
    """Every process of a run with its host.

    Attributes:
        ranks: in order.
        servers: in order.
        router: None where the run has none.
        master_port: where the ranks meet, on the first rank's host; None: a free one.
        unused: hosts that no role takes.
    """

    ranks: tuple[RankPlace, ...]
    servers: tuple[ServerPlace, ...]
    router: RouterPlace | None
    master_port: int | None
    unused: tuple[Host, ...]

    @property
    def master_address(self) -> str:
        """Where the ranks meet."""
        return self.ranks[0].host.address

    @property
    def rank_hosts(self) -> tuple[Host, ...]:
        """The hosts of the ranks, each once, in order."""
        return tuple(dict.fromkeys(place.host for place in self.ranks))

    @property
    def server_hosts(self) -> tuple[Host, ...]:
        """The hosts of the servers, each once, in order."""
        return tuple(dict.fromkeys(host for server in self.servers for host in server.hosts))

    @property
    def ranks_per_host(self) -> int:
        """Ranks on each of ``rank_hosts``."""
        return len(self.ranks) // len(self.rank_hosts)

    def table(self) -> str:
        """One line for each role on a host, aligned."""
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
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)

    def _rank_row(self, host: Host) -> tuple[str, str, str, str]:
        there = [place for place in self.ranks if place.host == host]
        ranks = _span(there[0].rank, len(there))
        master = self.master_port if there[0].rank == 0 else None
        role = f"ranks {ranks}" if len(there) > 1 else f"rank {ranks}"
        return host.name, role, _span(0, len(there)), _address(host, master)


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _address(host: Host, port: int | None) -> str:
    return host.address if port is None else f"{host.address}:{port}"
