"""The table of steps with its marks and explanations, progress bars, and lines of progress without a terminal."""

import io
import time

import pytest
from rich.console import Console

from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.progress import progress
from megatron_dppo.metrics.step_table import (
    COLUMNS,
    HEADER_EVERY,
    HISTORY,
    NormalityCheck,
    StepTable,
)
from megatron_dppo.metrics.table import BY_METRIC

VALUES = {
    names.REWARD: 0.4125,
    names.accuracy("held_out"): 0.5,
    names.GAP_ON_POLICY: 2.04e-6,
    names.GAP: 0.0031,
    names.MASKED_POSITIVE: 0.0002,
    names.MASKED_NEGATIVE: 0.001,
    names.ENTROPY: 0.83,
    names.RESPONSE_LENGTH: 41.24,
    names.TRUNCATED: 0.05,
    names.GRAD_NORM: 0.213,
    "time/generate_s": 7.1,
    "time/train_s": 4.0,
    "time/sync_s": 0.6,
    "time/other_s": 0.2,
    names.TOKENS_PER_SECOND: 950.4,
}


def console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=200 if terminal else 80)


def lines_of(output):
    return output.file.getvalue().splitlines()


def test_one_plain_unfolded_line_a_step_with_every_figure():
    output = console()
    StepTable("float32", 60, console=output).print_step(12, VALUES)
    *header, line = lines_of(output)
    assert " ".join(line.split()) == (
        "12/60 0.412 0.500 2.0e-06 3.1e-03 0.02% 0.10% 0.830 41.2 5.00% 0.21 11.9 7.1 4.0 0.6 950"
    )
    assert header[1].split()[:3] == ["step", "reward", "out"]
    assert "\x1b" not in output.file.getvalue()


def test_figures_stand_under_their_headers():
    output = console()
    StepTable("float32", 60, console=output).print_step(12, VALUES)
    _, bottom, line = lines_of(output)
    assert bottom.index("reward") + len("reward") == line.index("0.412") + len("0.412")
    assert bottom.index("sync") + len("sync") == line.index("0.6 ") + len("0.6")


def test_what_was_not_measured_stays_empty():
    output = console()
    StepTable("float32", 60, console=output).print_step(0, {names.accuracy("held_out"): 0.25})
    assert lines_of(output)[-1].split() == ["0/60", "0.250"]


def test_the_header_comes_back():
    output = console()
    steps = StepTable("float32", 60, console=output)
    for step in range(HEADER_EVERY + 1):
        steps.print_step(step, VALUES)
    assert sum("entropy" in line for line in lines_of(output)) == 2


def test_an_unusual_figure_is_marked_each_time_and_explained_once():
    output = console()
    steps = StepTable("float32", 60, console=output)
    for step in (1, 2):
        steps.print_step(step, {**VALUES, names.GAP_ON_POLICY: 2e-3})
    text = output.file.getvalue()
    assert text.count("2.0e-03!") == 2
    explanation = "|pi-mu| at equal weights 0.002: expected at most 0.0001 in float32. Trainer and"
    assert text.count(explanation) == 1


def test_a_large_gradient_norm_of_the_first_steps_is_marked():
    check = NormalityCheck("float32")
    assert check.compare({names.GRAD_NORM: 99.0}) == {}
    assert "at most 100 in the first" in check.compare({names.GRAD_NORM: 402.0})[names.GRAD_NORM]


def test_every_marked_column_has_a_normal_range_or_needs_none():
    unbounded_metrics = {names.REWARD, names.RESPONSE_LENGTH, names.TOKENS_PER_SECOND}
    marked = {c.metric for c in COLUMNS if c.metric.startswith(("policy/", "mask/", "optimizer/"))}
    assert marked <= set(BY_METRIC)
    assert unbounded_metrics.isdisjoint(BY_METRIC)


@pytest.mark.parametrize(
    ("dtype", "gap", "odd"),
    [
        ("float32", 1e-4, False),
        ("float32", 1.01e-4, True),
        ("bfloat16", 4e-3, False),
        ("bfloat16", 5.1e-3, True),
    ],
)
def test_the_expected_gap_depends_on_the_precision(dtype, gap, odd):
    assert bool(NormalityCheck(dtype).compare({names.GAP_ON_POLICY: gap})) is odd


def test_bounds_from_below_and_figures_in_percent():
    unusual = NormalityCheck("float32").compare({names.TOPK_MASS: 0.95, names.BAD_UPDATE: 0.0125})
    assert unusual[names.TOPK_MASS] == "mass of the engine's top K 0.95: expected at least 0.99"
    assert unusual[names.BAD_UPDATE].endswith("1.25%: expected at most 0.5%")


