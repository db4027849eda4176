"""EngineWeights against an HTTP server with prepared answers: refusals, lost servers, keys, the bytes of a bucket."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.errors import (
    EngineAnswerError,
    EngineLostError,
    EngineMismatchError,
    EngineRequestError,
)
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.weights.engine_weights import EngineWeights, MemoryOrderError, WireHeader
from megatron_dppo.weights.engines import Engines
from tests.unit.test_engine_checksums import model_shape

SERVER_INFO = {
    "device": "cpu",
    "dtype": "float32",
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "quantization": None,
}


class Engine(ThreadingHTTPServer):
    """A server that answers each path with its (status, body) in ``answers``.

    ``asked``: path and key of each request so far. ``bodies``: the last body for each path.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, str]] = {"/server_info": (200, json.dumps(SERVER_INFO))}
        self.asked: list[tuple[str, str | None]] = []
        self.bodies: dict[str, bytes] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def info(self, **changes: Any) -> None:
        self.answers["/server_info"] = (200, json.dumps(SERVER_INFO | changes))


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.split("?")[0]
        self.server.bodies[path] = body
        self.server.asked.append((self.path, self.headers["Authorization"]))
        status, answer = self.server.answers.get(path, (200, "{}"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def do_POST(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Control:
    """EngineWeights with blocking methods: each call waits for its coroutine."""

    def __init__(self, runner: AsyncRunner, client: HttpClient, **shape: Any) -> None:
        self._runner = runner
        self.engine = runner.run(
            EngineWeights.connect(client, model_shape(**shape), "float32", timeout_s=5)
        )

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.engine, name)
        if not inspect.iscoroutinefunction(method):
            return method
        return lambda *arguments, **options: self._runner.run(method(*arguments, **options))


Connect = Callable[..., Control]


@pytest.fixture
def connect(engine: Engine, runner: AsyncRunner) -> Iterator[Connect]:
    clients: list[HttpClient] = []

    def open_one(url: str = engine.url, **shape: Any) -> Control:
        clients.append(HttpClient(url, "user", "admin"))
        return Control(runner, clients[-1], **shape)

    yield open_one
    for client in clients:
        runner.run(client.close())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_dp_size": 2}, "moe_dp_size is 2; .* expected 1"),
        ({"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "deepep"}, "'deepep', .* expected 'none'"),
        ({"dp_size": 4}, "dp_size is 4"),
        ({"tp_size": 2, "attn_cp_size": 2}, "attn_cp_size is 2"),
        ({"tp_size": 2, "moe_dense_tp_size": 1}, "moe_dense_tp_size is 1"),
        # SGLang's own server answers a flush for one of its replicas.
        ({"tp_size": 2, "attn_dp_size": 2}, "2 attention replicas"),
        ({"tp_size": 3, "attn_dp_size": 2}, "attn_dp_size"),
        # The model has 4 attention heads.
        ({"tp_size": 3}, "http://127.0.0.1:"),
        ({"quantization": "fp8"}, "quantization is 'fp8'"),
        ({"device": "cuda"}, "moe_runner_backend is None, .* expected 'triton'"),
        (
            {"device": "cuda", "moe_runner_backend": "flashinfer_trtllm"},
            "'flashinfer_trtllm', which may keep",
        ),
        ({"dtype": "bfloat16"}, "bfloat16, .* float32"),
    ],
)
def test_servers_that_cannot_be_verified_are_refused(
    engine: Engine, connect: Connect, changes: dict[str, Any], message: str
) -> None:
    engine.info(**changes)
    with pytest.raises(EngineMismatchError, match=message):
        connect()


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (400, "no session is open", EngineRequestError, " 400: "),
        # A redirect is refused, so that no key goes elsewhere.
        (302, "elsewhere", EngineRequestError, " 302: "),
        (503, "", EngineLostError, "answered 503"),
        (200, "<html>", EngineAnswerError, "'<html>'"),
    ],
)
def test_errors_say_whether_the_server_refused_or_is_lost(
    engine: Engine, connect: Connect, status: int, body: str, error: type[Exception], message: str
) -> None:
    control = connect()
    engine.answers["/end_weight_update"] = (status, body)
    with pytest.raises(error, match=message) as caught:
        control.end()
    assert getattr(caught.value, "status", status) == status


