"""Gated delta nets (Qwen3-Next, Qwen3.5) with PyTorch: SGLang computes them in Triton kernels.

A request has a slot in two pools of the engine: the last tokens before the convolution, and the state of each head.

Legend: T tokens of a batch, B requests, C convolved channels, W tokens of the convolution, K key heads and V value
heads of a rank, D and E the sizes of their heads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_EPSILON = 1e-6


def use_pytorch() -> None:
    """Put the functions of this module in place of SGLang's; called before the model is made."""
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.models import qwen3_5, qwen3_next

    gdn_backend.causal_conv1d_fn = convolve_prompts
    gdn_backend.causal_conv1d_update = convolve_next
    gdn_backend.fused_gdn_gating = gating
    kernel = gdn_backend.TritonGDNKernel
    kernel.supports_packed_decode = False
    kernel.extend = extend
    kernel.decode = decode
    qwen3_next.fused_qkvzba_split_reshape_cat = split_by_head
    qwen3_next.FusedRMSNormGated = qwen3_next.RMSNormGated = GatedHeadNorm
    qwen3_5.fused_qkvzba_split_reshape_cat_contiguous = split_by_section
    qwen3_5.fused_sigmoid_mul = multiply_by_sigmoid
    qwen3_5.RMSNormGated = GatedHeadNorm


def convolve_prompts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    activation: str = "silu",
    **_: Any,
) -> Tensor:
    """silu(causal convolution) of each request's tokens, x [C, T], weight [C, W] -> [C, T]; updates ``conv_states``."""
    before = weight.shape[1] - 1
    output = torch.empty_like(x)
    for request, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        slot = int(cache_indices[request])
        earlier = conv_states[slot, :, -before:].to(x.dtype)
        if not has_initial_state[request]:
            earlier = torch.zeros_like(earlier)
        tokens = torch.cat([earlier, x[:, start:end]], 1)
        sums = F.conv1d(tokens[None].float(), weight[:, None].float(), groups=len(weight))[0]
        output[:, start:end] = F.silu(sums if bias is None else sums + bias.float()[:, None])
        conv_states[slot] = tokens[:, -before:]
    return output


def convolve_next(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """silu(causal convolution) of the next token of each request, x [B, C] -> [B, C]; updates ``conv_states``."""
    width = weight.shape[1]
    slots = conv_state_indices.long()
    tokens = torch.cat([conv_states[slots].to(x.dtype), x[:, :, None]], 2)
    conv_states[slots] = tokens[:, :, 1 - width :].to(conv_states.dtype)
    sums = (tokens[:, :, -width:].float() * weight.float()).sum(-1)
    return F.silu(sums if bias is None else sums + bias.float()).to(x.dtype)


def gating(
    log_rates: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay, and beta of the delta rule, of each token and value head: fp32 [1, T, V]."""
    decay = -log_rates.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute one request token by token, in fp32.

    Args:
        query: [T, K, D].
        key: [T, K, D].
        value: [T, V, E].
        decay: [T, V].
        beta: [T, V].
        state: [V, E, D], before the first token.

    Returns:
        the outputs [T, V, E], and the state after the last token.
    """
    repeats = value.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5
    queries = _normed(query).repeat_interleave(repeats, 1) * scale
    keys = _normed(key).repeat_interleave(repeats, 1)
    factors = decay.exp()
    state = state.float()
    outputs = []
    for token in range(len(value)):
        state = state * factors[token, :, None, None]
        known = (state * keys[token, :, None]).sum(-1)
        correction = (value[token].float() - known) * beta[token, :, None]
        state = state + correction[:, :, None] * keys[token, :, None]
        outputs.append((state * queries[token, :, None]).sum(-1))
    return torch.stack(outputs), state


def _normed(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


def extend(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Compute the new tokens of each request; all tensors have a first dimension of 1. Updates ``ssm_states``."""
    output = torch.empty_like(v)
    for request, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        if start == end:
            continue
        slot = int(cache_indices[request])
        query, key, value, decay, part = (x[0, start:end] for x in (q, k, v, g, beta))
        values, state = delta_rule(query, key, value, decay, part, ssm_states[slot])
        output[0, start:end] = values
        ssm_states[slot] = state
    return output, None, None


def decode(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    **options: Any,
) -> Tensor:
    """Compute the next token of each request: [1, B, V, E]. Updates ``ssm_states`` of ``options``."""
    g, beta = gating(options["A_log"], a, b, options["dt_bias"])
    # Each request is a sequence of one token.
    options["query_start_loc"] = torch.arange(v.shape[1] + 1)
    output, _, _ = extend(kernel, q, k, v, g, beta, **options)
    return output


def split_by_head(
    qkvz: Tensor,
    ba: Tensor,
    key_heads: int,
    value_heads: int,
    key_size: int,
    value_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split two products by key head, [T, (q k v.. z..)..] and [T, (b.. a..)..], into q k v, z, b and a of all
    heads."""
    tokens = len(qkvz)
    values = value_heads // key_heads
    widths = [key_size, key_size, values * value_size, values * value_size]
    q, k, v, z = qkvz.view(tokens, key_heads, -1).split(widths, -1)
    b, a = ba.view(tokens, key_heads, -1).split(values, -1)
    mixed = torch.cat([x.reshape(tokens, -1) for x in (q, k, v)], 1)
    gates = z.reshape(tokens, value_heads, value_size)
    return mixed, gates, b.reshape(tokens, -1), a.reshape(tokens, -1)


def split_by_section(
    qkvz: Tensor,
    ba: Tensor,
    key_heads: int,
    value_heads: int,
    key_size: int,
    value_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split two products by section, [T, q k v z] and [T, b a], into q k v, z, b and a."""
    values = value_heads * value_size
    mixed, gates = qkvz.split([2 * key_heads * key_size + values, values], 1)
    b, a = ba.split(value_heads, 1)
    gates = gates.reshape(len(qkvz), value_heads, value_size)
    return mixed.contiguous(), gates, b.contiguous(), a.contiguous()


def multiply_by_sigmoid(x: Tensor, gate: Tensor, inplace: bool = False) -> Tensor:
    """x [T, hidden] * sigmoid(gate), gate [T, heads, head] or [T, hidden], in fp32; with ``inplace`` also into x."""
    product = (x.float() * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)
    return x.copy_(product) if inplace else product


class GatedHeadNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) of each head, in fp32."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        dtype: torch.dtype | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [..., hidden] -> the same shape."""
        normed = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return (normed * F.silu(gate.float())).to(x.dtype)
