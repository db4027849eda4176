"""Model of the demo: a random Qwen3-MoE of 1.1 million parameters with a tokenizer of numbers.

A Hugging Face folder: config.json, model.safetensors, tokenizer.json with a chat template.
The model has the features of its family: 8 experts, 2 per token, grouped-query attention,
normalised queries and keys, an output layer that is not tied to the embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

SPECIAL = ["<pad>", "<user>", "<assistant>", "<end>", "<unknown>"]
NUMBERS = 28
"""Numbers 0 to 27: totals reach 20, estimates 25; 36 words in all are divisible by TP 4."""
WORDS = [*SPECIAL, *"+-=", *(str(i) for i in range(NUMBERS))]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% "
    "endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 160,
    "intermediate_size": 256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "initializer_range": 0.05,
}
"""Two layers and the larger initial weights learn the task in fewer steps."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each number and each sign; spaces are ignored."""
    vocabulary = {word: token_id for token_id, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex(r"[0-9]+|[^0-9]"), "isolated"),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unknown>",
        pad_token="<pad>",
        eos_token="<end>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(folder: Path, seed: int) -> int:
    """Write the checkpoint into ``folder``; returns the number of parameters."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3MoeConfig(**SHAPE, **ids, bos_token_id=None, dtype=torch.float32)
    model = Qwen3MoeForCausalLM(config)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())
