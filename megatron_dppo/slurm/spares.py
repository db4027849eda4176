"""Servers whose node has died move to a node that no role takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from megatron_dppo.launch.placement import Host
from megatron_dppo.slurm import commands
from megatron_dppo.slurm.commands import SlurmError

log = logging.getLogger(__name__)


def bad_nodes(names: Sequence[str]) -> dict[str, str]:
    """Nodes that Slurm can't use any more, with their state; none where it can't be asked."""
    try:
        return commands.bad_nodes(names)
    except SlurmError as error:
        log.warning("%s", error)
        return {}


class Spares:
    """Hosts that no role takes, given to the servers of hosts that died.

    All servers of one host move together: a spare has as many devices.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        ask: Callable[[Sequence[str]], dict[str, str]] = bad_nodes,
    ) -> None:
        self._left = list(hosts)
        self._moved: dict[Host, Host] = {}
        self._ask = ask

    def host_now(self, host: Host) -> Host:
        """Where a server of ``host`` starts again: there, or on the spare that stands for it."""
        now = self._moved.get(host, host)
        while (state := self._ask([now.name]).get(now.name)) is not None:
            if not self._left:
                log.error("node %s is %s, and there is no spare for its servers", now.name, state)
                return now
            spare = self._left.pop(0)
            log.warning("node %s is %s: its servers move to %s", now.name, state, spare.name)
            now = self._moved[host] = spare
        return now
