"""Teachers on real SGLang servers: what they return for given tokens."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.config import load_config, resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.batch_file import SavedBatch, load_batch, save_batch
from megatron_dppo.data.problems import load_tokenizer
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.diagnostics.doctor.__main__ import main as doctor
from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.errors import EngineAnswerError, EngineMismatchError, EngineRequestError
from megatron_dppo.engine.token_scores import ScoredTokens
from megatron_dppo.fleet import teachers
from megatron_dppo.fleet.endpoint import FleetEndpoint, RecordClient
from megatron_dppo.fleet.record import API_KEY_VARIABLE, FleetRecord, Server
from megatron_dppo.fleet.teachers import TeacherClient
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.teachers import Teachers
from megatron_dppo.metrics.records import read_records
from megatron_dppo.spec import RunSpec, TeacherSpec
from megatron_dppo.system.async_runner import AsyncRunner
from tests.integration.kept_fleet import KeptFleet, config_of, kill
from tests.integration.runs import TrainingRun, write_material
from tests.integration.shared_launcher import server_of
from tests.patience import wait_healthy
from tests.tiny_models import save_tiny_model
from tests.unit.small_fleet import KEYS, SmallServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

KEY = "5c0ffee5-teacher"
SEQUENCES = [
    tuple(np.random.default_rng(i).integers(3, 512, size=n).tolist())
    for i, n in enumerate((9, 40, 150))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("teacher") / "model", "qwen3", seed=5)


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The URL of a server of ``model``."""
    # Chunks of 32 tokens: a long sequence is scored in several steps.
    config = config_of(model.parent / "run", model).model_copy(
        update={"sglang": {"chunked_prefill_size": 32}}
    )
    process = server_of(config, model.parent / "server.log", KEY, KEY)
    process.start()
    try:
        wait_healthy(process)
        yield process.url
    finally:
        process.kill()


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with served(model) as url:
        yield url


def answer_to(scored: ScoredTokens, url: str) -> bytes:
    async def ask() -> bytes:
        async with HttpClient(url, KEY) as client:
            return await client.request("POST", "/generate", scored.body())

    with AsyncRunner() as runner:
        return runner.run(ask())


