"""The picture and the summary of a run, also of one step or without evaluation, and the comparison of several runs."""

import json
from typing import Any, cast

import matplotlib
import pytest
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.diagnostics.report import (
    MOST_PHASES,
    REST,
    STYLE,
    RunRecords,
    _draw,
    centred_mean,
    draw_arithmetic,
    draw_gap,
    draw_likelihood,
    draw_masked,
    draw_reward,
    draw_update_bytes,
    draw_update_seconds,
    fold_short_phases,
    main,
    write_comparison,
    write_report,
)
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import RecordsError, encode_record
from megatron_dppo.metrics.summary import (
    RunInfo,
    describe_layout,
    differing_keys,
    summarize,
    window_of,
    write_summary,
)
from megatron_dppo.metrics.table import BY_METRIC, METRICS
from tests.drawn_lines import heights, places
from tests.messages import mentioning, mentions
from tests.unit.config_files import minimal_config

ONE_RANK = {
    "world_size": 1,
    "tensor": 1,
    "pipeline": 1,
    "virtual_pipeline": None,
    "expert": 1,
    "expert_tensor": None,
    "sequence": None,
}
INFO = RunInfo("dppo-binary-tv", "TP2, 2 ranks", "tiny", "float32", 1)


def step_metrics(step, reward):
    return {
        names.REWARD: reward,
        names.GAP_ON_POLICY: 1e-6 * step,
        names.GAP: 0.004,
        names.MASKED_POSITIVE: 0.0,
        names.MASKED_NEGATIVE: 0.002,
        names.ENTROPY: 1.0 / step,
        names.RESPONSE_LENGTH: 20.0,
        names.TRUNCATED: 0.0,
        names.WEIGHT_UPDATES: 1,
        names.WEIGHT_UPDATES_VERIFIED: 1,
        "time/generate_s": 2.0,
        "time/train_s": 1.5,
    }


