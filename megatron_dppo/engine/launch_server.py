"""Entry point of the engine's process: SGLang's own server, with the keys kept out of sight.

``python -m megatron_dppo.engine.launch_server <SGLang's own flags>`` with one JSON object on
standard input: ``{"api_key": str | null, "admin_api_key": str}``. SGLang takes its keys only as
command-line flags, where ``ps`` shows them, prints them in its log, and answers them to whoever
holds the API key at ``/server_info``. Here they come through a pipe, and the printed configuration
says ``<redacted>``. Of a server over several hosts one such process runs on each, and all get the same
flags; the environment names the hosts, among which each finds itself.

The kernel ends this process with the thread that started it (``system.processes``); those that
SGLang spawns end with this one.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.engine import adapter_digests
from megatron_dppo.engine.options import HOSTS_VARIABLE
from megatron_dppo.engine.private_server import (
    bind_stores,
    keep_snapshots_private,
    listen_where,
    name_shared_memory,
    private_place,
)
from megatron_dppo.engine.recordings.sglang_plugin import offer
from megatron_dppo.engine.recordings.store import recordings_folder
from megatron_dppo.system.gpus import has_visible_gpu
from megatron_dppo.system.network import PortTakenError, hold_port
from megatron_dppo.system.processes import (
    HEARTBEAT_VARIABLE,
    PATIENCE_VARIABLE,
    die_with_parent,
    when_it_stops,
)
from megatron_dppo.system.toolchain import offer_tools

KEY_FIELDS = ("api_key", "admin_api_key")
_REQUEUE_S = 60
_HOST_VARIABLE = "SLURMD_NODENAME"
_PARENT_VARIABLE = "MEGATRON_DPPO_ENGINE_PARENT"


def redact_keys(configuration: dict[str, Any]) -> dict[str, Any]:
    """``configuration`` with every key that is set replaced by ``<redacted>``."""
    hidden = {name: "<redacted>" for name in KEY_FIELDS if configuration.get(name)}
    return {**configuration, **hidden}


def redact_server_args() -> None:
    """Hide the keys in ``resolved_dict``, from which SGLang logs and answers its configuration.

    Needed in the scheduler's process too, which answers ``/server_info`` in part.
    """
    from sglang.srt.server_args import ServerArgs

    resolved_dict = ServerArgs.resolved_dict
    ServerArgs.resolved_dict = lambda self: redact_keys(resolved_dict(self))


def refuse_repacked_experts() -> None:
    """Exit where the environment has SGLang interleave the rows of the experts' weights as it loads them.

    It does so once: a weight update would put rows in the order of the checkpoint among them.
    """
    from sglang.srt.environ import envs

    if envs.SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED.get():
        sys.exit(
            "error: SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED is set in the server's environment, expected unset: "
            "experts' weights in that order can't be updated"
        )


def hold_own_port(host: str, port: int) -> socket.socket:
    """Keep the port from others while the model is loaded; exit where somebody has it already.

    SGLang binds it at the end, and what it then says of a failure is lost among other errors.
    """
    try:
        return hold_port(host, port)
    except PortTakenError as error:
        sys.exit(f"error: {error}")


def _change_sglang() -> None:
    """In this process and in each that SGLang spawns."""
    redact_server_args()
    keep_snapshots_private()
    bind_stores()
    adapter_digests.register()


def watch_supervisor(kill: Callable[..., None]) -> None:
    """End this server, and have its Slurm job requeued, once the run's supervisor gives no sign of life.

    Only where the environment names its heartbeat: a job that outlives its batch process (``--no-kill``)
    would keep its nodes until its time limit.
    """
    path = os.environ.get(HEARTBEAT_VARIABLE)
    if path is None:
        return

    def end() -> None:
        print(f"{path} stands still: the supervisor is gone, this server ends", flush=True)
        job = os.environ.get("SLURM_JOB_ID")
        if job is not None and shutil.which("scontrol"):
            subprocess.run(["scontrol", "requeue", job], check=False, timeout=_REQUEUE_S)
        kill(os.getpid(), include_parent=True)

    when_it_stops(Path(path), end, float(os.environ[PATIENCE_VARIABLE]))


def host_flags(environment: Mapping[str, str]) -> list[str]:
    """SGLang's flags that differ between the hosts of one server; none for a server on one host."""
    if HOSTS_VARIABLE not in environment:
        return []
    addresses = json.loads(environment[HOSTS_VARIABLE])
    own = environment[_HOST_VARIABLE]
    return ["--node-rank", str(list(addresses).index(own)), "--host", addresses[own]]


def main() -> None:
    """Read the keys, parse SGLang's flags, run its server until it is told to stop."""
    start = json.load(sys.stdin)
    if has_visible_gpu():  # here, on the server's own machine, before SGLang looks for its compiler
        print(*offer_tools(os.environ), sep="\n", flush=True)
    os.environ[_PARENT_VARIABLE] = str(os.getpid())  # for the processes that this one spawns
    with private_place(), recordings_folder() as recordings:
        _run(start, recordings)


def _run(start: dict[str, Any], recordings: Path | None) -> None:
    name_shared_memory()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    watch_supervisor(kill_process_tree)
    refuse_repacked_experts()
    load_plugins()
    flags = host_flags(os.environ)
    server_args = prepare_server_args([*sys.argv[1:], *flags])
    for name in KEY_FIELDS:
        setattr(server_args, name, start[name])
    listen_where(server_args.host, several=bool(flags))
    if server_args.enable_lora:
        os.environ[adapter_digests.VARIABLE] = "1"
    _change_sglang()
    if recordings is not None:
        offer(recordings)
    held = hold_own_port(server_args.host, server_args.port)
    try:
        run_server(server_args)
    finally:
        held.close()
        kill_process_tree(os.getpid(), include_parent=False)
    if server_args.node_rank:  # without this host's ranks the others wait for ever
        sys.exit("this host's part of the server has ended")


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that SGLang spawns, before it imports anything
    # SGLang asks for the same signal, but only after imports that take seconds: a parent that dies
    # meanwhile would leave it behind for ever.
    die_with_parent(int(os.environ[_PARENT_VARIABLE]))
    name_shared_memory()
    _change_sglang()
