"""The real loop: Megatron-Core in two processes, the SGLang server, verified weights, and faults of all of them."""

import json
import shutil
import signal
import socket
import stat
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dppo.data.batch_file import SavedBatch, load_batch
from megatron_dppo.diagnostics.doctor.__main__ import main as doctor
from megatron_dppo.fleet.record import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from megatron_dppo.metrics.records import BATCH_FILES
from megatron_dppo.system.lease import LeaseFiles
from tests.integration.runs import GROUP, PROMPTS, TrainingRun, records_of, steps_of, summary_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def assert_every_response_counted_once(directory: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        keys = [(r.problem_id, r.sample_index) for r in load_batch(directory / "rollouts", step)]
        assert len(keys) == len(set(keys)) == PROMPTS * GROUP


def listening(run: TrainingRun) -> set[str]:
    """Return the addresses that the run's processes listen on."""
    found = [c for process in run.family() for c in process.net_connections("tcp")]
    return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}


def private_places(run: TrainingRun) -> dict[Path, int]:
    """Return the files of the run's processes in temporary folders and shared memory, with their permissions."""
    pids = {process.pid for process in run.family()}
    found = [
        path
        for base in (tempfile.gettempdir(), "/dev/shm")
        for path in Path(base).glob("*mdppo-*")
        if int(path.name.split("-")[3]) in pids
    ]
    inside = [path for folder in found if folder.is_dir() for path in folder.iterdir()]
    return {path: stat.S_IMODE(path.stat().st_mode) for path in [*found, *inside]}


@pytest.fixture(scope="module")
def disturbed_run(config):
    """A run of four steps, whose engine is killed while it generates for the third step."""
    keys = {API_KEY_VARIABLE: "api-key-of-the-run", ADMIN_KEY_VARIABLE: "admin-key-of-the-run"}
    # Responses of 160 tokens take seconds.
    run: Any = TrainingRun(config, "rollout.max_response_tokens=160", variables=keys)
    run.keys = list(keys.values())
    with run:
        run.wait_for_step(1)
        run.listening, run.private = listening(run), private_places(run)
        server = run.find("launch_server")
        run.wait_for_step(2)
        time.sleep(0.3)
        signalled = time.monotonic()
        server.send_signal(signal.SIGKILL)
        run.finish()
        run.seconds = time.monotonic() - signalled
    return run


@pytest.mark.first
def test_a_killed_engine_is_replaced_and_the_run_completes(disturbed_run):
    assert steps_of(disturbed_run.directory) == [0, 1, 2, 3, 4]
    assert "restart 1 of 3" in disturbed_run.text
    assert "engine restored at weight version 2" in disturbed_run.text
    assert_every_response_counted_once(disturbed_run.directory, 4)


@pytest.mark.first
def test_the_facts_of_the_run_are_in_its_folder(disturbed_run):
    facts = json.loads((disturbed_run.directory / "spec.json").read_text())
    assert facts["roles"]["ranks"] == 2
    assert facts["servers"]["started"] == 1
    (options,) = disturbed_run.directory.glob("logs/engine0-1.yaml")
    passed = json.loads(options.read_text())
    shared = {name.replace("_", "-"): v for name, v in facts["servers"]["options"].items()}
    assert passed.items() >= shared.items()


@pytest.mark.first
def test_it_is_out_of_reach_of_others_and_leaves_nothing_behind(disturbed_run):
    assert disturbed_run.listening == {"127.0.0.1"}
    in_folders = [p for p in disturbed_run.private if p.parent.name.startswith("mdppo-")]
    assert len(in_folders) > 4
    assert {mode & 0o077 for mode in disturbed_run.private.values()} == {0}
    assert not [path for path in disturbed_run.private if path.exists()]
    files = [path for path in disturbed_run.directory.rglob("*") if path.is_file()]
    for path in files:
        content = path.read_bytes()
        assert not [key for key in disturbed_run.keys if key.encode() in content], path


