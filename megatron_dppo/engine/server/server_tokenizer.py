"""The tokenizer of a server's processes. It decodes responses and finds stop texts, with the trainer's rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_dppo.data.tokenizer import with_file_rules
from megatron_dppo.engine.server import hooks

LOADED = "sglang.srt.utils.hf_transformers.tokenizer._apply_post_load_fixes"
"""SGLang 0.5.23's changes of a loaded tokenizer. It restores only two parts of tokenizer.json, the split into words and
the decoder, and only if the loaded tokenizer splits by another kind of rule."""


def register() -> None:
    """Register the hook, in each process of a server, before SGLang loads a tokenizer."""
    hooks.register(LOADED, change_loaded, "around")


def change_loaded(change: Callable[..., Any], tokenizer: Any, folder: str, revision: Any) -> Any:
    """Let SGLang ``change`` a tokenizer with the rules of the tokenizer.json in ``folder``, and return the result."""
    return change(with_file_rules(tokenizer, folder), folder, revision)
