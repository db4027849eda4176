"""Floating-point operations of a model's forward pass, by the length of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.model.shape import ModelShape

BACKWARD_FORWARDS = 2
"""A backward pass takes two products for each of the forward's: by the inputs and by the weights."""


@dataclass(frozen=True)
class SequenceCost:
    """What a sequence of S tokens costs: ``linear * S + quadratic * S^2``.

    ``linear``: matrix products, the same for every token. ``quadratic``: causal attention, in which a
    token meets all before it.
    """

    linear: float
    quadratic: float

    def __call__(self, tokens: int) -> float:
        """The cost of one sequence of ``tokens`` tokens."""
        return (self.linear + self.quadratic * tokens) * tokens


TOKENS = SequenceCost(1.0, 0.0)
"""Costs in tokens: what attention adds is left out."""


def forward_flops(shape: ModelShape) -> SequenceCost:
    """FLOPs of one forward pass of the whole model, a multiplication and an addition being two.

    With h the hidden size, q and kv the widths of all query and of all key heads, f the width of an
    MLP, L the layers and V the vocabulary, a token takes in matrix products

        L * (2h(q + 2kv) + 2qh + mlp) + 2hV,   mlp = 6hf  or  6hf * (experts a token) + 2h * experts

    and S tokens take 4q for each of the S^2/2 pairs of causal attention (Q K^T and its product with
    V) in every layer: 2qL S^2. Norms, rotary embedding and softmax are left out. The output layer
    counts for every token, sampled or not: it is computed for all.
    """
    h, query = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    key_value = 2 * shape.num_query_groups * shape.head_dim
    attention = 2 * h * (query + key_value) + 2 * query * h
    if shape.is_moe:
        mlp = 6 * h * shape.moe_ffn_hidden_size * shape.experts_per_token
        mlp += 2 * h * shape.num_experts
    else:
        mlp = 6 * h * shape.ffn_hidden_size
    linear = shape.num_layers * (attention + mlp) + 2 * h * shape.vocab_size
    return SequenceCost(float(linear), float(2 * query * shape.num_layers))
