"""Chat templates and tokenizers of the supported families. They behave like the published templates: they take the same
roles, put tools and calls in the same places, drop or trim the same parts of a history, and join white space alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_dppo.data.thoughts import DEFAULT_MARKS
from megatron_dppo.engine.turn_text import ResponseReader
from tests.tiny_models import CHAT_TEMPLATE

_QWEN_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content + '\\n\\n' if messages[0].role == 'system' else DEFAULT }}
    {{- '# Tools\\n\\nYou may call one or more functions.\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nReturn <tool_call>\\n{"name": <name>, "arguments": <json>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- elif DEFAULT %}
    {{- '<|im_start|>system\\n' + DEFAULT + '<|im_end|>\\n' }}
{%- endif %}"""
_QWEN_CALL = """\
{{- '<tool_call>\\n{"name": "' }}{{- call.function.name }}{{- '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"""
# Consecutive messages of tools become one message of the user.
_QWEN_RESPONSE = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""
_ASKING = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

# Turns after the last question keep their thoughts. Earlier turns lose them.
QWEN3 = (
    "{%- set DEFAULT = '' %}"
    + _QWEN_TOOLS
    + """
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set ns.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = '' %}
        {%- if '</think>' in m.content %}
            {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.query and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
            """
    + _QWEN_CALL
    + """
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        """
    + _QWEN_RESPONSE
    + """
    {%- endif %}
{%- endfor %}
"""
    + _ASKING
)
# The release of 2507: the prompt itself opens a thought. A history does not have this opening.
QWEN3_THINKING = QWEN3.replace(_ASKING, _ASKING.replace("assistant\\n", "assistant\\n<think>\\n"))
QWEN2 = (
    "{%- set DEFAULT = 'You are helpful.' %}"
    + _QWEN_TOOLS
    + """
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first)
        or (m.role == 'assistant' and not m.tool_calls) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
        {%- for call in m.tool_calls %}
            {{- '\\n' }}"""
    + _QWEN_CALL
    + """
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        """
    + _QWEN_RESPONSE
    + """
    {%- endif %}
{%- endfor %}
"""
    + _ASKING
)
# Tools are in the first message of the user. A call is JSON in place of the content. A tool's answer is written as
# JSON, because the template writes everything iterable as JSON, and text is iterable. Two calls in one turn are
# refused.
LLAMA3 = """\
{{- '<|begin|>' }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|header|>system<|header_end|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|im_end|>' }}
{%- if tools is not none %}
    {{- '<|header|>user<|header_end|>\\n\\nGiven the following functions, please respond with JSON.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- messages[0].content | trim + '<|im_end|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if not (m.role in ('ipython', 'tool') or 'tool_calls' in m) %}
        {{- '<|header|>' + m.role + '<|header_end|>\\n\\n' + m.content | trim + '<|im_end|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|header|>assistant<|header_end|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|im_end|>' }}
    {%- else %}
        {{- '<|header|>ipython<|header_end|>\\n\\n' }}
        {{- m.content | tojson if m.content is mapping or m.content is iterable else m.content }}
        {{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""
# The template takes no list of tools. A mark precedes only the first answer of a tool in a conversation. The prompt
# itself opens a thought.
R1_DISTILL = """\
{%- set ns = namespace(is_tool=false, is_output_first=true, system='') %}
{%- for m in messages %}{%- if m.role == 'system' %}{%- set ns.system = m.content %}{%- endif %}{%- endfor %}
{{- '<|begin|>' + ns.system }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.is_tool = false %}{{- '<|User|>' + m.content }}{%- endif %}
    {%- if m.role == 'assistant' and m.content is not none %}
        {%- if ns.is_tool %}
            {{- '<|outputs_end|>' + m.content + '<|im_end|>' }}{%- set ns.is_tool = false %}
        {%- else %}
            {{- '<|Assistant|>' + m.content.split('</think>')[-1] + '<|im_end|>' }}
        {%- endif %}
    {%- endif %}
    {%- if m.role == 'tool' %}
        {%- set ns.is_tool = true %}
        {{- '<|outputs_begin|><|output|>' if ns.is_output_first else '\\n<|output|>' }}
        {{- m.content + '<|output_end|>' }}
        {%- set ns.is_output_first = false %}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<|outputs_end|>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""
