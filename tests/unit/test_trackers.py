"""Experiment trackers: the real libraries, offline, in two starts of one run, and trackers that fail."""

import json
import logging
import math
import os
import struct
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from matplotlib.image import imsave
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_dppo.config.schema import TrackingConfig, TrainConfig
from megatron_dppo.metrics import trackers
from megatron_dppo.metrics.records import set_aside
from megatron_dppo.metrics.trackers import TrackedRun, Trackers, find_trackers, run_id
from megatron_dppo.system import plugins
from megatron_dppo.system.secret_variables import hide_secrets
from tests.extras import environment_with
from tests.messages import mentioning, mentions
from tests.patience import happens, run_patiently
from tests.unit.config_files import minimal

pytestmark = pytest.mark.second

BROKEN = "tests.unit.planted_broken"
SAMPLE = {
    "step": 0,
    "set": "sums",
    "response": "<b>5</b>",
    "reward": 1.0,
    "advantage": None,
    "components": {"a": 0.5},
}
ROW = SAMPLE | {"components": '{"a": 0.5}'}
"""The row of ``SAMPLE`` in a tracker's table."""


def tracked_run(folder: Path, resume_step: int = 0) -> TrackedRun:
    folder.mkdir(exist_ok=True)
    config = {"run": {"seed": 7}, "data": {"train": [{"path": "x"}]}}
    return TrackedRun(run_id(folder), "sums", "demo", folder, config, resume_step)


def two_starts(name: str, folder: Path) -> None:
    """Log steps 0 to 2, and then 2 to 4, as a run does that restarts from its checkpoint of step 1.

    Each step has a reward of step / 8 and a NaN. Each start has one sample and one figure.
    """
    imsave(folder / "report.png", np.zeros((4, 5, 3)))
    for first in (0, 2):
        with Trackers(find_trackers([name]), tracked_run(folder / "run", first)) as run_trackers:
            for step in range(first, first + 3):
                run_trackers.scalars(step, {"reward/mean": step / 8, "policy/entropy": math.nan})
            run_trackers.samples(first, [{**SAMPLE, "step": first}])
            run_trackers.figure("report", folder / "report.png")
        assert run_trackers.lost() == {name: 0}


REWARDS_OF_TWO_STARTS = [(0, 0.0), (1, 0.125), (2, 0.25), (2, 0.25), (3, 0.375), (4, 0.5)]


