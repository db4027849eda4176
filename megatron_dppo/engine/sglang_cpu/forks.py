"""SGLang's processes as forks of the server's process.

SGLang spawns its scheduler and its detokenizer. Each of them would import SGLang again, which takes a processor eight
seconds. Forks share the imports of the server's process, which may itself be a fork (``system.fork_server``).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from typing import Any

from megatron_dppo.engine.process import LIBRARIES
from megatron_dppo.system.gpus import has_visible_gpu
from megatron_dppo.system.processes import die_with_parent

CONFIGURED = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""SGLang's function that selects the start method of its processes, before it starts the first one."""

_server = 0
"""The id of the server's process once it has selected forks."""


def fork_processes() -> None:
    """Have SGLang fork its processes; called in the server's process before it starts one."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # A driver's state does not survive a fork.
    if not has_visible_gpu():
        HookRegistry.register(CONFIGURED, _select_forks, HookType.AFTER)
        HookRegistry.apply_hooks()


def _select_forks(result: Any, *_: Any) -> None:
    global _server  # noqa: PLW0603  one server in a process
    from sglang.srt.plugins.hook_registry import HookRegistry

    importlib.import_module(LIBRARIES)
    # Those that were registered after SGLang's plugins: a spawned process would apply them itself.
    HookRegistry.apply_hooks()
    multiprocessing.set_start_method("fork", force=True)
    if not _server:
        os.register_at_fork(after_in_child=_become_child)
    _server = os.getpid()


def _become_child() -> None:
    """Undo in a fork of the server what a spawned process would not have."""
    if os.getppid() == _server:
        die_with_parent(_server)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # A process with threads, such as SGLang's controller of data parallel schedulers, spawns its own.
    multiprocessing.set_start_method("spawn", force=True)
