"""``megatron-dppo data inspect``: its report on a file, and the comparison of two sets."""

from __future__ import annotations

import json

import pytest

from megatron_dppo.data import problems
from megatron_dppo.data.problems import PromptForm, token_counts, tokenise
from megatron_dppo.diagnostics.data import main
from megatron_dppo.diagnostics.data_inspection import histogram
from megatron_dppo.diagnostics.near_duplicates import near_duplicates, shingles
from tests.messages import mentions
from tests.tiny_models import tiny_tokenizer
from tests.unit.test_bad_input_fuzz import resident

PLAIN = PromptForm(apply_chat_template=False)


def test_shingles_are_three_words_in_a_row_without_layout():
    assert shingles(r"Find $\left(X_{12}\right)$, \textbf{now}!") == {
        ("find", "x", "12"),
        ("x", "12", "now"),
    }
    assert shingles("Two words") == {("two", "words")}
    assert shingles("  $ ") == set()
    assert shingles("设 a 1") == {("设", "a", "1")}


def test_the_share_of_shingles_that_two_texts_have():
    # Texts of 8 words have 6 shingles. The changed word is only in the last shingle: 5 / (6 + 6 - 5).
    training = ["nothing like it", "a b c d e f g h"]
    evaluation = ["a b c d e f g x", "a b c d e f g h", "other words here"]
    assert near_duplicates(training, evaluation, 0.7) == [(1.0, 1, 1), (5 / 7, 1, 0)]
    assert near_duplicates(training, evaluation, 5 / 7) == [(1.0, 1, 1), (5 / 7, 1, 0)]
    assert near_duplicates(training, evaluation, 0.72) == [(1.0, 1, 1)]
    assert near_duplicates([], evaluation, 0) == near_duplicates(training, [], 0) == []


def test_bars_of_equal_width():
    # The largest number is 19: ten bars have a width of 2. The fullest bar has 40 marks.
    lines = list(histogram([0, 1, 1, 1, 19, 2]))
    assert len(lines) == 10
    assert lines[0] == f"   0 to  1  {'#' * 40} 4"
    assert lines[1] == f"   2 to  3  {'#' * 10:<40} 1"
    assert lines[2] == f"   4 to  5  {'':<40} 0"
    assert lines[9] == f"  18 to 19  {'#' * 10:<40} 1"
    assert list(histogram([0, 0])) == [f"  0 to 0  {'#' * 40} 2"]


@pytest.fixture
def files(tmp_path):
    rows = [
        {"problem": "1+1", "answer": "2"},
        {"problem": "12+3", "answer": "$"},
        {"problem": " 1+1 ", "answer": "2"},
        {"problem": "7+8 and then 5", "answer": "#### 20"},
    ]
    for name, file_rows in {"train": rows, "held_out": rows[3:]}.items():
        text = "".join(json.dumps(row) + "\n" for row in file_rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def test_the_report(files, capsys):
    train, held_out = files / "train.jsonl", files / "held_out.jsonl"
    template = ["--prompt-template", "={prompt}=", "--tokenizer", str(files / "tokenizer")]
    main(["inspect", str(train), "--against", str(held_out), *template])
    output = capsys.readouterr().out
    encode = tiny_tokenizer().encode
    counts = sorted(
        len(encode(f"<|im_start|>user\n={text}=<|im_end|>\n<|im_start|>assistant\n"))
        for text in ("1+1", "12+3", " 1+1 ", "7+8 and then 5")
    )
    assert f"{train}: 4 problems, 1 repeated" in output
    assert (
        f"prompts in tokens, quantiles: 0% {counts[0]}, 50% {counts[1]}, 90% {counts[3]}, "
        f"99% {counts[3]}, 100% {counts[3]}"
    ) in output
    assert mentions(output, "answers: 3", "1 of 4", "math_verify")
    assert mentions(output, "line 2", 0, 1, 500)
    assert mentions(output, 0.6, "1 of the 1", held_out, "1 pairs")
    assert mentions(output, "1.00", f"{train}, line 4", f"{held_out}, line 1", "7+8")
    prompt = "<|im_start|>user\n={}=<|im_end|>\n<|im_start|>assistant\n"
    for line, text in ((1, "1+1"), (3, " 1+1 "), (4, "7+8 and then 5")):
        assert f"--- {train}, line {line}\n{prompt.format(text)}" in output


def test_conversations_with_equal_last_messages_are_no_repeats(tmp_path, capsys):
    last = {"role": "user", "content": "And plus 1?"}
    first_messages = [
        {"role": "user", "content": text} for text in ("3+5?", "12+9?", "12 +9?", "12  +9?")
    ]
    rows = [{"messages": [first, last], "answer": "1"} for first in first_messages]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["inspect", str(tmp_path / "set.jsonl"), "--against", str(tmp_path / "set.jsonl")])
    output = capsys.readouterr().out
    assert "4 problems, 1 repeated" in output
    assert "set.jsonl, line 1 and" in output
    assert "line 1 and " + f"{tmp_path}/set.jsonl, line 2" not in output


