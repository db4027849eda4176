"""Tool calls: SGLang's parsers read the calls of each family's template, and what they can't read is counted."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.agents.conversation import _message_of, _read
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.records import DataError
from megatron_dppo.engine import tool_parsers
from megatron_dppo.engine.tool_calls import (
    ReadTurn,
    ToolCall,
    ToolFormat,
    ToolFormatError,
    formats_that_read,
    tool_format_of,
    written_call,
)
from megatron_dppo.engine.tool_parsers import parser_names, sglang_parsers
from megatron_dppo.environments import PolicyFormat, Turn
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.system import time_limit
from tests.chat_templates import LLAMA3, QWEN3, QWEN3_THINKING
from tests.patience import run_patiently
from tests.tiny_models import tiny_tokenizer
from tests.unit.config_files import minimal

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            },
        },
    }
]
ADD = ToolCall("add", {"a": 3, "b": "5"})

# Turns with a call in the form of a family's template, and the rest of a conversation as short as possible.
_FRAME = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content or '' }}}}"
    "{{% for c in m.tool_calls or [] %}}{}{{% endfor %}}<|im_end|>\n{{% endfor %}}"
)
_ITEMS = "{% for k, v in c.function.arguments.items() %}"
XML = (
    "\n<tool_call>\n<function={{ c.function.name }}>\n"
    + _ITEMS
    + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>"
)
GLM45 = (
    "\n<tool_call>{{ c.function.name }}\n"
    + _ITEMS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
    "{% endfor %}</tool_call>"
)
GLM47 = (
    "<tool_call>{{ c.function.name }}"
    + _ITEMS
    + "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}"
    "</tool_call>"
)
MINIMAX = (
    '\n<minimax:tool_call>\n<invoke name="{{ c.function.name }}">\n' + _ITEMS
    + '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>'
)  # fmt: skip
# These templates join the arguments to other text, so they take JSON text only.
DEEPSEEK = (
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n'"
    " + c.function.arguments + '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
)
KIMI = (
    "{{ '<|tool_calls_section_begin|><|tool_call_begin|>functions.' + c.function.name + ':0'"
    " + '<|tool_call_argument_begin|>' + c.function.arguments + '<|tool_call_end|><|tool_calls_section_end|>' }}"
)
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% for c in m.tool_calls or [] %} to=functions.{{ c.function.name }}"
    "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% else %}"
    "{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}<|end|>{% endfor %}{% endfor %}"
)
MISTRAL = _FRAME.format(
    '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}]'
)
HUNYUAN = (
    "<tool_calls:own>\n<tool_call:own>{{ c.function.name }}<tool_sep:own>\n" + _ITEMS
    + "<arg_key:own>{{ k }}</arg_key:own>\n<arg_value:own>{{ v }}</arg_value:own>\n{% endfor %}</tool_call:own>\n"
    "</tool_calls:own>"
)  # fmt: skip
TEMPLATES = {
    "hermes": QWEN3,
    "qwen3_coder": _FRAME.format(XML),
    "glm45": _FRAME.format(GLM45),
    "glm47": _FRAME.format(GLM47),
    "minimax-m2": _FRAME.format(MINIMAX),
    "deepseekv3": _FRAME.format(DEEPSEEK),
    "gpt-oss": GPT_OSS,
    "kimi_k2": _FRAME.format(KIMI),
    "mistral": MISTRAL,
    "hunyuan": _FRAME.format(HUNYUAN),
    "llama3": LLAMA3,
}


def tokenizer_with(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    if template == _FRAME.format(HUNYUAN):
        names = ("tool_calls", "tool_call", "arg_key", "arg_value")
        tokenizer.add_tokens(
            ["<tool_sep:own>"] + [f"<{end}{name}:own>" for name in names for end in ("", "/")]
        )
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_chooses_the_format_that_reads_its_calls(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    assert tool_format_of(tokenizer) == name
    assert tool_format_of(tokenizer, name) == name
    other_name = "minimax-m2" if name != "minimax-m2" else "hermes"
    with pytest.raises(ToolFormatError, match=rf"tool_format: got '{other_name}'.*{name}"):
        tool_format_of(tokenizer, other_name)


def test_a_template_without_calls_leaves_the_format_to_the_configuration():
    """For example, a template that lists tools, for a policy whose calls stay in the text of its turns."""
    tokenizer = tiny_tokenizer()
    assert written_call(tokenizer) is None
    assert (tool_format_of(tokenizer), tool_format_of(tokenizer, "glm45")) == ("hermes", "glm45")


def test_a_template_whose_calls_nothing_reads_has_no_format(caplog):
    tokenizer = tokenizer_with(
        _FRAME.format("CALL {{ c.function.name }}: {{ c.function.arguments.a }}")
    )
    assert tool_format_of(tokenizer) is None
    assert "CALL probe_sum: 3" in caplog.text
    with pytest.raises(ToolFormatError, match="hermes"):
        tool_format_of(tokenizer, "hermes")


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": "5"}}\n</tool_call>'
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>\n<arg_value>5</arg_value>\n"
    "</tool_call>"
)
CHANNELS = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
OSS = '{"a": 3, "b": "5"}'


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", f"so {HERMES}", "so"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 3, \\"b\\": \\"5\\"}"}</tool_call>', ""),
        ("glm45", GLM, ""),
        ("gpt-oss", f"{CHANNELS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{OSS}", ""),
        ("gpt-oss", f"{CHANNELS} to=functions.add<|channel|>commentary json<|message|>{OSS}", ""),
        ("gpt-oss", f"<|channel|>commentary to=functions.add<|message|>{OSS}", ""),
        ("gpt-oss", f"<|channel|>commentary to=functions.add code<|message|>{OSS}<|call|>", ""),
    ],
)  # fmt: skip
def test_a_call_is_read_with_arguments_of_the_tools_types(name, text, content):
    assert ToolFormat(name).read(text, TOOLS) == ReadTurn(content, (ADD,))


def test_a_call_without_arguments_or_of_an_unknown_tool_is_read():
    """The agent answers a call of a tool that it does not have."""
    for arguments in ("", ', "arguments": null', ', "arguments": {}'):
        read_turn = ToolFormat("hermes").read(
            f'<tool_call>{{"name": "now"{arguments}}}</tool_call>', TOOLS
        )
        assert read_turn.calls == (ToolCall("now", {}),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES.replace("}}", "}")),
        ("hermes", HERMES + HERMES.replace("}}", "}")),
        ("hermes", HERMES.replace('{"a": 3, "b": "5"}', "3")),
        ("qwen25", HERMES + "\n" + HERMES.replace("}}", "}")),
        ("glm45", HERMES),
        ("minimax-m2", "<minimax:tool_call>\nadd\n</minimax:tool_call>"),
        ("deepseekv3", "<｜tool▁calls▁begin｜>add"),
        ("gpt-oss", "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{3"),
        ("llama3", '{"name": 3}'),
        ("llama3", "{" * 100_000),
        ("hermes", "<tool_call>" + "[" * 100_000),
    ],
)
def test_a_call_that_cant_be_read_is_counted_and_stays_text(name, text):
    assert ToolFormat(name).read(text, TOOLS) == ReadTurn(is_unread=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_without_a_call_is_no_unread_call(name):
    assert ToolFormat(name).read("The answer is 8.", TOOLS) == ReadTurn()


def test_a_turn_that_keeps_a_parser_busy_is_an_unread_call(monkeypatch):
    """A policy that repeats itself: the pattern of the parser takes cubic time."""
    monkeypatch.setattr("megatron_dppo.engine.tool_calls._PARSING_S", 0.2)
    part = 'function<｜tool▁sep｜>add\n```json\n{"a": 3}\n```\n'
    text = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{part * 2000}<｜tool▁call▁end｜>x"
    assert ToolFormat("deepseekv3").read(text, TOOLS) == ReadTurn(is_unread=True)


def test_the_limit_holds_for_a_regular_expression_and_no_longer_than_the_block():
    with pytest.raises(time_limit.TimeLimitError), time_limit.interrupting_limit(0.1):
        re.search("(a*)*b", "a" * 40)
    with time_limit.interrupting_limit(60):
        pass
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_a_worker_reads_calls_without_torch_and_can_still_import_sglang():
    """Parsers load in a fraction of the memory that SGLang needs. A user's code may need SGLang itself."""
    program = (
        "import sys; from megatron_dppo.engine.tool_calls import ToolFormat\n"
        f"print(len(ToolFormat('hermes').read({HERMES!r}, {TOOLS!r}).calls))\n"
        "heavy = {'torch', 'transformers', 'sglang', 'xgrammar'} & set(sys.modules); print(sorted(heavy))"
    )
    done = run_patiently([sys.executable, "-c", program], 120, check=True)
    assert done.stdout.splitlines() == ["1", "[]"]


