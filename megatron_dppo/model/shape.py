"""ModelShape: the facts of a decoder-only model that fix its tensors' shapes and its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency scaling (``rope_type: llama3``); positions in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelShape:
    """One model. ``num_experts`` 0: dense.

    ``dtype``: the type that config.json names for the weights, "float32", "bfloat16" or "float16".
    ``norm_topk_prob``: the router's top-k probabilities are renormalised to sum to 1.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    max_position_embeddings: int
    dtype: str
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    norm_topk_prob: bool = True

    @property
    def is_moe(self) -> bool:
        """Whether every layer's MLP is a mixture of experts."""
        return self.num_experts > 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers, from 0, whose MLP is a mixture of experts."""
        return tuple(range(self.num_layers)) if self.is_moe else ()

    def sizes(self) -> dict[str, int]:
        """Elements of each symbolic dimension that a family's table uses."""
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "head": self.head_dim,
            "query": self.num_attention_heads * self.head_dim,
            "kv": self.num_query_groups * self.head_dim,
            "ffn": self.ffn_hidden_size,
            "experts": self.num_experts,
            "expert_ffn": self.moe_ffn_hidden_size,
        }
