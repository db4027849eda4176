"""The process of the HTTP router. The router is smg, and spreads generation over the servers.

The import of this module loads no torch and no smg. ``router_link.py`` has the connection to the router.

``python -m megatron_dppo.fleet.http_router`` is the router's process, with one JSON object on standard input:
``{"options": {field of smg's RouterArgs: value}, "api_key": str, "admin_api_key": str}``. smg takes its keys only as
command-line flags, and ``ps`` shows these. Therefore this process receives the keys through a pipe.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import EngineConfig
from megatron_dppo.engine.process import ChildServer, Runtime
from megatron_dppo.system.secret_variables import hide_secrets, without_secrets

OPEN_PATHS = (
    "/health",
    "/health_generate",
    "/liveness",
    "/readiness",
    "/v1/models",
    "/get_model_info",
    "/get_server_info",
    "/engine_metrics",
)
"""Paths that smg answers without a key, whatever options smg has: its health, and facts about the servers."""

_LONGEST_CALL_S = 7 * 24 * 3600
"""smg requires a time limit of a call. The clients limit their calls themselves."""


class HttpRouterProcess(ChildServer):
    """One HTTP router, without servers until ``router_link.set_servers`` names them.

    Args:
        engine: section with the router's policy and the authority of the servers' certificates.
        host: address to listen on.
        port: port of generation and control.
        metrics_port: port of smg's metrics, on loopback.
        log_path: log of the process.
        api_key: key of generation.
        admin_api_key: key of the list of servers.
        runtime: host and Python of the process.
    """

    title = "the router"

    def __init__(
        self,
        engine: EngineConfig,
        *,
        host: str,
        port: int,
        metrics_port: int,
        log_path: Path,
        api_key: str,
        admin_api_key: str,
        runtime: Runtime | None = None,
    ) -> None:
        environment = without_secrets(os.environ)
        if engine.ca_file is not None:
            # smg's option ca_cert_paths does not reach the connections to its servers; this variable does.
            environment["SSL_CERT_FILE"] = engine.ca_file
        options = http_router_options(host, port, metrics_port, engine.router_policy)
        super().__init__(
            host,
            port,
            log_path,
            engine.start_timeout_s,
            runtime,
            command=["-m", __name__],
            environment=environment,
            secrets={"options": options, "api_key": api_key, "admin_api_key": admin_api_key},
            probe=("/workers", admin_api_key),
        )


def http_router_options(host: str, port: int, metrics_port: int, policy: str) -> dict[str, Any]:
    """Return the options of smg (fields of its RouterArgs)."""
    # FleetClient repeats calls, limits their time and checks the servers' health. It knows which servers have the
    # committed weights, and the router does not. So these functions of the router are turned off: it tries each call
    # once, without a deadline, and removes no server by itself.
    return {
        "host": host,
        "port": port,
        "policy": policy,
        "power_of_two_load_metric": "least_requests",
        # In any other mode, some policies cannot start without servers.
        "enable_igw": True,
        # smg's metrics have no key, and without a host smg would listen on all addresses.
        "prometheus_host": "127.0.0.1",
        "prometheus_port": metrics_port,
        "disable_retries": True,
        "disable_circuit_breaker": True,
        "disable_health_check": True,
        "worker_overload_protection": False,
        "max_concurrent_requests": 0,
        "request_timeout_secs": _LONGEST_CALL_S,
        "shutdown_grace_period_secs": 1,
        "disable_tokenizer_autoload": True,
        "history_backend": "none",
        "log_level": "warn",
    }


def main() -> None:
    """Run the router in this process, which HttpRouterProcess has started."""
    from smg.launch_router import launch_router
    from smg.router_args import RouterArgs

    hide_secrets()
    settings = json.load(sys.stdin)
    options = settings["options"]
    print(json.dumps(options), flush=True)
    # smg's form: id, name, key, role.
    admin_key = ("trainer", "trainer", settings["admin_api_key"], "admin")
    launch_router(
        RouterArgs(**options, api_key=settings["api_key"], control_plane_api_keys=[admin_key])
    )


if __name__ == "__main__":
    main()
