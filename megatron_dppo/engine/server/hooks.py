"""Hooks for SGLang's functions and methods, registered before or after SGLang has applied its plugins' hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

Kind = Literal["before", "after", "around", "replace"]


def register(target: str, hook: Callable[..., Any], kind: Kind) -> None:
    """Register ``hook`` for ``target``, unless it is registered already: a fork has the hooks of its parent.

    The hooks of a target are applied by SGLang's ``HookRegistry.apply_hooks``. SGLang applies hooks to a target once,
    and ignores hooks that are registered later. This function applies such a later hook at once.

    Args:
        target: dotted name of a function or method.
        hook: the hook.
        kind: when the hook is called, and with which arguments. "before": before the target, with the target's
            arguments. "after": after the target, with the result and the arguments. "around": instead of the target,
            with the target's function and the arguments. "replace": instead of the target, with the arguments.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hook_type = HookType(kind)
    for registered_type, registered_hook, _ in HookRegistry._hooks[target]:
        if (registered_type, registered_hook) == (hook_type, hook):
            return
    HookRegistry.register(target, hook, hook_type)
    if target in HookRegistry._patched:
        HookRegistry._apply_target(target, [(hook_type, hook, None)])
