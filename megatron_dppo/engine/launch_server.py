"""Entry point of the engine's process: SGLang's own server, with the keys kept out of sight.

``python -m megatron_dppo.engine.launch_server <SGLang's own flags>`` reads one JSON object from standard input:
``{"api_key": str | null, "admin_api_key": str}``. SGLang accepts keys only as command-line flags, and ``ps`` shows
flags. SGLang also prints the keys in its log, and returns them at ``/server_info`` to every holder of the API key. This
module reads the keys from a pipe, and the printed configuration has ``<redacted>`` in their place. A server over
several hosts has one of these processes on each host, all with the same flags. Environment variables then have the
names of all hosts and of this process's host.

The kernel ends this process when the thread that started it ends (``system.processes``). When this process ends, the
kernel ends the processes that SGLang has started. On a CPU this process may be a fork (``system.fork_server``), and
SGLang's processes are forks of this process (``cpu/engine/forks.py``).
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import process, shared_memory
from pathlib import Path
from typing import Any

from megatron_dppo.engine.options import DIGESTS_VARIABLE, HOSTS_VARIABLE
from megatron_dppo.engine.server import recordings
from megatron_dppo.system import interfaces, network, ports, processes, scratch, secret_variables
from megatron_dppo.system.gpus import has_visible_gpu
from megatron_dppo.system.toolkit import (
    leave_out_transformer_engine,
    offer_runtime,
    offer_toolkit,
    tool_path,
)

HOOK_MODULES = (
    "megatron_dppo.engine.server.recordings",
    "megatron_dppo.engine.server.continuation",
    "megatron_dppo.weights.server.weight_groups",
    "megatron_dppo.weights.server.server_state",
    "megatron_dppo.weights.server.raw_checksums",
    "megatron_dppo.weights.server.held_tensors",
    "megatron_dppo.weights.server.tied_output",
    "megatron_dppo.weights.server.direct_loading",
    "megatron_dppo.engine.server.flushing",
    "megatron_dppo.engine.server.ngram_drafts",
    "megatron_dppo.engine.server.server_tokenizer",
    "megatron_dppo.weights.server.adapter_digests",
)
"""Modules whose ``register`` changes SGLang in each of the server's processes, in the order of their hooks. The modules
of ``weights`` are above this package, so all modules are imported by name."""

_NAME_VARIABLE = "MEGATRON_DPPO_PRIVATE_NAME"
_PRIVATE_UMASK = 0o077


@contextmanager
def private_place() -> Iterator[Path]:
    """Create a runtime directory for this process and its child processes; enter before importing SGLang."""
    # SGLang's processes exchange pickles over sockets in the temporary folder, and leave files there and in shared
    # memory. The private folder and the private names keep other users out.
    os.umask(_PRIVATE_UMASK)
    scratch.remove_left_behind()
    directory = scratch.make_runtime_directory()
    scratch.use_as_temporary(directory)
    os.environ[_NAME_VARIABLE] = scratch.private_name()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def name_shared_memory() -> None:
    """Make Python's shared memory and semaphores have this server's private name as a prefix."""
    # The process that ends the server removes shared memory by this prefix. Python has no public setting for it.
    prefix = f"/{os.environ[_NAME_VARIABLE]}"
    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    # The private name ends in a hyphen. Python itself adds a hyphen after a semaphore's prefix.
    config["semprefix"] = prefix.rstrip("-")
    shared_memory._SHM_NAME_PREFIX = prefix  # type: ignore[attr-defined]
    # Python fills the name up to this length with random hexadecimal digits.
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + 16  # type: ignore[attr-defined]


def keep_snapshots_private() -> None:
    """Make SGLang write the snapshots of its load into the private temporary folder."""
    # A snapshot in /dev/shm would stay there after the server's end.
    from sglang.srt.managers import load_snapshot

    public_path = load_snapshot.shm_path_for

    def private_path(ipc_name: str) -> str:
        return os.path.join(os.environ["TMPDIR"], os.path.basename(public_path(ipc_name)))

    load_snapshot.shm_path_for = private_path


def listen_on_interface_of(host: str, *, several: bool = False) -> None:
    """Make gloo and SGLang's queues listen on the interface of the server's ``host``.

    Do nothing unless ``host`` is loopback or the server runs on ``several`` hosts.
    """
    # By default both listen on the address that the machine's name resolves to.
    if not (several or network.is_loopback(host)):
        return
    address = network.resolve(host)
    if several:
        os.environ.setdefault("SGLANG_HOST_IP", address)
    interface = interfaces.interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def bind_stores() -> None:
    """Make torch.distributed's stores listen on their own address instead of on all addresses."""
    from torch.distributed import TCPStore

    def open_store(
        host_name: str, port: int, world_size: int, is_master: bool, **options: Any
    ) -> Any:
        if not is_master:
            return TCPStore(host_name, port, world_size, False, **options)
        return network.listening_store(host_name, port, world_size, **options)

    # The package exports a function with the module's name. The function hides the module from an import statement.
    vars(importlib.import_module("torch.distributed.rendezvous"))["TCPStore"] = open_store


KEY_FIELDS = ("api_key", "admin_api_key")
_REQUEUE_S = 60
_HOST_VARIABLE = "SLURMD_NODENAME"
"""Slurm's variable with the name of a task's host."""
_PARENT_VARIABLE = "MEGATRON_DPPO_ENGINE_PARENT"
"""Variable with the process id of this process, for the processes that SGLang spawns."""


def redact_keys(configuration: dict[str, Any]) -> dict[str, Any]:
    """Return ``configuration`` with ``<redacted>`` in place of each key."""
    hidden_keys = {name: "<redacted>" for name in KEY_FIELDS if configuration.get(name)}
    return {**configuration, **hidden_keys}