def save_run(folder, steps, *, evaluate=True, algorithm="dppo-binary-tv", seed=1):
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    if evaluate:
        start = {names.accuracy("held_out"): 0.25, names.WEIGHT_UPDATES: 1, "time/sync_s": 0.5}
        lines.append(encode_record(0, start))
    for step in range(1, steps + 1):
        values = step_metrics(step, step / 16)
        if evaluate and step == steps:
            values[names.accuracy("held_out")] = 0.75
        lines.append(encode_record(step, values))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    config = {
        "algorithm": {"name": algorithm},
        "run": {"seed": seed},
        "model": {"hf_checkpoint": "build/tiny-moe", "dtype": "float32"},
        "parallel": ONE_RANK,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.mark.parametrize(("steps", "evaluate"), [(1, False), (1, True), (8, True), (40, True)])
def test_a_report_is_drawn_of_long_and_short_runs(tmp_path, steps, evaluate):
    path = write_report(save_run(tmp_path, steps, evaluate=evaluate))
    assert path == tmp_path / "report.png"
    height, width, _ = imread(path).shape
    assert width > 900
    assert height > 900


def test_use_of_the_machine_is_drawn_where_it_is_recorded(tmp_path):
    plain = imread(write_report(save_run(tmp_path / "plain", 3))).shape[0]
    used = save_run(tmp_path / "used", 3)
    lines = [json.loads(line) for line in (used / "metrics.jsonl").read_text().splitlines()]
    speed = {names.TFLOPS: 240.0, names.MFU: 0.24, names.PEAK_MEMORY: 60.0, names.IDLE_SHARE: 0.02}
    updates = {names.UPDATE_SECONDS: 3.0, names.UPDATE_STALL: 2.5, names.UPDATE_BYTES_MOVED: 6e10}
    single, several = {names.TURNS: 1.0}, {names.TURNS: 1.5, names.PREFIX_CACHED: 0.5}
    drafts = {names.ACCEPTED_LENGTH: 1.4}
    for added_metrics, rows in ((speed | single, 4), (updates, 5), (several, 6), (drafts, 7)):
        for record in lines[1:]:
            record.update(added_metrics)
        (used / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
        assert imread(write_report(used)).shape[0] == pytest.approx(plain * rows / 3, abs=2)


def test_an_update_is_drawn_beside_its_bounds():
    records = [
        {"step": step, names.UPDATE_SECONDS: 3.0, names.UPDATE_STALL: 2.5, names.UPDATE_BOUND: 1.25,
         names.UPDATE_BYTES_MOVED: 6e10, names.UPDATE_BYTES_BOUND: 5e10, names.UPDATE_BYTES_BETWEEN_NODES: 0}
        for step in (1, 2)
    ]  # fmt: skip
    seconds, size, silent = (Figure().subplots() for _ in range(3))
    draw_update_seconds(seconds, [RunRecords("run", records)])
    assert [heights(line).tolist() for line in seconds.lines] == [[3, 3], [2.5, 2.5], [1.25] * 2]
    draw_update_bytes(size, [RunRecords("run", records)])
    lines = [heights(line).tolist() for line in size.lines]
    assert lines == [pytest.approx([gb, gb]) for gb in (60, 50, 0)]
    assert (seconds.get_ylabel(), size.get_ylabel()) == ("seconds", "GB")
    unstated = [{k: v for k, v in r.items() if k != names.UPDATE_BOUND} for r in records]
    draw_update_seconds(silent, [RunRecords("run", unstated)])
    assert [t.get_text() for t in silent.get_legend().get_texts()] == [
        "whole update",
        "engines paused",
    ]


def many_figures(step):
    """Return the metrics of a step with everything that a panel can show."""
    return step_metrics(step, 0.5) | {
        "step": step, names.ROUTING_AGREEMENT: 0.99, names.UPDATE_SECONDS: 3.0,
        names.UPDATE_STALL: 2.5, names.UPDATE_BOUND: 1.25, names.UPDATE_BYTES_MOVED: 6e10,
        names.UPDATE_BYTES_BOUND: 6e10, names.UPDATE_BYTES_BETWEEN_NODES: 6e10,
        names.accuracy("held_out"): 0.5, names.TFLOPS: 1.0, names.PEAK_MEMORY: 1.0,
        names.IDLE_SHARE: 0.1, "time/sync_s": 0.5, "time/evaluate_s": 1.0, "time/reward_s": 0.1,
        "time/checkpoint_s": 0.1, "time/exchange_s": 0.2,
    }  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_every_legend_is_inside_the_picture_and_tells_lines_apart(count):
    runs = [RunRecords(f"run {i}", [many_figures(1), many_figures(2)]) for i in range(count)]
    with matplotlib.rc_context(STYLE):
        figure = _draw(runs, "title")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        for axes in figure.axes:
            legend = axes.get_legend()
            if legend is None:
                continue
            box = legend.get_window_extent(canvas.get_renderer())
            assert 0 <= box.x0 < box.x1 <= figure.bbox.x1, axes.get_title(loc="left")
            title = cast(Any, axes)._left_title.get_window_extent(canvas.get_renderer())
            assert box.y1 <= title.y0 + 1
            looks = [
                (h.get_color(), h.get_linestyle(), h.get_linewidth(), h.get_marker())
                for h in legend.legend_handles
                if isinstance(h, Line2D)
            ]
            assert len(looks) == len(set(looks)), axes.get_title(loc="left")


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_an_axis_of_shares_goes_from_none_to_all(share):
    shares = (
        names.ROUTING_AGREEMENT, names.TRUNCATED, names.DISTINCT, names.INTERRUPTED, names.IDLE_SHARE,
        names.TRAINERS_WAITED, names.PREFIX_CACHED, names.MFU, names.REWARD,
    )  # fmt: skip
    record = many_figures(1) | dict.fromkeys(shares, share)
    record |= {names.STALENESS: 1.0, names.STALENESS_MAX: 1, names.TURNS: 2.0}
    record[names.accuracy("held_out")] = share
    figure = _draw([RunRecords("run", [record])], "title")
    ends = {axes.get_ylabel(): axes.get_ylim() for axes in figure.axes}
    assert ends.pop("mean") == pytest.approx((0, 1), abs=0.02)
    percent = [unit for unit in ends if "%" in unit and unit != "% of tokens"]
    assert len(percent) == 8
    for unit in percent:
        assert ends[unit] == pytest.approx((0, 100), abs=2), unit


def test_a_reward_outside_of_0_to_1_is_seen_whole():
    axes = Figure().subplots()
    draw_reward(
        axes, [RunRecords("run", [{"step": 1, names.REWARD: -1.0}, {"step": 2, names.REWARD: 3.0}])]
    )
    low, high = axes.get_ylim()
    assert low < -1
    assert high > 3


def test_a_healthy_run_stays_within_the_bounds_drawn_for_it():
    axes = Figure().subplots()
    draw_gap(axes, [RunRecords("run", [many_figures(1), many_figures(2)])])
    gap, step, gap_bound, step_bound = axes.lines
    for line, bound in ((gap, gap_bound), (step, step_bound)):
        assert line.get_color() == bound.get_color()
        assert max(heights(line)) < heights(bound)[0] < axes.get_ylim()[1]


def test_a_run_that_recorded_one_of_the_gaps_shows_that_one_s_bound():
    axes = Figure().subplots()
    record = {k: v for k, v in many_figures(1).items() if k != names.GAP_ON_POLICY}
    draw_gap(axes, [RunRecords("run", [record])])
    upper = BY_METRIC[names.GAP].upper("float32")
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert f"{METRICS[names.GAP].line.legend} (at most {upper:g})" in texts
    _, bound = axes.lines
    assert heights(bound)[0] == upper


def test_a_supervised_run_shows_its_loss_and_those_of_held_out_sets():
    axes = Figure().subplots()
    likelihood, sums, words = (
        names.NEGATIVE_LOG_LIKELIHOOD,
        "evaluation/sums/nll",
        "evaluation/words/nll",
    )
    rows = [{"step": 0, sums: 3.0, words: 4.0}, {"step": 1, likelihood: 2.0, sums: 1.0}]
    draw_likelihood(axes, [RunRecords("run", rows)])
    drawn = [(list(places(line)), list(heights(line))) for line in axes.lines]
    assert drawn == [([1], [2.0]), ([0, 1], [3.0, 1.0]), ([0], [4.0])]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["training", "held-out: sums, words"]


def test_a_run_without_advantages_has_nothing_to_mask():
    silent, other = Figure().subplots(2)
    flat = {"step": 1, names.ZERO_VARIANCE_GROUPS: 1.0}
    draw_masked(silent, [RunRecords("run", [flat])])
    draw_masked(other, [RunRecords("run", [flat, {"step": 2, names.ZERO_VARIANCE_GROUPS: 0.5}])])
    assert "each group earned the same" in silent.texts[0].get_text()
    assert other.texts[0].get_text() == "not recorded"


@pytest.mark.parametrize(
    ("shares", "unit", "drawn"),
    [
        ([None], "TFLOP/s", [[240.0, 480.0]]),
        ([0.24], "% of the GPU's bf16 peak", [[24.0, 24.0]]),
        ([0.24, None], "TFLOP/s", [[240.0, 480.0]] * 2),
    ],
)
def test_arithmetic_is_a_share_of_the_peak_where_every_run_knows_it(shares, unit, drawn):
    axes = Figure().subplots()
    runs = []
    for share in shares:
        known = {} if share is None else {names.MFU: share}
        records = [{"step": step, names.TFLOPS: 240.0 * step, **known} for step in (1, 2)]
        runs.append(RunRecords("run", records))
    draw_arithmetic(axes, runs)
    assert axes.get_ylabel() == unit
    assert [heights(line).tolist() for line in axes.lines] == [pytest.approx(d) for d in drawn]


def test_a_run_that_recorded_little_is_drawn_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": null}\n')
    assert write_report(tmp_path).is_file()


def test_a_run_without_a_step_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=mentioning(tmp_path)):
        write_report(tmp_path)


def test_several_runs_are_compared(tmp_path):
    runs = [save_run(tmp_path / f"seed{i}", 4 + i, seed=i, evaluate=i > 1) for i in (1, 2, 3)]
    assert write_comparison(runs, tmp_path / "all.png").is_file()


def test_more_runs_than_colours_are_refused(tmp_path):
    with pytest.raises(ValueError, match=mentioning(8, 7)):
        write_comparison([tmp_path] * 8, tmp_path / "all.png")


def test_the_command_line_names_what_it_wrote_and_what_it_could_not_read(tmp_path, capsys):
    save_run(tmp_path / "demo", 2)
    main([str(tmp_path / "demo")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "demo" / "report.png")
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "nothing")])
    assert stopped.value.code == 2
    assert mentions(capsys.readouterr().err, tmp_path / "nothing")


