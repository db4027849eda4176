"""Rank 0's file: what a terminal would show in the end, worked by hand."""

import pytest

from megatron_dppo.launch.console import PlainLines

CASES = [
    ("a\nb\n", ["a", "b"]),
    ("a\r\nb\r\n", ["a", "b"]),
    ("\x1b[1;32mgreen\x1b[0m\n", ["green"]),
    ("10%\r20%\rdone\n", ["done"]),
    ("abcdef\rXY\n", ["XYcdef"]),
    ("abcdef\r\x1b[KXY\n", ["XY"]),
    ("bar 1\nbar 2\n\x1b[2A\r\x1b[2Kline\nbar 3\n", ["line", "bar 3"]),
    ("x\x1b[5Ay\n", ["xy"]),
    ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x07\n", ["link"]),
    ("no end", ["no end"]),
    ("", []),
]


@pytest.mark.parametrize(("stream", "lines"), CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_stays_whatever_the_chunks(stream, lines, size):
    plain = PlainLines()
    kept = []
    for start in range(0, len(stream), size):
        kept += plain.feed(stream[start : start + size])
    assert kept + plain.finish() == lines


def test_lines_are_final_when_the_cursor_can_no_longer_reach_them():
    plain = PlainLines(live=2)
    assert plain.feed("1\n2\n3\n4\n") == ["1", "2"]
    assert plain.feed("\x1b[9A\x1b[2Knew\n") == []
    assert plain.finish() == ["new"]
