"""``make why``: its plan of runs, the mean and the band over seeds, its table and its figure."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from examples.why import run as run_module
from examples.why.aggregate import band, end_value
from examples.why.figure import COLOURS, LABELS, PANELS, write_figure
from examples.why.plan import ALGORITHMS, CONFIG, PlanError, PlannedRun, plan_runs
from examples.why.table import cell, write_table
from megatron_dppo.config import load_config, resolved_yaml
from megatron_dppo.metrics.records import encode_record
from megatron_dppo.metrics.table import accuracy


def test_a_band_is_the_mean_and_the_range_at_the_steps_that_all_seeds_have():
    shown = band([([1, 2, 3], [1.0, 4.0, 5.0]), ([2, 3, 4], [2.0, 7.0, 0.0]), ([3, 2], [0.0, 9.0])])
    assert shown.steps == [2, 3]
    assert shown.mean == [5.0, 4.0]  # (4 + 2 + 9) / 3, (5 + 7 + 0) / 3
    assert shown.low == [2.0, 0.0]
    assert shown.high == [9.0, 7.0]


def test_a_band_of_nothing_is_empty():
    assert band([]).steps == []
    assert band([([1], [1.0]), ([], [])]).mean == []


@pytest.mark.parametrize(
    ("last", "window", "expected"),
    [(5, 2, 8.0), (5, 1, 8.0), (5, 4, 5.0), (6, 1, None), (3, 2, 3.5), (9, 4, None)],
)
def test_an_end_value_is_the_mean_over_the_last_steps_that_have_one(last, window, expected):
    seed = ([1, 2, 3, 5], [100.0, 1.0, 6.0, 8.0])  # none at step 4; (1 + 6 + 8) / 3 = 5
    assert end_value(seed, last, window) == expected


def test_a_cell_holds_mean_and_range_over_seeds():
    flat = [([1, 2], [value, value]) for value in (0.5, 0.25, 0.75)]
    assert cell(flat) == "0.5 (0.25 to 0.75)"
    steps = list(range(1, 13))
    assert cell([(steps, [99.0, 99.0, *[3.0] * 5, *[5.0] * 5])]) == "4 (4 to 4)"
    assert cell([([], [])]) == "-"


def test_the_plan_has_every_algorithm_with_every_seed_once(tmp_path):
    runs = plan_runs(tmp_path)
    assert [(run.algorithm, run.seed) for run in runs] == [
        (name, seed)
        for seed in (1, 2, 3)
        for name in ("pg-is", "pg-tis", "grpo-clip-higher", "dppo-binary-tv")
    ]
    assert len({run.directory for run in runs}) == 12
    assert runs[0].directory == tmp_path / "pg-is-seed-1"


def test_the_plan_takes_one_algorithm_or_one_seed(tmp_path):
    assert [r.seed for r in plan_runs(tmp_path, algorithm="pg-tis")] == [1, 2, 3]
    assert len(plan_runs(tmp_path, seed=2)) == 4
    (one,) = plan_runs(tmp_path, algorithm="pg-is", seed=3)
    assert one == PlannedRun("pg-is", 3, tmp_path)
    with pytest.raises(PlanError, match=r"algorithm 'gspo': expected one of pg-is, pg-tis"):
        plan_runs(tmp_path, algorithm="gspo")
    with pytest.raises(PlanError, match=r"seed 4: expected one of 1, 2, 3"):
        plan_runs(tmp_path, seed=4)


def test_runs_differ_in_algorithm_and_seed_alone_and_start_from_one_checkpoint(tmp_path):
    configs = []
    for run in plan_runs(tmp_path):
        *_, module, recipe, directory, seed, algorithm = run.command
        assert (module, recipe) == ("megatron_dppo.train", CONFIG)
        config = load_config(recipe, [directory, seed, algorithm])
        assert (config.algorithm.name, config.run.seed) == (run.algorithm, run.seed)
        assert config.run.directory == str(run.directory)
        tree = config.model_dump()
        del tree["run"]["directory"], tree["run"]["seed"], tree["algorithm"]["name"]
        configs.append(tree)
    assert all(tree == configs[0] for tree in configs)


def test_the_conditions_are_the_demos_but_for_those_that_the_readme_states():
    here, demo = load_config(CONFIG), load_config("examples/tiny_moe/config.yaml")
    assert here.model.hf_checkpoint == "runs/tiny_moe/material/seed-1/warm"
    assert (here.optimizer.lr, demo.optimizer.lr) == (2e-4, 5e-5)
    assert (here.rollout.max_staleness, demo.rollout.max_staleness) == (1, 0)
    assert here.rollout.prompts_per_step // here.training.prompts_per_mini_batch == 16
    same = ("model", "data", "algorithm", "reward", "parallel", "engine", "weight_sync")
    assert all(getattr(here, section) == getattr(demo, section) for section in same)


def test_a_folder_of_other_conditions_is_refused(tmp_path):
    run = PlannedRun("pg-is", 1, tmp_path)
    run.refuse_other_conditions()
    config = load_config(CONFIG, run.overrides)
    run.directory.mkdir()
    (run.directory / "config.yaml").write_text(resolved_yaml(config))
    run.refuse_other_conditions()
    changed = load_config(CONFIG, [*run.overrides, "optimizer.lr=1e-3", "run.steps=9"])
    (run.directory / "config.yaml").write_text(resolved_yaml(changed))
    with pytest.raises(PlanError, match=r"other conditions \(run.steps, optimizer.lr differ\)"):
        run.refuse_other_conditions()


@pytest.fixture
def started(monkeypatch):
    """The runs that were started, stood in for by a summary in their folder."""
    names = []

    def stand_in(command):
        (directory,) = (w.partition("=")[2] for w in command if w.startswith("run.directory="))
        names.append(Path(directory).name)
        if "pg-tis" in directory:
            return 1
        write_run(Path(directory), steps=12, accuracy_at_end=0.75)
        return 0

    monkeypatch.setattr(run_module, "run_to_the_end", stand_in)
    monkeypatch.setattr(run_module, "prepare", lambda seed: None)
    return names


def write_run(directory, steps, accuracy_at_end):
    directory.mkdir(parents=True, exist_ok=True)
    values = {panel.metric: 0.25 for panel in PANELS if panel.metric != accuracy("held_out")}
    lines = [encode_record(0, {accuracy("held_out"): 0.5})]
    for step in range(1, steps + 1):
        evaluation = {accuracy("held_out"): accuracy_at_end} if step == steps else {}
        lines.append(encode_record(step, values | evaluation))
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (directory / "summary.json").write_text("{}")


def test_finished_runs_are_not_made_again_and_a_failed_one_keeps_none_back(tmp_path, started):
    words = ["--directory", str(tmp_path), "--seed", "1"]
    assert run_module.main(words) == 1
    names = ["pg-is-seed-1", "pg-tis-seed-1", "grpo-clip-higher-seed-1", "dppo-binary-tv-seed-1"]
    assert started == names
    assert run_module.main(words) == 1
    assert started[4:] == ["pg-tis-seed-1"]


def test_the_figure_alone_starts_nothing(tmp_path, started):
    words = ["--directory", str(tmp_path), "--only-figure"]
    assert run_module.main(words) == 1
    assert not list(tmp_path.iterdir())
    write_run(tmp_path / "pg-is-seed-1", steps=12, accuracy_at_end=0.75)
    assert run_module.main(words) == 0
    assert started == []
    assert (tmp_path / "why.png").is_file()
    assert (tmp_path / "table.md").is_file()


def test_figure_and_table_of_two_seeds(tmp_path):
    runs = [PlannedRun("dppo-binary-tv", seed, tmp_path) for seed in (1, 2)]
    for run in runs:
        write_run(run.directory, steps=12, accuracy_at_end=0.5 * run.seed)
    height, width, _ = imread(write_figure(runs, tmp_path / "why.png")).shape
    assert (height > 1000, width > 1000) == (True, True)
    header, _, row = write_table(runs, tmp_path / "table.md").read_text().splitlines()
    assert header.split(" | ")[1] == "Held-out accuracy, fraction (avg@4)"
    assert header.split(" | ")[3] == r"Mean \|pi - mu\|, probability"
    cells = row.strip("| ").split(" | ")
    assert cells[0] == "DPPO-Binary-TV (2 seeds)"
    assert cells[1] == "0.75 (0.5 to 1)"
    assert cells[3] == "0.25 (0.25 to 0.25)"  # |pi - mu|, a probability
    assert cells[4] == "25 (25 to 25)"  # a share, in percent


def test_every_algorithm_has_a_colour_and_a_name():
    assert len(COLOURS) == len(ALGORITHMS)
    assert set(LABELS) == set(ALGORITHMS)
