"""The paper's numbers: recipes and presets have them, and every figure has runs that the configuration accepts."""

import pytest

from examples.recipes import paper
from megatron_dppo.algorithms.table import PRESETS, algorithm_facts
from megatron_dppo.config import load_config
from megatron_dppo.metrics.table import METRICS

EXPERIMENTS = [name for name, row in paper.experiments().items() if row["recipe"] is not None]
RUNS = [(figure, run) for figure in paper.figures() for run in paper.runs_of(figure)]


def config_of(experiment, words=()):
    recipe = paper.experiments()[experiment]["recipe"]
    return load_config(paper.RECIPES / f"{recipe}.yaml", list(words))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_recipe_has_the_published_numbers(experiment):
    config = config_of(experiment)
    published: dict[str, object] = {}
    for _, values in paper.tables_of(experiment, ["scripts", "published"]):
        published |= values
    assert {key: paper.value_of(config, key) for key in published} == published


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_recipe_has_the_papers_number_where_a_script_differs(experiment):
    config = config_of(experiment)
    for script in paper.experiments()[experiment].get("scripts", ()):
        for key, number in script.get("differs", {}).items():
            assert paper.value_of(config, key) != number


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_one_override_selects_an_algorithm_with_its_published_numbers(experiment):
    for _, presets in paper.tables_of(experiment, ["presets"]):
        for name, published in presets.items():
            facts = config_of(experiment, [f"algorithm.name={name}"]).algorithm.facts()
            assert {key: facts.numbers[key] for key in published} == published


def test_every_published_preset_belongs_to_a_setting():
    """A preset's numbers in the setting of an experiment's recipe are the published ones without options."""
    for experiment in EXPERIMENTS:
        config = config_of(experiment)
        assert config.algorithm.options == {}
        for _, presets in paper.tables_of(experiment, ["presets"]):
            for name, published in presets.items():
                numbers = algorithm_facts(name, {}, config.algorithm.settings).numbers
                assert published.items() <= dict(numbers).items()
                assert name in PRESETS


def test_every_figure_and_table_of_the_paper_has_an_entry():
    expected = [f"Figure {number}" for number in range(1, 21)]
    assert list(paper.figures()) == [*expected, "Table 1", "Table 2", "Appendix D"]
    for name, row in paper.figures().items():
        assert row["shows"]
        unknown = set(row["experiments"]) - set(paper.experiments())
        assert not unknown
        if name != "Table 1":
            assert list(paper.runs_of(name))


@pytest.mark.parametrize(
    ("figure", "run"),
    RUNS,
    ids=[f"{figure}, {run.experiment}, {run.label}" for figure, run in RUNS],
)
def test_the_runs_of_a_figure_load_and_end_where_its_axis_ends(figure, run):
    config = load_config(run.path, list(run.words))
    assert config.algorithm.facts()
    # A figure may show the first part of a run.
    assert config.run.steps >= paper.steps_of(figure, run.experiment)
    if any(word.startswith("run.steps=") for word in run.words):
        assert config.run.steps == paper.steps_of(figure, run.experiment)


def test_runs_of_one_folder_differ_only_in_their_length():
    words_of: dict[str, tuple] = {}
    for _, run in RUNS:
        directory = load_config(run.path, list(run.words)).run.directory
        words = tuple(sorted(word for word in run.words if not word.startswith("run.steps=")))
        assert words_of.setdefault(directory, (run.recipe, words)) == (run.recipe, words)


@pytest.mark.parametrize("figure", paper.figures())
def test_the_panels_of_a_figure_show_metrics_of_its_runs(figure):
    row = paper.figures()[figure]
    for run in paper.runs_of(figure):
        config = load_config(run.path, list(run.words))
        recorded = set(METRICS)
        recorded |= {f"evaluation/{name}/accuracy" for name in config.data.evaluation_files}
        for panel in row.get("panels", {}).values():
            assert set(panel.get("metrics", ())) <= recorded
            if "policy/topk_mass" in panel.get("metrics", ()):
                assert config.rollout.topk_log_probs == 20


def test_the_figure_at_equal_weights_takes_one_optimiser_step():
    for run in paper.runs_of("Figure 2"):
        config = load_config(run.path, list(run.words))
        assert paper.value_of(config, "optimizer_steps") == 1
        assert config.rollout.save
