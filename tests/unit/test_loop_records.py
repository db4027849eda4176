"""What a run remembers and tells, without a trainer or an engine."""

import json

import pytest

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.loop.recorder import Recorder, RecordingError
from megatron_dppo.loop.state import ResumeError, RunState, identity_of
from megatron_dppo.metrics.records import RecordsError
from megatron_dppo.system.fence import FencedError
from tests.unit.config_files import minimal


def config(tmp_path, **run) -> TrainConfig:
    tree = minimal(tmp_path)
    tree["run"] = {"directory": str(tmp_path), "steps": 2, **run}
    tree["data"]["evaluation"] = {"sums": "x.jsonl"}
    return TrainConfig.model_validate(tree)


def test_a_step_is_recorded_with_its_weight_version(tmp_path):
    with Recorder(config(tmp_path), 0, 0) as recorder:
        recorder.write(0, {})
        recorder.write(1, {"loss/mean": 0.5})
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert (record["step"], record["weight_version"], record["loss/mean"]) == (1, 1, 0.5)


def test_updates_of_a_resumed_start_are_counted_in_the_next_record(tmp_path):
    with Recorder(config(tmp_path), 0, 1) as recorder:
        recorder.carry_over({"weights/updates": 2, "weights/verified": 1, "weights/bytes": 9})
        recorder.write(2, {"weights/updates": 1, "weights/verified": 1})
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["weights/updates"], record["weights/verified"]) == (3, 2)
    assert "weights/bytes" not in record


def test_an_evaluation_that_a_stop_prevented_is_made_up(tmp_path):
    settings = config(tmp_path)
    with Recorder(settings, 0, 0) as recorder:
        recorder.write(0, {"evaluation/sums/accuracy": 0.25})
        recorder.write(2, {"weights/updates": 1, "policy/kl": float("nan")})
    with Recorder(settings, 0, 2) as recorder:
        assert recorder.lacks_last_evaluation()
        recorder.complete({"weights/updates": 1, "evaluation/sums/accuracy": 0.5})
        assert not recorder.lacks_last_evaluation()
    first, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["evaluation/sums/accuracy"] == 0.25
    assert last["evaluation/sums/accuracy"] == 0.5
    assert last["weights/updates"] == 2
    assert last["policy/kl"] is None


def test_a_fenced_start_records_nothing(tmp_path):
    fenced = []

    def fence() -> None:
        if fenced:
            raise FencedError("another start of this run took over")

    settings = config(tmp_path)
    with Recorder(settings, 0, 0, fence=fence) as recorder:
        recorder.write(0, {})
        recorder.write(1, {})
        fenced.append(True)
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        actions = (
            lambda: recorder.write(2, {}),
            lambda: recorder.write_masked_tokens(2, ["never looked at"]),
            lambda: recorder.write_samples(["never looked at"]),
            lambda: recorder.complete({"evaluation/sums/accuracy": 0.5}),
            lambda: recorder.finish(None),
            lambda: Recorder(settings, 0, 1, fence=fence),
        )
        for action in actions:
            with pytest.raises(FencedError):
                action()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_other_ranks_write_nothing(tmp_path):
    with Recorder(config(tmp_path), 1, 0) as recorder:
        recorder.write(0, {})
        assert not recorder.lacks_last_evaluation()
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
    ("key", "value"),
    [
        ("aggregation", "token-mean"),
        ("reference_estimator", "k2"),
        ("reference_importance_weights", True),
        ("reference_kl", 0.25),
        ("truncated_responses", "drop"),
    ],
)
def test_what_the_loss_is_belongs_to_the_identity(tmp_path, key, value, caplog):
    before = config(tmp_path)
    algorithm = before.algorithm.model_copy(update={key: value})
    after = before.model_copy(update={"algorithm": algorithm})
    state = RunState(3, {}, identity_of(before, "abc"))
    with pytest.raises(ResumeError, match=f"algorithm.{key}: .* there, {value!r} now"):
        state.check_identity(identity_of(after, "abc"), "step_3")
    del state.identity[f"algorithm.{key}"]  # as an older version wrote it
    state.check_identity(identity_of(after, "abc"), "step_3")
    assert f"step_3 is of a version that did not record algorithm.{key}={value}" in caplog.text
    assert state.identity == identity_of(after, "abc")


def test_a_state_of_another_version_is_refused():
    assert RunState.from_json(RunState(3, {"a": 1}, {}).to_json()) == RunState(3, {"a": 1}, {})
    with pytest.raises(ResumeError, match="fields"):
        RunState.from_json({"step": 3})


@pytest.mark.parametrize("content", [None, "", '{"step": 0}\n', '{"step": 0'])
def test_a_run_whose_records_are_gone_says_so_and_goes_on(tmp_path, content, caplog):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with Recorder(config(tmp_path), 0, 2) as recorder:
        assert not recorder.lacks_last_evaluation()
        held = 1 if content and content.endswith("\n") else 0
        assert f"metrics.jsonl holds {held} of the 3 records before step 3" in caplog.text
        recorder.finish(None)
    assert "no trained step is recorded" in caplog.text
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "masked_tokens.jsonl"])
@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"[]\n", b"{}\n"])
def test_damaged_records_are_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordsError, match=name) as caught:
        Recorder(config(tmp_path), 0, 2)
    assert len(str(caught.value)) < 500


def test_records_in_the_way_of_a_folder_are_one_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises((RecordingError, RecordsError), match="Is a directory"):
        Recorder(config(tmp_path), 0, 2)