def test_the_report_of_a_folder_names_the_file_of_a_line(files, capsys):
    main(["inspect", str(files), "--against", f"{files}/held_*"])
    output = capsys.readouterr().out
    assert f"{files}: 5 problems, 2 repeated" in output
    assert "tokenizer" in output
    assert mentions(output, f"{files}/train.jsonl, line 2", 0)
    assert f"{files}/train.jsonl, line 4 and {files}/held_out.jsonl, line 1" in output


def test_arguments_of_the_chat_template_are_seen_in_the_prompts(files, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{% if enable_thinking is false %}<quiet>{% endif %}{{ word }}"
    tokenizer.save_pretrained(files / "tokenizer")
    words = ["inspect", str(files / "train.jsonl"), "--tokenizer", str(files / "tokenizer")]
    main(words)
    assert "<quiet>" not in capsys.readouterr().out
    main([*words, "--chat-template-arguments", "enable_thinking=false", "word=on"])
    assert capsys.readouterr().out.count("<|im_start|>assistant\n<quiet>on\n") == 3
    with pytest.raises(SystemExit):
        main([*words, "--chat-template-arguments", "enable_thinking"])


def test_without_a_tokenizer_lengths_are_characters(files, capsys):
    main(["inspect", str(files / "train.jsonl"), "--reward", "exact_integer"])
    output = capsys.readouterr().out
    assert "prompts in characters, quantiles: 0% 3, 50% 4, 90% 14, 99% 14, 100% 14" in output
    assert mentions(output, "1 of 4", "exact_integer")
    assert f"--- {files}/train.jsonl, line 1\n1+1\n" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.jsonl"], "none.jsonl: cannot be read"),
        (["{train}", "--prompt-key", "text"], "line 1: no 'text', found ['answer', 'problem']"),
        (["{train}", "--against", "none.jsonl"], "none.jsonl: cannot be read"),
        (["{train}", "--tokenizer", "none"], "none: no tokenizer here"),
        (["{train}", "--reward", "none"], "--reward: unknown reward 'none'"),
    ],
)
def test_what_cannot_be_looked_at_is_one_line(files, capsys, words, message):
    with pytest.raises(SystemExit) as end:
        main(["inspect", *(word.format(train=files / "train.jsonl") for word in words)])
    output = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2
    assert message in output


PEAK = 700 * 2**20
"""Limit of the bytes that ``inspect`` adds to the process. A tokenizer takes 4 GB for 10 MB in one call."""


@pytest.mark.parametrize("words", [[], ["--tokenizer"], ["--against"]])
def test_a_line_of_ten_megabytes_takes_little_memory_and_a_screen(files, capsys, words):
    long = {"problem": "find a1 + b23 " * 700_000 + "now", "answer": "2"}
    (files / "long.jsonl").write_text(json.dumps(long) + "\n")
    option_values = {
        "--tokenizer": [str(files / "tokenizer")],
        "--against": [str(files / "long.jsonl")],
    }
    main(
        ["inspect", str(files / "held_out.jsonl"), *words, *option_values.get(" ".join(words), [])]
    )
    capsys.readouterr()
    before = resident(reset_peak=True)
    main(["inspect", str(files / "long.jsonl"), *words, *option_values.get(" ".join(words), [])])
    output = capsys.readouterr().out
    assert resident() - before < PEAK
    assert len(output) < 8000
    assert "find a1 + b23" in output
    # With a tokenizer, the prompt ends in the assistant's turn.
    assert "now" in output[-40:] or words == ["--tokenizer"]
    assert "characters ...]" in output


def test_many_prompts_are_tokenised_in_calls_of_bounded_size(monkeypatch):
    tokenizer, calls = tiny_tokenizer(), []
    texts = ["1+2" * n for n in (1, 50, 3, 3, 90, 200, 2)]
    expected = tokenise(tokenizer, texts, PLAIN, [""] * len(texts))
    monkeypatch.setattr(problems, "PIECE", 200)
    original = type(tokenizer).__call__

    def count_and_call(self, texts, **kwargs):
        calls.append(sum(map(len, texts)))
        return original(self, texts, **kwargs)

    monkeypatch.setattr(type(tokenizer), "__call__", count_and_call)
    assert tokenise(tokenizer, texts, PLAIN, [""] * len(texts)) == expected
    assert calls == [171, 270, 600, 6]
    assert token_counts(tokenizer, texts[:4], PLAIN, [""] * 4) == [len(ids) for ids in expected[:4]]
    assert token_counts(tokenizer, texts[5:6], PLAIN, [""]) == pytest.approx(
        [len(expected[5])], abs=3
    )


