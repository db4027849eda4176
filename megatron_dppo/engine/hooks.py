"""Hooks for SGLang's functions and methods, registered before or after SGLang has applied its plugins' hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

Kind = Literal["before", "after", "around", "replace"]


def register(target: str, hook: Callable[..., Any], kind: Kind) -> None:
    """Register ``hook``; once for the same hook of the same ``target``, also where a fork has its parent's hooks.

    SGLang's own registry applies hooks to a target once, and ignores those that are registered later.

    Args:
        target: dotted name of a function or method.
        hook: with "before" it is called with the arguments, with "after" with the result before them, with "around"
            with the original function before them, and with "replace" in its place.
        kind: the hook's kind.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hook_type = HookType(kind)
    if any((t, h) == (hook_type, hook) for t, h, _ in HookRegistry._hooks[target]):
        return
    HookRegistry.register(target, hook, hook_type)
    if target in HookRegistry._patched:
        HookRegistry._apply_target(target, [(hook_type, hook, None)])
