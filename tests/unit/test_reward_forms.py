"""A reward's signature decides its inputs and its form. Also batches, several rewards, and unavailable rewards."""

from __future__ import annotations

import math
import re
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_dppo.config.data_schema import RewardConfig, RewardTerm
from megatron_dppo.data.thoughts import TurnText
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.loop.scorer import Scorer, weighted_sum
from megatron_dppo.rewards import RewardForm, RewardInput, RewardUnavailableError, find_reward
from megatron_dppo.rewards import verifier as verifiers
from megatron_dppo.rewards.verifier import Score, Verifier, VerifierError, require
from megatron_dppo.system.ports import free_port
from tests.messages import mentioning, mentions
from tests.verifiers import verifier_of

PLANTED = "tests.unit.planted_rewards:"


def planted_verifier(function: str, **settings: Any) -> Verifier:
    return verifier_of(PLANTED + function, **settings)


def test_a_reward_gets_what_its_parameters_name():
    reward_input = RewardInput("2.5", prompt="abc", messages=({}, {}), metadata={"factor": 3})
    with planted_verifier("with_metadata") as verifier:
        assert verifier.form() == RewardForm(("response", "metadata"), is_async=False)
        assert verifier.score([reward_input]) == [
            Score(7.5, components={"given": 2.5, "factor": 3.0}, reason="2.5 x 3.0")
        ]
    with planted_verifier("whole_record") as verifier:
        assert verifier.score([reward_input])[0].value == pytest.approx(3.23)


def test_a_reward_reads_columns_by_the_names_of_its_parameters():
    reward_input = RewardInput("abc", metadata={"difficulty": 2, "other": 5})
    with planted_verifier("with_columns", options={"factor": 10}) as verifier:
        assert verifier.form() == RewardForm(("response",), is_async=False, columns=("difficulty",))
        assert [score.value for score in verifier.score([reward_input])] == [60.0]
        (score,) = verifier.check([RewardInput("abc", metadata={"other": 5})])
        assert "'difficulty'" in (score.refusal or "")
        assert "['other']" in (score.refusal or "")


def test_a_function_of_verl_gets_what_verl_gives_it():
    options = {"function": PLANTED + "compute_score", "arguments": {"bonus": 0.5}}
    metadata = {"data_source": "gsm8k", "extra_info": {"split": "train"}}
    with verifier_of("verl", 60.0, 1, options=options) as verifier:
        inputs = [
            RewardInput("7", "7", metadata=metadata),
            RewardInput("8", "7", metadata=metadata),
            RewardInput("plain", "7", metadata={"data_source": "x"}),
        ]
        right, wrong, plain = verifier.score(inputs)
        assert right == Score(1.5, components={"acc": 1.0, "of_train": 1.0})
        assert wrong == Score(0.5, components={"acc": 0.0, "of_train": 1.0})
        assert plain == Score(0.25)
        (score,) = verifier.check([RewardInput("7", "7", metadata={"split": "train"})])
        assert "data_source" in (score.refusal or "")


