"""metrics.jsonl has one record for each step, also after a resume."""

import json
import math
from pathlib import Path

import pytest

from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import (
    RECORDS_FILE,
    MetricsWriter,
    RecordsError,
    StepLines,
    decode_records,
    encode_record,
    last_step,
    mean_accuracy,
    phase_table,
    read_records,
    read_step_lines,
    series,
    step_of,
)
from megatron_dppo.metrics.table import METRICS, reference

ROOT = Path(__file__).resolve().parents[2]


def test_a_record_is_flat_json_with_null_for_what_is_not_finite():
    line = encode_record(
        3, {"reward/mean": 0.5, "policy/entropy": math.nan, "a": math.inf, "weights/bytes": 2**40}
    )
    assert line == (
        '{"step": 3, "reward/mean": 0.5, "policy/entropy": null, "a": null, '
        '"weights/bytes": 1099511627776}'
    )
    assert encode_record(3, {"step": 3, "weights/verified": True}).endswith('verified": 1.0}')


@pytest.mark.parametrize("value", ["0.5", None, [1.0]])
def test_a_value_that_is_no_number_is_named(value):
    with pytest.raises(RecordsError, match=r"'reward/mean'.* 3 "):
        encode_record(3, {"reward/mean": value})


def test_a_record_of_another_step_is_refused():
    with pytest.raises(RecordsError, match=r": 3\b"):
        encode_record(3, {"step": 4})


def test_decoding_leaves_out_a_torn_last_line_and_names_a_bad_one():
    assert decode_records(['{"step": 1}\n', '{"step": 2, "re'], "m") == [{"step": 1}]
    with pytest.raises(RecordsError, match="m, line 2"):
        decode_records(['{"step": 1}\n', '{"step"\n', '{"step": 3}\n'], "m")
    with pytest.raises(RecordsError, match="m, line 1"):
        decode_records(['{"loss": 1}\n'], "m")


def test_a_folder_without_metrics_is_named(tmp_path):
    with pytest.raises(RecordsError, match=r"metrics.jsonl"):
        read_records(tmp_path)


def test_series_and_phases_leave_out_what_is_missing():
    records = [
        {"step": 0, "time/sync_s": 1.0},
        {"step": 1, "a": None, "time/sync_s": 2.0, "time/generate_s": 4.0},
        {"step": 2, "a": 0.5},
    ]
    assert series(records, "a") == ([2], [0.5])
    assert phase_table(records) == {"generate": [0.0, 4.0, 0.0], "sync": [1.0, 2.0, 0.0]}
    assert list(phase_table(records)) == ["generate", "sync"]


def test_mean_accuracy_is_the_mean_over_the_sets_measured():
    record = {
        "step": 1,
        names.accuracy("aime24"): 0.5,
        names.accuracy("aime25"): 0.25,
        "evaluation/aime25/response_length": 900.0,
    }
    assert mean_accuracy(record) == 0.375
    assert mean_accuracy({"step": 1, names.accuracy("aime24"): None}) is None


def test_lines_are_flushed_as_they_are_written_and_steps_must_rise(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"reward/mean": 0.25})
    assert read_records(tmp_path) == [{"step": 0, "reward/mean": 0.25}]
    with pytest.raises(RecordsError, match=r"step 0 .*step 0"):
        writer.write(0, {"reward/mean": 0.25})


def test_a_resumed_run_has_each_step_once(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in range(5):
        writer.write(step, {"reward/mean": step / 8})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rewa')  # the process ends here; its last checkpoint is of step 2
    writer = MetricsWriter(tmp_path, resume_step=3)
    for step in (3, 4):
        writer.write(step, {"reward/mean": 1 + step / 8})

    expected = [0, 0.125, 0.25, 1.375, 1.5]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [json.loads(line)["reward/mean"] for line in lines] == expected


def test_a_fresh_run_starts_the_file_anew(tmp_path):
    for value in (0.25, 0.5):
        MetricsWriter(tmp_path).write(1, {"reward/mean": value})
    assert read_records(tmp_path) == [{"step": 1, "reward/mean": 0.5}]


def test_every_row_names_a_divisor_and_a_panel_that_there_are():
    assert {row.divisor for row in METRICS.values()} - {None} <= set(METRICS)
    lines = [row.line for row in METRICS.values() if row.line]
    panels = {line.panel for line in lines if line.panel}
    assert panels == {"gap", "masked", "entropy", "reward", "length", "memory", "tflops", "mfu", "likelihood",
                     "update seconds", "update bytes", "age", "waiting", "turns", "prefix", "accepted",
                     "teacher"}  # fmt: skip


def test_the_page_of_metrics_is_the_table():
    assert (ROOT / "docs" / "metrics.md").read_text() == reference()


def test_the_last_step_of_a_running_run_leaves_out_an_incomplete_line(tmp_path):
    assert last_step(tmp_path) == -1
    lines = [encode_record(step, {}) for step in (0, 1, 2)]
    (tmp_path / RECORDS_FILE).write_text("\n".join(lines))
    assert last_step(tmp_path) == 1


def test_a_record_that_was_completed_since_is_not_restored_again(tmp_path):
    first = MetricsWriter(tmp_path)
    first.write(1, {"reward/mean": 0.5})
    unwritten = encode_record(2, {"reward/mean": 0.75})
    for _ in range(2):
        writer = MetricsWriter(tmp_path, resume_step=3)
        writer.restore(unwritten + "\n")
        writer.complete(2, {"evaluation/sums/accuracy": 0.5})
    rows = read_records(tmp_path)
    assert [step_of(row) for row in rows] == [1, 2]
    assert rows[-1]["evaluation/sums/accuracy"] == 0.5


def test_a_line_with_half_a_surrogate_pair_is_restored_once(tmp_path):
    for _ in range(2):
        lines = StepLines(tmp_path / "samples.jsonl", 3)
        lines.restore('{"step": 1, "text": "\udc80"}\n')
    assert len(read_step_lines(tmp_path / "samples.jsonl")) == 1
