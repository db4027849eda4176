"""The files of a run's records and the state in its checkpoints, without a trainer or an engine."""

import hashlib
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.loop.inputs import model_files
from megatron_dppo.loop.recorder import Recorder, RecordingError
from megatron_dppo.loop.run_identity import identity_of
from megatron_dppo.loop.run_state import FILES, ResumeError, RunState, settings_of
from megatron_dppo.loop.start_checks import changes_since_checkpoint, check_resume
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import RecordsError, read_records, read_step_lines, step_of
from megatron_dppo.metrics.samples import Sample
from megatron_dppo.metrics.summary import RunInfo
from megatron_dppo.system.files import sha256_of
from megatron_dppo.system.lease import FencedError
from megatron_dppo.trainer.checkpoint.directory import CheckpointDirectory, DamagedCheckpointError
from tests.tiny_models import save_tiny_model
from tests.unit.config_files import minimal_config
from tests.unit.test_batch_file import flipped


def config(tmp_path, **run) -> TrainConfig:
    run = {"directory": str(tmp_path), "steps": 2, **run}
    return minimal_config(tmp_path, run=run, data={"evaluation": {"sums": "x.jsonl"}})


def recorder_of(config: TrainConfig, rank: int, first_step: int, **options) -> Recorder:
    info = RunInfo.of_config(config.model_dump())
    return Recorder(config.run, info, rank, first_step, evaluates=True, **options)


def test_a_step_is_recorded_with_its_weight_version(tmp_path):
    with recorder_of(config(tmp_path), 0, 0) as recorder:
        recorder.write(0, {})
        recorder.write(1, {"loss/mean": 0.5})
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert (record["step"], record["weight_version"], record["loss/mean"]) == (1, 1, 0.5)


def test_a_masked_token_stands_beside_its_text(tmp_path):
    with recorder_of(config(tmp_path), 0, 0, text_of="<{0[0]}>".format) as recorder:
        recorder.write_masked_tokens(1, [{"id": 7, "raised": 0, "lowered": 4}])
    line = json.loads((tmp_path / "masked_tokens.jsonl").read_text())
    token = {"id": 7, "raised": 0, "lowered": 4, "text": "<7>"}
    assert line == {"step": 1, "tokens": [token]}


def test_a_runs_end_names_the_environment_that_failed(tmp_path, caplog):
    """The faults of all starts are counted by reason. Steps that a resumed run repeats count once."""
    name = "games:Chess"
    with recorder_of(config(tmp_path), 0, 0) as recorder:
        recorder.write(1, {names.REWARD: 1.0})
        recorder.write_environment_faults(1, name, Counter({f"{name}: crashed": 2, "too long": 1}))
        recorder.write_environment_faults(2, name, Counter({"too long": 100}))
    with recorder_of(config(tmp_path), 0, 1) as recorder, caplog.at_level("INFO"):
        recorder.write(2, {names.REWARD: 1.0})
        many = Counter({f"reason {i}": 1 for i in range(30)})
        recorder.write_environment_faults(2, name, Counter())
        recorder.write_environment_faults(2, name, Counter({f"{name}: crashed": 38}) + many)
        recorder.finish(None)
    found = json.loads((tmp_path / "summary.json").read_text())["environment_faults"]
    assert [fault["environment"] for fault in found] == [name] * len(found)
    counts = {fault["reason"]: fault["count"] for fault in found}
    listed_reasons = {f"reason {i}": 1 for i in range(19)}
    assert counts == {"crashed": 40, "other reasons": 11, "too long": 1, **listed_reasons}
    assert found[0]["reason"] == "crashed"
    *_, warning, last_line = [record.getMessage() for record in caplog.records]
    assert warning == (
        "the environment games:Chess failed 71 times, most often (40 times): crashed; "
        f"all reasons are in {tmp_path}/summary.json"
    )
    assert last_line.startswith("done: 2 steps")


def test_updates_of_a_resumed_start_are_counted_in_the_next_record(tmp_path):
    with recorder_of(config(tmp_path), 0, 1) as recorder:
        recorder.carry_over({"weights/updates": 2, "weights/verified": 1, "weights/bytes": 9})
        recorder.write(2, {"weights/updates": 1, "weights/verified": 1})
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["weights/updates"], record["weights/verified"]) == (3, 2)
    assert "weights/bytes" not in record


