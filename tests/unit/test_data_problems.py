"""Data sets: the forms of records that are read, and the error that names each faulty line."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import re
from datetime import date, datetime
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.config.data_files import data_files
from megatron_dppo.data.chat import has_date, lacks_generation_prompt, render
from megatron_dppo.data.problems import (
    DataKeys,
    ProblemSet,
    PromptForm,
    load_problems,
    load_tokenizer,
    load_turns,
    token_counts,
)
from megatron_dppo.data.records import (
    ANSWER_KEYS,
    METADATA_KEYS,
    PROMPT_KEYS,
    DataError,
    UnansweredError,
    answer_of,
    metadata_of,
    prompt_of,
    read_records,
)
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.rewards import RewardInput
from megatron_dppo.rewards.answer_check import refuse_bad_answers
from tests.chat_templates import PUBLISHED, published_tokenizer
from tests.messages import mentioning
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def write(path, content):
    """Write text, bytes or records. Records are Parquet if the file's name ends so, otherwise JSON Lines."""
    if isinstance(content, list) and path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(content), path)
        return path
    if isinstance(content, list):
        content = "\n".join(json.dumps(record) for record in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path, tokenizer, *, max_prompt_tokens=100, keys=None, embedding_rows=None, **form):
    return load_problems(
        path,
        tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        form=PromptForm(**{"apply_chat_template": False, **form}),
        keys_of=keys or DataKeys(),
        embedding_rows=embedding_rows,
    )


def problems_of(path, tokenizer, **keys):
    problem_set = read(path, tokenizer, keys=DataKeys(**keys))
    return [(problem.prompt, problem.answer) for problem in problem_set.problems]


@pytest.fixture
def load(tmp_path, tokenizer):
    """Write a data file and read its problems."""

    def load(content, *, name="set.jsonl", **options):
        return read(write(tmp_path / name, content), tokenizer, **options)

    return load


@pytest.fixture
def load_pairs(tmp_path, tokenizer, monkeypatch):
    """Write a data file and read its turns, with a chat template in place of the tokenizer's own."""

    def load_pairs(content, *, template=None, **options):
        if template is not None:
            monkeypatch.setattr(tokenizer, "chat_template", template)
        form = PromptForm(apply_chat_template=template is not None)
        path = write(tmp_path / "pairs.jsonl", content)
        return load_turns(path, tokenizer, form=form, **options)

    return load_pairs


GOOD = '{"prompt": "1+1", "answer": "2"}'


def test_a_plain_line(load, tokenizer):
    problem_set = load(GOOD + "\n")
    assert problem_set.problems == (Problem(0, "1+1", "2", tuple(tokenizer.encode("1+1"))),)
    assert problem_set.dropped == 0
    assert problem_set.sha256 == hashlib.sha256((GOOD + "\n").encode()).hexdigest()
    assert len(problem_set) == 1


@pytest.mark.parametrize(
    ("record", "prompt", "answer"),
    [
        ({"problem": "p", "answer": "3"}, "p", "3"),
        ({"question": "q", "answer": 3}, "q", "3"),
        ({"prompt": "p", "problem": "other", "answer": 0.5}, "p", "0.5"),
        (
            {
                "prompt": [{"role": "user", "content": "dapo"}],
                "reward_model": {"ground_truth": "34", "style": "rule"},
                "data_source": "math_dapo",
            },
            "dapo",
            "34",
        ),
    ],
)
def test_forms_of_a_record(load, record, prompt, answer):
    (problem,) = load(json.dumps(record)).problems
    assert (problem.prompt, problem.answer) == (prompt, answer)


def key_spellings(keys: list[str]) -> st.SearchStrategy[str]:
    """One of ``keys``, as it is in the table or with a capital."""
    return st.sampled_from(keys + [key.capitalize() for key in keys if "." not in key])


def record_with(path: str, value: object) -> dict:
    name, _, rest = path.partition(".")
    return {name: {rest: value} if rest else value}


TEXTS = st.text(min_size=1, max_size=9).filter(lambda text: text.strip())
FORMS = {
    "text": lambda text: text,
    "messages": lambda text: [{"role": "user", "content": text}],
    "sharegpt": lambda text: [{"from": "human", "value": text}],
    "parts": lambda text: [
        {"role": "user", "content": [{"type": "text", "text": t} for t in (text[:1], text[1:])]}
    ],
    "answered": lambda text: [
        {"from": "human", "value": text},
        {"from": "gpt", "value": "I think"},
        {"role": "assistant", "content": "2", "name": None},
    ],
}


@settings(max_examples=200, deadline=None)
@given(
    key_spellings([name for row in PROMPT_KEYS for name in row]),
    key_spellings([name for row in ANSWER_KEYS for name in row]),
    st.sampled_from(METADATA_KEYS),
    st.sampled_from(sorted(FORMS)),
    TEXTS,
    st.data(),
)
def test_records_of_any_shape_that_is_known(prompt_key, answer_key, metadata_key, form, text, data):
    answer, expected_answer = data.draw(
        st.sampled_from([("7", "7"), (7, "7"), (7.0, "7"), (["x"], "x"), (r"so \boxed{7}",) * 2])
    )
    metadata = data.draw(st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2))
    as_text = data.draw(st.booleans())
    other_columns = data.draw(st.dictionaries(st.sampled_from(["id", "source", "system"]), TEXTS))
    record = {
        **record_with(prompt_key, FORMS[form](text)),
        **record_with(answer_key, answer),
        metadata_key: json.dumps(metadata) if as_text else metadata,
        **other_columns,
    }
    keys = data.draw(st.permutations(sorted(record)))
    record = {key: record[key] for key in keys}
    prompt = prompt_of(record, "line 1")
    assert prompt == (text if form == "text" else [{"role": "user", "content": text}])
    assert answer_of(record) == expected_answer
    assert metadata_of(record, "line 1") == metadata