def test_a_server_that_is_gone_is_lost(engine: Engine, connect: Connect) -> None:
    control = connect()
    assert control.is_answering(5)
    engine.shutdown()
    engine.server_close()
    with pytest.raises(EngineLostError, match="end_weight_update"):
        control.end()
    assert not control.is_answering(5)


def test_keys_go_where_they_belong(engine: Engine, connect: Connect) -> None:
    connect().resume()
    assert engine.asked == [
        ("/server_info", "Bearer user"),
        ("/continue_generation", "Bearer admin"),
    ]


def test_a_version_that_does_not_stick_is_an_error(engine: Engine, connect: Connect) -> None:
    engine.answers["/model_info"] = (200, '{"weight_version": "6"}')
    control = connect()
    control.set_version("6")
    with pytest.raises(EngineAnswerError, match=r"'6' .*'7'"):
        control.set_version("7")


def test_calls_about_weights_are_about_the_served_model_alone(
    engine: Engine, connect: Connect
) -> None:
    control = connect()
    place = [{"tp_rank": 0}]
    answer = {"ranks": [{"checksums": {"a": "0"}, "parallelism_info": place}]}
    engine.answers["/weights_checker"] = (200, json.dumps(answer))
    control.begin()
    control.receive(WireHeader(("a",), ("float32",), ((1,),), 4), "group")
    control.checksums()
    for path in ("begin_weight_update", "update_weights_from_distributed", "weights_checker"):
        assert json.loads(engine.bodies[f"/{path}"])["selector"] == "target"


def test_checksums_come_by_rank_and_completely(engine: Engine, connect: Connect) -> None:
    engine.info(tp_size=2)
    control = connect()

    def rank(number: int) -> dict[str, Any]:
        place = [{"tp_rank": number}]
        return {"checksums": {"a": str(number)}, "parallelism_info": place}

    engine.answers["/weights_checker"] = (200, json.dumps({"ranks": [rank(1), rank(0)]}))
    assert control.checksums() == [{"a": "0"}, {"a": "1"}]
    engine.answers["/weights_checker"] = (200, json.dumps({"ranks": [rank(1)]}))
    with pytest.raises(EngineAnswerError, match=r"ranks \[1\]"):
        control.checksums()


