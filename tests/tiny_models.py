"""Tiny random Hugging Face checkpoints of the supported families, with a byte-level BPE tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

ONE_PLUS = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families whose norms multiply by 1 + their weight. The norms of delta nets are an exception."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 512,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 256,
}
R1_FORM = {
    "q_lora_rank": 48,
    "rope_parameters": YARN,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}
"""DeepSeek-R1's parts that Moonlight lacks: a latent of queries, YaRN, groups of experts."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on sums; ids 0, 1, 2 are <|endoftext|> (pad), <|im_start|>, <|im_end|> (end)."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(
        [f"{a}+{b}={a + b}. The answer is {a + b}." for a in range(60) for b in range(60)], trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_model(
    folder: str | Path,
    family: str = "qwen3_moe",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    hidden: int = 64,
    vocab_size: int = 512,
    tied: bool = False,
    **overrides: object,
) -> Path:
    """Write a random model of ``family`` (a row of ``builders``) and its tokenizer into ``folder``.

    Weights are larger than a fresh initialisation's, and norms differ from 1, so that a mistake shows in the logits.
    """
    folder = Path(folder)
    common = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    rope = {"rope_theta": 1e6}
    head = {"head_dim": 16}
    moe = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    sigmoid_moe = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "num_mtp_layers": 0,
    }
    latent = {
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    }
    builders: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**head, **moe}),
        "qwen2_moe": (
            Qwen2MoeConfig,
            Qwen2MoeForCausalLM,
            {**moe, "norm_topk_prob": False, "shared_expert_intermediate_size": hidden},
        ),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, head),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
        "llama": (LlamaConfig, LlamaForCausalLM, head),
        "olmoe": (
            OlmoeConfig,
            OlmoeForCausalLM,
            {
                "num_key_value_heads": 4,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "intermediate_size": hidden // 2,
            },
        ),
        "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 8}),
        "glm4_moe": (
            Glm4MoeConfig,
            Glm4MoeForCausalLM,
            {
                **sigmoid_moe,
                "head_dim": 32,
                "attention_bias": True,
                "use_qk_norm": True,
                "first_k_dense_replace": 1,
            },
        ),
        "deepseek_v3": (
            DeepseekV3Config,
            DeepseekV3ForCausalLM,
            {
                **sigmoid_moe,
                **latent,
                "q_lora_rank": None,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
            },
        ),
        "glm4_moe_lite": (
            Glm4MoeLiteConfig,
            Glm4MoeLiteForCausalLM,
            # transformers' norms of latents have this epsilon with any configuration.
            {**sigmoid_moe, **latent, "rms_norm_eps": 1e-6},
        ),
    }
    builders["minimax_m2"] = (
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        {
            "head_dim": 32,
            "rotary_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": hidden,
        },
    )
    builders["hy_v3"] = (
        HYV3Config,
        HYV3ForCausalLM,
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.8,
        },
    )
    builders["gpt_oss"] = (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": hidden,
            # Windows and limits that short sequences and small weights reach.
            "sliding_window": 8,
            "swiglu_limit": 1.0,
            "rope_parameters": GPT_OSS_ROPE,
        },
    )
    builders["qwen3_next"] = (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            **moe,
            "head_dim": 32,
            "shared_expert_intermediate_size": hidden,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "full_attention_interval": min(layers, 4),
        },
    )
    # Keys of published files that transformers 5 does not have in a model's configuration.
    hybrid_keys: dict[str, Any] = {
        "rope_parameters": {**rope, "partial_rotary_factor": 0.25, "rope_type": "default"}
    }
    qwen3_5 = {**builders["qwen3_next"][2], **hybrid_keys}
    builders["qwen3_5_moe_text"] = (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, qwen3_5)
    builders["qwen3_5_moe"] = (
        _with_vision_tower,
        Qwen3_5MoeForConditionalGeneration,
        {
            **qwen3_5,
            "rope_parameters": {
                **hybrid_keys["rope_parameters"],
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    )
    config_class, model_class, extra = builders[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**common, **rope, **extra, **overrides}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = (
                0.2
                if "mlp.gate." in name or "mlp.router." in name or "shared_expert_gate" in name
                else 0.08
            )
            if name.endswith("A_log"):
                p.copy_(2 * torch.rand_like(p))
            elif name.endswith((".sinks", "experts.gate_up_proj_bias", "experts.down_proj_bias")):
                p.copy_(0.5 * torch.randn_like(p))
            elif "norm" not in name:
                p.copy_(scale * torch.randn_like(p))
            elif family in ONE_PLUS and not name.endswith("linear_attn.norm.weight"):
                p.copy_(0.1 * torch.randn_like(p))
            else:
                p.copy_(1 + 0.1 * torch.randn_like(p))
        biases = {}
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                biases[name] = buffer.copy_(0.3 * torch.randn_like(buffer)).clone()
    model = model.to(dtype)
    # A router's bias is fp32 in a model of any type.
    for name, values in biases.items():
        model.get_buffer(name).data = values
    model.config.dtype = dtype
    if family == "qwen3_5_moe":
        model.config.text_config.dtype = dtype
    model.save_pretrained(folder)
    if family == "qwen3_5_moe":
        _write_as_published(folder, model)
    tiny_tokenizer(vocab_size).save_pretrained(folder)
    return folder


def _with_vision_tower(**text: Any) -> Qwen3_5MoeConfig:
    """The configuration of a Qwen3.5 with the language model ``text`` and a vision tower of one layer."""
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
    }
    return Qwen3_5MoeConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"]
    )


def _write_as_published(folder: Path, model: PreTrainedModel) -> None:
    """Write the weights as Qwen3.5's published folders have them.

    They have all experts of a layer in one tensor, and a layer that predicts further tokens. transformers would save a
    tensor for each expert, and would not save the further layer.
    """
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    (_, hidden) = tensors["lm_head.weight"].shape
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, dtype=model.dtype)
    tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.randn(8, 64, hidden, dtype=model.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of a checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def save_hollow_model(folder: str | Path, **changes: object) -> Path:
    """A qwen3_moe checkpoint in bfloat16 whose weights are a hole in the file: zeros of any size that take no disk.

    ``changes``: changed entries in the config.json of a tiny model of one layer.
    """
    from megatron_dppo.checkpoint_conversion.tensor_store import SafetensorsFileWriter, TensorSpec
    from megatron_dppo.model.families import load_model_shape
    from megatron_dppo.model.mapping import hf_tensors

    folder = save_tiny_model(folder, layers=1)
    config, weights = folder / "config.json", folder / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"} | changes))
    tensors = hf_tensors(load_model_shape(folder))
    weights.unlink()
    with SafetensorsFileWriter(
        weights, {n: TensorSpec(d, torch.bfloat16) for n, d in tensors.items()}
    ):
        return folder