def test_options_are_keyword_arguments():
    with planted_verifier("with_options", options={"longest": 3, "penalty": 0.5}) as verifier:
        assert [s.value for s in verifier.score([RewardInput("abc"), RewardInput("abcdef")])] == [
            0,
            -1.5,
        ]


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("unnamed", {}, r"\['text', 'gold'\], .*response, answer, prompt"),
        ("with_options", {}, "'longest'"),
        ("with_options", {"longest": 1, "shortest": 2}, "'shortest'"),
        ("Counting", {"times": 2}, "'times'"),
        ("mixed", {}, r"\['records', 'answer'\], .*response, .*records"),
        ("is_the_answer", {"answer": "2"}, "option 'answer'"),
        ("nowhere", {}, "nowhere"),
    ],
)  # fmt: skip
def test_a_signature_that_is_no_reward_is_refused_at_the_start(name, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        find_reward(PLANTED + name).bind(options)


def test_a_batch_form_gets_several_at_once():
    with planted_verifier("in_batches", batch_size=4) as verifier:
        verifier.form()
        scores = verifier.score([RewardInput("") for _ in range(9)])
        assert [s.value for s in scores] == [4.0] * 8 + [1.0]
        with pytest.raises(verifiers.VerifierError, match=mentioning(0, 1)):
            verifier.score([RewardInput("short")])


def test_one_of_a_batch_that_ends_the_process_costs_its_own_score():
    with planted_verifier("in_batches", batch_size=3) as verifier:
        scores = verifier.check([RewardInput(word) for word in ("", "", "die", "", "")])
        assert [s.crashed for s in scores] == [False, False, True, False, False]
        assert all(s.value >= 1 for s in scores if not s.crashed)


def test_an_asynchronous_reward_is_asked_for_several_at_the_same_time():
    with planted_verifier("together", batch_size=3) as verifier:
        assert verifier.form().is_async
        # Calls one after another would never end: the first waits for the two others.
        assert [s.value for s in verifier.score([RewardInput("3")] * 3)] == [1.0] * 3


def test_an_answer_that_does_not_come_in_time_is_no_reward_of_0():
    with planted_verifier("away", batch_size=3, timeout_s=0.5) as verifier:
        good, late = verifier.check([RewardInput("0"), RewardInput("50")])
        assert good == Score(1.0)
        assert math.isnan(late.value)
        assert mentions(late.unavailable or "", "0.5 s")
        with pytest.raises(RewardUnavailableError, match=mentioning("away", "0.5 s")):
            verifier.score([RewardInput("50")])


def test_an_asynchronous_reward_whose_process_ends_is_no_reward_of_0():
    with planted_verifier("dying") as verifier:
        (dead,) = verifier.check([RewardInput("die")])
        assert math.isnan(dead.value)
        assert mentions(dead.unavailable or "", "process")
        assert verifier.score([RewardInput("ok")]) == [Score(1.0)]


def test_a_synchronous_reward_may_say_that_a_service_is_to_blame(monkeypatch):
    """With on_timeout = "unavailable", a call that takes too long or ends its process is unavailable instead of 0.
    In a batch this is so only for the response at fault.
    """
    monkeypatch.setattr(verifiers, "BACK_OFF_S", 0.001)
    settings = {"on_timeout": "unavailable", "timeout_s": 2.0}
    with planted_verifier("loop_on_request", **settings) as verifier:
        late, good = verifier.check([RewardInput("loop"), RewardInput("ok")])
        assert (late.timed_out, good) == (False, Score(1.0))
        assert mentions(late.unavailable or "", "2 s")
    with planted_verifier(
        "in_batches", batch_size=3, attempts=2, on_timeout="unavailable"
    ) as verifier:
        scores = verifier.check([RewardInput(word) for word in ("", "", "die", "", "")])
        reasons = [score.unavailable for score in scores]
        assert [reason is None for reason in reasons] == [True, True, False, True, True]
        assert mentions(reasons[2] or "", "process", "60 s")


ANSWERS = {
    # An empty answer, a part of an answer, and statuses for which OpenAI's client has exceptions of their own.
    "/nothing": b"",
    "/piece": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
    "/busy": b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n",
    "/broken": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    "/refused": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
}


class FailingHandler(socketserver.StreamRequestHandler):
    """A service that ends each connection with one of ``ANSWERS``."""

    def handle(self) -> None:
        path = self.rfile.readline().split()[1].decode()
        while self.rfile.readline().strip():
            pass
        self.wfile.write(ANSWERS[path.removesuffix("/models")])


@pytest.fixture(scope="module")
def failing_service() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), FailingHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("form", "clients"),
    [
        ("at_once", ("httpx", "openai", "requests", "urllib")),
        ("meanwhile", ("aiohttp", "httpx", "openai")),
    ],
)
def test_a_clients_error_about_its_service_is_no_end_of_the_run(form, clients, failing_service):
    unused_url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    urls = (f"{failing_service}/nothing", f"{failing_service}/piece", unused_url)
    texts = [f"{client} {url}" for client in clients for url in urls]
    texts += [f"openai {failing_service}/{state}" for state in ("busy", "broken")]
    name = f"tests.unit.planted_services:{form}"
    with verifier_of(name, 60.0, 1, batch_size=4) as verifier:
        scores = verifier.check([RewardInput(text) for text in texts])
        unavailable = {text for text, s in zip(texts, scores, strict=True) if s.unavailable}
        assert unavailable == set(texts), [s.unavailable for s in scores]
        # An answer that rejects the request itself is an error of the program.
        with pytest.raises(verifiers.VerifierError, match="BadRequestError"):
            verifier.check([RewardInput(f"openai {failing_service}/refused")])


@pytest.mark.parametrize("error", ["RewardUnavailableError", "OSError"])
def test_what_is_away_is_asked_again_so_many_times(monkeypatch, error):
    monkeypatch.setattr(verifiers, "BACK_OFF_S", 0.001)
    options = {"fails": 2, "error": error}
    with planted_verifier("Counting", options=options, attempts=3) as verifier:
        assert verifier.score([RewardInput("a"), RewardInput("b")]) == [Score(3.0)] * 2
    with planted_verifier("Counting", options=options, attempts=2) as verifier:
        (score,) = verifier.check([RewardInput("a")])
        assert mentions(score.unavailable or "", 2)


