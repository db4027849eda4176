"""What a server's base URL must be, wherever one is given: in the configuration or by command."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_HOST = re.compile(r"[\w-]+(\.[\w-]+)*")


def url_problem(url: str) -> str | None:
    """What is wrong with ``url``, in a line; None where a server can have it.

    It is ``http`` or ``https``, a host's name or address, perhaps a port from 1 on and a path.
    """
    problem = f"got {url!r}, expected http://host:port"
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc:  # told without the URL: it would be in every log
            return (
                f"got one for {parts.hostname} with a user or a password in it, expected "
                "http://host:port; keys are environment variables (docs/fleet.md)"
            )
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        return f"{problem}: {error}"
    named = ":" in host or _HOST.fullmatch(host)  # an IPv6 address, checked by urlsplit, or a name
    plain = not (parts.query or parts.fragment or re.search(r"\s", url))
    return None if parts.scheme in ("http", "https") and named and port != 0 and plain else problem