def test_every_name_of_sglang_is_a_parser():
    assert set(parser_names()) == set(sglang_parsers().FunctionCallParser.ToolCallParserEnum)
    assert (
        next(
            formats_that_read('<tool_call>{"name": "probe_sum", "arguments": {"a": 3}}</tool_call>')
        )
        == "hermes"
    )


FORMAT = PolicyFormat("hermes", special_tokens=["<|special|>"])


@pytest.mark.parametrize(
    ("turn", "content", "calls", "is_unread"),
    [
        (Turn(f"I call {HERMES}\n</think>\n\n8", (1,), open_thought="<think>\n"), ..., 0, False),
        (Turn(f"I call {HERMES}", (1,), open_thought="<think>\n"), ..., 0, True),
        (Turn("I call.", (1,), open_thought="<think>\n"), ..., 0, False),
        (
            Turn(f"Sum.\n</think>\n\n{HERMES}", (1,), open_thought="<think>\n"),
            "Sum.\n</think>",
            1,
            False,
        ),
        (Turn("so", (1,), special_text=f"so<|special|> {HERMES}"), "so", 1, False),
    ],
)
def test_a_call_in_a_thought_is_no_call(turn, content, calls, is_unread):
    """A turn that ends in a thought with a call counts as unread."""
    read_turn = _read(turn, FORMAT, TOOLS)
    message = _message_of(turn, 0, read_turn, FORMAT)
    assert message["content"] == (turn.text if content is ... else content)
    assert (len(read_turn.calls), len(message.get("tool_calls", ()))) == (calls, calls)
    assert read_turn.is_unread is is_unread