ROWS = [row for row in PROMPT_KEYS if len(row) > 1]


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_two_prompts_of_a_row_are_one_or_an_error(row):
    first, second = row[:2]
    messages = [{"role": "user", "content": "1+1"}]
    assert prompt_of({second: messages, first: "1+1"}, "line 1") == "1+1"
    assert prompt_of({first: " ", second: "1+2"}, "line 1") == "1+2"
    # An earlier row of the table goes first, whatever the later rows have.
    assert prompt_of({"prompt": "p", first: "1+1", second: "1+2"}, "line 1") == "p"
    with pytest.raises(DataError) as caught:
        prompt_of({second: "1+2", first: "1+1"}, "line 1")
    assert str(caught.value) == (
        f"line 1: '{first}' is \"1+1\" and '{second}' is \"1+2\"; which of them is meant? "
        "Set the file's prompt_key (docs/data.md)"
    )


def test_two_answers_of_a_row_are_one_or_none():
    assert answer_of({"target": "2", "label": 2}) == "2"
    assert answer_of({"answer": None, "target": "2", "solution": "3"}) == "2"
    with pytest.raises(UnansweredError) as caught:
        answer_of({"label": 3, "target": "2"})
    assert str(caught.value) == (
        "'target' is \"2\" and 'label' is 3; which of them is meant? "
        "Set the file's answer_key (docs/data.md)"
    )
    for answer in ([], ["2", "3"], {"value": "2"}):
        with pytest.raises(UnansweredError, match=r"^'target' "):
            answer_of({"target": answer})


def test_an_instruction_with_its_input():
    assert prompt_of({"instruction": "Add.", "input": "1+1"}, "line 1") == "Add.\n\n1+1"
    assert prompt_of({"instruction": "Add 1 and 1.", "input": ""}, "line 1") == "Add 1 and 1."
    assert prompt_of({"question": "1+1", "input": "x"}, "line 1") == "1+1"


def test_a_conversation_with_calls_of_tools_up_to_the_answer(load, tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    start = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "2"}]},
    ]
    answer = {"role": "assistant", "content": "It is 2."}
    (problem,) = load(json.dumps({"messages": [*start, answer], "answer": "2"})).problems
    # Chat templates expect the arguments as an object.
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    assert problem.prompt == "2"
    assert problem.messages == (
        *start[:2],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    )
    turns = [("system", "S"), ("user", "1+1"), ("assistant", ""), ("tool", "2")]
    assert tokenizer.decode(problem.prompt_ids) == chat(*turns)


MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1\n?"}]
USER = MESSAGES[1]


@pytest.mark.parametrize(
    "text", [json.dumps(MESSAGES), json.dumps(MESSAGES, indent=1), repr(MESSAGES)]
)
def test_messages_may_be_the_text_of_a_column(text):
    """JSON, or Python's notation, which pandas writes into CSV files."""
    assert prompt_of({"messages": text}, "line 1") == MESSAGES
    assert prompt_of({"problem": text}, "line 1", "problem") == MESSAGES
    assert prompt_of({"prompt": json.dumps(MESSAGES[1])}, "line 1") == MESSAGES[1:]
    answered = json.dumps([*MESSAGES, {"role": "assistant", "content": "2"}])
    assert prompt_of({"messages": answered}, "line 1") == MESSAGES
    assert answer_of({"messages": answered}, "messages[-1].content") == "2"
    assert answer_of({"reward_model": '{"ground_truth": "2"}'}) == "2"
    with pytest.raises(UnansweredError, match=r"messages\[-1\]\.content"):
        answer_of({"messages": answered})


@pytest.mark.parametrize("text", ["[1, 2]", "{x} is?", '[{"a": 1}]', '{"role": "admin"}', "[["])
def test_other_text_in_brackets_is_a_prompt(text):
    assert prompt_of({"prompt": text}, "line 1") == text


@pytest.mark.parametrize(
    "messages",
    [
        json.dumps(MESSAGES)[:-4],
        repr(MESSAGES).replace("}, {", "} {"),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": ["1+1"]}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": "1+1"}],
        [{"content": "1+1"}],
        [{"from": 3, "value": "1+1"}],
        ["1+1"],
    ],
)
def test_a_value_that_is_no_list_of_messages_is_refused(messages):
    words = r"^line 1: 'messages' " + (".*JSON" if isinstance(messages, str) else "")
    with pytest.raises(DataError, match=words):
        prompt_of({"messages": messages}, "line 1")


EMPTY_CONTENTS = ["", " ", None, []]


@pytest.mark.parametrize(
    "messages",
    [
        *([{"role": "system", "content": content}, USER] for content in EMPTY_CONTENTS),
        *([{"role": "developer", "content": content}, USER] for content in EMPTY_CONTENTS),
        [USER, {"role": "assistant", "content": ""}],
    ],
)
def test_an_empty_system_message_or_last_answer_is_left_out(messages):
    assert prompt_of({"messages": messages}, "line 1") == [USER]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "user"},
        "x",
    ],
)
def test_a_message_without_content_is_named(message):
    with pytest.raises(DataError, match="message 2"):
        prompt_of({"messages": [USER, message, USER]}, "line 1")


def test_metadata_that_is_none():
    assert metadata_of({"metadata": "x", "info": '{"a": 1}'}, "line 1") == {"a": 1}
    assert metadata_of({"metadata": '{"a": ', "extra_info": [1]}, "line 1") == {}
    assert metadata_of({"more": '{"a": 1}', "metadata": {"b": 1}}, "line 1", "more") == {"a": 1}


def chat(*messages: tuple[str, str]) -> str:
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return text + "<|im_start|>assistant\n"


def test_whole_numbers_are_written_without_a_point(load):
    problem_set = load('{"prompt": "1", "answer": 27.0}\n{"prompt": "1", "answer": -1e3}')
    assert [p.answer for p in problem_set.problems] == ["27", "-1000"]


def test_the_keys_that_a_recipe_names(load):
    def load_with(prompt: str | None, answer: str | None) -> tuple[str, str]:
        record = {"prompt": "no", "q": {"text": "1+1"}, "label": 2, "a.b": "3"}
        (problem,) = load([record], keys=DataKeys(prompt, answer)).problems
        return problem.prompt, problem.answer

    assert load_with("q.text", "label") == ("1+1", "2")
    assert load_with(None, "a.b") == ("no", "3")
    for keys, missing in [(("q.none", "label"), "q.none"), (("q.text", "answer"), "answer")]:
        with pytest.raises(DataError, match=rf"line 1: .*'{missing}', .*'a\.b', 'label'"):
            load_with(*keys)