def test_an_evaluation_that_a_stop_prevented_is_made_up(tmp_path):
    settings = config(tmp_path)
    with recorder_of(settings, 0, 0) as recorder:
        recorder.write(0, {"evaluation/sums/accuracy": 0.25})
        recorder.write(2, {"weights/updates": 1, "policy/kl": float("nan")})
    with recorder_of(settings, 0, 2) as recorder:
        assert recorder.lacks_evaluation(since=2)
        recorder.complete(2, {"weights/updates": 1, "evaluation/sums/accuracy": 0.5})
        assert not recorder.lacks_evaluation(since=2)
    first, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["evaluation/sums/accuracy"] == 0.25
    assert last["evaluation/sums/accuracy"] == 0.5
    assert last["weights/updates"] == 2
    assert last["policy/kl"] is None


def test_a_later_evaluation_shows_at_its_step_everywhere(tmp_path, capsys):
    with recorder_of(config(tmp_path), 0, 0) as recorder:
        recorder.write(1, {names.REWARD: 0.125})
        recorder.complete(1, {"evaluation/sums/accuracy": 0.5})
        recorder.write(2, {names.REWARD: 0.25})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["1/2", "0.125"], ["1/2", "0.500"], ["2/2", "0.250"]]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (accuracy,) = events.Scalars("evaluation/sums/accuracy")
    assert (accuracy.step, accuracy.value) == (1, 0.5)
    assert [event.step for event in events.Scalars(names.REWARD)] == [1, 2]


@pytest.mark.parametrize(
    ("evaluated", "first_step", "since", "lacks"),
    [
        ([0], 2, 2, True),
        ([0, 2], 2, 2, False),
        # A stop in step 3 prevented the evaluation that was due after step 2, so step 3 gets one.
        ([0], 3, 2, True),
        ([0, 3], 3, 2, False),
        ([0, 2], 3, 2, False),
        # The record of the step from which the run resumes is gone.
        ([0], 4, 4, False),
    ],
)
def test_a_due_evaluation_that_no_record_has_is_lacking(
    tmp_path, evaluated, first_step, since, lacks
):
    with recorder_of(config(tmp_path), 0, 0) as recorder:
        for step in range(min(first_step, 3) + 1):
            recorder.write(step, EVALUATED if step in evaluated else {"loss/mean": 0.5})
    with recorder_of(config(tmp_path), 0, first_step) as recorder:
        assert recorder.lacks_evaluation(since) == lacks


@pytest.mark.parametrize("remaining", ["", '{"step": 0}\n'])
def test_an_evaluation_whose_record_is_gone_ends_no_run(tmp_path, remaining, caplog):
    with recorder_of(config(tmp_path), 0, 0) as recorder:
        recorder.write(1, {})
        (tmp_path / "metrics.jsonl").write_text(remaining)
        recorder.complete(1, EVALUATED)
    assert "will lack the evaluation of step 1: " in caplog.text
    assert (tmp_path / "metrics.jsonl").read_text() == remaining


def test_a_fenced_start_records_nothing(tmp_path):
    fenced = []

    def fence() -> None:
        if fenced:
            raise FencedError("another start of this run took over")

    def contents() -> dict[Path, bytes]:
        # TensorBoard's files are left out: its writer thread may still write earlier rows.
        files = (p for p in tmp_path.rglob("*") if p.is_file() and "tfevents" not in p.name)
        return {p: p.read_bytes() for p in files}

    settings = config(tmp_path)
    with recorder_of(settings, 0, 0, fence=fence) as recorder:
        recorder.write(0, {})
        recorder.write(1, {})
        fenced.append(True)
        before = contents()
        actions = (
            lambda: recorder.write(2, {}),
            lambda: recorder.write_masked_tokens(2, []),
            lambda: recorder.write_samples([]),
            lambda: recorder.complete(1, {"evaluation/sums/accuracy": 0.5}),
            lambda: recorder.finish(None),
            lambda: recorder_of(settings, 0, 1, fence=fence),
        )
        for action in actions:
            with pytest.raises(FencedError):
                action()
    assert contents() == before
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("weight_version")] == [0, 1]