def test_an_agent_reads_the_final_channel():
    turn = Turn(
        "analysis41assistantfinal42",
        (1,),
        special_text=f"{CHANNELS}<|channel|>final<|message|>42",
        answer="42",
    )
    policy_format = PolicyFormat("gpt-oss")
    read_turn = _read(turn, policy_format, TOOLS)
    assert _message_of(turn, 0, read_turn, policy_format)["content"] == "42"


def run_data(folder: Path, template: str, **changes: Any) -> RunData:
    tree = minimal(folder)
    tokenizer = tokenizer_with(template)
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text('{"prompt": "3+5", "answer": "8"}\n' * 3)
    tree["data"] |= {"apply_chat_template": True, "evaluation": {}, **changes.pop("data", {})}
    tree["environment"] = {"name": "agent", "options": {"agent": "echo", **changes}}
    return RunData(TrainConfig.model_validate(tree))


def test_a_run_hands_the_form_of_the_turns_to_its_environment(tmp_path: Path):
    opened = QWEN3_THINKING.replace("<think>", "<mull>")
    data = run_data(tmp_path, opened, data={"thought_marks": [["<mull>", "</mull>"]]})
    assert (data.policy_format.tool_format, data.policy_format.thought_marks) == (
        "hermes",
        [["<mull>", "</mull>"]],
    )
    assert "<|im_end|>" in data.policy_format.special_tokens
    prompt_ids = data.train.problems[0].prompt_ids
    assert data.reader.open_thought(prompt_ids) == "<mull>\n"
    assert run_data(tmp_path, QWEN3, tool_format="qwen25").policy_format.tool_format == "qwen25"
    with pytest.raises(ToolFormatError, match=r"environment\.options\.tool_format: got 'glm45'"):
        run_data(tmp_path, QWEN3, tool_format="glm45")


def test_the_format_of_an_environment_by_problem_is_checked_too(tmp_path: Path):
    environments = {
        "calls": {"name": "agent", "options": {"agent": "echo", "tool_format": "glm45"}}
    }
    config = run_data(tmp_path, QWEN3)._config
    tree = config.model_dump()
    tree["environment"] |= {"name": "by-problem", "options": {"environments": environments}}
    key = r"environment\.options\.environments\.calls\.options\.tool_format: got 'glm45'"
    with pytest.raises(ToolFormatError, match=key):
        RunData(TrainConfig.model_validate(tree))


def test_an_agent_without_sglang_is_refused(tmp_path: Path, monkeypatch):
    def no_folder() -> Path:
        raise ImportError("no sglang")

    monkeypatch.setattr(tool_parsers, "_sglang_folder", no_folder)
    with pytest.raises(DataError, match=r"environment\.name: agent.*no sglang"):
        run_data(tmp_path, QWEN3)
