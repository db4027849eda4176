"""Entry point of the HTTP router's process: smg, with the keys kept out of sight.

``python -m megatron_dppo.fleet.launch_http_router`` with one JSON object on standard input: ``{"options": {field of
smg's RouterArgs: value}, "api_key": str, "admin_api_key": str}``. smg takes its keys only as command-line flags, where
``ps`` shows them; here they come through a pipe. The process dies with the parent's thread that started it.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    start = json.load(sys.stdin)
    print(json.dumps(start["options"]), flush=True)
    from smg.launch_router import launch_router
    from smg.router_args import RouterArgs

    admin = ("trainer", "trainer", start["admin_api_key"], "admin")
    launch_router(
        RouterArgs(**start["options"], api_key=start["api_key"], control_plane_api_keys=[admin])
    )


if __name__ == "__main__":
    main()
