"""The answer to a flush of a server's cache, for all of its attention replicas.

SGLang 0.5.23 returns the answer of the first replica. So the server would count as idle although another replica may
still have running requests. The run would then release the server's memory, or change its weights, during requests.
"""

from __future__ import annotations

from typing import Any

from megatron_dppo.engine.server import hooks

FLUSHED = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.flush_cache"


def register() -> None:
    """Register the hook, in each process of a server, before SGLang applies its plugins' hooks."""
    hooks.register(FLUSHED, flush_all_replicas, "replace")


async def flush_all_replicas(manager: Any, timeout_s: float | None = None) -> Any:
    """Flush the caches of all replicas; each waits at most ``timeout_s`` for its requests. Return the first answer that
    reports a failure. If all replicas succeed, return the answer of the first replica."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager.auto_create_handle_loop()
    answers = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
    for answer in answers:
        if not answer.success:
            return answer
    if manager.mm_processor is not None:
        manager.mm_processor.clear_preprocess_cache()
    return answers[0]
