"""The cluster's private network: a bridge of this machine, one cable to each node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tools.slurm_cluster.shell import CommandError, run

_SUBNETS = range(64, 250)


@dataclass(frozen=True)
class Network:
    """The network ``10.<subnet>.0.0/24``; its bridge has the address 254."""

    subnet: int

    @property
    def bridge(self) -> str:
        """Name of the bridge's network interface."""
        return f"slurm{self.subnet}"

    def address(self, number: int) -> str:
        """Address of the node with this number, counted from 1."""
        return f"10.{self.subnet}.0.{number}"

    @property
    def controller(self) -> str:
        """Address of the controller: the bridge's address on this machine."""
        return self.address(254)

    def cable(self, number: int) -> str:
        """Name of this machine's end of a node's cable."""
        return f"slurm{self.subnet}n{number}"

    def plug(self, number: int, pid: int) -> None:
        """Lay a cable to the network namespace of process ``pid``. Inside the namespace, its name is ``eth0``."""
        cable = self.cable(number)
        run("ip", "link", "del", cable, check=False)  # the cable of a crashed node
        run(*f"ip link add {cable} type veth peer name eth0 netns {pid}".split())
        run("ip", "link", "set", cable, "master", self.bridge, "up")

    def switch(self, number: int, *, on: bool) -> None:
        """Pull a node's cable, or plug it in again."""
        run("ip", "link", "set", self.cable(number), "up" if on else "down")

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove the bridge and its cables. It is no error if some are already gone."""
        for number in numbers:
            run("ip", "link", "del", self.cable(number), check=False)
        run("ip", "link", "del", self.bridge, check=False)


def make_network() -> Network:
    """A network on a subnet that nothing on this machine uses."""
    taken = run("ip", "route", "show") + run("ip", "addr", "show")
    start = os.getpid() % len(_SUBNETS)
    for subnet in [*_SUBNETS[start:], *_SUBNETS[:start]]:
        network = Network(subnet)
        if f"10.{subnet}." in taken:
            continue
        try:
            # This command fails if the name is in use.
            run("ip", "link", "add", network.bridge, "type", "bridge")
        except CommandError:
            continue
        run("ip", "addr", "add", f"{network.controller}/24", "dev", network.bridge)
        run("ip", "link", "set", network.bridge, "up")
        return network
    raise CommandError("no subnet 10.64.0.0 to 10.249.0.0 is free for a cluster")
