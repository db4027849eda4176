"""The servers of a run and their router, kept alive together: the run goes on while one is left."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_dppo.fleet.folder import FleetFolder, Keys
from megatron_dppo.fleet.keeper import EngineGivenUpError, EngineKeeper

log = logging.getLogger(__name__)


class FleetKeeper:
    """``servers`` may be empty where others run elsewhere. ``keys``: what clients of these
    processes must show. All methods are called from the main thread."""

    def __init__(
        self,
        servers: Sequence[EngineKeeper],
        router: EngineKeeper | None,
        folder: FleetFolder,
        keys: Keys,
    ) -> None:
        self._servers = list(servers)
        self._router = router
        self._folder = folder
        self._keys = keys
        self._ended: list[EngineKeeper] = []

    def start(self) -> None:
        """Start every process and return at once."""
        self._folder.publish_keys(self._keys)
        for keeper in self._keepers():
            keeper.start()

    def check(self) -> None:
        """Publish who became healthy, restart who died.

        Raises EngineGivenUpError when the last server is given up and none is attached.
        """
        for keeper in self._servers[:]:
            try:
                keeper.check()
            except EngineGivenUpError as error:
                self._give_up_server(keeper, error)
        if self._router is not None:
            try:
                self._router.check()
            except EngineGivenUpError as error:
                log.error("%s\ngoing on without a router", error)
                self._ended.append(self._router)
                self._router = None

    def stop(self, *, at_once: bool) -> None:
        """End all of them at the same time."""
        keepers = [*self._keepers(), *self._ended]
        with ThreadPoolExecutor(max(1, len(keepers)), "stop") as pool:
            for ended in [pool.submit(keeper.stop, at_once=at_once) for keeper in keepers]:
                ended.result()

    def _keepers(self) -> list[EngineKeeper]:
        return self._servers + ([self._router] if self._router is not None else [])

    def _give_up_server(self, keeper: EngineKeeper, error: EngineGivenUpError) -> None:
        self._servers.remove(keeper)
        self._ended.append(keeper)
        attached = [s for s in self._folder.servers() if not s.replaceable]
        if not self._servers and not attached:
            raise error
        left = len(self._servers) + len(attached)
        log.error("%s\ngoing on with the other servers, %d", error, left)