def test_parquet_holds_the_same_problems(tmp_path, load, tokenizer):
    rows = [
        {"prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"ground_truth": "2"}},
        {"prompt": [{"role": "user", "content": ""}], "reward_model": {"ground_truth": "2"}},
    ]
    path = tmp_path / "set.parquet"
    problem_set = load(rows[:1], name="set.parquet")
    ids = tuple(tokenizer.encode(chat(("user", "1+1"))))
    messages = ({"role": "user", "content": "1+1"},)
    assert problem_set.problems == (Problem(0, "1+1", "2", ids, messages),)
    assert problem_set.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert problem_set.line_of(4) == "row 5"
    with pytest.raises(DataError, match=r"set\.parquet, row 2: 'prompt' "):
        load(rows, name="set.parquet")
    pq.write_table(pa.Table.from_pylist([], pa.schema([("prompt", pa.string())])), path)
    with pytest.raises(DataError, match=r"set\.parquet: "):
        read(path, tokenizer)


TALK = json.dumps({"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"})


@pytest.mark.parametrize("line", [GOOD, TALK])
def test_a_template_and_a_system_prompt(load, tokenizer, line):
    def text(**form) -> str:
        (problem,) = load(line, apply_chat_template=True, **form).problems
        assert problem.prompt == "1+1"
        return tokenizer.decode(problem.prompt_ids)

    user_turn = ("user", "Q: 1+1 {}\nA:")
    assert text(template="Q: {prompt} {}\nA:") == chat(user_turn)
    assert text(system_prompt="Add.") == chat(("system", "Add."), ("user", "1+1"))
    with_both = text(template="Q: {prompt} {}\nA:", system_prompt="Add.")
    assert with_both == chat(("system", "Add."), user_turn)


def test_a_template_of_plain_text_and_of_the_last_message(load, tokenizer):
    (plain_problem,) = load(GOOD, template="{prompt}=").problems
    assert plain_problem.prompt_ids == tuple(tokenizer.encode("1+1="))
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "{prompt}"}]
    line = json.dumps({"prompt": talk, "answer": "2"})
    (chat_problem,) = load(line, template="<{prompt}>").problems
    assert tokenizer.decode(chat_problem.prompt_ids) == chat(
        ("system", "S"), ("user", "<{prompt}>")
    )
    with pytest.raises(DataError, match=r"line 1: .*data\.system_prompt"):
        load(line, system_prompt="T")


def test_text_and_messages_go_through_the_chat_template(load, tokenizer):
    ids = tuple(tokenizer.encode("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"))
    assert load(GOOD, apply_chat_template=True).problems[0].prompt_ids == ids
    messages = json.dumps({"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"})
    assert load(messages, apply_chat_template=False).problems[0].prompt_ids == ids


