"""The tokens between two turns, for the chat templates of every family: turns laid end to end are the tokens that the
template's own rendering of the whole conversation has. The templates here have the published ones' form, without what
renders tool definitions."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import ChatCall
from megatron_dppo.environments.templates import TurnTemplate, TurnTemplateError
from megatron_dppo.model.families import FAMILIES
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

QWEN3 = """\
{%- set ns = namespace(query=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role in ('user', 'system') %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set thought = thought if '</think>' in m.content else '' %}
        {%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.query and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN2 = """\
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
R1_DISTILL = """\
{{- '<|begin|>' }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}{%- endif %}
    {%- if m.role == 'user' %}{{- '<|User|>' + m.content }}{%- endif %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}
        {{- '<|Assistant|>' + content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}"""
LLAMA3 = """\
{{- '<|begin|>' }}
{%- for m in messages %}
    {%- set role = 'ipython' if m.role == 'tool' else m.role %}
    {%- set content = m.content | tojson if m.role == 'tool' else m.content | trim %}
    {{- '<|header|>' + role + '<|header_end|>\\n\\n' + content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""
MIXTRAL = """\
{{- '<|begin|>' }}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {{- ' [INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + '<|im_end|>' }}
{%- endfor %}"""

TEMPLATES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # template, what a turn begins with beyond the prompt before it, roles
    "qwen3": (QWEN3, "", ("user", "tool")),
    "qwen3_moe": (QWEN3, "", ("user", "tool")),
    "qwen2": (QWEN2, "", ("user", "tool")),
    "qwen2, distilled from R1": (R1_DISTILL, "", ("user",)),
    "llama": (LLAMA3, "", ("user", "tool")),
    "mixtral, of the walk": (MIXTRAL, " ", ("user",)),
    "these tests'": (CHAT_TEMPLATE, "", ("user", "tool")),
}
EVERY = [(name, role) for name, (*_, roles) in TEMPLATES.items() for role in roles]


@cache
def _tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokens = ["<|begin|>", "<|User|>", "<|Assistant|>", "<|header|>", "<|header_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


def tokenizer_of(template: str) -> Any:
    tokenizer = copy.deepcopy(_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def encoded(tokenizer: Any, messages: list[dict[str, str]], *, prompts: bool) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=prompts, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_every_family_has_a_template_here():
    assert {name.split(",")[0] for name in TEMPLATES} >= FAMILIES.keys()


@pytest.mark.parametrize(("name", "role"), EVERY)
def test_turns_end_to_end_are_the_whole_conversation(name, role):
    template, begin, _ = TEMPLATES[name]
    tokenizer = tokenizer_of(template)
    turns = TurnTemplate(tokenizer, role)
    messages = [{"role": "user", "content": "3+5"}]
    ids = encoded(tokenizer, messages, prompts=True)
    end = tokenizer.eos_token_id
    for said, observation in [("4+1", "5"), ("so 5+3", "8 is\nright"), ("", "8")]:
        sampled = [*tokenizer(begin + said, add_special_tokens=False)["input_ids"], end]
        ids += [*sampled, *turns.delta(sampled, observation)]
        messages += [
            {"role": "assistant", "content": said},
            {"role": role, "content": observation},
        ]
        assert ids == encoded(tokenizer, messages, prompts=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_was_sampled_stays_whatever_the_template_would_make_of_it(name):
    """Thoughts, white space and several ways to write a text: a template drops or trims them in its history."""
    tokenizer = tokenizer_of(TEMPLATES[name][0])
    turns = TurnTemplate(tokenizer, "user")
    plain = [*tokenizer("5")["input_ids"], tokenizer.eos_token_id]
    for text in ("<think>\n3\n</think>\n\n5", " 5 \n\n", "<|User|>"):
        sampled = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        assert turns.delta(sampled, "8") == turns.delta(plain, "8")


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "these tests'"])
def test_the_newline_after_the_end_of_a_turn_is_the_templates(name):
    tokenizer = tokenizer_of(TEMPLATES[name][0])
    turns = TurnTemplate(tokenizer, "user")
    (newline,) = tokenizer("\n")["input_ids"]
    end = tokenizer.eos_token_id
    assert turns.delta([7, end], "8")[0] == newline
    # A turn that a stop text ended has no end of turn yet.
    assert turns.delta([7, 9], "8")[:2] == [end, newline]
    assert turns.delta([], "8")[:2] == [end, newline]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_first_observation_is_one_more_message_of_the_user(name):
    """Behind the prompt as it was encoded, and before what asks for an answer."""
    tokenizer = tokenizer_of(TEMPLATES[name][0])
    turns = TurnTemplate(tokenizer, "user")
    messages = [{"role": "user", "content": "3+5"}]
    prompt = tuple(encoded(tokenizer, messages, prompts=True))
    asking = len(prompt) - len(encoded(tokenizer, messages, prompts=False))
    assert turns.generation_tokens == asking
    problem = Problem(0, "3+5", "8", prompt)
    if name == "mixtral, of the walk":
        with pytest.raises(TurnTemplateError, match=r"messages of user, user: .* must alternate"):
            turns.opening(problem, "Begin: 8")
        return
    more = [*messages, {"role": "user", "content": "Begin:\n8"}]
    assert turns.opening(problem, "Begin:\n8") == encoded(tokenizer, more, prompts=True)
    if name.startswith(("llama", "qwen3")):
        more = [{"role": "system", "content": "Add."}, *more]
        whole = tuple(encoded(tokenizer, more[:2], prompts=True))
        problem = replace(problem, prompt_ids=whole, messages=tuple(more[:2]))
        assert turns.opening(problem, "Begin:\n8") == encoded(tokenizer, more, prompts=True)


def test_a_template_that_swallows_it_or_a_prompt_that_is_not_its_own_is_refused():
    drops = changed(" in messages %}", " in messages[:1] + messages[2:] %}")
    drops = drops.replace("<|im_start|>assistant", "{{ messages|length }}<|im_start|>assistant")
    tokenizer = tokenizer_of(drops)
    turns = TurnTemplate.__new__(TurnTemplate)
    turns._tokenizer, turns._is_chat, turns.generation_tokens = tokenizer, True, 3
    ids = tuple(encoded(tokenizer, [{"role": "user", "content": "3+5"}], prompts=True))
    with pytest.raises(TurnTemplateError, match="does not put a second message of the user after"):
        turns.opening(Problem(0, "3+5", "8", ids), "Begin")
    whole = TurnTemplate(_tokenizer(), "user")
    with pytest.raises(TurnTemplateError, match="does not put a second message of the user after"):
        whole.opening(Problem(0, "3+5", "8", (10, 11, 12, 13, 14, 15)), "Begin")


def test_a_prompt_has_all_messages_calls_and_tools_or_is_refused():
    """Of a turn that is nothing but a call only the call can be lost."""
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 3}}}
    messages = [
        {"role": "user", "content": "3+5"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "8", "tool_call_id": "1"},
    ]
    shows_calls = changed(
        "{{ m['content'] }}",
        "{{ m['content'] }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}",
    )
    tokenizer = tokenizer_of(shows_calls)
    text = (
        "<|im_start|>user\n3+5<|im_end|>\n"
        '<|im_start|>assistant\n{"name": "add", "arguments": {"a": 3}}<|im_end|>\n'
        "<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = TurnTemplate(tokenizer, "user").prompt(ChatCall(messages, branch=1))
    assert prompt == tokenizer(text, add_special_tokens=False)["input_ids"]
    tool = {"type": "function", "function": {"name": "minus"}}
    for template, tools, lost in (
        (CHAT_TEMPLATE, [], "a call of 'add'"),
        (shows_calls, [tool], "the tool 'minus'"),
        (DROPS_TOOLS, [], "a message of tool"),
    ):
        with pytest.raises(TurnTemplateError, match=f"leaves out, or alters, {lost}"):
            TurnTemplate(tokenizer_of(template), "user").prompt(ChatCall(messages, tools))


def test_plain_text_follows_as_it_is():
    tokenizer = _tokenizer()
    assert (
        TurnTemplate(tokenizer, "user", is_chat=False).delta([7, 2], "\n8 ")
        == (tokenizer("\n8 ")["input_ids"])
    )
    plain = TurnTemplate(tokenizer, "user", is_chat=False)
    opened = plain.opening(Problem(0, "3+5", "8", (7, 2)), "\n8 ")
    assert (opened, plain.generation_tokens) == ([7, 2, *tokenizer("\n8 ")["input_ids"]], 0)


def changed(old: str, new: str) -> str:
    assert old in CHAT_TEMPLATE
    return CHAT_TEMPLATE.replace(old, new)


DROPS_TOOLS = changed(" in messages %}", " in messages if m['role'] != 'tool' %}")
COUNTS = changed("{{ m['role'] }}", "{{ m['role'] }}{{ loop.index }}")
LAST_ONLY = changed("{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' }}")
NO_END = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "role", "message"),
    [
        (DROPS_TOOLS, "tool", r"drops a message of tool after a turn \(environment.role\)"),
        (COUNTS, "user", r"is not stable: after a turn stands .*user3.*, but .*user5.* where 3 messages"),
        (LAST_ONLY, "tool", r"leaves out, or alters, what the assistant said before a message of tool"),
        (MIXTRAL, "tool", r"fails on messages of user, assistant, tool: TemplateError: roles must alternate"),
        (None, "user", r"the tokenizer has no chat template; set data.apply_chat_template to false"),
    ],
)  # fmt: skip
def test_a_template_that_can_not_say_what_follows_is_refused_at_the_start(template, role, message):
    with pytest.raises(TurnTemplateError, match=f"(?s){message}"):
        TurnTemplate(tokenizer_of(template), role)


def test_a_tokenizer_that_writes_a_space_before_every_text_is_refused():
    tokenizer = tokenizer_of(NO_END)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(TurnTemplateError, match="is encoded otherwise behind a turn than alone"):
        TurnTemplate(tokenizer, "user")