def run_child(name: str, folder: Path, code: str, **variables: str) -> str:
    """Run ``two_starts`` and then ``code`` with the real package in a child process. Returns its output."""
    prelude = (
        "import json, sys; from pathlib import Path; from tests.unit import test_trackers as t\n"
        f"folder = Path(sys.argv[1]); t.two_starts({name!r}, folder)\n"
    )
    result = run_patiently(
        [sys.executable, "-c", prelude + code, str(folder)],
        300,
        env=environment_with("trackers", **variables),
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_tensorboard_has_each_step_once_and_text_and_figure(tmp_path):
    two_starts("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert shown == sorted(set(REWARDS_OF_TWO_STARTS))
    (text,) = events.Tensors("samples/sums/text_summary")[-1].tensor_proto.string_val
    assert b"<b>5</b>" in text
    assert (events.Images("report")[-1].width, events.Images("report")[-1].height) == (5, 4)


def test_wandb_offline_has_both_starts_under_one_id(tmp_path):
    code = "print(json.dumps(t.wandb_histories(folder / 'run' / 'trackers' / 'wandb')))"
    output = run_child("wandb", tmp_path, code, WANDB_MODE="offline")
    runs = json.loads(output.splitlines()[-1])
    assert {run for run, _ in runs} == {run_id(tmp_path / "run")}
    rows = [row for _, history in runs for row in history]
    steps = [(int(r["step"]), float(r["reward/mean"])) for r in rows if "reward/mean" in r]
    assert steps == REWARDS_OF_TWO_STARTS
    assert {r["policy/entropy"] for r in rows if "policy/entropy" in r} == {"NaN"}
    assert [r["samples/sums/nrows"] for r in rows if "samples/sums/nrows" in r] == ["1", "1"]
    assert [r["report/width"] for r in rows if "report/width" in r] == ["5", "5"]
    tables = [json.loads(path.read_text()) for path in (tmp_path / "run").rglob("*.table.json")]
    shown = sorted(table["data"][0] for table in tables)
    assert shown == [list(ROW.values()), list((ROW | {"step": 2}).values())]


def test_wandbs_own_process_has_no_keys_in_its_environment(tmp_path):
    keys = {"WANDB_API_KEY": "4711" * 10, "HF_TOKEN": "hf-4711"}
    code = "print(t.keys_in_children(folder))"
    output = run_child("wandb", tmp_path, code, WANDB_MODE="offline", **keys)
    has_key, own_keys = json.loads(output.splitlines()[-1])
    assert has_key == {"wandb-core": False}
    assert own_keys == keys


def keys_in_children(folder: Path) -> str:
    """Return whether each process that wandb starts has a key in its environment, and the keys of this process."""
    hide_secrets()
    with Trackers(find_trackers(["wandb"]), tracked_run(folder / "another")) as run_trackers:
        run_trackers.scalars(0, {"reward/mean": 0.5})
        assert happens(lambda: list((folder / "another").rglob("*.wandb")), 240.0)
        children = psutil.Process().children(recursive=True)
        wandb_core = [p for p in children if p.name() == "wandb-core"]
        has_key = {p.name(): "4711" in str(p.environ()) for p in wandb_core}
    own_keys = {name: os.environ[name] for name in ("WANDB_API_KEY", "HF_TOKEN")}
    return json.dumps([has_key, own_keys])


def wandb_histories(folder: Path) -> list[tuple[str, list[dict[str, str]]]]:
    """Return run id and logged rows of every ``.wandb`` file: blocks of 32 KiB, with split records (LevelDB's log)."""
    from wandb.proto.wandb_internal_pb2 import Record

    # wandb's own process writes the files, and may be late with their end.
    files = sorted(folder.glob("offline*/*.wandb"))
    assert happens(lambda: all(b"width" in path.read_bytes() for path in files))
    histories = []
    for path in files:
        data, offset, piece, identity, rows = path.read_bytes(), 7, b"", "", []
        while offset < len(data):
            if 32768 - offset % 32768 < 7:  # no room for a header: the rest of a block is filled up
                offset += 32768 - offset % 32768
                continue
            _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
            piece += data[offset + 7 : offset + 7 + length]
            offset += 7 + length
            if kind in (1, 4):  # whole, or the last piece
                record, piece = Record.FromString(piece), b""
                identity = record.run.run_id or identity
                items = record.history.item
                rows += [{"/".join(i.nested_key) or i.key: i.value_json for i in items}] if items else []  # fmt: skip
        histories.append((identity, rows))
    return histories


def test_trackio_goes_on_in_the_same_run(tmp_path):
    code = (
        "from trackio.sqlite_storage import SQLiteStorage as s\n"
        "(name,) = s.get_runs('sums')\n"
        "print(json.dumps([name, s.get_logs('sums', name)]))"
    )
    output = run_child("trackio", tmp_path, code, TRACKIO_DIR=str(tmp_path / "trackio"))
    name, rows = json.loads(output.splitlines()[-1])
    assert name == f"demo-{run_id(tmp_path / 'run')}"
    steps = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert steps == REWARDS_OF_TWO_STARTS
    tables = [row["samples/sums"]["_value"] for row in rows if "samples/sums" in row]
    assert tables == [[ROW], [{**ROW, "step": 2}]]
    assert sum("report" in row for row in rows) == 2


def test_mlflow_goes_on_in_the_same_run(tmp_path):
    code = (
        "from mlflow.tracking import MlflowClient\n"
        "client = MlflowClient()\n"
        "(run,) = client.search_runs([client.get_experiment_by_name('sums').experiment_id])\n"
        "i = run.info.run_id\n"
        "history = [(m.step, m.value) for m in client.get_metric_history(i, 'reward/mean')]\n"
        "files = [a.path for f in ('samples/sums', 'figures') for a in client.list_artifacts(i, f)]\n"
        "print(json.dumps([run.info.run_name, run.info.status, run.data.params, history, files]))"
    )
    uri = f"file:{tmp_path / 'mlruns'}"
    output = run_child("mlflow", tmp_path, code, MLFLOW_TRACKING_URI=uri, MLFLOW_ALLOW_FILE_STORE="true")  # fmt: skip
    name, status, params, history, files = json.loads(output.splitlines()[-1])
    assert (name, status, params["run.seed"]) == ("demo", "FINISHED", "7")
    assert sorted(map(tuple, history)) == REWARDS_OF_TWO_STARTS
    steps = ["samples/sums/step_000000.json", "samples/sums/step_000002.json"]
    assert sorted(files) == ["figures/report.png", *steps]


# --- names


def test_a_run_begun_anew_is_another_run(tmp_path):
    first = run_id(tmp_path)
    assert run_id(tmp_path) == first
    set_aside(tmp_path, rollouts=True)
    assert run_id(tmp_path) != first


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["wanbd"], "unknown tracker 'wanbd'; there are mlflow, tensorboard, trackio, wandb"),
        (["tensorboard", "tensorboard"], "got 'tensorboard' twice"),
        (["no_such:Tracker"], "'no_such:Tracker' can't be imported: No module named 'no_such'"),
        (["json:Tracker"], "has no attribute 'Tracker'"),
        (["..json:JSONEncoder"], "..json:JSONEncoder"),
        (["string:digits"], "string:digits"),
        (["os:fspath"], "os:fspath"),
        (["json:JSONEncoder"], "json:JSONEncoder"),
        ([f"{BROKEN}:X"], f"{BROKEN}:X' can't be imported: KeyError: 'planted'"),
        (["wandb"], r"needs the package wandb, .* pip install 'megatron-dppo\[wandb\]'"),
    ],
)
def test_a_name_that_is_none_is_refused(names, complaint):
    with pytest.raises(ValueError, match=complaint):
        find_trackers(names)