def test_a_template_that_is_not_there_is_asked_for_by_line(load, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    message = '{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}'
    with pytest.raises(DataError, match=r"set\.jsonl, line 2: .*data\.apply_chat_template"):
        load(GOOD + "\n" + message)


def test_byte_order_mark_crlf_and_blank_end(load):
    problem_set = load(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n" + GOOD.encode() + b"\r\n\r\n  \n")
    assert [p.problem_id for p in problem_set.problems] == [0, 1]


def test_long_prompts_are_dropped_and_counted_and_ids_stay(load):
    long_line = json.dumps({"prompt": "1+1" * 50, "answer": "2"})
    problem_set = load("\n".join([long_line, GOOD, long_line, GOOD]), max_prompt_tokens=10)
    assert problem_set.dropped == 2
    assert [p.problem_id for p in problem_set.problems] == [1, 3]


def test_long_prompts_without_an_answer_are_counted_as_long_alone(load):
    long_line, short_line = (json.dumps({"prompt": "1+1" * repeats}) for repeats in (50, 1))
    problem_set = load("\n".join([long_line, short_line, long_line]), max_prompt_tokens=10)
    assert (problem_set.dropped, problem_set.records) == (2, 3)
    assert [row for row, _ in problem_set.unanswered] == [1]
    with pytest.raises(DataError, match=r" 2 .*max_prompt_tokens=10"):
        load("\n".join([long_line, long_line]), max_prompt_tokens=10)


def refuse_unanswered(problem_set: ProblemSet) -> None:
    """Refuse records without an answer, as ``data.on_bad_answer: refuse`` does."""
    refuse_bad_answers(
        {"set.jsonl": [list(row) for row in problem_set.unanswered]}, {"set.jsonl": problem_set}
    )


def test_records_without_an_answer_are_named_with_the_reason(load):
    """Reading keeps records without an answer, because not every reward needs answers."""
    rows = [{"prompt": "1+1", "answer": answer} for answer in ["", None, "2", "  "]]
    problem_set = load(rows, name="set.parquet")
    assert [p.answer for p in problem_set.problems] == ["", "", "2", ""]
    assert problem_set.unanswered == (
        (0, "'answer' is \"\", expected text or a number"),
        (1, "'answer' is null, expected text or a number"),
        (3, "'answer' is \"  \", expected text or a number"),
    )
    assert (problem_set.dropped, problem_set.records) == (0, 4)
    words = r"row 1: 'answer' is \"\", .*; no record of the file has an"
    with pytest.raises(DataError, match=words):
        load(rows[:2], name="set.parquet", keys=DataKeys(answer="answer"))


def test_metadata_and_the_messages_of_a_problem(load):
    metadata = {"source": {"task": "x"}, "difficulty": [1, 2.5, None]}
    record = {"prompt": "1+1", "answer": "2", "metadata": metadata}
    (problem,) = load([record]).problems
    assert problem.metadata == metadata
    messages = ({"role": "user", "content": "1+1"},)
    assert RewardInput.of(problem, "so 2") == RewardInput("so 2", "2", "1+1", messages, metadata)
    # A reward gets the messages that the model gets, not the messages of the file.
    form = {"apply_chat_template": True, "system_prompt": "Be brief.", "template": "{prompt}="}
    (problem,) = load([record], **form).problems
    assert [m["content"] for m in RewardInput.of(problem, "").messages] == ["Be brief.", "1+1="]
    assert RewardInput.of(problem, "").prompt == "1+1"
    # Some published sets have text in the column ``metadata``.
    (problem,) = load([{"prompt": "1", "answer": "1", "metadata": "x"}]).problems
    assert problem.metadata == {}
    with pytest.raises(DataError, match=r"line 1: 'info' .*null"):
        load(GOOD, keys=DataKeys(metadata="info"))


def test_metadata_of_a_parquet_file_is_json(load):
    """Environments are sent the metadata as JSON, and rewards must see the same values."""
    day, noon = date(2024, 1, 31), datetime(2024, 1, 31, 12)
    metadata = {"day": day, "when": [{"noon": noon}], "price": Decimal("1.50"), "x": 1.5}
    row = {"prompt": [{"role": "user", "content": "1+1", "sent": noon}], "metadata": metadata}
    (problem,) = load([row], name="set.parquet", apply_chat_template=True).problems
    noon_text = "2024-01-31 12:00:00"
    expected = {"day": "2024-01-31", "when": [{"noon": noon_text}], "price": "1.50", "x": 1.5}
    assert problem.metadata == json.loads(json.dumps(problem.metadata)) == expected
    assert problem.messages[0]["sent"] == noon_text
    with pytest.raises(DataError, match=r"set.parquet, row 2: 'metadata' .*bytes"):
        load([row, row | {"metadata": {"image": b"x"}}], name="set.parquet")


DEEP = "[" * 100_000 + "]" * 100_000
HALF_DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1+1", "answer": }', "not JSON: Expecting value at column 29"),
        ('["1+1", "2"]', "list, expected a JSON object"),
        (b'{"prompt": "\xff", "answer": "2"}', "not UTF-8"),
        (
            '{"text": "1+1", "answer": "2"}',
            r"no prompt; expected one of prompt, problem, .*, found \['answer', 'text'\]",
        ),
        ('{"prompt": "1+1"}', r"no answer; expected 'answer', .*, found \['prompt'\]"),
        ('{"prompt": "1+1", "answer": ""}', "'answer' is \"\", expected text or a number"),
        ('{"prompt": "1+1", "answer": null}', "'answer' is null, expected text or a number"),
        ('{"prompt": "1+1", "answer": true}', "'answer' is true, expected text or a number"),
        ('{"prompt": "1+1", "answer": NaN}', "'answer' is NaN, expected text or a number"),
        ('{"prompt": "1+1", "reward_model": {}}', "'reward_model.ground_truth' is null"),
        ('{"prompt": " ", "answer": "2"}', "'prompt' is \" \", expected text or a list"),
        ('{"prompt": [], "answer": "2"}', r"'prompt' is \[\], expected text or a list"),
        ('{"prompt": [{"role": "user"}], "answer": "2"}', ".*with a role and a content"),
        ('{"prompt": 11, "answer": "2"}', "'prompt' is 11, expected text or a list"),
        ('{"prompt": "1+1", "answer": "2", "tools": ["add"]}', "'tools'"),
        (r'{"prompt": "\ud800", "answer": "2"}', "holds half of a surrogate pair"),
        (r'{"prompt": "1+1", "answer": "\uDFFF"}', "holds half of a surrogate pair"),
        (r'{"\ud800": 1, "prompt": "1+1", "answer": "2"}', "holds half of a surrogate pair"),
        (f'{{"prompt": "1+1", "answer": {DEEP}}}', "nested too deeply"),
        (f'{{"prompt": {HALF_DEEP}, "answer": "2"}}', "'prompt' is .*, expected text or a list"),
        ('{"prompt": "1+1", "answer": 1e400}', "'answer' is Infinity, expected text or a number"),
        (f'{{"prompt": "1+1", "answer": {"9" * 5000}}}', ".*write a long number as text"),
        (json.dumps({str(i) * 99: i for i in range(999)}), "no prompt; .* and more"),
        ('{"prompt": "1+1", "solution": "It is two."}', "no answer; .*, or a 'solution'"),
    ],
)
def test_a_bad_line_is_named_in_one_short_line(load, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    content = GOOD.encode() + b"\n" + line + b"\n" + GOOD.encode()
    with pytest.raises(DataError, match=rf"set\.jsonl, line 2: {message}") as caught:
        refuse_unanswered(load(content))
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1200


def test_a_whole_surrogate_pair_and_a_long_number_are_text(load):
    pair, long_number = json.dumps({"prompt": "\U0001f600", "answer": "2"}), "9" * 400
    problem_set = load(f'{pair}\n{{"prompt": "1+1", "answer": {long_number}}}')
    assert [p.answer for p in problem_set.problems] == ["2", long_number]


def test_megabytes_are_dropped_before_they_are_tokenised(load, tokenizer, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("tokenised")

    huge_line = json.dumps({"prompt": "1+" * 5_000_000, "answer": "2"})
    assert load(GOOD + "\n" + huge_line).dropped == 1
    monkeypatch.setattr(type(tokenizer), "__call__", refuse)
    with pytest.raises(DataError, match=r" 1 .*max_prompt_tokens"):
        load(huge_line)


ENDLESS = "{% for i in range(90000) %}" * 4 + "{% endfor %}" * 4


@pytest.mark.parametrize(
    "template",
    ["{{ nothing.at.all }}", "{% if %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", ENDLESS],
)
def test_a_chat_template_that_fails_names_the_line(load, tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    monkeypatch.setattr("megatron_dppo.data.chat.RENDERING_S", 0.3)
    error = ".*TimeLimitError" if template == ENDLESS else ""
    with pytest.raises(DataError, match=rf"set\.jsonl, line 1: {error}"):
        load(GOOD, apply_chat_template=True)


def test_solutions_stand_in_for_answers(load):
    gsm8k = {"question": "q", "answer": "2 + 70 = 72\n#### 72"}
    math = {"problem": "p", "solution": r"so \boxed{\frac{1}{2}}."}
    problem_set = load(json.dumps(gsm8k) + "\n" + json.dumps(math))
    assert [p.answer for p in problem_set.problems] == [gsm8k["answer"], math["solution"]]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": "1.0"}', '{"model": {"type": "X"}}']
)
def test_a_damaged_tokenizer_is_one_line(tmp_path, tokenizer, content):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=mentioning(tmp_path)) as caught:
        load_tokenizer(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("set.jsonl", "", ": "),
        ("set.jsonl", "\n\n", ": "),
        ("set.jsonl", b"\xef\xbb\xbf", ": "),
        ("set.jsonl", json.dumps({"prompt": "1+1" * 99, "answer": "2"}), ".* 1 .*max_prompt_tokens=100"),
        ("set.jsonl", b"PK\x03\x04 and so on", ".*zip archive"),
        ("set.jsonl", "[]", ".*empty"),
        ("set.jsonl", "[1]", ".*record 1: int"),
        ("set.jsonl", '[{"prompt": "1"},', ".*not JSON"),
        ("set.jsonl", f"{GOOD}\n\n{{no\n", ".*line 3: not JSON"),
        ("set.csv", "a,b\n", ": .* empty"),
        ("set.csv", "prompt,answer\n1,2\n1\n", ".*row 2: .* 2 columns"),
        ("set.csv", "prompt,answer\n1,2,3\n", ".*row 1: .* 2 columns"),
        ("set.csv", 'prompt,answer\n"1,2', ", line .: not CSV"),
    ],
)  # fmt: skip
def test_a_file_that_has_no_problems_is_named(load, name, content, message):
    with pytest.raises(DataError, match=re.escape(name) + message):
        load(content, name=name)


