"""Rewards of real servers: the verifier's workers call a tiny reward model and a tiny judge behind SGLang."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.rewards import RewardInput
from megatron_dppo.rewards import verifier as verifiers
from megatron_dppo.rewards.verifier import Verifier, VerifierError
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.ports import free_port
from tests.integration.runs import TrainingRun, records_of, write_material
from tests.patience import UNBOUNDED_S, wait_healthy
from tests.small_config import small_config
from tests.tiny_models import save_tiny_model, tiny_tokenizer
from tests.verifiers import verifier_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

KEY, VARIABLE = "5c0ffee5-rewards", "MEGATRON_DPPO_TEST_REWARD_KEY"


class RewardServer(EngineProcess):
    """A server of a model without a trainer. The check of its health requests no generation: a classifier can't
    generate."""

    def serve(self, folder: Path) -> None:
        """Start with this model instead of the configured one."""
        self._options["model_path"] = str(folder)
        self.start()

    async def _warm_up(self, client: Any) -> None:
        pass


@contextmanager
def served(folder: Path, like: Path, **sglang: Any) -> Iterator[RewardServer]:
    """Yield a healthy server of ``folder``, with the options for a policy of the shape of ``like``."""
    config = small_config(
        folder.parent,
        like,
        data={"max_prompt_tokens": 256},
        engine={"device": "cpu", "start_timeout_s": UNBOUNDED_S},
        sglang={"max_total_tokens": 8192, **sglang},
    )
    server = RewardServer(
        config,
        RunSpec.of_checked(config).servers,
        port=free_port("127.0.0.1"),
        log_path=folder.parent / f"{folder.name}.log",
        seed=1,
        api_key=KEY,
        admin_api_key=KEY + "-admin",
    )
    server.serve(folder)
    try:
        wait_healthy(server)
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    os.environ[VARIABLE] = KEY
    yield
    del os.environ[VARIABLE]


# --- the reward model


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a head of one label, like Skywork-Reward-Llama-3.1-8B."""
    folder = tmp_path_factory.mktemp("rewards") / "model"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=None, eos_token_id=2, dtype=torch.float32,
    )  # fmt: skip
    config.num_labels = 1
    model = LlamaForSequenceClassification(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name:
                p.copy_(torch.randn_like(p) * 0.15)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("judge") / "policy", "llama", seed=4)


@pytest.fixture(scope="module")
def classifier(reward_model: Path, policy: Path) -> Iterator[RewardServer]:
    with served(reward_model, policy, is_embedding=True) as server:
        yield server


def conversation(response: str) -> RewardInput:
    messages = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"})
    return RewardInput(response, prompt="1+1", messages=messages)


def transformers_score(folder: Path, given: RewardInput) -> float:
    """Return transformers' score of the conversation."""
    model = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    turns = [*given.messages, {"role": "assistant", "content": given.response}]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(turns, return_dict=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(ids).logits[0, 0])


def options_of(url: str, folder: Path) -> dict[str, Any]:
    return {"url": url, "tokenizer": str(folder), "api_key_variable": VARIABLE}


def test_a_reward_models_scores_are_transformers_own(classifier, reward_model):
    inputs = [conversation(text) for text in ("2", "It is 2.", "2", "3" * 100, "")]
    options = options_of(classifier.url, reward_model)
    with verifier_of("reward_model", 120.0, 1, options=options, batch_size=8) as verifier:
        values = [score.value for score in verifier.score(inputs)]
        again = [score.value for score in verifier.score(inputs[::-1])]
    assert values == pytest.approx(
        [transformers_score(reward_model, given) for given in inputs], abs=1e-4
    )
    # Two of the five responses are equal. A random head gives the others different values.
    assert len(set(values)) == 4
    assert again == values[::-1]


def test_a_run_trains_on_a_reward_models_scores(classifier, reward_model, tmp_path):
    """Every reward of a run is transformers' score of the conversation."""
    path = write_material(tmp_path)
    settings = yaml.safe_load(path.read_text())
    settings["reward"] = {
        "name": "reward_model",
        "options": options_of(classifier.url, reward_model),
        "timeout_s": 120.0,
        "batch_size": 8,
    }
    settings["run"]["steps"] = 2
    path.write_text(yaml.safe_dump(settings))
    with TrainingRun(path) as run:
        run.finish(timeout=600)
    model = LlamaForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(reward_model)
    problems = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    records = {record["step"]: record for record in records_of(run.directory)}
    for step in (1, 2):
        batch = load_batch(run.directory / "rollouts", step)
        assert len({t.reward for t in batch}) > len(batch) / 2
        assert records[step]["reward/mean"] == pytest.approx(
            sum(t.reward for t in batch) / len(batch)
        )
        for t in batch[::4]:
            # The token that ended a response is not a part of its text.
            text_ids = t.response_ids[:-1] if t.finish_reason == "stop" else t.response_ids
            turns = [
                {"role": "user", "content": problems[t.problem_id]["prompt"]},
                {
                    "role": "assistant",
                    "content": tokenizer.decode(text_ids, skip_special_tokens=True),
                },
            ]
            ids = tokenizer.apply_chat_template(turns, return_dict=True, return_tensors="pt")
            with torch.no_grad():
                score = float(model(ids["input_ids"]).logits[0, 0])
            assert t.reward == pytest.approx(score, abs=1e-4)