def test_decoded_tokens_are_those_after_the_first_and_before_one_that_cannot_be_scored(
    engine: Engine, connect: Connect
) -> None:
    # Entries are [log-probability, token id, text]. Token 9 of the first response can't be scored.
    generated = [
        [[-0.1, 5, None], [-0.2, 6, None], [-0.3, 9, None], [-0.4, 7, None]],
        [[-0.5, 5, None], [-0.6, 6, None], [-0.7, 8, None], [-0.8, 7, None]],
    ]
    scored = [
        [[None, 1, None], [-1.0, 2, None], [-1.1, 5, None], [-1.2, 6, None]],
        [
            [None, 3, None], [-2.0, 4, None], [-2.1, 5, None], [-2.2, 6, None], [-2.3, 8, None],
            [-2.4, 7, None],
        ],
    ]  # fmt: skip
    answer = [
        {"meta_info": {"input_token_logprobs": inputs, "output_token_logprobs": outputs}}
        for inputs, outputs in zip(scored, generated, strict=True)
    ]
    engine.answers["/generate"] = (200, json.dumps(answer))
    decoded = connect().decode([[1, 2], [3, 4]], 3, end_before=9)
    assert decoded.decode == [[-0.2], [-0.6, -0.7, -0.8]]
    assert decoded.prefill == [[-1.2], [-2.2, -2.3, -2.4]]
    with pytest.raises(EngineAnswerError, match="expected 5 each"):
        connect().decode([[1, 2], [3, 4]], 4, end_before=9)


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        ("/weights_checker", {}, lambda c: c.checksums()),
        ("/weights_checker", {"ranks": [{"checksums": {}}]}, lambda c: c.checksums()),
        ("/weights_checker", {"ranks": 3}, lambda c: c.checksums()),
        ("/model_info", {}, lambda c: c.version()),
        ("/generate", [{"meta_info": {}}], lambda c: c.score([[1, 2]])),
        ("/generate", [{"meta_info": {"input_token_logprobs": [[]]}}], lambda c: c.score([[1, 2]])),
        ("/generate", [{"meta_info": {}}], lambda c: c.decode([[1, 2]], 4, end_before=9)),
        ("/v1/models", {"data": [{}]}, lambda c: c.adapter_names()),
    ],
)
def test_an_answer_of_another_form_is_the_engines_fault(
    engine: Engine, connect: Connect, path: str, body: Any, call: Callable[..., Any]
) -> None:
    """The error names the path of the server. A plain KeyError would look like a bug of this package."""
    control = connect()
    engine.answers[path] = (200, json.dumps(body))
    with pytest.raises(EngineAnswerError, match=path):
        call(control)


def test_busy_engine_is_resumed(engine: Engine, connect: Connect) -> None:
    control = connect()
    engine.answers["/flush_cache"] = (400, "requests are running")
    engine.asked.clear()
    assert not control.pause_when_idle(0)
    paths = ["/pause_generation", "/flush_cache", "/continue_generation"]
    assert requested_paths(engine) == paths


def test_sglangs_loader_needs_a_tied_mixtures_embedding_twice(
    connect: Connect, runner: AsyncRunner
) -> None:
    own_loader, direct = connect(tied=True).engine, connect(tied=True).engine
    direct.places_directly = True
    name = "model.embed_tokens.weight"
    assert Engines([direct], runner).inputs(name) == [name]
    together = Engines([direct, own_loader], runner)
    assert together.inputs(name) == [name, "lm_head.weight"]
    assert together.inputs("model.norm.weight") == ["model.norm.weight"]


def test_scores_are_of_the_tokens_that_were_asked(engine: Engine, connect: Connect) -> None:
    control = connect()

    def answers(*prompts: list[Any]) -> tuple[int, str]:
        body = [{"meta_info": {"input_token_logprobs": entries}} for entries in prompts]
        return 200, json.dumps(body)

    first = [[None, 5, None], [-1.5, 6, None], [-0.5, 7, None]]
    engine.answers["/generate"] = answers(first, [[None, 8, None], [-2.0, 9, None]])
    assert control.score([[5, 6, 7], [8, 9]]) == [[-1.5, -0.5], [-2.0]]
    assert engine.asked[-1] == ("/generate", "Bearer user")
    with pytest.raises(EngineAnswerError, match="tokens"):
        control.score([[5, 6, 8], [8, 9]])


def test_a_cache_that_cannot_be_flushed_is_an_error(engine: Engine, connect: Connect) -> None:
    control = connect()
    control.flush()
    engine.answers["/flush_cache"] = (400, "requests are running")
    with pytest.raises(EngineAnswerError, match="flushed"):
        control.flush()


def test_a_path_prefix_of_the_url_is_kept(engine: Engine, connect: Connect) -> None:
    engine.answers["/fleet/a/server_info"] = engine.answers["/server_info"]
    connect(f"{engine.url}/fleet/a/")
    assert engine.asked == [("/fleet/a/server_info", "Bearer user")]


def test_no_key_travels_in_clear_text_to_an_https_engine(engine: Engine, connect: Connect) -> None:
    with pytest.raises(EngineLostError, match="SSL"):
        connect(engine.url.replace("http:", "https:"))
    assert engine.asked == []


