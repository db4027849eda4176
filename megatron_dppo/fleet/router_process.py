"""The router as a child process: smg, which spreads generation over the servers it is told of.

Light: imports neither torch nor smg.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.child_server import ChildServer

ROUTED_MODEL = "policy"
"""The model's name at the router; the servers' own may differ (a path each)."""

_FOREVER_S = 7 * 24 * 3600


class RouterProcess(ChildServer):
    """One router, without servers until it is told of them (``router_client.RouterClient``).

    ``api_key`` opens generation, ``admin_api_key`` the list of servers.
    """

    what = "the router"

    def __init__(
        self,
        config: TrainConfig,
        *,
        port: int,
        metrics_port: int,
        log_path: Path,
        api_key: str,
        admin_api_key: str,
    ) -> None:
        engine = config.engine
        super().__init__(engine.host, port, log_path, engine.start_timeout_s)
        self._admin_key = admin_api_key
        self._options = router_options(engine.host, port, metrics_port, engine.router_policy)
        self._keys = {"api_key": api_key, "admin_api_key": admin_api_key}

    def _command(self) -> Sequence[str]:
        return ["-m", "megatron_dppo.fleet.launch_router"]

    def _environment(self) -> Mapping[str, str]:
        return os.environ

    def _secrets(self) -> Mapping[str, Any]:
        return {**self._keys, "options": self._options}

    def _answers(self) -> bool:
        """It takes our key, which no other router would."""
        answer = self._get("/workers", self._admin_key)
        return answer is not None and answer[0] == 200


def router_options(host: str, port: int, metrics_port: int, policy: str) -> dict[str, Any]:
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
        "prometheus_host": host,
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