def test_a_cliff_of_the_entropy_is_seen_and_a_slow_fall_is_not():
    check = NormalityCheck("float32")
    for value in (1.0, 0.9, 0.8, 0.7, 0.6):
        assert check.compare({names.ENTROPY: value}) == {}
    assert check.compare({names.ENTROPY: 0.5}) == {}
    # the mean of the five values before, 0.9 .. 0.5, is 0.7; 40% of it is 0.28
    assert "was 0.7" in check.compare({names.ENTROPY: 0.27})[names.ENTROPY]


def test_a_jump_of_the_gradient_norm_needs_a_history():
    check = NormalityCheck("float32")
    assert check.compare({names.GRAD_NORM: 100.0}) == {}
    for _ in range(5):
        check.compare({names.GRAD_NORM: 0.2})
    assert check.compare({names.GRAD_NORM: 0.99}) == {}
    # mean of 0.2, 0.2, 0.2, 0.2, 0.99 is 0.358; five times that is 1.79
    assert names.GRAD_NORM in check.compare({names.GRAD_NORM: 1.8})


def test_zeros_are_no_history_to_compare_with():
    check = NormalityCheck("float32")
    for _ in range(5):
        check.compare({names.GRAD_NORM: 0.0, names.ENTROPY: 0.0})
    assert check.compare({names.GRAD_NORM: 0.5, names.ENTROPY: 0.0}) == {}


def test_a_short_wait_without_a_terminal_says_nothing():
    output = console()
    with progress("generate", 4, console=output) as tracker:
        tracker.advance(4)
    assert output.file.getvalue() == ""


def test_a_long_wait_without_a_terminal_gives_a_line_now_and_then():
    output = console()
    with progress("generate", 4, console=output, interval_s=0.2) as tracker:
        for _ in range(3):
            tracker.advance()
        time.sleep(0.5)
        tracker.advance()
    lines = lines_of(output)
    assert lines[0].startswith("generate: 3/4 (75%), ")
    assert lines[-1].startswith("generate: 4/4 (100%), ")
    assert lines[-1].endswith("(done)")
    assert 2 <= len(lines) <= 4


def test_what_ends_below_its_total_does_not_say_that_it_is_done():
    output = console()
    with progress("generate", 4, console=output, interval_s=0.05) as tracker:
        tracker.advance(3)
        time.sleep(0.1)
    assert lines_of(output)[-1].startswith("generate: 3/4 (75%), ")
    assert lines_of(output)[-1].endswith(" (ended)")


def test_a_wait_without_a_total_says_that_it_began_and_what_it_is_at():
    output = console()
    with progress("start the engine", console=output) as tracker:
        tracker.update(note="loading weights")
    assert lines_of(output) == [
        "start the engine ...",
        "start the engine: 0 s, loading weights (done)",
    ]


def test_an_error_passes_and_ends_the_lines():
    output = console()
    with pytest.raises(OSError), progress("generate", 4, console=output, interval_s=0.05):
        raise OSError
    time.sleep(0.15)
    assert output.file.getvalue() == ""


def test_a_bar_on_a_terminal_counts_and_leaves_no_line():
    output = console(terminal=True)
    with progress("generate", 8, console=output) as tracker:
        tracker.update(completed=7, note="slowest")
        tracker.advance()
    text = output.file.getvalue()
    assert "8/8" in text
    assert "slowest" in text
    assert text.endswith("\x1b[2K")  # the line is erased
    assert "(done)" not in text


def test_bars_may_be_nested():
    output = console(terminal=True)
    with (
        progress("evaluate", 2, console=output) as outer,
        progress("held_out", 8, console=output) as inner,
    ):
        inner.advance(3)
        time.sleep(0.5)  # both are drawn by the outer bar's own thread, ten times a second
        outer.advance(2)
    text = output.file.getvalue()
    assert "3/8" in text
    assert "2/2" in text


def test_a_quiet_rank_shows_nothing():
    file = io.StringIO()
    output = Console(file=file, quiet=True)
    with progress("start the engine", console=output, interval_s=0.01) as tracker:
        tracker.advance()
        time.sleep(0.05)
    assert file.getvalue() == ""


def test_a_metric_without_a_bound_on_its_drop_may_fall_below_zero():
    check = NormalityCheck("float32")
    for _ in range(HISTORY):
        assert check.compare({names.TWINS: 1e-6, names.ENTROPY: 1.0}) == {}
    assert check.compare({names.TWINS: -1e-3}) == {}
    assert list(check.compare({names.ENTROPY: 0.25})) == [names.ENTROPY]
