"""Multi-head latent attention (DeepSeek-V3, GLM-4.7-Flash) with PyTorch's attention."""

from __future__ import annotations

from typing import Any

from megatron_dppo.cpu.engine.replacements import ATTENTION, replace


def get_rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: Any = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> Any:
    """Make the rotary embedding of latent attention. On a CPU the replaced function of SGLang supports only YaRN."""
    from sglang.srt.layers.rotary_embedding import factory

    sizes = (head_size, rotary_dim, max_position, base, is_neox_style)
    scaling = (rope_scaling, dtype, partial_rotary_factor)
    if rope_scaling is None:
        return factory.get_rope(*sizes, *scaling)
    return factory.get_rope_cpu(*sizes, *scaling, device)


def use_latent_cache() -> None:
    """Make PyTorch's attention compute all passes from the cached latents, with ``get_rope``.

    SGLang's default method for an unregistered backend reads the heads' keys and values. The cache does not have these.
    """
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    replace(factory, "get_rope_wrapper", get_rope)
    handlers.AttentionBackendRegistry.register(ATTENTION, _latent_method)


def _latent_method(attention: Any, batch: Any) -> Any:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    return handlers.AttnForwardMethod.MLA
