"""Where SGLang keeps each Hugging Face tensor: in which fused tensor, as which part, cut how.

SGLang concatenates some tensors (``q_proj | k_proj | v_proj -> qkv_proj``), stacks experts, pads
the vocabulary and cuts by tensor-parallel rank. Every fused tensor is a sequence of contiguous
blocks, so a rank's bytes are its slices of the parts one after another. The table follows SGLang
0.5.23's loaders for the supported families, unquantised, with the canonical (Triton or native)
expert layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron_dppo.checkpoint_conversion.model_shape import ModelShape

VOCABULARY_MULTIPLE = 64
"""SGLang pads embedding rows to a multiple of this."""
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
EXPERT_MULTIPLE = {"cpu": 32, "cuda": 1}
"""Each rank's share of an expert's intermediate dimension is padded with zeros to a multiple."""
UNTIED_IN_ENGINE = frozenset({"qwen3_moe"})
"""Families whose SGLang model keeps its own output matrix whatever ``tie_word_embeddings`` says."""

Cut = Callable[[Tensor, int, "EngineLayout"], Tensor]


@dataclass(frozen=True)
class EnginePart:
    """A Hugging Face tensor's place: part ``index`` of the ``count`` of the engine's ``tensor``.

    ``cut(hf_tensor, rank, layout)`` is what of it tensor-parallel ``rank`` holds.
    """

    tensor: str
    index: int
    count: int
    cut: Cut


@dataclass(frozen=True)
class EngineLayout:
    """A served model: its shape, over how many tensor-parallel ranks it is cut, "cpu" or "cuda"."""

    shape: ModelShape
    ranks: int = 1
    device: str = "cuda"

    def __post_init__(self) -> None:
        for what, count in _divisible(self.shape).items():
            if count % self.ranks:
                raise ValueError(
                    f"engine layout: {what} is {count}, not divisible by the engine's "
                    f"{self.ranks} tensor-parallel ranks"
                )
        groups = self.shape.num_query_groups
        if max(groups, self.ranks) % min(groups, self.ranks):
            raise ValueError(
                f"engine layout: {groups} key-value heads over {self.ranks} tensor-parallel ranks; "
                "one must divide the other"
            )

    def parts(self, hf_name: str) -> list[EnginePart]:
        """Places of ``hf_name`` in the engine; two for an embedding that the engine doesn't tie.

        Raises ValueError where the engine has no such tensor.
        """
        return [self._part(name) for name in self.engine_inputs(hf_name)]

    def engine_inputs(self, hf_name: str) -> list[str]:
        """Names under which the engine must be sent ``hf_name``'s tensor."""
        untied = self.shape.tied_embeddings and self.shape.family in UNTIED_IN_ENGINE
        return [EMBEDDING, HEAD] if untied and hf_name == EMBEDDING else [hf_name]

    def _part(self, name: str) -> EnginePart:
        for rule in _RULES:
            match = rule.pattern.fullmatch(name)
            if match:
                expert = int(match["expert"]) if "expert" in rule.pattern.groupindex else 0
                experts = self.shape.num_experts if "expert" in rule.pattern.groupindex else 1
                tensor = match.expand(rule.tensor)
                index = rule.index + expert * rule.parts
                return EnginePart(tensor, index, rule.parts * experts, rule.cut)
        raise ValueError(f"engine layout of {self.shape.family}: the engine loads no {name!r}")


def whole(tensor: Tensor, rank: int, layout: EngineLayout) -> Tensor:
    """Replicated on every rank."""
    return tensor


def rows(tensor: Tensor, rank: int, layout: EngineLayout) -> Tensor:
    """Column-parallel: an equal share of dimension 0."""
    return tensor.tensor_split(layout.ranks, dim=0)[rank]


def columns(tensor: Tensor, rank: int, layout: EngineLayout) -> Tensor:
    """Row-parallel: an equal share of dimension 1."""
    return tensor.tensor_split(layout.ranks, dim=1)[rank]


def expert_rows(tensor: Tensor, rank: int, layout: EngineLayout) -> Tensor:
    """Column-parallel, padded with zero rows."""
    held = rows(tensor, rank, layout)
    return F.pad(held, (0, 0, 0, -held.shape[0] % EXPERT_MULTIPLE[layout.device]))


