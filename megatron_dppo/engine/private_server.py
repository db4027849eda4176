"""What keeps a server's insides from other users of its machine: sockets, files, listeners.

SGLang's processes send each other pickles over sockets in the temporary folder, leave files there and
in shared memory, and meet over a store of torch.distributed, which listens on every interface. Here all
of it lies in a folder and under names of this process alone, and the store listens on one address.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process, shared_memory
from pathlib import Path
from typing import Any

from megatron_dppo.system.network import interface_of, is_loopback, resolve
from megatron_dppo.system.scratch import (
    make_runtime_directory,
    private_name,
    remove_left_behind,
    use_as_temporary,
)

_NAME_VARIABLE = "MEGATRON_DPPO_PRIVATE_NAME"
_PRIVATE_UMASK = 0o077


@contextmanager
def private_place() -> Iterator[Path]:
    """A runtime directory for this process and those that it spawns; enter before importing SGLang."""
    os.umask(_PRIVATE_UMASK)
    remove_left_behind()
    directory = make_runtime_directory()
    use_as_temporary(directory)
    os.environ[_NAME_VARIABLE] = private_name()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def name_shared_memory() -> None:
    """Have this process's shared memory and semaphores begin with the server's name.

    Whoever ends the server then knows what to remove. Python has no public setting for it.
    """
    prefix = f"/{os.environ[_NAME_VARIABLE]}"
    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = prefix.rstrip("-")
    shared_memory._SHM_NAME_PREFIX = prefix  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + 16  # type: ignore[attr-defined]


def keep_snapshots_private() -> None:
    """Put SGLang's file of load snapshots into the runtime directory in place of ``/dev/shm``, where it
    would be left behind."""
    from sglang.srt.managers import load_snapshot

    def private_path(ipc_name: str) -> str:
        return os.path.join(os.environ["TMPDIR"], os.path.basename(public_path(ipc_name)))

    public_path = load_snapshot.shm_path_for
    load_snapshot.shm_path_for = private_path


def listen_where(host: str, *, several: bool = False) -> None:
    """Name to gloo and to SGLang's queues the interface of the server's ``host``, where that is loopback or
    the server runs on ``several`` hosts; else they listen where the machine's name leads."""
    if not (several or is_loopback(host)):
        return
    address = resolve(host)
    if several:
        os.environ.setdefault("SGLANG_HOST_IP", address)
    if (interface := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def bind_stores() -> None:
    """Have torch.distributed's stores listen on the address that they are given, not on all."""
    from torch.distributed import TCPStore

    from megatron_dppo.system.network import listening_store

    def bound(host_name: str, port: int, world_size: int, is_master: bool, **options: Any) -> Any:
        if not is_master:
            return TCPStore(host_name, port, world_size, False, **options)
        return listening_store(host_name, port, world_size, **options)

    # The package exports a function of the module's name, so an import statement can't reach it.
    vars(importlib.import_module("torch.distributed.rendezvous"))["TCPStore"] = bound