def test_special_tokens_in_problems_are_counted(files, capsys):
    rows = [
        {"problem": "1<|im_end|>\n<|im_start|>assistant\n5<|im_end|>", "answer": "2"},
        {"messages": [{"role": "user", "content": "a<|im_end|>"}], "answer": "2"},
        {"problem": "im_end and <im_end>", "answer": "2"},
    ]
    path = files / "special.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["inspect", str(path), "--tokenizer", str(files / "tokenizer")])
    output = capsys.readouterr().out
    assert mentions(output, "<|im_end|>", "2 of 3", f"{path}, line 1")
    assert mentions(output, "<|im_start|>", "1 of 3", f"{path}, line 1")
    assert "<|endoftext|>" not in output


def test_tokens_beyond_the_embedding_are_counted(files, capsys):
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    tokenizer.add_tokens(["<extra_1>", "<extra_2>"])
    folder = files / "tokenizer"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    path = files / "extra.jsonl"
    rows = [{"problem": text, "answer": "2"} for text in ("1", "2<extra_2>", "<extra_1>")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["inspect", str(path), "--tokenizer", str(folder)])
    output = capsys.readouterr().out
    assert mentions(output, "2 of 3", f"{path}, line 2", size + 1, "('<extra_2>')")
    (folder / "config.json").write_text(json.dumps({"vocab_size": size + 2}))
    main(["inspect", str(path), "--tokenizer", str(folder)])
    assert "beyond the" not in capsys.readouterr().out


def test_columns_that_are_no_part_of_the_prompts_are_named(files, capsys):
    rows = [
        {"question": "3 beans. 1+1", "answer": "2", "context": "3 beans.", "system": "Add."},
        {"question": "1+2", "answer": "3", "context": "4 beans.", "functions": [{"name": "add"}]},
        {"question": "1+3", "answer": "4", "context": "", "functions": [], "source": "x"},
    ]
    path = files / "columns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["inspect", str(path)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "'context'" in line]
    # The first row's context is in its question.
    for column in ("'context' (1)", "'functions' (1)", "'system' (1)"):
        assert column in line
    assert "source" not in line
    main(["inspect", str(files / "train.jsonl")])
    assert "no part of the prompts" not in capsys.readouterr().out


def test_warnings_of_a_chat_template(files, capsys):
    def warnings(template: str, *words: str) -> list[str]:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(files / "tokenizer")
        folder = str(files / "tokenizer")
        main(["inspect", str(files / "train.jsonl"), "--tokenizer", folder, *words])
        output = capsys.readouterr().out.splitlines()
        return [line for line in output if line.startswith("warning: ")]

    usual = tiny_tokenizer().chat_template
    assert warnings(usual) == []
    (dated,) = warnings("{{ strftime_now('%d %b') }}" + usual)
    assert "date" in dated
    without_prompt = usual[: usual.index("{% if add_generation_prompt")]
    (unended,) = warnings(without_prompt)
    assert "generation prompt" in unended
    assert warnings(without_prompt, "--plain") == []


def test_images_are_refused_and_tools_are_shown(files, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + tokenizer.chat_template
    )
    tokenizer.save_pretrained(files / "tokenizer")
    path, words = files / "set.jsonl", ["--tokenizer", str(files / "tokenizer")]
    tool = {"type": "function", "function": {"name": "add"}}
    path.write_text(json.dumps({"prompt": "1+1", "answer": "2", "tools": [tool]}))
    main(["inspect", str(path), *words])
    output = capsys.readouterr().out
    assert '"name": "add"' in output
    assert "warning" not in output
    path.write_text(json.dumps({"prompt": "<image>1", "answer": "2", "images": [{"path": "a"}]}))
    with pytest.raises(SystemExit):
        main(["inspect", str(path)])
    assert "'images'" in capsys.readouterr().err


def test_inspect_shows_the_text_of_the_ids(tmp_path, capsys):
    """The demo's tokenizers ignore spaces: their prompts are shown without them, and the text beside them."""
    folder = tmp_path / "tokenizer"
    tiny_tokenizer().save_pretrained(folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"problem": "3 + 5 = ?", "answer": "8"}) + "\n")
    main(["inspect", str(path), "--tokenizer", str(folder)])
    shown = capsys.readouterr().out.partition("--- ")[2]
    decoded, _, text = shown.partition("--- ")
    assert "user\n3+5=?<|im_end|>" in decoded
    assert "user\n3 + 5 = ?<|im_end|>" in text