def expert_columns(tensor: Tensor, rank: int, layout: EngineLayout) -> Tensor:
    """Row-parallel, padded with zero columns."""
    held = columns(tensor, rank, layout)
    return F.pad(held, (0, -held.shape[1] % EXPERT_MULTIPLE[layout.device]))


def key_value_rows(tensor: Tensor, rank: int, layout: EngineLayout) -> Tensor:
    """Whole key-value heads; with more ranks than heads, neighbouring ranks hold the same head."""
    groups = layout.shape.num_query_groups
    shares = min(groups, layout.ranks)
    return tensor.tensor_split(shares, dim=0)[rank * shares // layout.ranks]


def vocabulary_rows(tensor: Tensor, rank: int, layout: EngineLayout) -> Tensor:
    """A share of the padded vocabulary; rows beyond the true one are zero."""
    multiple = VOCABULARY_MULTIPLE
    padded = -(-tensor.shape[0] // multiple) * multiple
    if padded % layout.ranks:
        multiple *= layout.ranks
        padded = -(-tensor.shape[0] // multiple) * multiple
    share = padded // layout.ranks
    held = tensor[rank * share : (rank + 1) * share]
    return F.pad(held, (0, 0, 0, share - held.shape[0]))


@dataclass(frozen=True)
class _Rule:
    """A row: ``pattern`` names HF tensors, ``tensor`` is the template of the engine's name.

    With a group ``expert`` in the pattern, ``index`` and ``parts`` count within one expert.
    """

    pattern: re.Pattern[str]
    tensor: str
    index: int
    parts: int
    cut: Cut


def _rule(pattern: str, tensor: str, cut: Cut, part: tuple[int, int] = (0, 1)) -> _Rule:
    return _Rule(re.compile(pattern), tensor, *part, cut)


_LAYER = r"(?P<layer>model\.layers\.\d+)\."
_EXPERT = _LAYER + r"mlp\.experts\.(?P<expert>\d+)\."
_QKV = r"\g<layer>.self_attn.qkv_proj.\g<kind>"

_RULES: Iterable[_Rule] = (
    _rule(_LAYER + r"self_attn\.q_proj\.(?P<kind>weight|bias)", _QKV, rows, (0, 3)),
    _rule(_LAYER + r"self_attn\.k_proj\.(?P<kind>weight|bias)", _QKV, key_value_rows, (1, 3)),
    _rule(_LAYER + r"self_attn\.v_proj\.(?P<kind>weight|bias)", _QKV, key_value_rows, (2, 3)),
    _rule(_LAYER + r"self_attn\.o_proj\.weight", r"\g<0>", columns),
    _rule(_LAYER + r"self_attn\.[qk]_norm\.weight", r"\g<0>", whole),
    _rule(_LAYER + r"mlp\.gate_proj\.weight", r"\g<layer>.mlp.gate_up_proj.weight", rows, (0, 2)),
    _rule(_LAYER + r"mlp\.up_proj\.weight", r"\g<layer>.mlp.gate_up_proj.weight", rows, (1, 2)),
    _rule(_LAYER + r"mlp\.down_proj\.weight", r"\g<0>", columns),
    _rule(_LAYER + r"mlp\.gate\.weight", r"\g<0>", whole),
    _rule(_EXPERT + r"gate_proj\.weight", r"\g<layer>.mlp.experts.w13_weight", expert_rows, (0, 2)),
    _rule(_EXPERT + r"up_proj\.weight", r"\g<layer>.mlp.experts.w13_weight", expert_rows, (1, 2)),
    _rule(_EXPERT + r"down_proj\.weight", r"\g<layer>.mlp.experts.w2_weight", expert_columns),
    _rule(_LAYER + r"(input|post_attention)_layernorm\.weight", r"\g<0>", whole),
    _rule(r"model\.norm\.weight", r"\g<0>", whole),
    _rule(r"model\.embed_tokens\.weight|lm_head\.weight", r"\g<0>", vocabulary_rows),
)


def _divisible(shape: ModelShape) -> dict[str, int]:
    counts = {"the number of attention heads": shape.num_attention_heads}
    if shape.is_moe:
        return {**counts, "the experts' intermediate size": shape.moe_ffn_hidden_size}
    return {**counts, "the intermediate size": shape.ffn_hidden_size}