def test_other_ranks_write_nothing(tmp_path):
    with recorder_of(config(tmp_path), 1, 0) as recorder:
        recorder.write(0, {})
        assert not recorder.lacks_evaluation(since=0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_checkpoint_of_another_run_is_refused_with_every_difference(tmp_path):
    state = RunState(3, {}, identity_of(config(tmp_path), "abc"))
    state.check_identity(identity_of(config(tmp_path), "abc"), "step_3")
    with pytest.raises(ResumeError) as caught:
        state.check_identity(identity_of(config(tmp_path, seed=9), "xyz"), "step_3")
    assert "step_3 belongs to another run" in str(caught.value)
    assert "data.train (SHA-256): 'abc' there, 'xyz' now; run.seed: 1 there, 9 now" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("algorithm", "aggregation", "token-mean"),
        ("algorithm", "reference_estimator", "k2"),
        ("algorithm", "reference_importance_weights", True),
        ("algorithm", "reference_kl", 0.25),
        ("algorithm", "truncated_responses", "drop"),
        ("data", "chat_template_arguments", {"enable_thinking": False}),
    ],
)
def test_a_change_of_the_loss_or_of_the_prompts_is_another_run(tmp_path, section, key, value):
    before = config(tmp_path)
    changed = getattr(before, section).model_copy(update={key: value})
    after = before.model_copy(update={section: changed})
    identity = identity_of(before, "abc")
    # Checkpoints of runs without arguments of the chat template do not have their key.
    assert "data.chat_template_arguments" not in identity
    words = f"{section}.{key}: .* there, {re.escape(repr(value))} now"
    with pytest.raises(ResumeError, match=words):
        RunState(3, {}, identity).check_identity(identity_of(after, "abc"), "step_3")


def test_a_state_of_another_version_is_refused():
    assert RunState.from_json(RunState(3, {"a": 1}, {}).to_json()) == RunState(3, {"a": 1}, {})
    with pytest.raises(ResumeError, match="fields"):
        RunState.from_json({"step": 3})


def test_a_state_of_before_weights_and_settings_were_kept_is_read(tmp_path):
    values = RunState(3, {"a": 1}, {}).to_json()
    del values["weights"], values["settings"]
    state = RunState.from_json(values)
    state.check_weights("form", "any", tmp_path)
    assert state.changed_settings(settings_of(config(tmp_path))) == []


def test_a_list_of_tables_is_unchanged_whatever_the_order_of_their_keys():
    state = RunState(3, settings={"data": {"train": [{"answer": "a", "path": "b"}]}})
    assert state.changed_settings({"data": {"train": [{"path": "b", "answer": "a"}]}}) == []
    assert state.changed_settings({"data": {"train": [{"path": "c", "answer": "a"}]}}) == [
        'data.train: [{"answer": "a", "path": "b"}] there, [{"answer": "a", "path": "c"}] now'
    ]


def test_a_state_knows_its_weights(tmp_path):
    state = RunState(3, weights={"form": "those"})
    state.check_weights("form", "those", tmp_path)
    state.check_weights("another layout's", "others", tmp_path)
    with pytest.raises(DamagedCheckpointError, match="others"):
        state.check_weights("form", "others", tmp_path)


def test_a_resume_lists_what_changed_and_what_the_identity_lets_pass(saved_run):
    settings, state, _ = saved_run
    assert changes_since_checkpoint(settings) is None
    new_settings = settings.model_copy(
        update={
            "rollout": settings.rollout.model_copy(update={"group_size": 16}),
            "optimizer": settings.optimizer.model_copy(update={"lr": 0.125}),
            "run": settings.run.model_copy(update={"resume": "required"}),
            "environment": settings.environment.model_copy(update={"options": {"depth": 2}}),
        }
    )
    check_resume(new_settings, "abc")
    rollout, lr = settings.rollout.group_size, settings.optimizer.lr
    assert state.changed_settings(settings_of(new_settings)) == [
        "environment.options.depth: not set there, 2 now",
        f"optimizer.lr: {lr!r} there, 0.125 now",
        f"rollout.group_size: {rollout!r} there, 16 now",
    ]
    changes = changes_since_checkpoint(new_settings)
    assert changes is not None
    assert "rollout.group_size" in changes


def record_steps(tmp_path, values, upto: int = 2) -> dict:
    """Record the steps 0 .. ``upto``, and return the mark for a checkpoint of the last one."""
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    with recorder_of(config(tmp_path, steps=9), 0, 0) as recorder:
        for step in range(upto + 1):
            recorder.write(step, {"loss/mean": 0.5 + step, **values})
        return recorder.mark(upto)


