"""The tokenizer of a rehearsal: the recipe's own tokenizer, or a tokenizer with a token for every byte."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.model.splits import ceil_to

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_vocabulary_size() -> int:
    """Return the number of bytes and special tokens, rounded up to a multiple of 4."""
    return ceil_to(256 + len(SPECIAL_TOKENS), 4)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for every byte and a ChatML template. It encodes any text without loss."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def copy_tokenizer(source: str | Path, folder: Path) -> None:
    """Copy the tokenizer's files of the Hugging Face folder ``source`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in TOKENIZER_FILES:
        for path in sorted(Path(source).glob(pattern)):
            shutil.copyfile(path, folder / path.name)


def write_tokenizer(folder: Path, source: str | Path | None) -> None:
    """Write the tokenizer of the folder ``source`` into ``folder``; None: the byte tokenizer."""
    if source is None:
        byte_tokenizer().save_pretrained(folder)
    else:
        copy_tokenizer(source, folder)
