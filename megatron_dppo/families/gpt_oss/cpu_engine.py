"""Attention with sinks (gpt-oss): PyTorch's attention in SGLang has windows, but no sinks.

The softmax of each head has one more logit, the head's sink. The sink's share of the probability is dropped. Here an
additional key and value of zeros have this effect. The key's logit is 0, and the sink is added to the logit. The value
adds nothing to the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_sinks: list[Tensor] = []
"""The sinks of the layer that is being computed, if it has any: at most one tensor."""


def use_sinks() -> None:
    """Give PyTorch's attention sinks; called before the model is made."""
    from sglang.srt.layers.attention import torch_native_backend
    from sglang.srt.models import gpt_oss

    if torch_native_backend.scaled_dot_product_attention is attend:
        return
    torch_native_backend.scaled_dot_product_attention = attend
    backend = torch_native_backend.TorchNativeAttnBackend
    backend.forward_extend = _with_sinks(backend.forward_extend)
    backend.forward_decode = _with_sinks(backend.forward_decode)
    gpt_oss.GptOssAttention.__init__ = _with_sinks_of_the_models_type(
        gpt_oss.GptOssAttention.__init__
    )


def _with_sinks(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``forward``, a pass of a layer, with the argument ``sinks`` [heads]."""

    def compute(*args: Any, sinks: Tensor | None = None, **options: Any) -> Tensor:
        if sinks is not None:
            _sinks.append(sinks)
        try:
            return forward(*args, **options)
        finally:
            _sinks.clear()

    return compute


def _with_sinks_of_the_models_type(create: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor ``create`` with sinks in the model's type. SGLang makes sinks in bfloat16 in any model."""

    def create_attention(attention: Any, *args: Any, **options: Any) -> None:
        create(attention, *args, **options)
        sinks = attention.sinks.to(options["params_dtype"])
        attention.sinks = torch.nn.Parameter(sinks, requires_grad=False)

    return create_attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the attention of query [1, H, L, D] to key [1, G, S, D] and value [1, G, S, E], with the layer's sinks.

    ``attn_mask`` [L, S]: whether a query attends to a key. With ``is_causal`` L equals S.
    """
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if not _sinks:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options
        )
    (sinks,) = _sinks
    heads, length = query.shape[1:3]
    is_seen = attn_mask
    if is_seen is None:
        is_seen = torch.ones(length, key.shape[2], dtype=torch.bool)
        if is_causal:
            is_seen = is_seen.tril()
    # PyTorch adds a mask of floats to the logits.
    mask = torch.zeros(is_seen.shape, dtype=query.dtype).masked_fill(~is_seen, -math.inf)
    mask_and_sinks = torch.cat(
        [
            mask.expand(heads, *mask.shape),
            sinks.to(query.dtype).view(heads, 1, 1).expand(heads, length, 1),
        ],
        -1,
    )
    padded_key, padded_value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    return F.scaled_dot_product_attention(
        query, padded_key, padded_value, attn_mask=mask_and_sinks[None], **options
    )
