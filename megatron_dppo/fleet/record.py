"""What a rank, or the user's command, asks of the record of a run's servers, wherever the record is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megatron_dppo.fleet.folder import Keys, Origin, Server


class FleetRecord(Protocol):
    """The servers of a run; FleetFolder is one by files, RemoteRecord one over HTTP."""

    def servers(self) -> list[Server]:
        """Every published server, by name with numbers in order."""

    def router(self) -> Server | None:
        """The router, while it is healthy."""

    def keys(self, server: Server) -> Keys:
        """The keys that ``server`` takes."""

    def attach(self, url: str, origin: Origin = "command") -> Server:
        """Add a server that runs elsewhere. Raises ValueError for what is no URL, or is a member
        already."""

    def detach(self, url: str) -> Server:
        """Take out an attached server. Raises ValueError where there is none, or it was started
        here."""

    def sync_configured(self, urls: list[str]) -> None:
        """Attach what ``engine.urls`` names now, and detach what it named in an earlier start."""

    def report_lost(self, server: Server) -> None:
        """Ask the supervisor to replace this incarnation, which runs on but doesn't answer."""

    def publish_status(self, version: int | None, states: Mapping[str, str]) -> None:
        """``states``: a word or a sentence on every server, by name."""

    def status(self) -> dict[str, Any]:
        """What ``publish_status`` was told last; empty before that."""
