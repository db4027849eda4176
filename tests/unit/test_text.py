"""Texts of messages, cut to a length, on a single line, or the first of several."""

from __future__ import annotations

from megatron_dppo.system.text import cut, first_of, short_json, single_line


def test_a_long_text_is_cut_to_its_limit() -> None:
    assert cut("a" * 60) == "a" * 60
    assert cut("a" * 61) == "a" * 57 + "..."
    assert cut("abcdef", 5) == "ab..."


def test_white_space_becomes_one_space() -> None:
    assert single_line(" a\n\t b\r\n") == "a b"
    assert single_line(ValueError("x\ny"), 3) == "x y"
    assert single_line("a\n" * 200) == "a " * 148 + "a..."


def test_further_texts_are_counted() -> None:
    assert first_of(["a", "b"], 2) == "a; b"
    assert first_of([1, 2, 3, 4], 2, ", ") == "1, 2, and 2 more"


def test_a_value_is_shown_as_json() -> None:
    assert short_json({"a": ["é", None]}) == '{"a": ["é", null]}'
    assert short_json("x" * 60) == '"' + "x" * 56 + "..."
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert short_json(deep) == "a deeply nested list"