@pytest.mark.first
def test_every_weight_update_was_verified(disturbed_run):
    summary = summary_of(disturbed_run.directory)
    assert summary["steps"] == 4
    assert summary["weight_updates"] == summary["weight_updates_verified"] == 4 + 1 + 1
    versions = {
        span.weight_version
        for r in load_batch(disturbed_run.directory / "rollouts", 4)
        for span in r.version_spans
    }
    assert versions == {3}


@pytest.mark.first
def test_trainer_engine_and_export_agree(disturbed_run):
    summary = summary_of(disturbed_run.directory)
    assert summary["mean_abs_prob_gap"] <= 1e-4
    assert summary["hf_export_max_logprob_diff"] <= 1e-4
    assert (disturbed_run.directory / "report.png").stat().st_size > 10_000
    assert list((disturbed_run.directory / "tensorboard").iterdir())
    assert {"generate", "train", "sync"} <= set(summary["seconds_per_phase"])


def test_a_run_outlives_a_rank_and_a_server_until_ctrl_c(config, tmp_path):
    """Trainer and server take turns on the same devices. A rank is killed, and later the server, in whatever turn.

    There is no checkpoint, so the new ranks repeat every step, from the responses that were kept.
    """
    directory = tmp_path / "killed"
    overrides = (
        *(f"run.directory={directory}", "run.steps=40", "evaluation.every=40"),
        *("engine.placement=colocated", "rollout.max_staleness=1", "rollout.interrupt=retract"),
        "checkpoint.every=40",
    )
    with TrainingRun(config, *overrides) as run:
        run.wait_for_step(3)
        server, killed = run.find("launch_server"), run.rank(1)
        killed.send_signal(signal.SIGKILL)
        died = time.monotonic()
        before = records_of(directory)
        weights = weights_of(directory)
        run.wait_for(lambda: "repeating" in run.text)
        assert "rank 1 was killed by SIGKILL" in run.text
        run.wait_for_step(len(before))
        print(f"first step {time.monotonic() - died:.1f} s after the death of a rank")
        assert run.text.count("bit for bit") >= 3
        assert weights.items() <= weights_of(directory).items()
        assert records_of(directory)[: len(before)] == before
        assert server.is_running()
        assert run.rank(1) != killed
        server.send_signal(signal.SIGKILL)
        run.wait_for_step(len(before) + 2)
        run.interrupt()
        run.finish(code=130, timeout=60)
        assert run.text.count("restart 1 of 3") == 2
        assert "the same command resumes after step" in run.text
    recorded = steps_of(directory)
    assert recorded == list(range(len(recorded)))
    saved = sorted((directory / "checkpoints").iterdir())
    assert saved[-1].name == f"step_{recorded[-1]:06d}"
    assert_every_response_counted_once(directory, recorded[-1])


def weights_of(directory: Path) -> dict[str, str]:
    """Return the hash of each step's new weights, by the name of the step's saved batch."""
    paths = sorted((directory / "rollouts").glob(BATCH_FILES))
    seals = {path.name: SavedBatch(path.parent, int(path.stem[5:])).seal for path in paths}
    return {name: seal.weights[seal.step] for name, seal in seals.items()}


def test_a_batch_that_stops_a_run_is_kept_for_the_doctor(config, tmp_path):
    """The limit is too low, so nothing is wrong with the batch."""
    directory, figures = tmp_path / "refused", tmp_path / "figures.json"
    with TrainingRun(config, f"run.directory={directory}", "rollout.largest_gap=1e-12") as run:
        run.finish(code=1)
        assert "GapError" in run.text
    assert doctor([str(directory), "--json", str(figures)]) == 0
    sides = {side["side"]: side["axis"] for side in json.loads(figures.read_text())["sides"]}
    assert sides == {"engine": "healthy", "trainer": "healthy"}


