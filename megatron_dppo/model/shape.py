"""ModelShape: the properties of a decoder-only model that define its tensors' shapes and its arithmetic; and the cost
of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a weight, by its type."""
OPTIMIZER_BYTES = {"float32": 8, "bfloat16": 12, "float16": 12}
"""Bytes of optimizer state of a trained weight, by its type: Adam's two fp32 moments and, for a narrower weight, its
fp32 master."""

TrainerPart = Literal["weights", "reference", "gradients", "optimizer"]
TRAINER_PARTS: tuple[TrainerPart, ...] = ("weights", "reference", "gradients", "optimizer")
"""The tensors that a trainer rank's device holds throughout a run. Each part may be parked; see
``trainer/parking.py``."""
COPIED_PARTS: frozenset[TrainerPart] = frozenset(("weights", "reference", "optimizer"))
"""Parts of which the host keeps a copy after they have been parked once."""


def checkpoint_bytes(trained: int, dtype: str) -> int:
    """Bytes of a checkpoint of ``trained`` elements: weights and optimizer state."""
    return trained * (ITEM_BYTES[dtype] + OPTIMIZER_BYTES[dtype])


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency scaling (``rope_type: llama3``); positions in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelShape:
    """One model. ``num_experts`` is 0 for a dense model.

    ``dtype`` is the type of the weights in config.json: "float32", "bfloat16" or "float16". With ``norm_topk_prob`` the
    router's top-k probabilities are renormalised to sum to 1. With ``norms_all_heads`` the norms of queries and of keys
    span all heads together, instead of each head. ``shared_ffn_hidden_size`` is the width of the MLP that every token
    passes beside its experts, 0 for none. With ``gates_shared_expert`` its output is multiplied by the sigmoid of a
    product of the token's hidden state and a weight. ``dense_layers`` are the layers of a mixture of experts, from 0,
    whose MLP is dense all the same.
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
    norms_all_heads: bool = False
    shared_ffn_hidden_size: int = 0
    gates_shared_expert: bool = False
    dense_layers: tuple[int, ...] = ()

    @property
    def is_moe(self) -> bool:
        """Whether the model has layers whose MLP is a mixture of experts."""
        return self.num_experts > 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers, from 0, whose MLP is a mixture of experts."""
        if not self.is_moe:
            return ()
        return tuple(layer for layer in range(self.num_layers) if layer not in self.dense_layers)

    def sizes(self) -> dict[str, int]:
        """The size of each symbolic dimension in a family's table."""
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "head": self.head_dim,
            "query": self.num_attention_heads * self.head_dim,
            "kv": self.num_query_groups * self.head_dim,
            "ffn": self.ffn_hidden_size,
            "experts": self.num_experts,
            "expert_ffn": self.moe_ffn_hidden_size,
            "shared_ffn": self.shared_ffn_hidden_size,
            "one": 1,
        }


BACKWARD_FORWARDS = 2
"""Matrix products of a backward pass for each product of the forward pass: by the inputs and by the weights."""
FROZEN_BACKWARD_FORWARDS = 1
"""The same for frozen weights, which have no gradient. The adapters' own products are not counted."""


@dataclass(frozen=True)
class SequenceCost:
    """The cost of a sequence of S tokens: ``linear * S + quadratic * S^2``.

    ``linear`` is the cost of matrix products, the same for every token. ``quadratic`` is that of causal attention, in
    which a token attends to all tokens before it.
    """

    linear: float
    quadratic: float

    def __call__(self, tokens: int) -> float:
        """The cost of one sequence of ``tokens`` tokens."""
        return (self.linear + self.quadratic * tokens) * tokens


TOKENS = SequenceCost(1.0, 0.0)
"""The cost in tokens, without attention."""


def active_parameters(shape: ModelShape) -> int:
    """Number of weights that multiply one token. With h the hidden size, q and kv the widths of all query and of
    all key heads, f the width of an MLP, L the layers, M those of them that route, and V the vocabulary

        L * h(2q + 2kv) + (L - M) * 3hf + M * (3hf * (experts a token) + h * experts + 3hs + hg) + hV

    s is the width of the shared expert, and g is 1 where its output is gated.
    """
    sizes = shape.sizes()
    hidden = shape.hidden_size
    routed_layers = len(shape.moe_layers)
    dense_layers = shape.num_layers - routed_layers
    attention = hidden * (2 * sizes["query"] + 2 * sizes["kv"])
    routed_mlp = 3 * hidden * shape.moe_ffn_hidden_size * shape.experts_per_token
    routed_mlp += hidden * shape.num_experts
    routed_mlp += 3 * hidden * shape.shared_ffn_hidden_size + hidden * shape.gates_shared_expert
    dense_mlp = 3 * hidden * shape.ffn_hidden_size
    layers = shape.num_layers * attention + routed_layers * routed_mlp + dense_layers * dense_mlp
    # Count the output layer, but not the embedding, which is looked up.
    return layers + hidden * shape.vocab_size


def forward_flops(shape: ModelShape) -> SequenceCost:
    """FLOPs of one forward pass of the whole model. A multiplication and an addition count as two.

    A token takes 2 x ``active_parameters``. In addition, S tokens take 4q for each of the S^2/2 pairs of causal
    attention (Q K^T and its product with V) in every layer: 2qL S^2. Norms, rotary embedding and softmax
    are not counted.
    """
    # The output layer counts for every token, because it is computed also for tokens that were not sampled.
    pairs = 2.0 * shape.sizes()["query"] * shape.num_layers
    return SequenceCost(2.0 * active_parameters(shape), pairs)