def test_the_weighted_sum_by_hand():
    scores = {
        "right": Score(1.0, reason="it is 3"),
        "short": Score(-2.0, timed_out=True, components={"tokens": 7.0}),
    }
    assert weighted_sum(scores, {"right": 2.0, "short": 0.25}) == Score(
        1.5, timed_out=True, components={"right": 1.0, "short": -2.0, "short/tokens": 7.0},
        reason="right: it is 3",
    )  # fmt: skip
    single = weighted_sum({"short": scores["short"]}, {"short": 0.5})
    assert (single.value, single.components) == (-1.0, {"tokens": 7.0})
    with_unavailable = scores | {"judge": Score.without_value("refused")}
    total = weighted_sum(with_unavailable, dict.fromkeys(with_unavailable, 1.0))
    assert math.isnan(total.value)
    assert total.unavailable == "reward judge: refused"
    refused = weighted_sum(
        with_unavailable | {"x": Score(0.0, refusal="no")}, dict.fromkeys("x", 1.0)
    )
    assert refused.refusal == "reward x: no"
    too_large = weighted_sum({"x": Score(1e18), "y": Score(1.0)}, {"x": 1e300, "y": 2.0})
    assert mentions(too_large.refusal or "", "x 1e+18 * 1e+300", "y 1 * 2", "inf")


LENGTH = RewardTerm(name=PLANTED + "with_options", weight=0.1, options={"longest": 1})


def test_several_rewards_of_a_run():
    config = RewardConfig(name="exact_integer", further={"length": LENGTH})
    assert list(config.terms) == ["exact_integer", "length"]
    with Scorer(config) as scorer:
        score = scorer.submit(Problem(0, "1+1", "2", ()), TurnText.plain("1+1=2")).result()
    assert score.value == pytest.approx(1 - 0.4)
    assert score.components == {"exact_integer": 1.0, "length": -4.0}


BY_COLUMN = RewardConfig(
    name="exact_integer",
    further={"words": RewardTerm(name=PLANTED + "is_the_answer"), "length": LENGTH},
    column="by",
)


@pytest.mark.parametrize(
    ("names", "components"),
    [
        ("words", {"words": 1.0}),
        (["length", "exact_integer"], {"exact_integer": 1.0, "length": 0.0}),
        ("exact_integer", {"exact_integer": 1.0}),
    ],
)
def test_a_column_names_the_rewards_of_a_problem(names, components):
    with Scorer(BY_COLUMN) as scorer:
        problem = Problem(0, "1+1", "2", (), metadata={"by": names})
        score = scorer.submit(problem, TurnText.plain("2")).result()
    assert score.components == components


@pytest.mark.parametrize(
    "metadata", [{}, {"by": "other"}, {"by": []}, {"by": 1}, {"by": ["words", None]}]
)
def test_a_problem_that_names_no_reward_is_refused(metadata):
    with pytest.raises(ValueError, match=mentioning("'by'", "exact_integer, words, length")):
        BY_COLUMN.names_for(metadata)


@pytest.mark.parametrize(
    ("reward", "response", "reason"),
    [
        ("raise_on_request", "raise", "RuntimeError"),
        ("refuse_on_request", "refuse", "no such answer"),
    ],
)
def test_an_error_in_a_run_shows_the_row_the_answer_and_the_rewards_own_frames(
    reward: str, response: str, reason: str
) -> None:
    """The reward raises an exception, or a ValueError, which refuses one response."""
    problem, places = Problem(4, "1+1", "two", (7, 8)), {(7, 8): "sums.jsonl, line 5"}
    config = RewardConfig(name=PLANTED + reward, workers=1)
    with Scorer(config, lambda ids: dict[Any, str](places)[tuple(ids)]) as scorer:
        pending = scorer.submit(problem, TurnText.plain(response))
        with pytest.raises(VerifierError) as caught:
            require([pending.result()], [RewardInput.of(problem, response)])
    message = str(caught.value)
    assert message.startswith("sums.jsonl, line 5: ")
    for shown in (reason, repr(response), "'two'", "planted_rewards.py"):
        assert shown in message
    assert not {"verifier.py", "runners.py", "scorer.py"} & set(re.findall(r"\w+\.py", message))