def test_a_start_is_refused_over_a_missing_package(tmp_path):
    from megatron_dppo.config import ConfigError
    from megatron_dppo.launch.library_checks import check_everything

    config = TrainConfig.model_validate(minimal(tmp_path) | {"tracking": {"trackers": ["trackio"]}})
    with pytest.raises(ConfigError, match=mentioning("tracking.trackers", "'trackio'")):
        check_everything(config, "c.yaml", weights=False)


def test_an_installed_package_may_bring_one(tmp_path, monkeypatch):
    installed = tmp_path / "mine-1.0.dist-info"
    installed.mkdir()
    entry = f"[{plugins.TRACKERS}]\nmine = planted_tracker:Mine\n"
    (installed / "entry_points.txt").write_text(entry)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    methods = "\n    def start(self, run): ...\n    def scalars(self, step, values): ...\n"
    (tmp_path / "planted_tracker.py").write_text(f"class Mine:{methods}")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_trackers(["mine"])["mine"].__name__ == "Mine"
    with pytest.raises(ValueError, match="mine, mlflow, tensorboard"):
        find_trackers(["another"])


def test_tensorboard_alone_is_the_default():
    assert TrackingConfig().trackers == ["tensorboard"]


# --- failures


class RecordingTracker:
    """Records its calls; fails in the first ``bad_starts`` starts and in ``scalars`` of the steps in ``bad_steps``."""

    latest: "RecordingTracker"
    bad_starts = 0
    bad_steps = frozenset()

    def __init__(self):
        self.calls = []

    def start(self, run):
        RecordingTracker.latest = self
        if RecordingTracker.bad_starts:
            RecordingTracker.bad_starts -= 1
            raise OSError("no network")

    def scalars(self, step, values):
        if step in self.bad_steps:
            raise RuntimeError("503")
        self.calls.append(step)

    def samples(self, step, samples): ...

    def figure(self, name, path): ...

    def finish(self):
        self.calls.append("finished")


def test_what_fails_is_counted_and_told_of_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(RecordingTracker, "bad_steps", frozenset({1, 3}))
    with (
        caplog.at_level(logging.WARNING),
        Trackers({"mine": RecordingTracker}, tracked_run(tmp_path)) as run_trackers,
    ):
        for step in range(5):
            run_trackers.scalars(step, {})
    assert RecordingTracker.latest.calls == [0, 2, 4, "finished"]
    assert run_trackers.lost() == {"mine": 2}
    first, last = [record.getMessage() for record in caplog.records]
    assert mentions(first, "mine", "RuntimeError: 503", "metrics.jsonl")
    assert mentions(last, "mine", 2)


def test_a_start_that_failed_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(RecordingTracker, "bad_starts", 2)
    with Trackers({"mine": RecordingTracker}, tracked_run(tmp_path)) as run_trackers:
        run_trackers.scalars(0, {})
        run_trackers.scalars(1, {})
    # Two calls are lost with the two failed starts: the opening call, and step 0.
    assert (run_trackers.lost(), RecordingTracker.latest.calls) == ({"mine": 2}, [1, "finished"])


def test_one_that_hangs_neither_stalls_nor_grows(tmp_path, caplog, monkeypatch):
    released = threading.Event()

    class HangingTracker(RecordingTracker):
        def start(self, run):
            released.wait(60)

    monkeypatch.setattr(trackers, "FINISH_S", 0.2)
    run_trackers = Trackers({"mine": HangingTracker}, tracked_run(tmp_path), longest_queue=3)
    for step in range(100):
        run_trackers.scalars(step, {})
    run_trackers.close()
    # The thread has at most the opening call. The queue has at most three calls, one of which may be the end mark. All
    # other calls are lost.
    assert 97 <= run_trackers.lost()["mine"] <= 101
    assert mentions(caplog.text, 3, "wait")
    assert "still at work after 0 s, and left behind" in caplog.text
    released.set()


def test_values_are_those_of_the_call(tmp_path):
    seen = []

    class ValueRecorder(RecordingTracker):
        def scalars(self, step, values):
            seen.append(dict(values))

    with Trackers({"mine": ValueRecorder}, tracked_run(tmp_path)) as run_trackers:
        values = {"reward/mean": 0.5}
        run_trackers.scalars(0, values)
        values["reward/mean"] = 0.25
    assert seen == [{"reward/mean": 0.5}]
