"""Gated delta nets (Qwen3-Next, Qwen3.5) with PyTorch: SGLang computes them in Triton kernels.

A request has a slot in two pools of the engine: the convolution's inputs of the last W - 1 tokens (``conv_states``,
[slots, C, W - 1]), and the state of each head (``ssm_states``, [slots, V, E, D]).

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
"""Added to the square of the norm of a query or key."""


def use_pytorch() -> None:
    """Put the functions of this module in place of SGLang's functions. Call it before the model is made."""
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
        earlier_tokens = conv_states[slot, :, -before:].to(x.dtype)
        if not has_initial_state[request]:
            earlier_tokens = torch.zeros_like(earlier_tokens)
        tokens = torch.cat([earlier_tokens, x[:, start:end]], 1)
        sums = F.conv1d(tokens[None].float(), weight[:, None].float(), groups=len(weight))[0]
        if bias is not None:
            sums = sums + bias.float()[:, None]
        output[:, start:end] = F.silu(sums)
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
    before = width - 1
    slots = conv_state_indices.long()
    tokens = torch.cat([conv_states[slots].to(x.dtype), x[:, :, None]], 2)
    conv_states[slots] = tokens[:, :, -before:].to(conv_states.dtype)
    sums = (tokens[:, :, -width:].float() * weight.float()).sum(-1)
    if bias is not None:
        sums = sums + bias.float()
    return F.silu(sums).to(x.dtype)


def gating(
    log_rates: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay, and beta of the delta rule, of each token and value head: fp32 [1, T, V]."""
    log_decay = -log_rates.float().exp() * F.softplus(a.float() + dt_bias.float())
    beta = b.float().sigmoid()
    return log_decay[None], beta[None]


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one request token by token, in fp32.

    For each value head, with unit key k, unit query q, value v, and scale D^-0.5:

        S <- exp(log_decay) S,   S <- S + beta (v - S k) k^T,   output = scale S q

    Args:
        query: [T, K, D].
        key: [T, K, D].
        value: [T, V, E].
        log_decay: [T, V].
        beta: [T, V].
        state: S, [V, E, D], before the first token.

    Returns:
        the outputs [T, V, E], and the state after the last token.
    """
    # A key head serves several value heads.
    repeats = value.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5
    queries = _unit(query).repeat_interleave(repeats, 1) * scale
    keys = _unit(key).repeat_interleave(repeats, 1)
    decay = log_decay.exp()
    state = state.float()
    outputs = []
    for token in range(len(value)):
        state = state * decay[token, :, None, None]
        state_times_key = (state * keys[token, :, None]).sum(-1)
        correction = (value[token].float() - state_times_key) * beta[token, :, None]
        state = state + correction[:, :, None] * keys[token, :, None]
        outputs.append((state * queries[token, :, None]).sum(-1))
    return torch.stack(outputs), state


def _unit(x: Tensor) -> Tensor:
    """Divide each vector by its norm."""
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
    """Compute the new tokens of each request. Updates ``ssm_states``.

    q, k, v, ``g`` and ``beta`` are the query, key, value, log_decay and beta of ``delta_rule`` for the tokens of all
    requests. Each has a first dimension of 1.
    """
    output = torch.empty_like(v)
    for request, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        if start == end:
            continue
        slot = int(cache_indices[request])
        tokens = slice(start, end)
        output[0, tokens], ssm_states[slot] = delta_rule(
            q[0, tokens],
            k[0, tokens],
            v[0, tokens],
            g[0, tokens],
            beta[0, tokens],
            ssm_states[slot],
        )
    return output, None, None


def decode(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **options: Any
) -> Tensor:
    """Compute the next token of each request: [1, B, V, E]. Updates ``ssm_states`` of ``options``."""
    g, beta = gating(options["A_log"], a, b, options["dt_bias"])
    # Each request is a sequence of one token.
    options["query_start_loc"] = torch.arange(v.shape[1] + 1)
    output, _, _ = extend(kernel, q, k, v, g, beta, **options)
    return output


def split_by_head(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split two products that are ordered by key head.

    Returns q, k and v of all heads side by side, [T, C], then z [T, V, E], b [T, V] and a [T, V].

    For each key head, ``qkvz`` has the q and k of the key head, then v of its value heads, then z of its value heads.
    For each key head, ``ba`` has b of its value heads, then a of its value heads.
    """
    tokens = len(qkvz)
    values = value_heads // key_heads
    widths = [key_size, key_size, values * value_size, values * value_size]
    q, k, v, z = qkvz.view(tokens, key_heads, -1).split(widths, -1)
    b, a = ba.view(tokens, key_heads, -1).split(values, -1)
    mixed = torch.cat([x.reshape(tokens, -1) for x in (q, k, v)], 1)
    gates = z.reshape(tokens, value_heads, value_size)
    return mixed, gates, b.reshape(tokens, -1), a.reshape(tokens, -1)


def split_by_section(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of ``split_by_head`` from two products that are ordered by section.

    ``qkvz`` has q of all heads, then k, v and z of all heads. ``ba`` has b of all heads, then a.
    """
    value_width = value_heads * value_size
    mixed, gates = qkvz.split([2 * key_heads * key_size + value_width, value_width], 1)
    b, a = ba.split(value_heads, 1)
    gates = gates.reshape(len(qkvz), value_heads, value_size)
    return mixed.contiguous(), gates, b.contiguous(), a.contiguous()


def multiply_by_sigmoid(x: Tensor, gate: Tensor, inplace: bool = False) -> Tensor:
    """x [T, hidden] * sigmoid(gate), gate [T, heads, head] or [T, hidden], in fp32; with ``inplace`` also into x."""
    factors = gate.reshape(x.shape).float().sigmoid()
    product = (x.float() * factors).to(x.dtype)
    return x.copy_(product) if inplace else product


class GatedHeadNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) of each head, in fp32."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, *, dtype: torch.dtype | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate are [..., hidden], and so is the result."""
        normed = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return (normed * F.silu(gate.float())).to(x.dtype)