def test_a_file_that_does_not_exist_is_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"none\.jsonl: "):
        read(tmp_path / "none.jsonl", tokenizer)


def test_tokenizer_of_a_folder(tmp_path, tokenizer):
    with pytest.raises(DataError, match=mentioning(tmp_path)):
        load_tokenizer(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("12+34=46") == tokenizer.encode("12+34=46")
    assert loaded.chat_template == tokenizer.chat_template


def test_arguments_of_the_chat_template_reach_every_prompt(load, load_pairs, tokenizer, tmp_path):
    """The arguments reach the prompts of problems and of pairs, and the token counts. A form's repr leaves them out."""
    thinking_template = tokenizer.chat_template.replace(
        "assistant\n", "assistant\n{% if enable_thinking is false %}0{% endif %}"
    )
    load_pairs([{"prompt": "1+1", "response": "2"}], template=thinking_template)
    for arguments, end in (({}, ""), ({"enable_thinking": False}, "0")):
        form = PromptForm(arguments=arguments)
        expected = tuple(tokenizer.encode(chat(("user", "1+1")) + end))
        problem_set = load(GOOD, apply_chat_template=True, arguments=arguments)
        assert problem_set.problems[0].prompt_ids == expected
        assert load_turns(tmp_path / "pairs.jsonl", tokenizer, form=form)[0][0] == expected
        assert token_counts(tokenizer, ["1+1"], form, ["1"]) == [len(expected)]
        assert repr(form) == repr(PromptForm())


def test_pairs_end_with_the_end_token(load_pairs, tokenizer):
    encode = tokenizer.encode
    pairs = [{"prompt": "1+1", "response": "2"}, {"prompt": "1+2", "response": "=3"}]
    assert load_pairs(pairs) == [
        (tuple(encode("1+1")), (*encode("2"), tokenizer.eos_token_id)),
        (tuple(encode("1+2")), (*encode("=3"), tokenizer.eos_token_id)),
    ]


CONVERSATION = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": "3"},
]
KEEPS_TURNS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As templates that drop the thoughts of earlier turns, this one shows earlier answers in another form.
CHANGES_TURNS = KEEPS_TURNS.replace("{{ m['content'] }}", "{{ m['content'] | upper }}!")


END = "<|im_end|>"
FIRST_PROMPT = "<system>s<user>1+1<assistant>"
SECOND_PROMPT = "<user>1+2<assistant>"


@pytest.mark.parametrize(
    ("template", "only_last", "sequences"),
    [
        (KEEPS_TURNS, False, [(FIRST_PROMPT, f"2{END}", SECOND_PROMPT, f"3{END}")]),
        (KEEPS_TURNS, True, [(f"{FIRST_PROMPT}2{END}{SECOND_PROMPT}", f"3{END}")]),
        (
            CHANGES_TURNS,
            False,
            [
                ("<system>S!<user>1+1!<assistant>", f"2{END}"),
                (f"<system>S!<user>1+1!<assistant>2!{END}<user>1+2!<assistant>", f"3{END}"),
            ],
        ),
    ],
    ids=["all turns", "the last turn", "turns in another form later"],
)
def test_the_turns_of_a_conversation_are_one_sequence_unless_the_template_changes_them(
    load_pairs, tokenizer, template, only_last, sequences
):
    assert tokenizer.eos_token == END
    turns = load_pairs([{"messages": CONVERSATION}], template=template, only_last=only_last)
    assert turns == [tuple(tuple(tokenizer.encode(text)) for text in texts) for texts in sequences]


def test_conversations_are_not_joined(load_pairs):
    """The second conversation begins with the whole first one, and is a sequence of its own."""
    rows = [{"messages": CONVERSATION[:3]}, {"messages": CONVERSATION}]
    sequences = load_pairs(rows, template=KEEPS_TURNS)
    assert [len(turns) for turns in sequences] == [2, 4]