def test_what_the_server_refuses_ends_the_run(classifier, reward_model, monkeypatch):
    options = options_of(classifier.url, reward_model)
    with (
        verifier_of("reward_model", 120.0, 1, options=options, attempts=3) as verifier,
        pytest.raises(VerifierError, match=r"reward reward_model: .*/classify: status 400"),
    ):
        verifier.score([conversation("1+2 " * 2000)])
    monkeypatch.setenv(VARIABLE, "another")
    with (
        verifier_of("reward_model", 120.0, 1, options=options) as verifier,
        pytest.raises(VerifierError, match="/classify: status 401"),
    ):
        verifier.score([conversation("2")])


def test_a_key_that_is_not_there_is_named_at_the_start(reward_model, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match=f"{VARIABLE} is not set in the environment"):
        verifiers.find_reward("reward_model").bind(options_of("http://x", reward_model))


def test_a_server_that_is_away_is_no_reward_of_0(reward_model, monkeypatch):
    monkeypatch.setattr(verifiers, "BACK_OFF_S", 0.01)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        options = options_of(f"http://127.0.0.1:{nobody.getsockname()[1]}", reward_model)
        with verifier_of("reward_model", 120.0, 1, options=options, attempts=2) as verifier:
            (score,) = verifier.check([conversation("2")])
    assert score.value != score.value  # NaN, not 0
    assert "Cannot connect to host 127.0.0.1" in (score.unavailable or "")


# --- the judge


@pytest.fixture(scope="module")
def judge_server(policy: Path) -> Iterator[RewardServer]:
    with served(policy, policy) as server:
        yield server


def judge(url: str, **options: Any) -> Verifier:
    given = {"url": f"{url}/v1", "model": "talker", "api_key_variable": VARIABLE, **options}
    return verifier_of("judge", 120.0, 1, options=given, batch_size=8, attempts=2)


def test_a_judge_of_nonsense_gives_no_reward_or_the_one_that_is_configured(
    judge_server, monkeypatch
):
    """A random model's text has no score. With another pattern, any character is a score."""
    monkeypatch.setattr(verifiers, "BACK_OFF_S", 0.01)
    request = {"max_tokens": 12}
    with judge(judge_server.url, request=request) as verifier:
        (score,) = verifier.check([conversation("2")])
        assert (score.unavailable or "").startswith("the judge gave no score: ")
    with judge(judge_server.url, request=request, unparsed=-0.5) as verifier:
        (score,) = verifier.check([conversation("2")])
        assert (score.value, score.reason[:10]) == (-0.5, "no score: ")


class ScriptedJudge(BaseHTTPRequestHandler):
    """A judge whose score is the number of digits in the response. The first question fails once."""

    questions: list[str] = []  # noqa: RUF012
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with self.lock:
            self.questions.append(body)
            first = len(self.questions) == 1
        response = re.findall(r"Response:\\n(.*?)\\n", body)[-1]
        text = f"Score: 9? No.\\n**Score**: {sum(c.isdigit() for c in response)}"
        answer = f'{{"choices": [{{"message": {{"content": "{text}"}}}}]}}'.encode()
        self.send_response(503 if first else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def test_a_judges_last_score_counts_once_for_the_same_question(monkeypatch):
    monkeypatch.setattr(verifiers, "BACK_OFF_S", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), ScriptedJudge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with judge(f"http://127.0.0.1:{server.server_port}") as verifier:
            words = ["12345", "{answer} 1", "none", "1" * 11]
            scores = verifier.check([conversation(word) for word in words])
            question_count = len(ScriptedJudge.questions)
            assert [s.value for s in verifier.score([conversation("12345")])] == [0.5]
    finally:
        server.shutdown()
        server.server_close()
    # 11 is beyond the range: no score.
    assert [s.value for s in scores[:3]] == [0.5, 0.1, 0.0]
    assert "the judge gave no score" in (scores[3].unavailable or "")
    assert len(ScriptedJudge.questions) == question_count
    # The text of a response is not read as a placeholder.
    assert any("{answer} 1" in question for question in ScriptedJudge.questions)