def log_of_resume(tmp_path, mark, caplog) -> str:
    caplog.clear()
    with recorder_of(config(tmp_path, steps=9), 0, mark["step"], mark=mark):
        return caplog.text


EVALUATED = {names.accuracy("sums"): 0.25}


def test_altered_records_are_told_on_resuming_and_whole_ones_are_not(tmp_path, caplog):
    mark = record_steps(tmp_path, EVALUATED)
    assert mark["step"] == 2
    assert "was altered" not in log_of_resume(tmp_path, mark, caplog)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    reported = 0
    for bit in random.Random(1).sample(range(8 * len(content)), 60):
        path.write_bytes(flipped(content, bit))
        has_same_values = _values(path) == [json.loads(line) for line in content.splitlines()]
        try:
            text = log_of_resume(tmp_path, mark, caplog)
        except RecordsError:
            reported += 1
            continue
        assert has_same_values or "was altered since the checkpoint" in text or "holds" in text, bit
        reported += "was altered" in text
    assert reported > 50


def _values(path) -> list | None:
    try:
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    except ValueError:
        return None


def test_a_last_record_that_may_still_get_its_evaluation_is_left_out(tmp_path, caplog):
    mark = record_steps(tmp_path, {})
    assert mark["step"] == 1
    with recorder_of(config(tmp_path), 0, 2, mark=mark) as recorder:
        recorder.complete(2, EVALUATED)
    assert "was altered" not in log_of_resume(tmp_path, mark, caplog)


def test_a_save_does_not_fail_over_records_that_are_gone(tmp_path, caplog):
    with recorder_of(config(tmp_path), 0, 0) as recorder:
        recorder.write(0, EVALUATED)
        (tmp_path / "metrics.jsonl").unlink()
        recorder.write(1, EVALUATED)
        mark = recorder.mark(1)
    assert "was altered" in log_of_resume(tmp_path, mark, caplog)


def test_the_hash_of_a_checkpoint_is_that_of_the_records_in_the_file(tmp_path):
    settings = config(tmp_path, steps=9)
    for first in (0, 3):
        with recorder_of(settings, 0, first) as recorder:
            for step in range(first, first + 3):
                recorder.write(step, {"loss/mean": 0.5 + step, "policy/kl": float("nan")})
                recorder.complete(step, EVALUATED)
                mark = recorder.mark(step)
                present = read_records(tmp_path)
                text = json.dumps(present, sort_keys=True)
                assert mark["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert [step_of(row) for row in present] == [0, 1, 2, 3, 4, 5]


MODEL_FILES = (
    "chat_template.jinja",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)


@pytest.fixture
def saved_run(tmp_path):
    """Save those parts of a checkpoint of step 2 that a start reads before any rank runs.

    Returns the run's configuration, the checkpoint's state, and the folder of the start model.
    """
    settings = config(tmp_path)
    folder = Path(settings.model.hf_checkpoint)
    save_tiny_model(folder, "qwen3_moe")
    files = {
        name: sha256_of(path)
        for name, path in model_files(settings.model.hf_checkpoint, None).items()
    }
    identity = {**identity_of(settings, "abc"), FILES: files}
    state = RunState(2, {}, identity, settings=settings_of(settings))
    folders = CheckpointDirectory(tmp_path / "checkpoints", 2)
    new_checkpoint = folders.begin(2)
    folders.publish(
        new_checkpoint, {"files": {}, "state": state.to_json(), "serial": new_checkpoint.serial}
    )
    return settings, state, folder


@pytest.mark.parametrize("name", MODEL_FILES)
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_of_the_start_model_is_refused_by_the_files_name(saved_run, name, seed):
    settings, state, folder = saved_run
    path = folder / name
    content = path.read_bytes()
    check_resume(settings, "abc")
    path.write_bytes(flipped(content, random.Random(seed).randrange(8 * len(content))))
    if name != "model.safetensors":  # the ranks check the weights, in the background
        with pytest.raises(ResumeError, match=f"model.hf_checkpoint/{name}: "):
            check_resume(settings, "abc")
    files = {
        name: sha256_of(path)
        for name, path in model_files(settings.model.hf_checkpoint, None).items()
    }
    with pytest.raises(ResumeError, match=f"model.hf_checkpoint/{name}: "):
        state.check_files(files, "step_2")


def test_a_file_that_came_or_went_is_told_and_texts_for_people_are_not(saved_run):
    settings, _, folder = saved_run
    (folder / "README.md").write_text("about")
    (folder / ".cache").mkdir()
    check_resume(settings, "abc")
    (folder / "added_tokens.json").write_text("another")
    with pytest.raises(ResumeError, match=r"model.hf_checkpoint/added_tokens.json"):
        check_resume(settings, "abc")
    (folder / "added_tokens.json").unlink()
    (folder / "generation_config.json").unlink()
    with pytest.raises(ResumeError, match=r"model.hf_checkpoint/generation_config.json"):
        check_resume(settings, "abc")


@pytest.mark.parametrize("content", [None, "", '{"step": 0}\n', '{"step": 0'])
def test_a_run_whose_records_are_gone_says_so_and_goes_on(tmp_path, content, caplog):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with recorder_of(config(tmp_path), 0, 2) as recorder:
        assert not recorder.lacks_evaluation(since=0)
        count = 1 if content and content.endswith("\n") else 0
        assert f"metrics.jsonl holds {count} of the 3 records before step 3" in caplog.text
        recorder.finish(None)
    assert "no trained step is recorded" in caplog.text
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "masked_tokens.jsonl"])
@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"[]\n", b"{}\n"])
def test_damaged_records_are_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordsError, match=name) as caught:
        recorder_of(config(tmp_path), 0, 2)
    assert len(str(caught.value)) < 500


