"""The gate of a shared expert (Qwen2-MoE). SGLang computes the gate in a Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def add_gated_shared_expert(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """Add sigmoid(h w) * shared to ``final_hidden_states`` in place; w [H], h and all other tensors [T, H]."""
    gate = torch.sigmoid(hidden_states @ gate_weight)
    final_hidden_states += gate[:, None] * shared_output
