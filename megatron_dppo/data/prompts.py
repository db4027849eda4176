"""From a problem to the tokens of its prompt: system prompt, template, chat template, tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_dppo.config.data_checks import PLACEHOLDER
from megatron_dppo.data.records import DataError

PIECE = 2**18
"""Characters that are given to a tokenizer at one time."""
Prompt = str | list[dict[str, str]]
"""Text, or chat messages."""


@dataclass(frozen=True)
class PromptForm:
    """How problems are put to the model.

    Attributes:
        apply_chat_template: send text through the tokenizer's chat template, as one user message;
            chat messages always go through it.
        system_prompt: a system message before the others; None: none.
        template: text with ``{prompt}`` where the problem goes, the last message's text; None: the
            problem alone.
    """

    apply_chat_template: bool = True
    system_prompt: str | None = None
    template: str | None = None

    def of(self, prompt: Prompt, where: str) -> Prompt:
        """``prompt`` in this form. Raises DataError where it brings a system message of its own
        beside ``system_prompt``."""
        if self.template is not None:
            prompt = _with_last_text(prompt, self.template.replace(PLACEHOLDER, text_of(prompt)))
        if self.system_prompt is None:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if any(message["role"] == "system" for message in messages):
            raise DataError(
                f"{where}: the prompt has a system message, and data.system_prompt is another; "
                "expected one of them"
            )
        return [{"role": "system", "content": self.system_prompt}, *messages]


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in ``folder`` (local files only). Raises DataError if there is none."""
    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise DataError(f"{folder}: no tokenizer here, expected a tokenizer_config.json")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    # Whatever a damaged file makes of the libraries: tokenizers raises bare Exceptions.
    except Exception as error:
        raise DataError(f"{folder}: its tokenizer can't be loaded: {_named(error)}") from error


def text_of(prompt: Prompt) -> str:
    """The text itself, or the last message's."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def short_enough(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], max_prompt_tokens: int
) -> list[int]:
    """Positions of the prompts that may be short enough: as characters, not as tokens.

    Tokenising megabytes takes gigabytes, and no token stands for more than the vocabulary's longest.
    """
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return [i for i, p in enumerate(prompts) if len(text_of(p)) <= longest * max_prompt_tokens]


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    form: PromptForm,
    locations: Sequence[str],
) -> list[tuple[str, bool]]:
    """The text of every prompt in ``form``, and whether the chat template wrote it."""
    formed = [form.of(prompt, where) for prompt, where in zip(prompts, locations, strict=True)]
    templated = [form.apply_chat_template or not isinstance(prompt, str) for prompt in formed]
    if tokenizer.chat_template is None and True in templated:
        raise DataError(
            f"{locations[templated.index(True)]}: the prompt needs a chat template and the tokenizer "
            "has none; set data.apply_chat_template to false for plain-text prompts"
        )
    return [
        (_render(tokenizer, prompt, where), True) if chat else (text_of(prompt), False)
        for prompt, chat, where in zip(formed, templated, locations, strict=True)
    ]


def tokenise(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    form: PromptForm,
    locations: Sequence[str],
) -> list[tuple[int, ...]]:
    """Token ids of every prompt in ``form``. Special tokens: the chat template's, or for plain text
    the tokenizer's.
    """
    texts = rendered(tokenizer, prompts, form, locations)
    prompt_ids: list[tuple[int, ...]] = [()] * len(prompts)
    for with_template in (False, True):
        chosen = [i for i, (_, by_template) in enumerate(texts) if by_template == with_template]
        if not chosen:
            continue
        encoded = _encoded(tokenizer, [texts[i][0] for i in chosen], special=not with_template)
        for i, ids in zip(chosen, encoded, strict=True):
            prompt_ids[i] = tuple(ids)
    if () in prompt_ids:
        raise DataError(f"{locations[prompt_ids.index(())]}: the prompt has no tokens")
    return prompt_ids


def token_counts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    form: PromptForm,
    locations: Sequence[str],
) -> list[int]:
    """Tokens of every prompt in ``form``. One of more than ``PIECE`` characters is counted in pieces, which
    may count a token more at each cut, and does not take gigabytes."""
    counts = []
    for text, by_template in rendered(tokenizer, prompts, form, locations):
        pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        encoded = _encoded(tokenizer, pieces, special=not by_template and len(pieces) == 1)
        counts.append(sum(map(len, encoded)))
    return counts


def _encoded(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool
) -> Iterator[list[int]]:
    """The ids of each text. Tokenizers takes 400 bytes and more for each character of a call, so a call gets
    about ``PIECE`` characters, or one text."""
    start = 0
    while start < len(texts):
        end, size = start + 1, len(texts[start])
        while end < len(texts) and (size := size + len(texts[end])) <= PIECE:
            end += 1
        yield from tokenizer(list(texts[start:end]), add_special_tokens=special)["input_ids"]
        start = end


def _with_last_text(prompt: Prompt, text: str) -> Prompt:
    return text if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": text}]


def _render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, where: str) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # A template is a program: it may raise anything.
    except Exception as error:
        raise DataError(f"{where}: the chat template fails on it: {_named(error)}") from error
    return str(text)


def _named(error: Exception) -> str:
    """An error of a library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
