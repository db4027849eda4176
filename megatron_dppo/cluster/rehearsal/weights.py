"""Random weights of a tiny model. With these weights, most responses end before the limit of their length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron_dppo.model.families import language_model_values
from megatron_dppo.model.hf_config import refusals_by_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

END_PROBABILITY = 0.15
"""Probability of the end-of-sequence token after a random token."""
_COMMON_LENGTH = 1.5
"""Length of the vector that is added to all embeddings, as a multiple of the mean length of an embedding."""
# The end's probability is measured on this many random sequences, each of this many tokens.
_SAMPLED_SEQUENCES = 8
_SAMPLED_TOKENS = 32
_HALVINGS = 20
"""Number of halvings in the bisection that finds the scale of the end's row."""


def write_model(folder: Path, config: Mapping[str, Any], dtype: str, seed: int) -> int:
    """Write random weights for ``config``, a config.json, into ``folder``; return the number of parameters.

    After any token, the end-of-sequence token has a probability of about ``END_PROBABILITY``, so that most responses
    end before the limit. In a purely random model with a large vocabulary, no response would end before the limit.
    Raises ModelConfigError for a value that transformers refuses.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    values = dict(config)
    end = language_model_values(values).get("eos_token_id")
    if isinstance(end, list):
        end = end[0]
    model_class = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    with refusals_by_transformers("the model's config.json"):
        transformers_config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = model_class.from_config(transformers_config)
    if end is not None:
        with torch.no_grad():
            _make_likely(model, end)
    torch_dtype = getattr(torch, dtype)
    model = model.to(torch_dtype)
    for model_config in (model.config, model.config.get_text_config()):
        model_config.dtype = torch_dtype
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _make_likely(model: PreTrainedModel, end: int) -> None:
    """Set the row of token ``end`` in the output layer so that the token has ``END_PROBABILITY`` after random tokens.

    One vector is added to all embeddings, so that all hidden states have a part along this vector. The row is a
    multiple of the vector; bisection finds the multiple.
    """
    import torch

    embeddings = cast("torch.nn.Embedding", model.get_input_embeddings()).weight
    rows = cast("torch.nn.Linear", model.get_output_embeddings()).weight
    vocabulary, hidden = embeddings.shape
    common = torch.randn(hidden)
    common *= _COMMON_LENGTH * embeddings.norm(dim=1).mean() / common.norm()
    embeddings += common
    tokens = torch.randint(0, vocabulary, (_SAMPLED_SEQUENCES, _SAMPLED_TOKENS))
    states = model.base_model(tokens).last_hidden_state.flatten(0, 1)
    logits = (states @ rows.T).index_fill(1, torch.tensor([end]), -math.inf)
    log_sum_of_others = logits.logsumexp(dim=1)
    # The row will be scale * common, so that the logit of ``end`` is scale * end_logit.
    end_logit = states @ common
    # Where scale * end_logit = log_sum_of_others, the probability is 1/2. A scale 4 times as large is an ample bound.
    lowest_scale = 0.0
    highest_scale = 4 * float(log_sum_of_others.mean() / end_logit.mean())
    for _ in range(_HALVINGS):
        scale = (lowest_scale + highest_scale) / 2
        end_probability = torch.sigmoid(scale * end_logit - log_sum_of_others)
        if end_probability.mean() < END_PROBABILITY:
            lowest_scale = scale
        else:
            highest_scale = scale
    rows[end] = common * lowest_scale
