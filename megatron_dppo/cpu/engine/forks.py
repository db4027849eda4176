"""SGLang's processes as forks of the server's process.

SGLang spawns its scheduler and its detokenizer. Each of them would import SGLang again: this takes a processor eight
seconds. Forks share the imports of the server's process. The server's process may itself be a fork
(``system.fork_server``).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from typing import Any

from megatron_dppo.engine.process import LIBRARIES
from megatron_dppo.engine.server import hooks
from megatron_dppo.system.gpus import has_visible_gpu
from megatron_dppo.system.processes import die_with_parent

CONFIGURED = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""SGLang's function that selects the start method of its processes, before it starts the first process."""

_server_pid = 0
"""Process id of the server after it has selected forks; 0 before."""


def fork_processes() -> None:
    """Make SGLang fork its processes. Call this function in the server's process before SGLang starts a process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    # Fork only on a machine without a GPU: the state of a GPU's driver does not survive a fork.
    if not has_visible_gpu():
        hooks.register(CONFIGURED, _select_forks, "after")
        HookRegistry.apply_hooks()


def _select_forks(result: Any, *_: Any) -> None:
    global _server_pid  # noqa: PLW0603  one server in a process
    from sglang.srt.plugins.hook_registry import HookRegistry

    importlib.import_module(LIBRARIES)
    # Apply the hooks that were registered after SGLang had applied its own. A spawned process does this at its start.
    HookRegistry.apply_hooks()
    multiprocessing.set_start_method("fork", force=True)
    if not _server_pid:
        os.register_at_fork(after_in_child=_become_child)
    _server_pid = os.getpid()


def _become_child() -> None:
    """Give a fork of the server the settings that a spawned process would have."""
    if os.getppid() == _server_pid:
        die_with_parent(_server_pid)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # Some processes of SGLang start processes themselves, for example the controller of data-parallel schedulers. They
    # have threads, so they must spawn their processes.
    multiprocessing.set_start_method("spawn", force=True)