def test_a_run_that_another_start_took_over_changes_nothing_more(config, tmp_path):
    directory = tmp_path / "fenced"
    with TrainingRun(config, f"run.directory={directory}", "run.steps=40") as run:
        run.wait_for_step(2)
        files = LeaseFiles(directory)
        files.install(replace(files.holder(), nonce="2" * 16, host="b", pid=88))
        left = steps_of(directory), sorted((directory / "rollouts").iterdir())
        run.finish(code=1, timeout=60)
        assert "another start of this run took over: process 88 on b" in run.text
        assert "Traceback" not in run.text
    assert (steps_of(directory), sorted((directory / "rollouts").iterdir())) == left
    assert [
        p for p in (directory / "checkpoints").iterdir() if int(p.name[5:11]) > left[0][-1]
    ] == []


def test_ctrl_c_while_the_engine_starts_is_a_clean_stop(config, tmp_path):
    # So many steps that the run does not end before the signal, however late the signal is.
    overrides = (f"run.directory={tmp_path / 'early'}", "run.steps=1000")
    with TrainingRun(config, *overrides) as run:
        run.wait_for(lambda: "starting the engine and" in run.text)
        run.interrupt()
        run.finish(code=130, timeout=60)
        assert "Traceback" not in run.text


def test_ctrl_c_while_the_run_waits_for_a_server_elsewhere_is_a_clean_stop(config, tmp_path):
    # The port is held, and nobody listens on it: the run waits until the signal.
    with socket.socket() as silent_server:
        silent_server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent_server.getsockname()[1]}"
        overrides = (f"run.directory={tmp_path / 'waiting'}", f"engine.urls=['{url}']")
        with TrainingRun(config, *overrides) as run:
            run.wait_for(lambda: "waiting for the engine" in run.text)
            run.interrupt()
            run.finish(code=130, timeout=60)
            assert "Traceback" not in run.text


@pytest.mark.first
def test_another_algorithm_does_not_continue_a_run(config, disturbed_run):
    overrides = (f"run.directory={disturbed_run.directory}", "algorithm.name=grpo", "run.steps=5")
    with TrainingRun(config, *overrides) as run:
        run.finish(code=2)
        assert "algorithm.name: 'dppo-binary-tv' there, 'grpo' now" in run.text


@pytest.mark.first
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(config, disturbed_run, tmp_path):
    """Both train on the rollouts of ``disturbed_run``: 4 steps at once, or 2 steps and 2 more in a new process."""
    common = (f"rollout.replay_from={disturbed_run.directory}/rollouts", "algorithm.name=pg-is")
    directories = {}
    for name, parts in {"whole": (4,), "halves": (2, 4)}.items():
        directories[name] = tmp_path / name
        for steps in parts:
            overrides = (*common, f"run.directory={directories[name]}", f"run.steps={steps}")
            with TrainingRun(config, *overrides) as run:
                run.finish()
    weights = [(d / "hf" / "model.safetensors").read_bytes() for d in directories.values()]
    assert weights[0] == weights[1]
    losses = [[r.get("optimizer/grad_norm") for r in records_of(d)] for d in directories.values()]
    assert losses[0] == losses[1]
    check_that_another_start_model_is_refused(config, directories["whole"], tmp_path, *common)


def check_that_another_start_model_is_refused(
    config, directory: Path, tmp_path: Path, *common: str
) -> None:
    """Assert that a run does not continue with a copy of its start model in which one bit is flipped."""
    model = config.parent / "model"
    other = tmp_path / "model"
    shutil.copytree(model, other)
    content = bytearray((other / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (other / "model.safetensors").write_bytes(content)
    left = steps_of(directory)
    words = (*common, f"run.directory={directory}", f"model.hf_checkpoint={other}", "run.steps=5")
    with TrainingRun(config, *words) as run:
        run.finish(code=1)
        rank_output = "".join(path.read_text() for path in (directory / "logs").glob("rank*.out"))
        assert (
            "begun with other files (model.hf_checkpoint/model.safetensors: its SHA-256"
            in rank_output
        )
    assert steps_of(directory) == left
