"""Algorithms and metrics of a user's own module, by ``package.module:ROW`` or an entry point."""

import itertools
import sys
from typing import Any

import pytest
import torch

from megatron_dppo.algorithms import rules
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.algorithms.table import Option, Preset, algorithm_facts
from megatron_dppo.config import ConfigError, TrainConfig
from megatron_dppo.config.checks import check_config
from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.diagnostics.explain.explanation import threshold_text
from megatron_dppo.diagnostics.report import write_report
from megatron_dppo.launch.library_checks import check_everything
from megatron_dppo.metrics import table
from megatron_dppo.metrics.records import RECORDS_FILE
from megatron_dppo.metrics.row import Line, Metric, NormalRange
from megatron_dppo.metrics.step_table import NormalityCheck
from megatron_dppo.metrics.sums import means
from megatron_dppo.system import plugins
from tests.messages import mentioning
from tests.metric_tables import restored_metrics
from tests.unit.config_files import minimal

NUMBERS = itertools.count()
FACTOR = {"factor": Option("largest r", "mask", low=1)}


def within(inputs, anchor, *, factor):
    return (inputs.log_probs - anchor(inputs)).exp() <= factor


def is_halved(inputs, decisions):
    return inputs.log_probs - inputs.rollout_log_probs < -0.69


def halved(**changes):
    values: dict[str, Any] = {"divisor": table.TRAINED_TOKENS, "share": True, "measure": is_halved}
    return Metric("policy/halved", "share of tokens below half of mu", **values | changes)


@pytest.fixture
def plant(monkeypatch):
    """Return a function that makes an object the attribute ROW of an importable module, and returns its target."""

    def add(row):
        # A row is imported once in a process, so every row has a module of its own.
        name = f"planted_rows_{next(NUMBERS)}"
        module: Any = type(sys)(name)
        module.ROW = row
        monkeypatch.setitem(sys.modules, name, module)
        return f"{name}:ROW"

    with restored_metrics():
        yield add


def tokens():
    mu = torch.tensor([0.5, 0.1, 0.5, 0.5])
    pi = torch.tensor([0.5, 0.4, 0.2, 0.1])
    return TokenInputs(pi.log(), mu.log(), torch.ones(4), torch.tensor([True, True, True, False]))


def test_a_row_of_the_users_module_is_an_algorithm(plant):
    target = plant(Preset(within, {"factor": 2.0}, options=FACTOR))
    algorithm = build_algorithm(target, {"factor": 3, "kl_coefficient": 0.1})
    assert algorithm.mask(tokens()).tolist() == [True, False, True, True]
    assert build_algorithm(target, {"factor": 5}).mask(tokens()).all()
    assert policy_loss(algorithm, tokens()).blocked.tolist() == [False, True, False, False]
    assert threshold_text(algorithm, positive=True) == "factor 3"


