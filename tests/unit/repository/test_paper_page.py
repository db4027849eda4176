"""The page of the paper's figures: complete, up to date, and drawn from the files of runs."""

import csv
import json
import re

import matplotlib.image
import numpy as np
import pytest
from matplotlib import pyplot

from examples.recipes import paper_figures, paper_page
from examples.recipes.paper import experiments, figures, runs_of
from examples.recipes.paper_figures import Curve, draw
from examples.recipes.paper_toys import TOKENS_FILE, TOYS, ToyRun
from megatron_dppo.config.loading import load_config
from tests.drawn_lines import heights, places
from tests.ranks import ROOT

NAMES = [*(f"Figure {n}" for n in range(1, 21)), "Table 1", "Table 2", "Appendix D"]


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_page_is_made_from_the_paper_s_file():
    assert paper_page.PAGE.read_text() == paper_page.whole()


def section_of(name):
    text = paper_page.PAGE.read_text()
    return text.partition(f"\n### {name}\n")[2].partition("\n### ")[0]


@pytest.mark.parametrize("name", NAMES)
def test_each_figure_has_its_recipes_commands_and_picture(name):
    section = section_of(name)
    recipes = [experiments()[e]["recipe"] for e in figures()[name]["experiments"]]
    recipes = [recipe for recipe in recipes if recipe is not None]
    assert recipes
    for recipe in recipes:
        assert (ROOT / "examples" / "recipes" / f"{recipe}.yaml").is_file()
    # A run stands in the section of its first figure, to which later figures have a link.
    texts = [section, *map(section_of, re.findall(r"runs? of \[([^]]+)\]", section))]
    for run in runs_of(name):
        assert sum(f"{run.command}\n" in text for text in texts) == 1
    if "panels" in figures()[name]:
        assert f'python -m examples.recipes.paper_figures "{name}"' in section
        picture = paper_page.picture_of(name)
        assert picture.is_file()
        assert f"({picture.relative_to(paper_page.PAGE.parent)})" in section


def test_every_run_of_a_figure_has_a_folder_of_its_own():
    for name in figures():
        folders = [load_config(run.path, run.words).run.directory for run in runs_of(name)]
        assert len(set(folders)) == len(folders), name


def test_every_experiment_has_a_toy():
    assert TOYS.keys() == experiments().keys()
    for name in figures():
        for run in runs_of(name):
            words = ToyRun.of(run).words
            assert [word for word in run.words if word.startswith("algorithm.")] == [
                word for word in words if word.startswith("algorithm.")
            ]


def write_run(folder, rewards):
    folder.mkdir()
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_panel_has_the_smoothed_metric_of_each_run(tmp_path):
    curve = Curve("a", write_run(tmp_path / "a", 20 * [0.0] + [1.0] + 20 * [0.0]))
    content = {"metrics": ["reward/mean"], "sigma": 2}
    axes = pyplot.figure().subplots()
    paper_figures._draw_panel(axes, content, [curve], 100)
    raw, smoothed = map(heights, axes.get_lines())
    assert raw.sum() == raw[20] == 1
    weights = np.exp(-(np.arange(-8, 9) ** 2) / (2 * 2**2))
    assert smoothed[12:29] == pytest.approx(weights / weights.sum(), abs=1e-9)
    assert axes.get_xlim() == (0, 100)


def test_the_bins_have_the_median_of_their_tokens(tmp_path):
    folder = write_run(tmp_path / "a", [0.0])
    with (folder / TOKENS_FILE).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mu", "ratio", "binary_tv"])
        writer.writerows([[0.01, 2.0, 0], [0.02, 3.0, 0], [0.03, 4.0, 0], [0.99, 1.0, 0]])
    axes = pyplot.figure().subplots()
    content = {"columns": ["mu", "ratio"]}
    paper_figures._draw_panel(axes, content, [Curve("a", folder)], 1)
    (line,) = axes.get_lines()
    assert list(places(line)) == [pytest.approx(0.025), pytest.approx(0.975)]
    assert list(heights(line)) == [3.0, 1.0]


def test_a_figure_is_drawn_from_folders_of_runs(tmp_path):
    rewards = [0.1, 0.2, 0.3]
    rows = {
        "first": [Curve("a", write_run(tmp_path / "a", rewards))],
        "second": [Curve("b", write_run(tmp_path / "b", rewards))],
    }
    path = tmp_path / "figure.png"
    draw("Figure 20", rows, 3, path)
    assert matplotlib.image.imread(path).shape[1] > 200
