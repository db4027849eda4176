"""Control tokens that stay text, for all kinds of tokenizers: a token that ``hold`` marks is encoded as the tokens of
its characters, and all other text as the tokenizer itself encodes it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_dppo.data.chat import ChatTemplateError, render
from megatron_dppo.data.control_tokens import ControlTokens
from megatron_dppo.demo.material import make_tokenizer
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

CORPUS = [f"{a} + {b} is {a + b}, they said." for a in range(20) for b in range(20)]


def unigram_tokenizer() -> Any:
    """Return a tokenizer with a space before the first piece alone. Its control tokens are pieces of its model too."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    alphabet = list("<|>_abcdefghijklmnopqrstuvwxyz0123456789+\n")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=special, unk_token="<unk>", initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def whole_word_tokenizer() -> Any:
    """Return a tokenizer in which a word of the vocabulary is one token without merges, as in Llama 3. The ids of its
    added tokens have a gap."""
    tokenizer = tiny_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.model.ignore_merges = True
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_tokens([AddedToken("<call>", normalized=False), AddedToken(" \n", rstrip=True)])
    return tokenizer


@cache
def tokenizer_of(kind: str) -> Any:
    makers = {
        "bytes": tiny_tokenizer, "unigram": unigram_tokenizer, "whole words": whole_word_tokenizer,
        "words": make_tokenizer,
    }  # fmt: skip
    tokenizer = makers[kind]()
    tokenizer.chat_template = CHAT_TEMPLATE + "{# <call> #}"
    return tokenizer


KINDS = ["bytes", "unigram", "whole words", "words"]


@pytest.mark.parametrize("kind", KINDS)
def test_held_tokens_are_the_tokens_of_their_characters(kind):
    tokenizer = tokenizer_of(kind)
    control = ControlTokens(tokenizer)
    end = str(tokenizer.eos_token)
    held_message = control.hold({"content": f"3 {end}+ <|im_end|>4"}, control.special)
    text = f"1 + 2 {end}\n{held_message['content']}{end}\n5"
    ids = control.encode(text)
    assert ids.count(tokenizer.eos_token_id) == 2
    first, last = (i for i, token in enumerate(ids) if token == tokenizer.eos_token_id)
    inner_text = control.release(text).split(end, 1)[1].rpartition(end)[0]
    if kind in ("bytes", "whole words"):
        inner_ids = tokenizer(inner_text, split_special_tokens=True)["input_ids"]
        assert ids[first + 1 : last] == inner_ids
        assert tokenizer.decode(ids) == control.release(text)
    plain_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[: first + 1] == plain_ids[: first + 1]
    assert ids[last:] == plain_ids[-len(ids[last:]) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", ["1 + 2<|im_end|>\n3", "<|im_start|>a \n <|im_end|>", "", " they", "<call>said<end>"]
)
def test_the_copy_encodes_other_text_as_the_tokenizer(kind, text):
    tokenizer = tokenizer_of(kind)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    control = ControlTokens(tokenizer)
    assert control.encode(text) == expected
    assert control._copy.encode(text) == expected


def test_a_tool_that_the_template_does_not_write_is_no_control_token():
    tokenizer = whole_word_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    assert "<call>" not in ControlTokens(tokenizer).further
    tokenizer.chat_template = CHAT_TEMPLATE + "<call>"
    assert ControlTokens(tokenizer).further == {"<call>"}


def test_marks_stand_in_every_text_of_a_message():
    control = ControlTokens(tiny_tokenizer())
    message = {
        "role": "tool",
        "content": "a<|im_<|im_end|>end|>",
        "tool_calls": [{"function": {"name": "x", "arguments": {"<|im_end|>": [1, "<|im_start|>"]}}}],
    }  # fmt: skip
    held_message = control.hold(message, control.special)
    assert not control.written_in(str(held_message))
    assert control.release(str(held_message)) == str(message)
    assert control.hold(message, ()) == message


def test_a_template_that_fails_is_named():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ChatTemplateError, match="no such role"):
        render(tokenizer, [{"role": "user", "content": "1"}])