def redact_server_args() -> None:
    """Hide the keys in ``resolved_dict``. SGLang logs and returns this dict as its configuration."""
    # The scheduler's process needs this too, because it answers a part of /server_info.
    from sglang.srt.server_args import ServerArgs

    resolved_dict = ServerArgs.resolved_dict

    def redacted_dict(self: Any) -> Any:
        return redact_keys(resolved_dict(self))

    ServerArgs.resolved_dict = redacted_dict


_OTHER_LAYOUTS = {
    # SGLang interleaves the rows only at its start. A later update would write rows in the checkpoint's order.
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "experts' weights in that order can't be updated",
    "SGLANG_ENABLE_EMBED_REPLICATION": "weight updates are verified only for an embedding that ranks divide",
    "SGLANG_SHARED_EXPERT_TP1": "weight updates are verified only for shared experts that ranks divide",
}
"""SGLang's variables that change the layout of weights in a server -> the reason why a server with the variable is
refused."""


def refuse_other_layouts() -> None:
    """Exit if the environment makes SGLang lay out weights in a way that weight updates do not know."""
    from sglang.srt.environ import envs

    for name, reason in _OTHER_LAYOUTS.items():
        if getattr(envs, name).get():
            sys.exit(f"error: {name} is set in the server's environment, expected unset: {reason}")


def hold_own_port(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded; exit if another process has it."""
    # SGLang binds its port last, and its message about a failure is lost among other errors.
    try:
        return ports.hold_port(host, port)
    except ports.PortTakenError as error:
        sys.exit(f"error: {error}")


def _change_sglang() -> None:
    """Change functions of SGLang, and register hooks, in each of the server's processes."""
    redact_server_args()
    keep_snapshots_private()
    bind_stores()
    for name in HOOK_MODULES:
        importlib.import_module(name).register()


def watch_supervisor(kill: Callable[..., None]) -> None:
    """End this server, and requeue its Slurm job, once the heartbeat of the run's supervisor stops.

    Without a heartbeat file in the environment, the function does nothing.
    """
    # A job that outlives its batch process (--no-kill) would keep its nodes until its time limit.
    path = os.environ.get(processes.HEARTBEAT_VARIABLE)
    if path is None:
        return

    def end() -> None:
        print(f"{path} stands still: the supervisor is gone, this server ends", flush=True)
        job = os.environ.get("SLURM_JOB_ID")
        if job is not None and shutil.which("scontrol"):
            subprocess.run(["scontrol", "requeue", job], check=False, timeout=_REQUEUE_S)
        kill(os.getpid(), include_parent=True)

    processes.call_when_unchanged(Path(path), end, float(os.environ[processes.PATIENCE_VARIABLE]))


def host_flags(environment: Mapping[str, str]) -> list[str]:
    """Return SGLang's flags that differ between the hosts of one server; none for a server on one host."""
    if HOSTS_VARIABLE not in environment:
        return []
    addresses = json.loads(environment[HOSTS_VARIABLE])
    host = environment[_HOST_VARIABLE]
    return ["--node-rank", str(list(addresses).index(host)), "--host", addresses[host]]


def main() -> None:
    """Run the server: options from the command line, keys from standard input."""
    secret_variables.hide_secrets()
    keys = json.load(sys.stdin)
    leave_out_transformer_engine(os.environ)
    # SGLang compiles kernels and the trie of NGRAM drafts with the ninja on PATH. A virtual environment has its own.
    os.environ["PATH"] = tool_path(os.environ)
    if has_visible_gpu():
        tool_messages = [*offer_toolkit(os.environ), *offer_runtime(os.environ)]
        print(*tool_messages, sep="\n", flush=True)
    # Spawned processes read this variable, and end with this process.
    os.environ[_PARENT_VARIABLE] = str(os.getpid())
    with private_place(), recordings.recordings_folders() as folders:
        _run(keys, folders)


def _run(keys: dict[str, Any], folders: list[Path]) -> None:
    """Run SGLang's server with ``keys``. The server sends the recordings in ``folders`` to clients."""
    name_shared_memory()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    watch_supervisor(kill_process_tree)
    refuse_other_layouts()
    load_plugins()
    flags = host_flags(os.environ)
    server_args = prepare_server_args([*sys.argv[1:], *flags])
    for name in KEY_FIELDS:
        setattr(server_args, name, keys[name])
    listen_on_interface_of(server_args.host, several=bool(flags))
    if server_args.enable_lora:
        os.environ[DIGESTS_VARIABLE] = "1"
    _change_sglang()
    recordings.offer(folders)
    port = hold_own_port(server_args.host, server_args.port)
    # Close the port in forks. Otherwise a fork that ends later than this process would still hold the port.
    os.register_at_fork(after_in_child=port.close)
    try:
        run_server(server_args)
    finally:
        port.close()
        kill_process_tree(os.getpid(), include_parent=False)
    # On a host other than the first, exit with an error, so that the launcher ends the whole server. Otherwise the
    # ranks on other hosts would wait for ever for this host's ranks.
    if server_args.node_rank:
        sys.exit("this host's part of the server has ended")


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that SGLang spawns, before it imports anything
    # SGLang makes this process die with its parent too, but only after imports that take seconds. If the parent died in
    # that time, this process would never end.
    processes.die_with_parent(int(os.environ[_PARENT_VARIABLE]))
    # Make this process's memory unreadable for other processes: it has its parent's keys.
    secret_variables.close_to_others()
    name_shared_memory()
    _change_sglang()
