"""ModelShape: the properties of a decoder-only model that define its tensors' shapes and its arithmetic; and the cost
of a pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a weight, by its type."""

TrainerPart = Literal["weights", "reference", "gradients", "optimizer"]
TRAINER_PARTS: tuple[TrainerPart, ...] = ("weights", "reference", "gradients", "optimizer")
"""The tensors that a trainer rank's device holds throughout a run. Each part may be parked; see
``trainer/parking.py``."""
COPIED_PARTS: frozenset[TrainerPart] = frozenset(("weights", "reference", "optimizer"))
"""The host keeps a copy of these parts once they have been parked."""


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency scaling (``rope_type: llama3``); positions in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN's frequency scaling (``rope_type: yarn``) as DeepSeek-V3 has it; positions in tokens.

    ``mscale`` and ``mscale_all_dim`` are coefficients of ln(``factor``). Both affect the factor of the rotated part
    (``rotated_factor``), and ``mscale_all_dim`` also affects the scale of attention. ``beta_fast`` and ``beta_slow``
    give the bounds of the interpolated dimensions; with ``truncate`` these bounds are rounded to whole numbers.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    truncate: bool = True

    @property
    def rotated_factor(self) -> float:
        """The factor of rotated queries and keys: (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)."""
        logarithm = 0.1 * math.log(max(self.factor, 1.0))
        return (self.mscale * logarithm + 1) / (self.mscale_all_dim * logarithm + 1)


@dataclass(frozen=True)
class AttentionWindow:
    """Sliding windows: in ``layers``, from 0, a token attends to the last ``tokens`` tokens, itself included."""

    tokens: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Router:
    """The choice of a token's experts, and the weights of their outputs.

    ``score`` is the function of the logits. With ``has_bias`` a constant of each expert is added to the scores for the
    choice, but not for the weights. The experts are divided into ``groups`` groups of adjacent experts, of equal size.
    For each token, ``chosen_groups`` groups are chosen first. The token's experts are then chosen from these groups.
    The weights of the chosen experts are multiplied by ``scale``.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values of all heads are computed from one latent vector of a token.

    ``query_rank`` is the width of the latent of queries; None: queries are computed from the hidden state.
    ``key_value_rank`` is the width of the latent of keys and values. A head's query and key have a part of width
    ``plain_size`` without rotation, and a rotated part of width ``rotary_size``; the rotated part of the key is shared
    by all heads. ``value_size`` is the width of a head's value.
    """

    query_rank: int | None
    key_value_rank: int
    plain_size: int
    rotary_size: int
    value_size: int

    @property
    def head_size(self) -> int:
        """The width of a head's query and key."""
        return self.plain_size + self.rotary_size

    @property
    def cached_size(self) -> int:
        """Elements that an engine keeps of a token in a layer: the latent and the rotated part of the key."""
        return self.key_value_rank + self.rotary_size


RopeScaling = Llama3RopeScaling | YarnRopeScaling


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta nets: linear attention whose state is one matrix a head, in place of keys and values of all tokens.

    Every ``attention_interval``-th layer has attention, the other layers have a delta net. Each group of
    ``value_heads`` / ``key_heads`` value heads shares one head of queries and one of keys. Queries, keys and values
    pass a causal convolution over ``kernel_size`` tokens.
    """

    attention_interval: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel_size: int

    @property
    def key_width(self) -> int:
        """Elements of the keys of all heads. The queries have as many elements."""
        return self.key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """Elements of the values of all heads. The values' gates have as many elements."""
        return self.value_heads * self.value_size

    @property
    def convolved_width(self) -> int:
        """Elements of queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def input_rows(self) -> int:
        """Rows of the input matrix: queries, keys, values, the values' gates, and two numbers of each value head."""
        return self.convolved_width + self.value_width + 2 * self.value_heads

    def state_elements(self) -> tuple[int, int]:
        """Return the elements that an engine keeps of a sequence in a layer, as two numbers: the elements of the state
        matrices, and the elements of the last convolved tokens."""
        matrices = self.value_heads * self.key_size * self.value_size
        return matrices, self.convolved_width * (self.kernel_size - 1)


