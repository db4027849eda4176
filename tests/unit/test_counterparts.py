"""The table of other packages' names, the page that is generated from it, and its keys."""

from pathlib import Path

from megatron_dppo.algorithms.table import OPTIONS
from megatron_dppo.config.counterparts import COUNTERPARTS, key_of_last_part, key_of_name
from megatron_dppo.config.errors import dotted_paths
from megatron_dppo.config.schema import TrainConfig
from tools.coming_from import page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_that_of_the_table():
    assert (DOCS / "coming_from.md").read_text() == page()


def test_every_row_names_a_key_that_exists():
    paths = set(dotted_paths(TrainConfig))
    for row in COUNTERPARTS:
        key = row.key.partition("=")[0]
        section, _, name = key.rpartition(".")
        assert (
            key in paths
            or section == "sglang"
            or (section, name in OPTIONS) == ("algorithm.options", True)
        )
        assert row.names, row.key


def test_a_whole_name_counts_more_than_its_last_part():
    assert key_of_name("trainer.experiment_name") == "tracking.name"
    assert key_of_name("val_kwargs.n") == "evaluation.samples_per_prompt"
    assert key_of_name("--n") is None
    assert key_of_last_part("rollout.n") == "rollout.group_size"
    assert key_of_last_part("no_such_name") is None
