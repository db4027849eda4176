"""The options and the environment of the SGLang servers that a run starts.

The module imports neither torch nor sglang.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import EngineConfig
from megatron_dppo.spec import ServersSpec
from megatron_dppo.system.network import url_host
from megatron_dppo.system.ports import free_port
from megatron_dppo.system.secret_variables import chosen_variables, without_secrets

FIRST_WEIGHT_VERSION = 0
"""The weight version of an engine that has just loaded its checkpoint; weight updates count up from 1."""

ADAPTER_DIGESTS = "sha256"
"""Key in a response's ``loaded_adapters``. Its value is the digests of the adapters, as JSON."""
DIGESTS_VARIABLE = "MEGATRON_DPPO_ADAPTER_DIGESTS"
"""Variable that is set in the processes of a server with LoRA."""
ATOMIC_VARIABLE = "MEGATRON_DPPO_ATOMIC_UPDATES"
"""Variable of a server that keeps whole messages until the end of an update."""
REPLICAS_PORT_DISTANCES = (13, *range(233, 240))
"""A server with attention replicas also listens on its port plus each of these numbers (SGLang 0.5.23). It ends if one
of the ports is taken."""

_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""torch.distributed's variables of a trainer rank, which a server must not have."""


HOSTS_VARIABLE = "MEGATRON_DPPO_SERVER_HOSTS"
"""Variable of every task of a server over several hosts: the hosts' names and addresses, as JSON."""


@dataclass(frozen=True)
class ServerHosts:
    """The hosts of a server that runs over several hosts.

    ``addresses``: the launcher's name of each host -> the host's address; clients connect to the first host.
    ``port``: the port of the first host for the rendezvous of the server's ranks.
    """

    addresses: Mapping[str, str]
    port: int

    @property
    def options(self) -> dict[str, Any]:
        """SGLang's options for several hosts, the same on all hosts."""
        first_host = next(iter(self.addresses.values()))
        address = f"{url_host(first_host)}:{self.port}"
        return {"nnodes": len(self.addresses), "dist_init_addr": address}


def server_options(
    servers: ServersSpec,
    *,
    host: str,
    port: int,
    seed: int,
    first_device: int = 0,
    hosts: ServerHosts | None = None,
) -> dict[str, Any]:
    """Return the fields of SGLang's ServerArgs for one server.

    Args:
        servers: the servers of the run.
        host: address that the server listens on.
        port: port that the server listens on.
        seed: seed of the server's sampling.
        first_device: index of the server's first GPU on its host, or on each of ``hosts``.
        hosts: the hosts of a server that runs over several hosts.
    """
    options: dict[str, Any] = {
        **servers.options,
        "host": host,
        "port": port,
        "random_seed": seed,
        "weight_version": str(FIRST_WEIGHT_VERSION),
    }
    if hosts is not None:
        options |= hosts.options
    if servers.device == "cuda":
        options["base_gpu_id"] = first_device
    return options


def free_server_port(servers: ServersSpec, host: str) -> int:
    """Return a free port for a server on ``host``."""
    if servers.layout.attention_replicas == 1:
        return free_port(host)
    return free_port(host, REPLICAS_PORT_DISTANCES)


FLAGS: Mapping[str, str] = {
    "fp8_gemm_runner_backend": "fp8-gemm-backend",
    "fp4_gemm_runner_backend": "fp4-gemm-backend",
    "ep_join_mode": "elastic-ep-join-mode",
    "ep_join_rank_offset": "elastic-ep-join-rank-offset",
}
"""Field of SGLang's ServerArgs whose flag has another name -> the flag, without its hyphens in front."""


def flag_of(field_name: str) -> str:
    """Return the name of the flag of a field of SGLang's ServerArgs, without its hyphens in front."""
    return FLAGS.get(field_name, field_name.replace("_", "-"))


def write_options(options: Mapping[str, Any], path: Path) -> None:
    """Write SGLang's ``--config`` file, with the names of flags. The file is YAML; JSON is a subset of YAML."""
    flags = {flag_of(name): value for name, value in options.items()}
    path.write_text(json.dumps(flags, indent=2) + "\n")


def server_environment(
    engine: EngineConfig, servers: ServersSpec, hosts: ServerHosts | None = None
) -> dict[str, str]:
    """Return the environment of a server.

    It is this process's environment without the variables of trainer ranks and without secrets.
    ``engine.passed_variables`` and SGLang's own variables are added.
    """
    plain_variables = without_secrets(os.environ)
    env = {name: value for name, value in plain_variables.items() if name not in _RANK_VARIABLES}
    env |= chosen_variables(os.environ, engine.passed_variables)
    env |= {
        "PYTHONUNBUFFERED": "1",
        # By default /health generates a token. This takes a second, and returns 503 while generation is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Keep idle connections longer than the client does, so that the server closes no connection during a request.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "60",
        # Seconds until the server notices a client's disconnect and aborts its request (default: 4 s).
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
    }
    if servers.has_states:
        # By default SGLang keeps the last tokens before a convolution in bfloat16, even if the model has another dtype.
        env["SGLANG_MAMBA_CONV_DTYPE"] = servers.options["dtype"]
    if servers.device == "cpu":
        ranks = servers.layout.tensor
        env["SGLANG_PLATFORM"] = "torch_cpu"
        # Two threads that wait for each other while the trainer uses a core are 20 times slower than one thread. A user
        # can set the variable for a large model on its own cores.
        env.setdefault("OMP_NUM_THREADS", "1")
        host_count = 1 if hosts is None else len(hosts.addresses)
        if ranks > 1:
            # The variable has the cores of all hosts' ranks. Every host gets the core numbers of this machine.
            bindings = [bind_cores(ranks // host_count)] * host_count
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(bindings))
    if engine.atomic_updates:
        env[ATOMIC_VARIABLE] = "1"
    if hosts is not None:
        env[HOSTS_VARIABLE] = json.dumps(dict(hosts.addresses))
    return env


def bind_cores(ranks: int) -> str:
    """Distribute this process's cores over ``ranks`` engine ranks, in SGLang's notation: ``0,1|2,3``."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups: list[str] = []
    for rank in range(ranks):
        first_core = rank * share
        group = [cores[i % len(cores)] for i in range(first_core, first_core + share)]
        groups.append(",".join(map(str, group)))
    return "|".join(groups)
