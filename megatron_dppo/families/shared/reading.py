"""The reader of the entries of a config.json that all families have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dppo.model.config_facts import MOST_LAYERS, ConfigFacts
from megatron_dppo.model.shape import ModelShape


def read_decoder_shape(
    facts: ConfigFacts,
    *,
    head_dim_default: int | None = None,
    key_value_heads_default: int | None = None,
    theta_default: float = 1e4,
    rotary_fraction: float = 1,
    accepts_untruncated_yarn: bool = False,
    **extra: Any,
) -> ModelShape:
    """Read the entries that have the same names in all supported families.

    Args:
        facts: the file's entries.
        head_dim_default: transformers' default if the file has no ``head_dim``; None: hidden size / heads.
        key_value_heads_default: transformers' default if the file has no ``num_key_value_heads``; None: as many as
            ``num_attention_heads``.
        theta_default: transformers' default if the file has no ``rope_theta``.
        rotary_fraction: the part of each head that the family rotates.
        accepts_untruncated_yarn: whether the family's models may have YaRN, with ``truncate`` true or false.
        extra: fields of ModelShape to add or to replace.
    """
    facts.require("hidden_act", "silu", "silu")
    facts.require("use_sliding_window", False, False)
    if "delta" not in extra and "window" not in extra:
        facts.require_each("layer_types", "full_attention")
    heads = facts.positive("num_attention_heads")
    # transformers uses its default only if the key is absent. The value null means ``heads``.
    groups_default = heads
    if key_value_heads_default is not None and "num_key_value_heads" not in facts.values:
        groups_default = key_value_heads_default
    hidden = facts.positive("hidden_size")
    theta, scaling = facts.rope(
        rotary_fraction,
        theta_default=theta_default,
        accepts_yarn="latent" in extra or accepts_untruncated_yarn,
        accepts_untruncated_yarn=accepts_untruncated_yarn,
    )
    fields: dict[str, Any] = {
        "family": facts.values["model_type"],
        "num_layers": facts.positive("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": facts.positive("num_key_value_heads", default=groups_default),
        "head_dim": extra.get("head_dim")
        or facts.positive("head_dim", default=head_dim_default or max(1, hidden // heads)),
        "ffn_hidden_size": extra.get("ffn_hidden_size") or facts.positive("intermediate_size"),
        "vocab_size": facts.positive("vocab_size"),
        "tied_embeddings": facts.flag("tie_word_embeddings", False),
        "norm_eps": facts.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": facts.positive("max_position_embeddings"),
        "dtype": facts.dtype(),
        "rotary_fraction": rotary_fraction,
    }
    return ModelShape(**{**fields, **extra})


def read_dense_layers(facts: ConfigFacts) -> tuple[int, ...]:
    """Read which layers of a mixture of experts have a dense MLP.

    These are the first ``first_k_dense_replace`` layers, the layers in ``mlp_only_layers``, and the layers whose
    number, counted from 1, is no multiple of ``decoder_sparse_step``. This function is for added families whose SGLang
    model reads the same keys. No family of this package calls it.
    """
    first_layers = facts.count("first_k_dense_replace")
    listed_layers = facts.numbers("mlp_only_layers")
    step = facts.positive("decoder_sparse_step", default=1)
    dense_layers = []
    for layer in range(min(facts.positive("num_hidden_layers"), MOST_LAYERS)):
        if layer < first_layers or layer in listed_layers or (layer + 1) % step:
            dense_layers.append(layer)
    return tuple(dense_layers)


def rotary_size(facts: ConfigFacts, head_dim: int, default: float = 1) -> int:
    """Return the size of a head's rotated part, by ``partial_rotary_factor`` of the file or of its table of rotary
    parameters.

    ``default`` is the factor that transformers assumes if neither has the key. A factor that is no share of a head
    is ignored here; ``ConfigFacts.rope`` reports it.
    """
    tables = (facts.values, facts.values.get("rope_parameters"), facts.values.get("rope_scaling"))
    for table in tables:
        factor = table.get("partial_rotary_factor") if isinstance(table, Mapping) else None
        if isinstance(factor, int | float) and 0 < factor <= 1:
            return round(factor * head_dim)
    return round(default * head_dim)