@pytest.fixture
def shared(engine: Engine, connect: Connect) -> Control:
    """A connection to a server that shares its GPUs. ``engine.asked`` does not have the requests of the connection."""
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        engine.answers[path] = (200, "null")
    control = connect()
    engine.asked.clear()
    return control


def requested_paths(engine: Engine) -> list[str]:
    return [path.split("?")[0] for path, _ in engine.asked]


RELEASE = ["/pause_generation", "/flush_cache", "/release_memory_occupation"]


def test_memory_is_released_by_a_paused_idle_server_and_restored_in_parts(
    engine: Engine, shared: Control
) -> None:
    shared.release()
    assert requested_paths(engine) == RELEASE
    assert shared.occupation.released == {"kv_cache", "weights", "cuda_graph"}
    shared.restore(["weights"])
    shared.begin()
    shared.end()
    shared.restore()
    shared.resume()
    assert shared.occupation.released == set()
    assert requested_paths(engine)[3:] == [
        "/resume_memory_occupation", "/begin_weight_update", "/end_weight_update",
        "/resume_memory_occupation", "/continue_generation",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "call", "message"),
    [
        ([], lambda c: c.restore(["weights"]), "can't restore: weights is resident"),
        ([], lambda c: c.restore(), "restore: kv_cache .*, weights "),
        (["weights"], lambda c: c.release(), "can't release: weights is released"),
        (["weights"], lambda c: c.restore(["weights", "kv_cache"]), "restore: kv_cache is resident"),
        (["kv_cache"], lambda c: c.resume(), "can't generate: kv_cache is released"),
        (["cuda_graph"], lambda c: c.score([[1, 2]]), "can't score: cuda_graph is released"),
        (["weights"], lambda c: c.begin(), "update weights: weights "),
        (["weights"], lambda c: c.checksums(), "POST /weights_checker: weights "),
        (["weights"], lambda c: c.load_folder("f"), "update_weights_from_disk: weights is released"),
    ],
)  # fmt: skip
def test_a_wrong_order_is_never_sent(
    engine: Engine, shared: Control, before: list[str], call: Callable[..., Any], message: str
) -> None:
    if before:
        shared.release(before)
    engine.asked.clear()
    with pytest.raises(MemoryOrderError, match=message):
        call(shared)
    assert engine.asked == []
    assert shared.occupation.released == set(before)


@pytest.mark.parametrize("tags", [[], ["kv"], ["weights", "kv-cache"]])
def test_tags_that_sglang_does_not_know(engine: Engine, shared: Control, tags: list[str]) -> None:
    with pytest.raises(ValueError, match=" kv_cache, weights, cuda_graph"):
        shared.occupation._expect("resident", "release", tags)
    assert engine.asked == []


def test_a_busy_server_is_not_told_to_release(engine: Engine, shared: Control) -> None:
    engine.answers["/flush_cache"] = (400, "requests are running")
    with pytest.raises(EngineAnswerError, match="release memory: "):
        shared.release()
    assert requested_paths(engine) == RELEASE[:2]
    assert shared.occupation.released == set()
    shared.resume()


@pytest.mark.parametrize(("status", "body"), [(500, "dead"), (400, "no"), (200, '{"error": 1}')])
def test_after_a_call_that_failed_nothing_more_is_sent(
    engine: Engine, shared: Control, status: int, body: str
) -> None:
    shared.release(["kv_cache"])
    engine.answers["/release_memory_occupation"] = (status, body)
    with pytest.raises((EngineLostError, EngineRequestError, EngineAnswerError)):
        shared.release(["weights"])
    engine.asked.clear()
    for call in (
        lambda: shared.release(["weights"]),
        lambda: shared.restore(["weights"]),
        shared.resume,
    ):
        with pytest.raises(EngineLostError, match="started"):
            call()
    assert engine.asked == []
