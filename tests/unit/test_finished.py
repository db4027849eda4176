"""A run counts as finished if it has nothing left to do. If anything is missing or different, it starts again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.launch.run_directory import is_finished
from megatron_dppo.metrics.records import remember_upload
from tests.unit.config_files import minimal


def config(tmp_path: Path, upload: str | None = None, **run) -> TrainConfig:
    tree = minimal(tmp_path)
    tree["checkpoint"] = {"upload": upload}
    tree["run"] = {"directory": str(tmp_path / "run"), "steps": 2, **run}
    tree["data"]["evaluation"] = {"sums": str(tmp_path / "train.jsonl")}
    return TrainConfig.model_validate(tree)


@pytest.fixture
def finished_run(tmp_path) -> TrainConfig:
    """The configuration of a finished run, whose folder is written too."""
    settings, directory = config(tmp_path), tmp_path / "run"
    (directory / "hf").mkdir(parents=True)
    (directory / "config.yaml").write_text(resolved_yaml(settings))
    records = [{"step": step, "evaluation/sums/accuracy": 0.5} for step in range(3)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (directory / "summary.json").write_text(json.dumps({"steps": 2}))
    return settings


def test_a_whole_run_is_finished(finished_run):
    assert is_finished(finished_run)


def test_more_steps_or_a_new_beginning_are_not(finished_run, tmp_path):
    assert not is_finished(config(tmp_path, steps=3))
    assert not is_finished(config(tmp_path, resume="never"))
    assert not is_finished(config(tmp_path, seed=2))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", None),
        ("summary.json", "[]"),
        ("summary.json", "{"),
        ("summary.json", '{"steps": 1}'),
        ("config.yaml", None),
        ("metrics.jsonl", None),
        ("metrics.jsonl", ""),
        ("metrics.jsonl", '{"step": 2}\n'),
        ("metrics.jsonl", '{"step": 1, "evaluation/sums/accuracy": 0.5}\n'),
    ],
)
def test_nothing_may_be_missing(finished_run, tmp_path, file, content):
    path = tmp_path / "run" / file
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert not is_finished(finished_run)


@pytest.mark.parametrize(
    ("upload", "is_sent"),
    [(None, False), ("me/sums 1", False), ("me/other 2", False), ("{", False), ("me/sums 2", True)],
)
def test_an_upload_that_was_cut_off_is_repeated(finished_run, tmp_path, upload, is_sent):
    """Only an upload to the configured repository after the last step counts."""
    uploads, directory = config(tmp_path, upload="me/sums"), tmp_path / "run"
    (directory / "config.yaml").write_text(resolved_yaml(uploads))
    if upload == "{":
        (directory / "upload.json").write_text(upload)
    elif upload is not None:
        repository, steps = upload.split()
        remember_upload(directory, repository, int(steps))
    assert is_finished(uploads) == is_sent


def test_the_export_may_not_be_missing(finished_run, tmp_path):
    (tmp_path / "run" / "hf").rmdir()
    assert not is_finished(finished_run)