QUESTION, ANSWER = CONVERSATION[1:3]
THOUGHT = {"role": "assistant", "content": "2", "reasoning_content": "hm"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "1"}, r"no response; expected 'response', .*, found \['prompt'\]"),
        ({"prompt": "1", "response": ""}, "'response' is \"\", expected text"),
        ({"prompt": "1", "response": 2}, "'response' is 2, expected text"),
        ({"response": "2"}, "no prompt"),
        ({"messages": CONVERSATION[:2]}, ".*has no message of the assistant after another one"),
        ({"messages": [ANSWER]}, ".*has no message of the assistant after another one"),
        (
            {"messages": [*CONVERSATION, ANSWER]},
            ".*message 6 of 'messages' follows a message of the assistant",
        ),
        ({"messages": [QUESTION, THOUGHT]}, ".*message 2 of 'messages' is"),
        ({"messages": [QUESTION, CALL]}, ".*message 2 of 'messages' is"),
    ],
)
def test_a_record_without_a_turn_to_learn_is_named(load_pairs, record, message):
    with pytest.raises(DataError, match=rf"pairs\.jsonl, line 1: {message}"):
        load_pairs([record], template=KEEPS_TURNS)


def test_pairs_need_a_tokenizer_with_an_end_token(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    path = write(tmp_path / "pairs.jsonl", [{"prompt": "1+1", "response": "2"}])
    with pytest.raises(DataError, match=r"pairs\.jsonl: "):
        load_turns(path, tokenizer, form=PromptForm(False))


@pytest.mark.parametrize("form", [{}, {"apply_chat_template": False}])
def test_a_token_beyond_the_embedding_is_refused_with_its_line(tmp_path, form):
    tokenizer = tiny_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<extra_1>", "<extra_2>"])
    prompts = ["1+2", "2+2<extra_2>", "<extra_1>"]
    path = write(tmp_path / "set.jsonl", [{"prompt": p, "answer": "1"} for p in prompts])
    assert len(read(path, tokenizer, **form)) == 3
    assert len(read(path, tokenizer, embedding_rows=rows + 2, **form)) == 3
    words = rf"{path}, line 2: .* {rows + 1} .*<extra_2>.* {rows} rows"
    with pytest.raises(DataError, match=words):
        read(path, tokenizer, embedding_rows=rows, **form)
    write(path, [{"prompt": "1+2", "answer": "1"}])
    assert len(read(path, tokenizer, embedding_rows=rows, **form)) == 1
    pairs = [{"prompt": "1", "response": "1"}, {"prompt": "1", "response": "<extra_1>"}]
    write(path, pairs)
    with pytest.raises(DataError, match=rf"{path}, line 2: .* {rows} "):
        load_turns(path, tokenizer, form=PromptForm(False), embedding_rows=rows)


@pytest.mark.parametrize(
    ("value", "answer"),
    [("5.00", "5"), ("2.50", "2.5"), ("-0.125", "-0.125"), ("1E+3", "1000"), ("100", "100")],
)
def test_decimal_answers(value, answer):
    assert answer_of({"answer": Decimal(value)}) == answer
    with pytest.raises(UnansweredError):
        answer_of({"answer": Decimal("NaN")})


@pytest.mark.parametrize(
    ("ending", "compress"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", lambda content: pa.Codec("zstd").compress(content).to_pybytes()),
        (".lz4", lambda content: pa.Codec("lz4").compress(content).to_pybytes()),
    ],
)
def test_text_files_may_be_compressed(tmp_path, tokenizer, ending, compress):
    path = tmp_path / f"set.jsonl{ending}"
    content = compress(b'{"prompt": "1+1", "answer": "2"}\n{"prompt": "1", "answer": 3}\n')
    path.write_bytes(content)
    assert problems_of(path, tokenizer) == [("1+1", "2"), ("1", "3")]
    assert problems_of(tmp_path, tokenizer) == [("1+1", "2"), ("1", "3")]
    assert read_records(path).sha256 == hashlib.sha256(content).hexdigest()
    path.write_bytes(content[:-10])
    with pytest.raises(DataError, match=f"{path}: no readable"):
        problems_of(path, tokenizer)
    table = write(tmp_path / f"set.csv{ending}", compress(b"prompt,answer\n3,3\n"))
    assert problems_of(table, tokenizer) == [("3", "3")]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"data": rows}])
def test_a_json_document_is_a_list_of_records(load, indent, wrap):
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": "1", "answer": "3"}]
    loaded = load(json.dumps(wrap(rows), indent=indent))
    answers = [(problem.prompt, problem.answer) for problem in loaded.problems]
    assert answers == [("1+1", "2"), ("1", "3")]
    assert loaded.line_of(1) == "record 2"


def test_a_single_object_of_several_lines_is_a_record(load):
    loaded = load(json.dumps({"prompt": "1+1", "answer": "2"}, indent=2))
    assert [problem.prompt for problem in loaded.problems] == ["1+1"]


def test_blank_lines_between_records_are_left_out(load):
    loaded = load(f"{GOOD}\n\n{GOOD}\r\n  \r\n{GOOD}\n")
    assert [problem.problem_id for problem in loaded.problems] == [0, 1, 2]
    assert loaded.line_of(2) == "record 3"


@pytest.mark.parametrize(
    ("name", "delimiter"), [("set.csv", ","), ("set.tsv", "\t"), ("A.CSV.gz", ",")]
)
def test_a_table_with_names_in_its_first_line(load, name, delimiter):
    rows = ["question,answer,level", '"1+1, ""or"" 2\n?",2,a', "3,,b"]
    content = ("\ufeff" + "\r\n".join(row.replace(",", delimiter) for row in rows)).encode()
    loaded = load(gzip.compress(content) if name.endswith("gz") else content, name=name)
    text = '1+1, "or" 2\n?'.replace(",", delimiter)
    assert [(problem.prompt, problem.answer) for problem in loaded.problems] == [
        (text, "2"),
        ("3", ""),
    ]
    assert [row for row, _ in loaded.unanswered] == [1]
    assert loaded.line_of(1) == "row 2"


@pytest.fixture
def folder(tmp_path):
    """A folder with data files of four formats, and with entries that are not data files."""
    folder = tmp_path / "math"
    (folder / "sub.jsonl").mkdir(parents=True)
    write(folder / "b.jsonl", [{"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": ""}])
    write(folder / "a.csv", "prompt,answer\n3,3\n")
    write(folder / "c.jsonl.gz", gzip.compress(b'{"prompt": "4", "answer": "4"}'))
    pq.write_table(pa.table({"prompt": ["5"], "answer": ["5"]}), folder / "d.PARQUET")
    for name in (".hidden.jsonl", "README.md", "state.json"):
        (folder / name).write_text("not data")
    return folder