def test_a_row_may_name_functions_of_the_package(plant):
    numbers = {"clip_low": 0.1, "clip_high": 0.1}
    target = plant(Preset("ratio_clip", numbers, weight=rules.importance_ratio))
    assert build_algorithm(target).mask(tokens()).tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("dppo", mentioning("a str", "Preset")),
        (Preset("no_such_mask"), mentioning("mask", "'no_such_mask'", "binary_tv")),
        (Preset(weight="none"), mentioning("weight", "'none'", "importance_ratio")),
        (Preset(within, {"factor": 2.0}), mentioning("'factor'", "options")),
        (Preset(within, {"factor": 0.5}, options=FACTOR), mentioning("'factor'", "0.5")),
        (Preset(anchor="pi"), mentioning("anchor", "'pi'", "recomputed")),  # type: ignore[arg-type]
        (Preset(divergence="js"), mentioning("divergence", "'js'", "binary_tv")),  # type: ignore[arg-type]
        (
            Preset(within, options={"topk": FACTOR["factor"]}),
            mentioning("'topk'", "expected another name"),
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(plant, row, complaint):
    with pytest.raises(ValueError, match=complaint):
        algorithm_facts(plant(row))


def test_a_mask_that_does_not_take_its_numbers_is_refused_before_a_start(plant, tmp_path):
    row = Preset(within, {"tv_threshold": 0.1})
    config = TrainConfig.model_validate(minimal(tmp_path) | {"algorithm": {"name": plant(row)}})
    with pytest.raises(
        ConfigError, match=mentioning("algorithm.name", "mask within", "tv_threshold")
    ):
        check_everything(config, "c.yaml", weights=False)


def test_an_own_rule_of_whole_responses_excludes_turn_credit(plant, tmp_path):
    target = plant(Preset(within, {"factor": 2.0}, options=FACTOR, sequences=True))
    changes = {
        "algorithm": {"name": target},
        "environment": {
            "name": "calculator",
            "max_turns": 2,
            "max_observation_tokens": 8,
            "credit": "turn",
        },
    }
    config = TrainConfig.model_validate(minimal(tmp_path) | changes)
    with pytest.raises(ConfigError, match=mentioning("environment.credit", target)):
        check_config(config, "c.yaml")


def test_an_own_metric_is_summed_recorded_and_judged(plant):
    row = halved(normal=NormalRange("halved", "why", high=0.3))
    target = plant(row)
    table.add_metrics([target, target])
    metrics = policy_loss(build_algorithm("dppo-binary-tv"), tokens()).metrics
    recorded = means(metrics.values())
    assert recorded["policy/halved"] == pytest.approx(1 / 3)
    finding = NormalityCheck("float32").compare(recorded)["policy/halved"]
    assert finding == "halved 33.3%: expected at most 30%"


def test_an_own_metric_has_a_panel_of_its_own(plant, tmp_path, monkeypatch):
    from megatron_dppo.diagnostics import report

    target = plant(halved(line=Line("Halved", "below half")))
    changes = {"tracking": {"metrics": [target]}}
    config = TrainConfig.model_validate(minimal(tmp_path) | changes)
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    lines = [f'{{"step": {step}, "policy/halved": 0.1, "reward/mean": 0.5}}' for step in (1, 2)]
    (tmp_path / RECORDS_FILE).write_text("\n".join(lines) + "\n")
    titles = []
    monkeypatch.setattr(
        report, "finish", lambda axes, title, *rest, **options: titles.append(title)
    )
    write_report(tmp_path)
    assert titles[-1] == "Halved"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (3, mentioning("a int", "Metric")),
        (halved(measure=None), mentioning("measure", "None")),
        (halved(divisor="reward/mean"), mentioning("divisor", "'reward/mean'", "policy/tokens")),
        (halved(recorded_as="loss/mean"), mentioning("recorded_as", "'loss/mean'")),
        (Metric("policy/kl", "", measure=is_halved), mentioning("'policy/kl'", "another metric")),
        (Metric("loss/mean", "", measure=is_halved), mentioning("'loss/mean'", "another metric")),
        (Metric("halved", "", measure=is_halved), mentioning("'halved'", "policy/halved")),
    ],
)
def test_a_metric_that_cannot_be_used_is_refused(plant, row, complaint):
    with pytest.raises(ValueError, match=complaint):
        table.add_metrics([plant(row)])


@pytest.mark.parametrize(
    ("measure", "complaint"),
    [
        (
            lambda inputs, decisions: inputs.no_such_field,
            mentioning("'policy/halved'", "no_such_field"),
        ),
        (lambda inputs, decisions: 1.0, mentioning("'policy/halved'", "float", "(4,)")),
    ],
)
def test_a_metric_whose_function_fails_is_named(plant, measure, complaint):
    table.add_metrics([plant(halved(measure=measure))])
    with pytest.raises(ValueError, match=complaint):
        policy_loss(build_algorithm("pg-is"), tokens())


def test_an_unknown_metric_is_a_fault_of_its_key(tmp_path):
    changes = {"tracking": {"metrics": ["no_such_module:ROW", "nothing"]}}
    config = TrainConfig.model_validate(minimal(tmp_path) | changes)
    with pytest.raises(ConfigError, match=mentioning("tracking.metrics", "no_such_module:ROW")):
        check_everything(config, "c.yaml", weights=False)


def test_an_entry_point_names_an_algorithm(plant, tmp_path, monkeypatch):
    target = plant(Preset(within, {"factor": 2.0}, options=FACTOR))
    installed = tmp_path / "mine-1.0.dist-info"
    installed.mkdir()
    (installed / "entry_points.txt").write_text(f"[{plugins.ALGORITHMS}]\nmine = {target}\n")
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert algorithm_facts("mine").numbers["factor"] == 2.0
    with pytest.raises(ValueError, match=mentioning("'min'", "minirl")):
        algorithm_facts("min")