@dataclass(frozen=True)
class ModelShape:
    """The properties of one model.

    Attributes:
        dtype: the type of the weights in config.json: "float32", "bfloat16" or "float16".
        num_experts: experts in a layer; 0 for a dense model.
        norm_topk_prob: whether the probabilities of a token's experts are divided by their sum.
        norms_all_heads: whether one norm spans all heads of queries, and a second norm all heads of keys.
        shared_ffn_hidden_size: the width of the shared expert, an MLP for every token; 0: no shared expert.
        gates_shared_expert: whether the shared expert's output is multiplied by the sigmoid of a product of the token's
            hidden state and a weight.
        dense_layers: in a mixture of experts, the numbers, from 0, of the layers with a dense MLP.
        rotary_fraction: the part of each head that is rotated.
        norms_heads: whether each head of queries and keys is normed. Set only in families where some models have these
            norms.
        latent: multi-head latent attention. ``head_dim`` and ``num_query_groups`` then describe the heads that are
            computed from the latents.
        delta: the delta nets that replace attention in most layers; None: all layers have attention.
        gates_attention: whether the output of attention is multiplied by the sigmoid of a gate. The matrix of queries
            computes the gate, too.
        norms_add_one: whether a norm multiplies by 1 + its weight.
        window: sliding windows of attention; None: all layers attend to the whole sequence.
        has_sinks: whether the softmax of each attention head has one further logit, a parameter. The probability of
            this logit is dropped.
        has_biases: whether all linear layers have biases: in attention, MLPs, routers and experts.
        glu_limit: above 0, the gated unit of an MLP is gate * sigmoid(1.702 gate) * (up + 1), with the gate at most the
            limit, and up between -limit and limit.
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
    rope_scaling: RopeScaling | None
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
    router: Router = Router()
    rotary_fraction: float = 1.0
    norms_heads: bool = False
    latent: LatentAttention | None = None
    delta: DeltaNet | None = None
    gates_attention: bool = False
    norms_add_one: bool = False
    window: AttentionWindow | None = None
    has_sinks: bool = False
    has_biases: bool = False
    glu_limit: float = 0.0
    __pydantic_config__ = ConfigDict(extra="forbid")

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

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Layers, from 0, that have a delta net in place of attention."""
        if self.delta is None:
            return ()
        interval = self.delta.attention_interval
        return tuple(layer for layer in range(self.num_layers) if (layer + 1) % interval)

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.num_layers - len(self.delta_layers)

    def cached_elements(self, tensor: int = 1) -> int:
        """Return the elements of a token in the KV cache of an attention layer, on one of ``tensor`` engine ranks."""
        if self.latent is not None:
            # Every rank has the whole latents.
            return self.latent.cached_size
        return 2 * max(1, self.num_query_groups // tensor) * self.head_dim

    def sizes(self) -> dict[str, int]:
        """Return the size of each symbolic dimension in a family's table."""
        sizes = {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "head": self.head_dim,
            "heads": self.num_attention_heads,
            "query": self.num_attention_heads * self.head_dim,
            "kv": self.num_query_groups * self.head_dim,
            "ffn": self.ffn_hidden_size,
            "experts": self.num_experts,
            "expert_ffn": self.moe_ffn_hidden_size,
            "expert_gate_up": 2 * self.moe_ffn_hidden_size,
            "shared_ffn": self.shared_ffn_hidden_size,
            "one": 1,
        }
        if self.latent is not None:
            sizes |= _latent_sizes(self.latent, self.num_attention_heads)
        if self.gates_attention:
            sizes["gated_query"] = 2 * sizes["query"]
        if self.delta is not None:
            sizes |= _delta_sizes(self.delta)
        return sizes


def shape_of_json(values: Mapping[str, Any]) -> ModelShape:
    """Rebuild a shape from its JSON ``values``. Fields that the JSON of an older version lacks get their default.

    Raises ValueError if a field is unknown, missing, or of another type.
    """
    return TypeAdapter(ModelShape).validate_python(values)


def _latent_sizes(latent: LatentAttention, heads: int) -> dict[str, int]:
    return {
        "query": heads * latent.head_size,
        "query_rank": latent.query_rank or 0,
        "kv_rank": latent.key_value_rank,
        "kv_latent": latent.cached_size,
        "kv_heads": heads * (latent.plain_size + latent.value_size),
        "attention": heads * latent.value_size,
    }


def _delta_sizes(delta: DeltaNet) -> dict[str, int]:
    return {
        "delta_qkv": delta.convolved_width,
        "delta_values": delta.value_width,
        "delta_qkvz": delta.convolved_width + delta.value_width,
        "delta_ba": 2 * delta.value_heads,
        "delta_heads": delta.value_heads,
        "delta_head": delta.value_size,
        "delta_kernel": delta.kernel_size,
    }


BACKWARD_PRODUCTS = 2
"""Matrix products of a backward pass for each product of the forward pass: one for the gradient of the inputs, one for
the gradient of the weights."""
FROZEN_BACKWARD_PRODUCTS = 1
"""Matrix products of a backward pass for each product with frozen weights: only for the gradient of the inputs. The
products of adapters are not counted."""


@dataclass(frozen=True)
class SequenceCost:
    """The cost of a sequence of S tokens: ``linear * S + quadratic * S^2``.

    ``linear`` is the cost of matrix products, the same for every token. ``quadratic`` is the cost of causal attention,
    in which a token attends to all tokens before it.
    """

    linear: float
    quadratic: float

    def __call__(self, tokens: int) -> float:
        """Return the cost of one sequence of ``tokens`` tokens."""
        return self.of_token(tokens) * tokens

    def of_token(self, tokens: float) -> float:
        """Return the mean cost of a token in a sequence of ``tokens`` tokens."""
        return self.linear + self.quadratic * tokens


TOKENS = SequenceCost(1.0, 0.0)
"""The number of tokens as a cost, without attention."""


def active_parameters(shape: ModelShape) -> int:
    """Return the number of weights that multiply one token:

        L * a + (L - M) * 3hf + M * (3he * (experts of a token) + h * experts + 3hs + hg) + hV

    h is the hidden size, a the weights of a layer's attention, f the width of an MLP, e the width of an expert, s the
    width of the shared expert, L the layers, M the layers with a router, and V the vocabulary. g is 1 if the output of
    the shared expert is gated. Layers with a delta net have its weights in place of a.
    """
    hidden = shape.hidden_size
    routed_layers = len(shape.moe_layers)
    dense_layers = shape.num_layers - routed_layers
    experts = 3 * hidden * shape.moe_ffn_hidden_size * shape.experts_per_token
    router = hidden * shape.num_experts
    shared_expert = 3 * hidden * shape.shared_ffn_hidden_size + hidden * shape.gates_shared_expert
    dense_mlp = 3 * hidden * shape.ffn_hidden_size
    weights = shape.attention_layers * _attention_parameters(shape)
    weights += len(shape.delta_layers) * _delta_parameters(shape)
    weights += routed_layers * (experts + router + shared_expert)
    weights += dense_layers * dense_mlp
    # Count the output layer, but not the embedding: the embedding's rows are looked up, not multiplied.
    return weights + hidden * shape.vocab_size


def _attention_parameters(shape: ModelShape) -> int:
    """Return the number of weights in the matrices of a layer's attention."""
    sizes = shape.sizes()
    hidden = shape.hidden_size
    if shape.latent is None:
        queries = sizes["gated_query"] if shape.gates_attention else sizes["query"]
        # The output matrix of attention has one column for each column of the queries, without gates.
        output = sizes["query"]
        return hidden * (queries + 2 * sizes["kv"] + output)
    queries = hidden * sizes["query"]
    if shape.latent.query_rank is not None:
        queries = shape.latent.query_rank * (hidden + sizes["query"])
    keys_and_values = hidden * sizes["kv_latent"] + sizes["kv_rank"] * sizes["kv_heads"]
    return queries + keys_and_values + hidden * sizes["attention"]


def _delta_parameters(shape: ModelShape) -> int:
    """Return the number of weights in the matrices of a layer's delta net, and in its convolution."""
    if shape.delta is None:
        return 0
    delta = shape.delta
    matrices = shape.hidden_size * (delta.input_rows + delta.value_width)
    return matrices + delta.convolved_width * delta.kernel_size


def forward_flops(shape: ModelShape) -> SequenceCost:
    """Return the FLOPs of one forward pass of the whole model. A multiplication and an addition count as two.

    The matrix products take 2 x ``active_parameters`` for each token. Causal attention has S^2/2 pairs of tokens in
    each layer. A pair takes 2q FLOPs for Q K^T, and 2v for the product with V: q and v are the widths of all heads'
    queries and values. L layers take (q + v)L S^2. A layer with a window of W tokens is counted with S W pairs. In a
    layer with a delta net each token reads, corrects and reads again the state of each head: 6 FLOPs for each element.
    Norms, rotary embedding and softmax are not counted.
    """
    sizes = shape.sizes()
    values = sizes["query"] if shape.latent is None else sizes["attention"]
    windows = 0 if shape.window is None else len(shape.window.layers)
    quadratic = float(sizes["query"] + values) * (shape.attention_layers - windows)
    # This counts the output layer for every token, because it is computed also for tokens that were not sampled.
    linear = 2.0 * active_parameters(shape)
    if shape.window is not None:
        linear += 2.0 * (sizes["query"] + values) * windows * shape.window.tokens
    if shape.delta is not None:
        state, _ = shape.delta.state_elements()
        linear += 6.0 * state * len(shape.delta_layers)
    return SequenceCost(linear, quadratic)