ALL_ANSWERS = [("3", "3"), ("1", "1"), ("2", ""), ("4", "4"), ("5", "5")]


def test_a_folder_is_read_file_by_file_in_the_order_of_names(folder, tokenizer):
    assert problems_of(f"{folder}/", tokenizer) == ALL_ANSWERS
    expansion = data_files(folder)
    names = [file.name for file in expansion.files]
    assert names == ["a.csv", "b.jsonl", "c.jsonl.gz", "d.PARQUET"]
    assert expansion.unread == ("README.md", "state.json", "sub.jsonl")
    assert all(name in expansion.warning for name in expansion.unread)


def test_a_glob_is_read_file_by_file(folder, tokenizer):
    assert problems_of(f"{folder}/[ab].*", tokenizer) == ALL_ANSWERS[:3]
    assert problems_of(f"{folder.parent}/**/?.jsonl*", tokenizer) == ALL_ANSWERS[1:4]
    assert problems_of(f"{folder}/b.*", tokenizer) == ALL_ANSWERS[1:3]


def test_a_file_whose_name_is_a_pattern_is_that_file(folder, tokenizer):
    (folder / "[b].jsonl").write_text('{"prompt": "6", "answer": "6"}')
    assert problems_of(f"{folder}/[b].jsonl", tokenizer) == [("6", "6")]


@pytest.mark.parametrize("path", ["empty", "*.none"])
def test_no_file_in_a_folder_or_a_glob(folder, tokenizer, path):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=re.escape(f"{folder}/{path}: ")):
        problems_of(f"{folder}/{path}", tokenizer)


def test_a_problem_of_a_folder_has_the_place_in_its_file(folder, tokenizer):
    path = f"{folder}/"
    problem_set = read(path, tokenizer)
    places = [problem_set.line_of(problem.problem_id) for problem in problem_set.problems]
    expected = [
        "a.csv, row 1", "b.jsonl, line 1", "b.jsonl, line 2", "c.jsonl.gz, line 1", "d.PARQUET, row 1",
    ]  # fmt: skip
    assert places == [f"{folder}/{place}" for place in expected]
    with pytest.raises(DataError, match=f"{folder}/b.jsonl, line 2: bad"):
        refuse_bad_answers({path: [[2, "bad"]]}, {path: problem_set})
    (folder / "b.jsonl").write_text('{"prompt": "1", "answer": "1"}\n[]\n')
    with pytest.raises(DataError, match=f"{folder}/b.jsonl, line 2"):
        problems_of(path, tokenizer)


def test_the_hash_of_a_folder_covers_all_files_and_their_order(folder, tokenizer):
    def hash_of(path):
        return read(path, tokenizer).sha256

    original_hash = hash_of(folder)
    assert original_hash == hash_of(f"{folder}/?.*")
    assert hash_of(folder / "b.jsonl") == hash_of(f"{folder}/b.*")
    (folder / "a.csv").rename(folder / "e.csv")
    hash_after_rename = hash_of(folder)
    (folder / "e.csv").write_text("prompt,answer\n3,4\n")
    hash_after_change = hash_of(folder)
    (folder / "f.jsonl").write_text(GOOD)
    assert len({original_hash, hash_after_rename, hash_after_change, hash_of(folder)}) == 4


def test_pairs_of_a_folder(tmp_path, tokenizer):
    for name, text in (("b.jsonl", "2"), ("a.jsonl", "1")):
        (tmp_path / name).write_text(json.dumps({"prompt": text, "response": text}))
    pairs = load_turns(tmp_path, tokenizer, form=PromptForm(False))
    assert [tokenizer.decode(prompt) for prompt, _ in pairs] == ["1", "2"]


SHAREGPT = {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}


def test_the_last_message_of_a_conversation_as_the_answer(load):
    key = "conversations[-1].value"
    (problem,) = load([SHAREGPT], keys=DataKeys(answer=key)).problems
    assert (problem.prompt, problem.answer) == ("1+1?", "2")
    with pytest.raises(UnansweredError) as caught:
        answer_of(SHAREGPT)
    assert key in str(caught.value)
    with pytest.raises(UnansweredError) as caught:
        answer_of({"conversations": SHAREGPT["conversations"][:1]})
    assert key not in str(caught.value)
    with pytest.raises(UnansweredError):
        answer_of(SHAREGPT, "conversations[2].value")


def test_all_columns_as_metadata():
    record = {"prompt": "1", "level": Decimal("2.0"), "tags": ["a"], "metadata": {"b": 1}}
    expected = {"prompt": "1", "level": "2.0", "tags": ["a"], "metadata": {"b": 1}}
    assert metadata_of(record, "line 1", "*") == expected
    with pytest.raises(DataError, match="line 1: 'image' "):
        metadata_of({"image": b"1"}, "line 1", "*")


# --- content that would be left out of a prompt


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_message_that_the_chat_template_drops_is_named(load, tokenizer, monkeypatch, role):
    other_roles = f"{{% for m in messages if m['role'] != '{role}' %}}"
    template = CHAT_TEMPLATE.replace("{% for m in messages %}", other_roles)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    talk = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    line = json.dumps({"prompt": talk, "answer": "2"})
    with pytest.raises(DataError, match=rf"set\.jsonl, line 2: .*'{role}'"):
        load(json.dumps({"prompt": "x", "answer": "2"}) + "\n" + line)


def test_a_system_prompt_of_the_recipe_that_the_chat_template_drops_is_named(
    load, tokenizer, monkeypatch
):
    template = CHAT_TEMPLATE.replace("in messages", "in messages if m['role'] != 'system'")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(DataError, match=r"line 1: .*'system'"):
        load(GOOD, apply_chat_template=True, system_prompt="Add.")