def test_short_phases_are_summed_up_and_the_same_for_every_run():
    first = {f"p{i}": [float(i), float(i)] for i in range(1, 8)}
    second = {"p1": [100.0]}
    folded = fold_short_phases([first, second])
    # The totals are: p1 102, p7 14, p6 12, p5 10, p4 8. The short phases p2 and p3 have 2 + 3 seconds in each step.
    assert list(folded[0]) == ["p1", "p7", "p6", "p5", "p4", REST]
    assert len(folded[0]) == MOST_PHASES + 1
    assert folded[0][REST] == [5.0, 5.0]
    assert folded[1] == {
        "p1": [100.0],
        "p7": [0.0],
        "p6": [0.0],
        "p5": [0.0],
        "p4": [0.0],
        REST: [0],
    }


def test_smoothing_takes_neighbours_on_both_sides():
    assert centred_mean([0.0, 3.0, 6.0, 9.0], 1) == [1.5, 3.0, 6.0, 7.5]


def test_layouts_are_named_as_megatron_names_them():
    assert describe_layout(ONE_RANK) == "1 rank"
    large = {"world_size": 16, "tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "expert": 4}
    layout = describe_layout({**ONE_RANK, **large, "expert_tensor": 1, "sequence": True})
    assert layout == "TP2 PP2 VPP2 EP4 DP4 SP, 16 ranks"
    assert describe_layout({**ONE_RANK, "world_size": 4, "context": 2}) == "CP2 DP2, 4 ranks"


def test_a_run_is_named_from_its_configuration(tmp_path):
    assert RunInfo.of_run(tmp_path) is None
    save_run(tmp_path, 1, seed=7)
    info = RunInfo("dppo-binary-tv", "1 rank", "tiny-moe", "float32", 7)
    assert RunInfo.of_run(tmp_path) == info
    assert info.parts == ("dppo-binary-tv", "1 rank, fp32", "tiny-moe", "seed 7")
    (tmp_path / "config.yaml").write_text("algorithm: {}\n")
    with pytest.raises(ValueError, match=mentioning(tmp_path / "config.yaml")):
        RunInfo.of_run(tmp_path)


def test_the_windows_of_start_and_end_are_a_quarter_of_the_run_up_to_five():
    assert [window_of(steps) for steps in (1, 4, 8, 19, 20, 500)] == [1, 1, 2, 4, 5, 5]


def test_the_summary_of_a_run(tmp_path):
    save_run(tmp_path, 8)
    summary = write_summary(tmp_path, INFO, hf_export_max_logprob_diff=2e-6)
    assert summary.steps == 8
    assert summary.window_steps == 2
    assert (summary.eval_accuracy_start, summary.eval_accuracy_end) == (0.25, 0.75)
    assert summary.eval_steps == (0, 8)
    assert summary.eval_accuracy_by_set == {"held_out": (0.25, 0.75)}
    assert summary.train_reward_start == (1 + 2) / 2 / 16
    assert summary.train_reward_end == (7 + 8) / 2 / 16
    assert summary.mean_abs_prob_gap == pytest.approx(7.5e-6, rel=1e-12)
    assert (summary.weight_updates, summary.weight_updates_verified) == (9, 8)
    assert summary.seconds_per_phase == {"generate": 16.0, "train": 12.0, "sync": 0.5}
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved["hf_export_max_logprob_diff"] == 2e-6
    assert saved["layout"] == "TP2, 2 ranks"
    assert saved["eval_steps"] == [0, 8]


def test_a_summary_of_a_run_without_evaluation_says_none():
    summary = summarize([{"step": 1, names.REWARD: None}], INFO)
    assert summary.steps == 1
    assert summary.eval_accuracy_start is None
    assert summary.eval_steps is None
    assert summary.train_reward_end is None
    assert summary.mean_abs_prob_gap is None


def test_a_run_without_a_trained_step_has_no_summary(tmp_path):
    with pytest.raises(ValueError, match="no trained step"):
        summarize([{"step": 0}], INFO)
    with pytest.raises(RecordsError):
        write_summary(tmp_path, INFO)


def test_a_comparison_lists_the_keys_in_which_the_runs_differ(tmp_path, capsys):
    folders = []
    for seed, lr in ((1, 1e-4), (2, 1e-4)):
        folder = tmp_path / f"run{seed}"
        folder.mkdir()
        run = {"seed": seed, "directory": str(folder)}
        config = minimal_config(tmp_path, run=run, optimizer={"lr": lr})
        (folder / "config.yaml").write_text(resolved_yaml(config))
        (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        folders.append(str(folder))
    main([*folders, "--output", str(tmp_path / "both.png")])
    assert capsys.readouterr().out.splitlines()[1:] == ["run.seed: 1 | 2"]
    assert differing_keys([folders[0], tmp_path]) == {}