def log_probs_of(reference: PreTrainedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return log p(each token | all tokens before position t), fp64 [S - 1, vocabulary]."""
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0, :-1].double()
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize("start", [1, 5])
@pytest.mark.parametrize("tokens", SEQUENCES, ids=len)
def test_scores_are_the_models_own_log_probabilities(
    url: str, reference: PreTrainedModel, tokens: tuple[int, ...], start: int
) -> None:
    scored = ScoredTokens(tokens, start, top_k=7, vocabulary=512)
    # The second answer comes from a server with these tokens in its prefix cache.
    answers = [scored.read(answer_to(scored, url), url) for _ in range(2)]
    expected = log_probs_of(reference, tokens)[start - 1 :]
    of_tokens = expected.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
    best = expected.topk(7, dim=-1)
    for columns in answers:
        np.testing.assert_allclose(columns["teacher_log_probs"], of_tokens, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(columns["teacher_topk_ids"], best.indices)
        np.testing.assert_allclose(
            columns["teacher_topk_log_probs"], best.values, atol=1e-5, rtol=0
        )


def test_rows_of_other_tokens_are_refused(url: str) -> None:
    """A server that answers for the token before each token, as a fault of one row would, is noticed by its Top-K."""
    tokens = SEQUENCES[2]
    scored = ScoredTokens(tokens, 5, top_k=64, vocabulary=512)
    answer = orjson.loads(answer_to(scored, url))
    meta = answer["meta_info"]
    entries = meta["input_token_logprobs"]
    meta["input_token_logprobs"] = [entries[0], entries[-1], *entries[1:-1]]
    with pytest.raises(EngineAnswerError, match="the rows belong to other tokens"):
        scored.read(orjson.dumps(answer), url)
    meta["input_token_logprobs"] = entries[:-1]
    with pytest.raises(EngineAnswerError, match=f"{len(entries) - 1} log-probabilities, expected"):
        scored.read(orjson.dumps(answer), url)


def test_ids_outside_the_policys_vocabulary_are_left_out(url: str) -> None:
    scored = ScoredTokens(SEQUENCES[1], 5, top_k=20, vocabulary=256)
    columns = scored.read(answer_to(scored, url), url)
    ids = columns["teacher_topk_ids"]
    assert ids.max() < 256
    assert (ids == -1).any()
    assert (columns["teacher_topk_log_probs"][ids == -1] == 0).all()


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with a teacher of another size, "big", and its own start policy as a second one, "same"."""
    folder = tmp_path_factory.mktemp("distillation")
    path = write_material(folder, "qwen3")
    save_tiny_model(folder / "teacher", "qwen3", seed=9, layers=3, hidden=96)
    tree = yaml.safe_load(path.read_text())
    tree["parallel"] = {"world_size": 1}
    tree["run"]["steps"] = 2
    tree["distillation"] = {
        "teachers": {
            "big": {"hf_checkpoint": str(folder / "teacher")},
            "same": {
                "hf_checkpoint": str(folder / "model"),
                "prompt_template": "{prompt} is {answer}; hint: {hint}",
                "max_prompt_tokens": 64,
            },
        },
        "loss": "reverse",
        "top_k": 5,
    }
    lines = (folder / "train.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        metadata = {"teacher": ("big", "same")[number % 2], "hint": f"number {number}"}
        lines[number] = json.dumps(json.loads(line) | {"metadata": metadata})
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    path.write_text(yaml.safe_dump(tree))
    return path


def teacher_prompt(config: TrainConfig, problem: Problem) -> list[int] | None:
    """Return the prompt of the teacher "same" for a problem; None for the problems of "big"."""
    if problem.metadata["teacher"] == "big":
        return None
    text = f"{problem.prompt} is {problem.answer}; hint: {problem.metadata['hint']}"
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_a_run_with_two_teachers(material: Path) -> None:
    """Two steps, the death of a teacher's server, two more: each response has its teacher's own log-probabilities.

    The metrics count the teachers' prompts, not the policy's.
    """
    config = load_config(material)
    folder = material.parent
    with TrainingRun(material, "run.steps=4") as run:
        run.wait_for_step(1)
        run.find("teacher-big-0-1.yaml").kill()
        run.finish()
    assert (run.directory / "logs" / "teacher-big-0-2.log").is_file()
    assert not (run.directory / "logs" / "teacher-same-0-2.log").exists()
    data = RunData(config)
    problems = {problem.problem_id: problem for problem in data.train.problems}
    models = {
        name: AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        for name in ("teacher", "model")
    }
    seen = set()
    scored_tokens = 0
    for step in range(1, 5):
        for response in SavedBatch(run.directory / "rollouts", step).read(range(32)):
            problem = problems[response.problem_id]
            prompt = teacher_prompt(config, problem)
            seen.add(problem.metadata["teacher"])
            reference = models["teacher" if prompt is None else "model"]
            start = len(response.prompt_ids) if prompt is None else len(prompt)
            own_prompt = response.prompt_ids.tolist() if prompt is None else prompt
            tokens = (*own_prompt, *response.response_ids.tolist())
            scored_tokens += len(tokens)
            expected = log_probs_of(reference, tokens)[start - 1 :]
            of_tokens = expected.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
            columns = response.columns
            np.testing.assert_allclose(columns["teacher_log_probs"], of_tokens, atol=1e-5, rtol=0)
            best = expected.topk(5, dim=-1)
            np.testing.assert_allclose(
                columns["teacher_topk_log_probs"], best.values, atol=1e-5, rtol=0
            )
            assert response.stamp is not None
            assert {"teacher_log_probs", "teacher_topk_ids"} <= response.stamp.digests.keys()
    assert seen == {"big", "same"}
    rows = read_records(run.directory)
    counted_tokens = sum(
        row["distillation/tokens_per_second"] * row["distillation/seconds"]
        for row in rows
        if "distillation/seconds" in row
    )
    assert counted_tokens == pytest.approx(scored_tokens)
    replay = f"rollout.replay_from={run.directory / 'rollouts'}"
    with TrainingRun(material, replay, f"run.directory={folder / 'replayed'}") as again:
        again.finish()
    assert not list(again.directory.glob("logs/*teacher*"))
    _check_doctor(run.directory, problems)


def axes_by_doctor(directory: Path, *options: str) -> dict[str, str]:
    """Return the doctor's verdict on each side of the batch of step 1."""
    file = directory / "doctor.json"
    assert (
        doctor([str(directory), "--step", "1", "--limit", "16", "--json", str(file), *options]) == 0
    )
    return {side["side"]: side["axis"] for side in json.loads(file.read_text())["sides"]}


def _check_doctor(directory: Path, problems: dict[int, Problem]) -> None:
    """The doctor finds nothing in a run; in a copy whose scores are moved by a token, it names teacher and tokens."""
    axes = axes_by_doctor(directory)
    assert set(axes.values()) == {"healthy"}
    names = [f"teacher {name}{columns}" for name in ("big", "same") for columns in ("", ", Top-K")]
    assert axes.keys() == {"engine", "trainer", *names}
    assert axes_by_doctor(directory, "--no-teachers").keys() == {"engine", "trainer"}
    moved_run = directory.parent / "moved"
    # The saved scores of "same" belong to the token before each token.
    batch = load_batch(directory / "rollouts", 1)
    for number, response in enumerate(batch):
        if problems[response.problem_id].metadata["teacher"] == "same":
            moved = np.roll(response.column("teacher_log_probs"), 1)
            batch[number] = response.with_columns(teacher_log_probs=moved)
        else:
            # The ids of "big" belong to the token before each token, too.
            ids = np.roll(response.column("teacher_topk_ids"), 1, axis=0)
            batch[number] = response.with_columns(teacher_topk_ids=ids)
    save_batch(moved_run / "rollouts", 1, batch)
    shutil.copy(directory / "config.yaml", moved_run)
    moved_axes = {"teacher same": "tokens", "teacher big, Top-K": "unexplained"}
    assert axes_by_doctor(moved_run) == axes | moved_axes
    sides = json.loads((moved_run / "doctor.json").read_text())["sides"]
    (tokens,) = [side["tokens"] for side in sides if side["side"] == "teacher same"]
    for token in tokens:
        response = batch[token["response"]]
        assert problems[response.problem_id].metadata["teacher"] == "same"
        assert response.response_ids[token["position"]] == token["token_id"]


def _check_branches(
    config: TrainConfig, spec: RunSpec, record: RecordClient, reference: PreTrainedModel
) -> None:
    """An episode of two branches: each is scored as a sequence, and observations between its turns have no row."""
    first, second = SEQUENCES[1], SEQUENCES[0]
    masks = [np.zeros(len(first), bool), np.zeros(len(second), bool)]
    # Two turns of three tokens with an observation between them, and one turn of two.
    masks[0][[10, 11, 12, 20, 21, 22]] = True
    masks[1][[6, 7]] = True
    parts = zip((first, second), masks, strict=True)
    branches = [Trajectory(0, 0, np.array(tokens), mask) for tokens, mask in parts]
    data = RunData(config)
    scores = Teachers(config, spec, data, record, lambda: False, is_leader=True)
    problem = next(p for p in data.train.problems if p.metadata["teacher"] == "big")
    columns = scores.submit(problem, Trajectory.of_branches(branches)).result()
    scores.close()
    expected = [
        float(log_probs_of(reference, tokens)[position - 1, tokens[position]])
        for tokens, mask in zip((first, second), masks, strict=True)
        for position in np.flatnonzero(mask)
    ]
    np.testing.assert_allclose(columns["teacher_log_probs"], expected, atol=1e-5, rtol=0)
    assert columns["teacher_topk_ids"].shape == (8, 5)


def client_of(
    teacher: TeacherSpec, record: RecordClient, config: TrainConfig, *sequences: ScoredTokens
) -> TeacherClient:
    return TeacherClient(config, teacher, record, sequences, lambda: False)


def test_servers_of_a_teacher_are_followed_and_checked(material: Path, url: str) -> None:
    """A killed server's calls wait for its next start. A server of another checkpoint is refused at the start."""
    config = load_config(material, ["engine.servers=0", "engine.max_restarts=3"])
    spec = RunSpec.of_checked(config)
    teacher = next(t for t in spec.teachers if t.name == "big")
    reference = AutoModelForCausalLM.from_pretrained(
        material.parent / "teacher", dtype=torch.float32
    ).eval()
    tokens = ScoredTokens(SEQUENCES[1], 5, top_k=3, vocabulary=512)
    expected = log_probs_of(reference, SEQUENCES[1])[4:]
    of_tokens = expected.gather(1, torch.tensor(SEQUENCES[1][5:])[:, None])[:, 0]

    with KeptFleet(config) as fleet, AsyncRunner() as runner:
        client = client_of(teacher, fleet.record, config, tokens, tokens)
        runner.run(client.check())
        first = next(s for s in fleet.record.teachers() if s.teacher == "big")
        # A teacher's servers never become servers of the policy.
        assert fleet.record.servers() == []
        _check_branches(config, spec, fleet.record, reference)
        kill(first)
        columns = runner.run(client.score(tokens))
        np.testing.assert_allclose(columns["teacher_log_probs"], of_tokens, atol=1e-5, rtol=0)
        second = next(s for s in fleet.record.teachers() if s.teacher == "big")
        assert second.incarnation == 2
        refused = replace(tokens, token_ids=SEQUENCES[2] * 20)
        with pytest.raises(EngineRequestError):
            runner.run(client.score(refused))
        runner.run(client.close())
        # The server of the test's other model, attached under this teacher's name.
        attached = replace(teacher, servers=replace(teacher.servers, started=0, urls=(url,)))
        os.environ[API_KEY_VARIABLE] = KEY
        try:
            client = client_of(replace(attached, name="attached"), fleet.record, config, tokens)
            with pytest.raises(EngineMismatchError, match=r"serves .*model, expected .*teacher"):
                runner.run(client.check())
            runner.run(client.close())
        finally:
            del os.environ[API_KEY_VARIABLE]


@pytest.fixture(scope="module")
def stale_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of another checkpoint, in a folder of the same name as the teacher's."""
    folder = tmp_path_factory.mktemp("stale") / "model"
    with served(save_tiny_model(folder, "qwen3", seed=6)) as url:
        yield url


@pytest.fixture
def far_teacher(
    material: Path, model: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A configuration with one teacher, "far", at ``url``."""
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    tree = yaml.safe_load(material.read_text())
    tree["run"]["directory"] = str(tmp_path / "run")
    # The run reads the teacher's tokenizer in a folder of its own, with another chat template.
    shutil.copytree(model, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    tokenizer.chat_template = f"{tokenizer.chat_template}{{# of the teacher #}}"
    tokenizer.save_pretrained(tmp_path / "model")
    teacher = {"hf_checkpoint": str(tmp_path / "model"), "urls": [url]}
    tree["distillation"] = {"teachers": {"far": teacher}}
    rows = [json.loads(line) for line in (material.parent / "train.jsonl").read_text().splitlines()]
    tree["data"]["train"] = str(tmp_path / "train.jsonl")
    plain = [json.dumps({key: row[key] for key in ("prompt", "answer")}) for row in rows]
    (tmp_path / "train.jsonl").write_text("\n".join(plain) + "\n")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_resumed_run_refuses_a_teacher_of_other_weights(
    far_teacher: Path,
    reference: PreTrainedModel,
    url: str,
    stale_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server of another checkpoint is named, also by the doctor; with the first one, the run goes on."""
    with TrainingRun(far_teacher, "run.steps=1") as first:
        first.finish()
    assert first.text.count("teacher far: its tokenizer has another chat template") == 1
    kept = json.loads((first.directory / "teachers.json").read_text())["far"]
    prompt = tuple(kept["prompts"][0])
    expected = log_probs_of(reference, prompt).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    np.testing.assert_allclose(kept["log_probs"][0], expected, atol=1e-5, rtol=0)
    given = f"distillation.teachers.far.urls=[{stale_url}]"
    with TrainingRun(far_teacher, "run.steps=2", given) as refused:
        refused.finish(code=1)
    assert f"teacher far at {stale_url}: got log-probabilities that differ" in refused.text
    assert "distillation.teachers.far.hf_checkpoint" in refused.text
    examined = tmp_path / "examined"
    shutil.copytree(first.directory / "rollouts", examined / "rollouts")
    given = f"distillation.teachers.far.urls=[{url}, {stale_url}]"
    config = load_config(far_teacher, [given])
    (examined / "config.yaml").write_text(resolved_yaml(config))
    axes = axes_by_doctor(examined)
    text = " ".join(capsys.readouterr().out.split())
    assert "teacher far: its tokenizer has another chat template" in text
    assert f"teacher far at {stale_url}: unexplained" in text
    assert axes.pop(f"teacher far at {stale_url}") == "unexplained"
    assert axes.keys() == {"engine", "trainer", "teacher far", f"teacher far at {url}"}
    assert set(axes.values()) == {"healthy"}
    assert [row["step"] for row in read_records(first.directory)] == [0, 1]
    with TrainingRun(far_teacher, "run.steps=2") as resumed:
        resumed.finish()
    assert [row["step"] for row in read_records(first.directory)] == [0, 1, 2]
    assert json.loads((first.directory / "teachers.json").read_text())["far"] == kept


def test_servers_of_one_teacher_have_the_same_weights(
    far_teacher: Path,
    reference: PreTrainedModel,
    url: str,
    stale_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the start, another server is refused. Later it is not used, and a warning of each client names it once."""
    given = f"distillation.teachers.far.urls=[{url}, {stale_url}]"
    config = load_config(far_teacher, [given, "engine.servers=0"])
    (spec,) = RunSpec.of_checked(config).teachers
    tokens = ScoredTokens(SEQUENCES[1], 5, top_k=3, vocabulary=512)
    of_tokens = log_probs_of(reference, SEQUENCES[1])[4:]
    of_tokens = of_tokens.gather(1, torch.tensor(SEQUENCES[1][5:])[:, None])[:, 0]
    with KeptFleet(config) as fleet, AsyncRunner() as runner:
        client = client_of(spec, fleet.record, config, tokens)
        with pytest.raises(EngineMismatchError, match=rf"{stale_url}: .* by {url}, expected"):
            runner.run(client.check())
        runner.run(client.close())
        client = client_of(spec, fleet.record, config, tokens)
        client.expect([of_tokens.tolist()], "at the run's start")
        for _ in range(4):
            columns = runner.run(client.score(tokens))
            np.testing.assert_allclose(columns["teacher_log_probs"], of_tokens, atol=1e-5, rtol=0)
        runner.run(client.close())
    refusal = f"refused: teacher far at {stale_url}: got log-probabilities that differ"
    assert caplog.text.count(refusal) == 2


def test_calls_go_on_while_another_server_is_examined(
    far_teacher: Path,
    reference: PreTrainedModel,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another program at a server's address hangs in the examination, then is refused; its next start is examined."""
    monkeypatch.setattr(teachers, "_REREAD_S", 0.0)
    given = ["distillation.teachers.far.servers=1", "engine.hang_timeout_s=600"]
    config = load_config(far_teacher, given)
    (spec,) = RunSpec.of_checked(config).teachers
    tokens = ScoredTokens(SEQUENCES[1], 5, top_k=3, vocabulary=512)
    expected = log_probs_of(reference, SEQUENCES[1])[4:]
    of_tokens = expected.gather(1, torch.tensor(SEQUENCES[1][5:])[:, None])[:, 0].tolist()
    published = FleetRecord(tmp_path / "published")
    with FleetEndpoint(published, "admin", "127.0.0.1") as endpoint, AsyncRunner() as runner:
        client = client_of(spec, RecordClient(endpoint.url, KEYS), config, tokens)
        client.expect([of_tokens], "at the run's start")

        def score() -> None:
            columns = runner.run(asyncio.wait_for(client.score(tokens), 100))
            np.testing.assert_allclose(columns["teacher_log_probs"], of_tokens, atol=1e-5, rtol=0)

        score()
        other = runner.run(SmallServer("other").start())
        other.deaf.add("/server_info")
        server = Server("teacher-far-0", other.url, 1, teacher="far")
        published.publish(server)
        while not other.asked["/health_generate"]:
            score()
        score()
        assert other.asked["/server_info"] == 0
        other.deaf.clear()
        while "refused" not in caplog.text:
            score()
        for _ in range(5):
            score()
        assert other.asked["/server_info"] == 1
        published.publish(replace(server, incarnation=2))
        while caplog.text.count("refused") == 1:
            score()
        assert other.asked["/server_info"] == 2
        runner.run(client.close())
        runner.run(other.die())
