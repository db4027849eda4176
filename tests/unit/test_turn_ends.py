"""The end of the assistant's turn: warnings if nothing stops there, and the end that stands in the next prompt."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from megatron_dppo.data.problems import PromptForm, load_problems, load_turns, template_warnings
from megatron_dppo.data.records import DataError
from megatron_dppo.data.turn_ends import ResponseEnds, prompt_end_warnings
from megatron_dppo.environments import ChatCall
from megatron_dppo.environments.turn_template import TurnTemplate, TurnTemplateError
from tests.chat_templates import PUBLISHED, published_tokenizer
from tests.messages import mentioning
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

FORM = PromptForm()
NOWHERE = {"config.json": 0, "generation_config.json": 0, "eos": "<|endoftext|>"}
"""The token of each place; the template ends turns by <|im_end|>, token 2."""


def tokenizer_with(template: str, **changes: str | None) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    for name, token in changes.items():
        setattr(tokenizer, name, token)
    return tokenizer


def end_warnings(tokenizer: Any, ends: ResponseEnds, rows: int | None = None) -> list[str]:
    return list(template_warnings(tokenizer, FORM, ends, rows))


def save_ends(folder: Path, places: dict[str, Any]) -> None:
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"eos_token_id": places[name]}))


def test_a_turn_that_nothing_ends_is_named(tmp_path):
    tokenizer = tokenizer_with(CHAT_TEMPLATE, eos_token="<|endoftext|>")
    save_ends(tmp_path, NOWHERE)
    (warning,) = end_warnings(tokenizer, ResponseEnds.of(tmp_path, tokenizer))
    for words in ("'<|im_end|>' (2)", "'<|endoftext|>' (0)", "stop_token_ids", *NOWHERE):
        assert words in warning or words == "eos"


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"config.json": 2}, {}),
        ({"config.json": [0, 2]}, {}),
        ({"generation_config.json": 2}, {}),
        ({"generation_config.json": [0, 2], "config.json": None}, {}),
        ({"eos": "<|im_end|>"}, {}),
        ({}, {"stop_token_ids": [2]}),
        ({}, {"stop": ["<|im_end|>"]}),
    ],
)
def test_a_turn_that_any_place_ends_is_not_named(tmp_path, changes, options):
    places = NOWHERE | changes
    tokenizer = tokenizer_with(CHAT_TEMPLATE, eos_token=places["eos"])
    save_ends(tmp_path, places)
    assert not end_warnings(tokenizer, ResponseEnds.of(tmp_path, tokenizer, **options))


def test_a_folder_without_or_with_damaged_files_names_the_tokenizers_end(tmp_path):
    tokenizer = tiny_tokenizer()
    for content in (None, "{", "[]", '{"eos_token_id": null}', '{"eos_token_id": []}'):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        assert list(ResponseEnds.of(tmp_path, tokenizer).tokens) == [2]


@pytest.mark.parametrize(
    "value", ['"2"', "true", "-1", "2.0", "99999999999", "[2, -1]", "[[2]]", "{}"]
)
def test_an_end_that_is_no_id_is_refused(tmp_path, value):
    path = tmp_path / "generation_config.json"
    path.write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(DataError, match=re.escape(f"{path}: eos_token_id is ")):
        ResponseEnds.of(tmp_path, tiny_tokenizer())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_end_their_turns(name):
    published = PUBLISHED[name]
    tokenizer = published_tokenizer(published)
    ends = [*published.ends.values(), tokenizer.eos_token]
    ids = tokenizer.convert_tokens_to_ids(ends)
    assert not end_warnings(tokenizer, ResponseEnds(dict.fromkeys(ids, ("config.json",))))


def test_the_next_turns_mark_ends_a_turn_where_no_other_mark_does():
    tokenizer = published_tokenizer(PUBLISHED["glm4_moe"])
    (warning,) = end_warnings(tokenizer, ResponseEnds({tokenizer.eos_token_id: ("config.json",)}))
    assert "<|User|>" in warning
    # A template for base models has no marks: any end of a text ends its turns.
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    assert not any(
        "stops nothing" in w for w in end_warnings(tokenizer_with(plain), ResponseEnds({}))
    )


def test_a_model_without_any_end_is_named():
    tokenizer = tokenizer_with(CHAT_TEMPLATE, eos_token=None)
    plain = PromptForm(apply_chat_template=False)
    (warning,) = template_warnings(tokenizer, plain, ResponseEnds.of("none", tokenizer))
    assert "no token and no text" in warning
    assert not list(template_warnings(tokenizer, plain, ResponseEnds({}, ("END",))))


def test_an_end_that_the_tokenizer_cuts_into_pieces_is_named():
    tokenizer = tokenizer_with(CHAT_TEMPLATE.replace("<|im_end|>", "<|done|>"))
    (warning,) = end_warnings(tokenizer, ResponseEnds({2: ("config.json",)}))
    assert "'<|done|>'" in warning
    assert "rollout.stop" in warning
    assert not end_warnings(tokenizer, ResponseEnds({2: ("config.json",)}, ("<|done|>",)))


def test_an_end_without_a_row_in_the_embedding_is_named():
    ends = ResponseEnds({2: ("config.json",)})
    (warning,) = end_warnings(tiny_tokenizer(), ends, 2)
    assert "'<|im_end|>' (2)" in warning
    assert "embedding" in warning
    assert not end_warnings(tiny_tokenizer(), ends, 3)


def test_a_turn_that_ends_twice_is_named():
    twice = CHAT_TEMPLATE.replace("<|im_end|>", "<|im_end|><|im_end|>")
    (warning,) = end_warnings(tokenizer_with(twice), ResponseEnds({2: ("config.json",)}))
    assert "twice" in warning


def test_prompts_with_two_beginnings_or_an_end_are_counted(tmp_path, caplog):
    """A text of the data was rendered before, and the tokenizer adds its tokens a second time."""
    tokenizer = tokenizer_with(CHAT_TEMPLATE, bos_token="<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    path = tmp_path / "problems.jsonl"
    rows = [{"problem": "<|im_start|>3+5", "answer": "8"}, {"problem": "3+5", "answer": "8"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = PromptForm(apply_chat_template=False)
    with caplog.at_level(logging.WARNING):
        load_problems(path, tokenizer, max_prompt_tokens=99, form=plain)
    doubled, ended = [record.getMessage() for record in caplog.records]
    assert "1 of 2 prompts begin with '<|im_start|>'" in doubled
    assert "2 of 2 prompts end with '<|im_end|>'" in ended
    assert not list(prompt_end_warnings(tiny_tokenizer(), [(1, 5), (7, 2, 5)]))


def test_a_pair_ends_once(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"problem": "3+5", "response": text} for text in ("8", "8<|im_end|>")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (_, plain), (_, ended) = load_turns(path, tiny_tokenizer(), form=FORM)
    assert plain == ended
    assert plain.count(2) == 1


# --- templates that end a turn in the history by another token, or take a tool's answer only after a call

_HARMONY = """\
{%- set ns = namespace(name='') %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if not ns.name %}{{- raise_exception('a tool answers without a call') }}{%- endif %}
        {{- '<|im_start|>NAMED to=assistant<|header|>' + m.content + '<|User|>' }}
    {%- elif m.tool_calls %}
        {%- set ns.name = m.tool_calls[0].function.name %}
        {{- '<|im_start|>assistant<|header|>' + m.content + '<|User|><|im_start|>assistant to=' + ns.name }}
        {{- '<|header|>' + (m.tool_calls[0].function.arguments | tojson) + '<|Assistant|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant<|header|>' + m.content }}
        {{- '<|im_end|>' if loop.last and not add_generation_prompt else '<|User|>' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '<|header|>' + m.content + '<|User|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}"""
"""As in gpt-oss: <|im_end|> ends the last turn, <|User|> the turns of a history, and <|Assistant|> a call."""
ANSWER = {"role": "tool", "content": "8", "tool_call_id": "c"}
CALL = {"type": "function", "id": "c", "function": {"name": "add", "arguments": {"a": 3}}}


def harmony(named: str = "tool") -> Any:
    """Return the tokenizer; ``named``: the name of a tool's turn in the template."""
    tokenizer = published_tokenizer(PUBLISHED["qwen3"])
    tokenizer.chat_template = _HARMONY.replace(
        "'<|im_start|>NAMED", f"'<|im_start|>' + {named} + '"
    )
    return tokenizer


def test_the_history_has_its_own_end_of_a_turn_alone():
    tokenizer = harmony("'tool'")
    end, other = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|User|>"])
    turns = TurnTemplate(tokenizer, "user")
    after_end = turns.after_turn([7, end], "8")
    assert (after_end.ids[0], after_end.replaces_end) == (other, True)
    assert turns.delta([7, end], "8") == after_end.ids
    # A turn that was cut off, and a turn that ends as the history does, keep their last token.
    assert turns.after_turn([7, 99], "8") == (after_end.ids, False)
    assert turns.after_turn([7, other], "8") == (after_end.ids[1:], False)
    assert turns.after_turn([], "8") == (after_end.ids, False)
    # The run's stop tokens end a turn too. A stop token that is no special token is text.
    output_end = tokenizer.convert_tokens_to_ids("<|output_end|>")
    stopped = TurnTemplate(tokenizer, "user", end_tokens=[99, output_end])
    assert stopped.after_turn([7, output_end], "8").replaces_end
    assert not stopped.after_turn([7, 99], "8").replaces_end
    assert not stopped.after_turn([7, end], "8").replaces_end


def test_an_end_stays_where_the_template_writes_none():
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    turns = TurnTemplate(tokenizer_with(plain), "user")
    assert not turns.after_turn([7, 2], "8").replaces_end
    bare = TurnTemplate(tiny_tokenizer(), "user", is_chat=False)
    assert not bare.after_turn([7, 2], "<|im_end|>8").replaces_end


def test_a_tools_answer_follows_a_call_where_the_template_requires_one():
    tokenizer = harmony("'tool'")
    call_end = tokenizer.convert_tokens_to_ids("<|Assistant|>")
    turns = TurnTemplate(tokenizer, "tool")
    expected = "<|im_start|>tool to=assistant<|header|>8<|User|><|im_start|>assistant"
    assert tokenizer.decode(turns.delta([7, call_end], "8")) == expected
    assert tokenizer.decode(turns.delta([7, call_end], ChatCall([ANSWER]))) == expected
    assert tokenizer.decode(turns.delta([7], "8")) == "<|Assistant|>" + expected


def test_a_tools_answer_has_the_name_that_the_turn_called():
    tokenizer = harmony("ns.name")
    call_end = tokenizer.convert_tokens_to_ids("<|Assistant|>")
    turns = TurnTemplate(tokenizer, "user")
    ids = turns.delta([7, call_end], ChatCall([ANSWER], calls=[CALL]))
    assert tokenizer.decode(ids).startswith("<|im_start|>add to=assistant<|header|>8<|User|>")
    forged = {**CALL, "function": {"name": "x<|im_end|>", "arguments": {}}}
    ids = turns.delta([7, call_end], ChatCall([ANSWER], calls=[forged]))
    assert tokenizer.eos_token_id not in ids
    # Without a call, no name is made up.
    with pytest.raises(TurnTemplateError, match=mentioning("name", "tool", "environment.role")):
        turns.delta([7, call_end], ChatCall([ANSWER]))
    with pytest.raises(TurnTemplateError, match=mentioning("name", "tool", "environment.role")):
        TurnTemplate(tokenizer, "tool")
