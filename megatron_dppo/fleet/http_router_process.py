"""The HTTP router as a child process: smg, which spreads generation over the servers it is told of.

Light: imports neither torch nor smg.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.config.schema import EngineConfig
from megatron_dppo.engine.child_server import ChildServer, Runtime

if TYPE_CHECKING:
    from megatron_dppo.engine.http_client import Answer

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
"""What smg answers to anybody, whatever its options: whether it serves, and what is told of the servers."""
ROUTED_MODEL = "policy"
"""The model's name at the router; the servers' own may differ (a path each)."""

_FOREVER_S = 7 * 24 * 3600


class HttpRouterProcess(ChildServer):
    """One HTTP router, without servers until ``HttpRouterClient`` names them.

    ``api_key`` opens generation, ``admin_api_key`` the list of servers. ``host``: address where it
    listens, ``engine.host`` by default. ``runtime``: where it runs, and with which Python.
    """

    what = "the router"

    def __init__(
        self,
        engine: EngineConfig,
        *,
        port: int,
        metrics_port: int,
        log_path: Path,
        api_key: str,
        admin_api_key: str,
        host: str | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        where = engine.host if host is None else host
        super().__init__(where, port, log_path, engine.start_timeout_s, runtime)
        self._options = http_router_options(where, port, metrics_port, engine.router_policy)
        # Its option ca_cert_paths does not reach the connections to its servers.
        self._variables = {} if engine.ca_file is None else {"SSL_CERT_FILE": engine.ca_file}
        self._keys = {"api_key": api_key, "admin_api_key": admin_api_key}

    def _command(self) -> Sequence[str]:
        return ["-m", "megatron_dppo.fleet.launch_http_router"]

    def _environment(self) -> Mapping[str, str]:
        return {**os.environ, **self._variables}

    def _secrets(self) -> Mapping[str, Any]:
        return {**self._keys, "options": self._options}

    def _probe(self) -> tuple[str, str | None]:
        return "/workers", self._keys["admin_api_key"]

    def _accepts(self, answer: Answer) -> bool:
        """It takes our key, which no other router would."""
        return answer.status == 200


def http_router_options(host: str, port: int, metrics_port: int, policy: str) -> dict[str, Any]:
    """Fields of smg's RouterArgs.

    Retries, deadlines and health are the client's business: it knows which weights a server has, and
    counts a response once. So the router tries once, waits, and judges nobody.
    """
    return {
        "host": host,
        "port": port,
        "policy": policy,
        "power_of_two_load_metric": "least_requests",
        "enable_igw": True,  # the only mode in which every policy may begin without servers
        "prometheus_host": "127.0.0.1",  # smg's metrics know no key; without a host it takes all addresses
        "prometheus_port": metrics_port,
        "disable_retries": True,
        "disable_circuit_breaker": True,
        "disable_health_check": True,
        "worker_overload_protection": False,
        "max_concurrent_requests": 0,
        "request_timeout_secs": _FOREVER_S,
        "shutdown_grace_period_secs": 1,
        "disable_tokenizer_autoload": True,
        "history_backend": "none",
        "log_level": "warn",
    }
