"""Random weights of a tiny model, with which most responses end by themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron_dppo.model.families import language_model_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

END_PROBABILITY = 0.15
_COMMON_PART = 1.5
"""Length of the part that all embeddings share, relative to the rest."""
_SAMPLED_SEQUENCES = 8
_SAMPLED_TOKENS = 32
_HALVINGS = 20


def write_model(folder: Path, config: Mapping[str, Any], dtype: str, seed: int) -> int:
    """Write random weights for ``config``, a config.json, into ``folder``; return the number of parameters.

    After any token, the end-of-sequence token has a probability of about ``END_PROBABILITY``, so that most responses
    end before the limit. In a purely random model with a large vocabulary, none would.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    values = dict(config)
    ends = language_model_values(values).get("eos_token_id")
    kind = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    end = ends[0] if isinstance(ends, list) else ends
    if end is not None:
        with torch.no_grad():
            _make_likely(model, end)
    model = model.to(getattr(torch, dtype))
    for written in (model.config, model.config.get_text_config()):
        written.dtype = getattr(torch, dtype)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _make_likely(model: PreTrainedModel, end: int) -> None:
    """Set the row of token ``end`` in the output layer so that it has ``END_PROBABILITY`` after random tokens.

    A common vector is added to all embeddings, so that the hidden states have a part along it; the row is a multiple of
    that vector.
    """
    import torch

    embeddings = cast("torch.nn.Embedding", model.get_input_embeddings()).weight
    rows = cast("torch.nn.Linear", model.get_output_embeddings()).weight
    vocabulary, hidden = embeddings.shape
    common = torch.randn(hidden)
    common *= _COMMON_PART * embeddings.norm(dim=1).mean() / common.norm()
    embeddings += common
    tokens = torch.randint(0, vocabulary, (_SAMPLED_SEQUENCES, _SAMPLED_TOKENS))
    states = model.base_model(tokens).last_hidden_state.flatten(0, 1)
    others = (states @ rows.T).index_fill(1, torch.tensor([end]), -math.inf).logsumexp(dim=1)
    shared = states @ common
    lowest = 0.0
    highest = 4 * float(others.mean() / shared.mean())
    for _ in range(_HALVINGS):
        scale = (lowest + highest) / 2
        if torch.sigmoid(scale * shared - others).mean() < END_PROBABILITY:
            lowest = scale
        else:
            highest = scale
    rows[end] = common * lowest