TALK_WITH_THOUGHTS = [
    {"role": "system", "content": ' Use "tools".\n'},
    {"role": "user", "content": "1+1?\n"},
    {"role": "assistant", "content": "<think>\nquick\n</think>\n\n2"},
    {"role": "user", "content": "and 2+2"},
]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "mixtral"])
def test_templates_that_trim_and_take_thoughts_out_lose_nothing(tmp_path, name):
    path = write(tmp_path / "set.jsonl", [{"prompt": TALK_WITH_THOUGHTS, "answer": "4"}])
    tokenizer = published_tokenizer(PUBLISHED[name])
    assert len(read(path, tokenizer, max_prompt_tokens=2000, apply_chat_template=True)) == 1


def test_what_a_tool_said_may_stand_as_json_in_the_prompt(load, tokenizer, monkeypatch):
    template = CHAT_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | tojson }}")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    talk = [{"role": "user", "content": "1+1"}, {"role": "tool", "content": '4 "°C"\nnow '}]
    assert len(load(json.dumps({"prompt": talk, "answer": "2"}))) == 1


@pytest.mark.parametrize("name", ["images", "Image", "videos", "audio"])
def test_a_column_that_no_text_model_gets_is_refused_where_it_has_a_value(load, name):
    empty_values = [None, [], "", {"bytes": None, "path": None}, [None]]
    lines = [json.dumps({"prompt": "1+1", "answer": "2", name: value}) for value in empty_values]
    assert len(load("\n".join(lines))) == len(empty_values)
    line_with_image = json.dumps({"prompt": "<image>1+1", "answer": "2", name: ["a.png"]})
    with pytest.raises(DataError, match=rf"line 6: .*'{name}'"):
        load("\n".join([*lines, line_with_image]))


def test_text_under_image_is_refused_where_the_prompt_refers_to_it(load):
    # Some sets name a container image in this column.
    assert len(load('{"prompt": "1+1", "answer": "2", "image": "python:3.12"}')) == 1
    with pytest.raises(DataError, match=r"line 1: .*'image'"):
        load('{"prompt": "<image> 1+1", "answer": "2", "image": "a.png"}')


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + CHAT_TEMPLATE


@pytest.mark.parametrize("value", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_the_column_tools_goes_to_the_chat_template(load, tokenizer, monkeypatch, value):
    monkeypatch.setattr(tokenizer, "chat_template", WITH_TOOLS)
    line = json.dumps({"prompt": "1+1", "answer": "2", "tools": value})
    without_tools, with_tools = load(
        f"{GOOD}\n{line}", apply_chat_template=True, max_prompt_tokens=999
    ).problems
    assert with_tools.tools == (TOOL,)
    assert without_tools.tools == ()
    assert tokenizer.decode(without_tools.prompt_ids) == chat(("user", "1+1"))
    expected = render(tokenizer, [{"role": "user", "content": "1+1"}], tools=[TOOL])
    assert list(with_tools.prompt_ids) == tokenizer.encode(expected)
    assert '"add"' in expected


def test_keys_that_parquet_adds_to_every_tool_are_left_out(load, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", WITH_TOOLS)
    other = {"type": "function", "function": {"name": "say", "description": "Says."}}
    rows = [{"prompt": "1+1", "answer": "2", "tools": [tool]} for tool in (TOOL, other)]
    problem_set = load(rows, name="set.parquet", max_prompt_tokens=999, apply_chat_template=True)
    assert [problem.tools for problem in problem_set.problems] == [(TOOL,), (other,)]


@pytest.mark.parametrize("form", [{"apply_chat_template": True}, {}])
def test_a_tool_that_prompts_lack_is_a_warning(load, caplog, form):
    load(json.dumps({"prompt": "1+1", "answer": "2", "tools": [TOOL]}), **form)
    (warning,) = caplog.messages
    assert '"add"' in warning
    assert "line 1" in warning


ARGUMENTS = {"city": "Zürich", "days": [1, None]}
CALLS_TEMPLATE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '<' + c.function.arguments + '>' }}"
)
ARGUMENT_EXPRESSIONS = {
    "joins text": " + c.function.arguments + ",
    "writes anything": " ~ c.function.arguments ~ ",
    "writes json": " + (c.function.arguments | tojson) + ",
}
TEMPLATE_END = "{% endfor %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize("expression", ARGUMENT_EXPRESSIONS.values(), ids=ARGUMENT_EXPRESSIONS)
@pytest.mark.parametrize("value", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "text"])
def test_arguments_of_a_call_stand_in_the_prompt_as_json(
    load, tokenizer, monkeypatch, expression, value
):
    template = CALLS_TEMPLATE.replace(ARGUMENT_EXPRESSIONS["joins text"], expression)
    monkeypatch.setattr(tokenizer, "chat_template", template + TEMPLATE_END)
    call = {"type": "function", "function": {"name": "w", "arguments": value}}
    talk = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
    ]
    (problem,) = load([{"prompt": talk, "answer": "4"}]).problems
    text = tokenizer.decode(problem.prompt_ids)
    # A list keeps its nulls.
    arguments = {"city": "Zürich", "days": [1, None]}
    assert json.loads(text[text.index("<") + 1 : text.index(">")]) == arguments


# --- properties of a chat template that prompts do not show


def test_no_published_template_lacks_a_generation_prompt_or_has_a_date():
    for name, published in PUBLISHED.items():
        tokenizer = published_tokenizer(published)
        assert not lacks_generation_prompt(tokenizer), name
        assert not has_date(tokenizer), name


def test_a_date_and_a_generation_prompt_that_is_not_there(tokenizer, monkeypatch):
    date_template = (
        "{% if not day is defined %}{% set day = strftime_now('%d %b') %}{% endif %}{{ day }}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", date_template + CHAT_TEMPLATE)
    assert has_date(tokenizer)
    assert not has_date(tokenizer, {"day": "1 Jan"})
    assert not lacks_generation_prompt(tokenizer)
    template_without_prompt = CHAT_TEMPLATE[: CHAT_TEMPLATE.index("{% if add_generation_prompt")]
    monkeypatch.setattr(tokenizer, "chat_template", template_without_prompt)
    assert lacks_generation_prompt(tokenizer)
    assert not has_date(tokenizer)