MIXTRAL = """\
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|begin|>' }}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('conversation roles must alternate') }}
    {%- endif %}
    {%- if m.role == 'user' %}{{- ' [INST] ' + (ns.system if loop.first else '') + m.content + ' [/INST]' }}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content + '<|im_end|>' }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

# A message of another role is left out without an error.
OLMOE = """\
{{- '<|begin|>' }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- '<|system|>\\n' + m.content + '\\n' }}
    {%- elif m.role == 'user' %}{{- '<|user|>\\n' + m.content + '\\n' }}
    {%- elif m.role == 'assistant' %}{{- '<|assistant|>\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
{%- endfor %}"""
# A message of any role is a turn. Tools are ignored.
QWEN15 = (
    """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
"""
    + _ASKING
)

# A turn of Moonlight begins with a role's mark and the role's name. Messages of tools are turns of the system.
MOONLIGHT = """\
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}
        {{- '<|header|>system<|header_end|>You are a helpful assistant<|im_end|>' }}
    {%- endif %}
    {{- '<|header|>' + ('system' if m.role == 'tool' else m.role) + '<|header_end|>' + m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|header_end|>' }}{%- endif %}"""
# No mark ends a turn of GLM. The policy ends a turn by the first token of the next turn's mark.
GLM = """\
{{- '<|begin|>' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|User|>\\n' + m.content }}
    {%- elif m.role == 'system' %}{{- '<|header|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<|Assistant|>\\n<think></think>\\n' + m.content.split('</think>')[-1].strip() }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|outputs_begin|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>\\n<think></think>\\n' }}{%- endif %}"""
# Consecutive answers of tools are one turn. The prompt opens a thought. A history does not have this opening.
MINIMAX = """\
{%- set system = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{{- '<|begin|><|header|>system\\n' + system + '<|im_end|>\\n' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|header|>user\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|header|>ai\\n' + m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|header|>tool' }}{%- endif %}
        {{- '\\n<response>' + m.content + '</response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>ai\\n<think>\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class PublishedTemplate:
    """The template of a family, or of some models of the family.

    Attributes:
        begin: text that the policy samples at the start of a turn, because the generation prompt does not have it.
        opened: text that the generation prompt has at the start of a turn, and that a history does not have.
        call: the policy's text for a call of the tool ``name`` with JSON ``arguments``; empty: the template has no
            tools.
        ends: role of the next turn -> the token that the policy ends its turn with. Missing: the tokenizer's end of
            text.
        trims: whether a history has the policy's turns without white space around them.
    """

    template: str
    pattern: str = "qwen"
    begin: str = ""
    opened: str = ""
    call: str = ""
    ends: Mapping[str, str] = field(default_factory=dict)
    trims: bool = False


_HERMES = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
_GLM_ENDS = {"user": "<|User|>", "tool": "<|outputs_begin|>"}
PUBLISHED: dict[str, PublishedTemplate] = {
    "qwen3": PublishedTemplate(QWEN3, call=_HERMES),
    "qwen3_moe": PublishedTemplate(QWEN3, call=_HERMES),
    "qwen3_moe, thinking": PublishedTemplate(QWEN3_THINKING, opened="<think>\n", call=_HERMES),
    "qwen2": PublishedTemplate(QWEN2, call=_HERMES),
    "qwen2, distilled from R1": PublishedTemplate(R1_DISTILL, opened="<think>\n"),
    "llama": PublishedTemplate(
        LLAMA3, "llama3", call='{{"name": "{name}", "parameters": {arguments}}}', trims=True
    ),
    "llama, distilled from R1": PublishedTemplate(R1_DISTILL, "llama3", opened="<think>\n"),
    "olmoe": PublishedTemplate(OLMOE),
    "qwen2_moe": PublishedTemplate(QWEN15),
    "deepseek_v3": PublishedTemplate(R1_DISTILL.replace("<think>\\n", "")),
    "deepseek_v3, R1": PublishedTemplate(R1_DISTILL, opened="<think>\n"),
    "deepseek_v3, Moonlight": PublishedTemplate(MOONLIGHT),
    "glm4_moe": PublishedTemplate(GLM, ends=_GLM_ENDS, trims=True),
    "glm4_moe_lite": PublishedTemplate(GLM, ends=_GLM_ENDS, trims=True),
    # The published templates were not available. This template does not resemble them.
    "hy_v3": PublishedTemplate(CHAT_TEMPLATE),
    "gpt_oss": PublishedTemplate(CHAT_TEMPLATE),
    "minimax_m2": PublishedTemplate(MINIMAX, opened="<think>\n"),
    "qwen3_next": PublishedTemplate(QWEN2.replace("You are helpful.", ""), call=_HERMES),
    "qwen3_next, thinking": PublishedTemplate(QWEN3_THINKING, opened="<think>\n", call=_HERMES),
    "qwen3_5_moe": PublishedTemplate(QWEN3_THINKING, opened="<think>\n", call=_HERMES),
    "qwen3_5_moe_text": PublishedTemplate(QWEN3_THINKING, opened="<think>\n", call=_HERMES),
    "mixtral": PublishedTemplate(MIXTRAL, "sentencepiece", begin=" "),
    "these tests'": PublishedTemplate(CHAT_TEMPLATE),
}

_WORDS = {
    kind: rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for kind, number in (("qwen", r"\p{N}"), ("llama3", r"\p{N}{1,3}"))
}
"""How the published tokenizers split a text: line ends belong to the signs before them, a space to the word after
it."""
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|User|>", "<|Assistant|>"),
    *("<|header|>", "<|header_end|>", "<|outputs_begin|>", "<|outputs_end|>"),
    *("<|output|>", "<|output_end|>"),
)
_CORPUS = [
    f'{a}+{b} is {a + b}.\n\nSo: {a + b}\n\n</tool_call>\n<tool_response>\n</think>\n\n"}}\n'
    for a in range(40)
    for b in range(10)
]


@cache
def _train_tokenizer(pattern: str) -> Tokenizer:
    bpe = Tokenizer(models.BPE(byte_fallback=pattern == "sentencepiece"))
    alphabet: Sequence[str] = pre_tokenizers.ByteLevel.alphabet()
    special = list(_SPECIAL)
    if pattern == "sentencepiece":
        # As in Llama 2 and Mixtral: a space precedes the text, and characters that are no piece become bytes.
        bpe.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
        alphabet = [chr(code) for code in range(32, 127)]
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS[pattern]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=special,
        initial_alphabet=list(alphabet),
        show_progress=False,
        max_token_length=12,
    )
    # Sentencepiece's tokenizers have no piece with a line end.
    has_lines = pattern != "sentencepiece"
    corpus = _CORPUS if has_lines else [text.replace("\n", " ") for text in _CORPUS]
    bpe.train_from_iterator(corpus, trainer)
    return bpe


def published_tokenizer(published: PublishedTemplate) -> Any:
    """A tokenizer that splits texts as its family's tokenizer does, with the ``published`` template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_train_tokenizer(published.pattern),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = published.template
    return tokenizer


def reader_of(tokenizer: Any, **options: Any) -> ResponseReader:
    """Return the reader of a tokenizer's responses; ``options`` are arguments of ``ResponseReader.of``."""

    def decode(ids: Any, /, *, special: bool = True) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=not special))

    options = {"is_chat": True, "arguments": {}, "marks": DEFAULT_MARKS, **options}
    return ResponseReader.of(tokenizer, decode, **options)
