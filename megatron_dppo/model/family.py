"""Family: all that this package knows of one model family, as its file in ``families/`` declares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.rules import EMBEDDING, FINAL_NORM, MEGATRON_LAYER, OUTPUT, Rule
from megatron_dppo.model.shape import ModelShape


@dataclass(frozen=True)
class Family:
    """A model family: how to read its config.json, and its table in model order.

    ``model_type`` and ``architecture``: what config.json calls it, and its class in transformers and
    SGLang. ``read``: ModelShape from the file's entries; what the table does not describe it notes as a
    problem. ``layer``: rows once a layer, before the experts. ``expert``: rows once an expert of a layer.
    ``megatron``: fields of Megatron's TransformerConfig that follow neither from the shape nor from the
    table. ``engine_keeps_output``: SGLang's model keeps an output matrix of its own, whatever
    ``tie_word_embeddings`` says.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigFacts], ModelShape]
    layer: tuple[Rule, ...]
    expert: tuple[Rule, ...] = ()
    megatron: Mapping[str, Any] = field(default_factory=dict)
    engine_keeps_output: bool = False
    embedding: Rule = EMBEDDING
    final_norm: Rule = FINAL_NORM
    output: Rule = OUTPUT

    def has_layer_parameter(self, name: str) -> bool:
        """Whether a layer has Megatron's parameter ``name``, as ``self_attention.linear_qkv.bias``."""
        return any(rule.megatron == MEGATRON_LAYER + name for rule in self.layer)

    @property
    def vocabulary_tensors(self) -> tuple[str, str]:
        """Hugging Face names of the embedding and of the output layer."""
        return self.embedding.sources[0].name, self.output.sources[0].name
