"""Random adapters, and Hugging Face models with PEFT's adapters: an independent check of the trainer's LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def save_random_adapters(
    folder: Path, hf_dir: Path, section: dict[str, Any], seed: int = 3
) -> Path:
    """Write adapters with A and B both random, as the ``lora:`` section asks for, in PEFT's format."""
    from megatron_dppo.checkpoint_conversion.adapters import write_peft
    from megatron_dppo.config.lora import adapters_of
    from megatron_dppo.config.schema import LoraConfig
    from megatron_dppo.model.adapters import adapter_tensors
    from megatron_dppo.model.families import load_model_shape

    shape = load_model_shape(hf_dir)
    adapters = adapters_of(LoraConfig(**section), shape)
    assert adapters is not None
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        (name, 0.1 * torch.randn(dims, generator=generator))
        for name, dims in adapter_tensors(adapters, shape).items()
    ]
    write_peft(folder, adapters, shape, tensors, base=str(hf_dir), dtype=torch.float32)
    return folder


class ExpertLinears(nn.Module):
    """The experts of a layer as separate linears. PEFT gives an adapter to each linear."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.activation = nn.functional.silu
        width = fused.down_proj.shape[2]
        for i in range(fused.gate_up_proj.shape[0]):
            gate, up = fused.gate_up_proj.data[i].split(width)
            weights = {"gate_proj": gate, "up_proj": up, "down_proj": fused.down_proj.data[i]}
            self.add_module(str(i), nn.ModuleDict({n: _linear(w) for n, w in weights.items()}))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        expert: Any
        for name, expert in self.named_children():
            token, place = torch.where(top_k_index == int(name))
            x = hidden[token]
            inner = self.activation(expert["gate_proj"](x)) * expert["up_proj"](x)
            weighted = expert["down_proj"](inner) * top_k_weights[token, place, None]
            out = out.index_add(0, token, weighted)
        return out


def peft_model(hf_dir: str, peft_dir: str) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return the fp32 model with the adapters of ``peft_dir`` in PEFT, and the adapters' parameters by the folder's
    names."""
    import json

    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    # A model with a vision tower has its own names only in its own class.
    has_vision = hasattr(AutoConfig.from_pretrained(hf_dir), "vision_config")
    auto_class = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    model: Any = auto_class.from_pretrained(hf_dir, dtype=torch.float32)
    decoder = model.model.language_model if has_vision else model.model
    for layer in decoder.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = ExpertLinears(layer.mlp.experts)
    model.config.model_type = "with-expert-linears"  # else PEFT rewrites the modules' names
    settings = json.loads((Path(peft_dir) / "adapter_config.json").read_text())
    lora_settings = {key: settings[key] for key in ("r", "lora_alpha", "target_modules", "bias")}
    peft = get_peft_model(model, LoraConfig(**lora_settings))
    values = load_file(Path(peft_dir) / "adapter_model.safetensors")
    trained = {n.replace(".default", ""): p for n, p in peft.named_parameters() if p.requires_grad}
    assert trained.keys() == values.keys()
    for name, parameter in trained.items():
        parameter.data.copy_(values[name])
    return peft, trained


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    return linear
