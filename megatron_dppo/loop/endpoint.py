"""Where the engine is right now: the small file that the supervisor renews at every start of the server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class EngineUnavailableError(RuntimeError):
    """No healthy engine appeared in time."""


@dataclass(frozen=True)
class Endpoint:
    """One incarnation of the server. ``incarnation`` grows by one with each restart; attached servers stay at 0."""

    url: str
    incarnation: int
    api_key: str | None = None
    admin_api_key: str | None = None


def read_endpoint(run_directory: str | Path) -> Endpoint | None:
    """What the supervisor published, or None while no server has been started."""
    folder = Path(run_directory) / "engine"
    try:
        place = json.loads((folder / "endpoint.json").read_text())
        keys = json.loads((folder / "keys.json").read_text())
    except FileNotFoundError:
        return None
    return Endpoint(
        place["url"], int(place["incarnation"]), keys.get("api_key"), keys.get("admin_api_key")
    )


def report_lost(run_directory: str | Path, endpoint: Endpoint) -> None:
    """Ask the supervisor to replace this incarnation, which runs on but doesn't answer.

    It sees by itself when one has exited, and drops a report on an incarnation before the present.
    """
    path = Path(run_directory) / "engine" / "lost.json"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"incarnation": endpoint.incarnation}))
    temporary.replace(path)


def wait_for_endpoint(
    run_directory: str | Path,
    is_healthy: Callable[[Endpoint], bool],
    *,
    attached: Endpoint | None = None,
    timeout_s: float,
    stop: Callable[[], bool],
    poll_s: float = 0.25,
) -> Endpoint | None:
    """The first published endpoint that answers its health check; None when ``stop`` came first.

    ``attached``: a server that runs elsewhere, waited for instead of a published one.
    Raises EngineUnavailableError after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    endpoint = None
    while time.monotonic() < deadline:
        if stop():
            return None
        endpoint = attached or read_endpoint(run_directory)
        if endpoint is not None and is_healthy(endpoint):
            return endpoint
        time.sleep(poll_s)
    seen = f"the last one published is {endpoint.url}" if endpoint else "none was published"
    raise EngineUnavailableError(f"no healthy engine within {timeout_s:.0f} s; {seen}")