def test_records_in_the_way_of_a_folder_are_one_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises((RecordingError, RecordsError), match="Is a directory"):
        recorder_of(config(tmp_path), 0, 2)


@pytest.mark.parametrize("full", ["metrics.jsonl", "samples.jsonl"])
def test_lines_that_a_full_disk_did_not_take_are_written_by_the_start_that_resumes(tmp_path, full):
    """The checkpoint has the lines. However many starts resume from it, each line is written once."""
    settings = config(tmp_path, steps=9)
    response = "not the end of a line: \u2028\x85"
    sample = Sample(1, "training", 2, 0, "p", response, "4", 0.0, "no answer", False, 3)
    with recorder_of(settings, 0, 0) as recorder:
        recorder.write(0, EVALUATED)
        content = (tmp_path / full).read_bytes() if full == "metrics.jsonl" else b""
        (tmp_path / full).unlink(missing_ok=True)
        (tmp_path / full).symlink_to("/dev/full")
        recorder.write_masked_tokens(1, [{"id": 7, "raised": 0, "lowered": 4}])
        recorder.write(1, EVALUATED | {"loss/mean": 0.5})
        recorder.write_samples([sample])
        assert full.split(".")[0] in str(recorder.failure)
        # Half of the line reached the disk.
        (tmp_path / full).unlink()
        (tmp_path / full).write_bytes(content + b'{"step": 1, "lo')
        mark = json.loads(json.dumps(recorder.mark(1)))
    for _ in range(2):
        with recorder_of(settings, 0, 1, mark=mark) as recorder:
            assert [step_of(row) for row in read_records(tmp_path)] == [0, 1]
            assert "unwritten" not in recorder.mark(1)
        (line,) = read_step_lines(tmp_path / "samples.jsonl")
        assert line["step"] == 1
        assert line["response"] == response
        assert len((tmp_path / "masked_tokens.jsonl").read_text().splitlines()) == 1
    with recorder_of(settings, 0, 1, mark=mark) as recorder:
        recorder.write(2, EVALUATED)
    records = read_records(tmp_path)
    assert [step_of(row) for row in records] == [0, 1, 2]
    assert records[1]["loss/mean"] == 0.5


def test_a_write_that_fails_is_kept_for_all_ranks_and_nothing_follows_it(tmp_path):
    """The run still saves a checkpoint before it ends. A line after an incomplete line would damage the file."""
    with recorder_of(config(tmp_path), 0, 0) as recorder:
        recorder.write(0, {})
        samples = tmp_path / "samples.jsonl"
        samples.symlink_to("/dev/full")
        sample = Sample(1, "training", 2, 0, "p", "r", "4", 0.0, "no answer", False, 3)
        recorder.write_samples([sample])
        assert isinstance(recorder.failure, RecordingError)
        assert "samples" in str(recorder.failure)
        recorder.write(1, {})
    assert [step_of(record) for record in read_records(tmp_path)] == [0]
