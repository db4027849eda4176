"""``base:``, the key by which a configuration extends another file."""

import pytest

from megatron_dppo.config import ConfigError, load_config
from megatron_dppo.config.loading import merged, read_with_bases
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.system.yaml_core import dump_yaml

TREES = {
    "top.yaml": {"base": "middle.yaml", "run": {"steps": 3, "sha256_list": None}},
    "middle.yaml": {"base": "ground.yaml", "run": {"seed": 2, "steps": 2}},
    "ground.yaml": {"run": {"directory": "d", "steps": 1, "sha256_list": "x"}},
    "wrong.yaml": {"base": 3},
    "lost.yaml": {"base": "nowhere.yaml"},
    "first.yaml": {"base": "second.yaml"},
    "second.yaml": {"base": "first.yaml"},
}


@pytest.fixture
def folder(tmp_path):
    for name, tree in TREES.items():
        (tmp_path / name).write_text(dump_yaml(tree))
    return tmp_path


def test_the_nearest_file_wins_key_by_key(folder):
    tree = read_with_bases(folder / "top.yaml", TrainConfig)
    assert tree == {"run": {"directory": "d", "seed": 2, "steps": 3, "sha256_list": None}}


def test_merging_changes_neither_side():
    base, top = {"a": {"x": 1}}, {"a": {"y": 2}, "b": 3}
    assert merged(base, top) == {"a": {"x": 1, "y": 2}, "b": 3}
    assert (base, top) == ({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong.yaml", "base: got 3"),
        ("lost.yaml", "nowhere.yaml"),
        ("first.yaml", "first.yaml -> second.yaml -> first.yaml: a configuration can't"),
    ],
)
def test_a_base_that_leads_nowhere_is_refused(folder, name, words):
    with pytest.raises(ConfigError, match=words):
        read_with_bases(folder / name, TrainConfig)


def test_a_path_is_relative_to_its_own_file(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "ground.yaml").write_text("run: {directory: d, steps: 1}\n")
    (tmp_path / "deep" / "top.yaml").write_text("base: ../ground.yaml\nrun: {seed: 7}\n")
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "deep" / "top.yaml")
    assert not [p for p in caught.value.faults if p.startswith("run")]
