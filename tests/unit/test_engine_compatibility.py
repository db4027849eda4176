"""check_engine with the real client and a server of prepared answers: its requests, and the engines that it refuses."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.errors import EngineLostError, EngineMismatchError
from megatron_dppo.engine.running_server import SGLANG_VERSION, check_engine, check_layout
from megatron_dppo.system.async_runner import AsyncRunner
from tests.messages import mentioning
from tests.unit.test_engine_checksums import model_shape
from tests.unit.test_engine_server import MODEL, spec_of
from tests.unit.test_engine_weights import SERVER_INFO, Engine, engine

__all__ = ["engine"]  # a fixture


@pytest.fixture
def matching_engine(engine: Engine) -> Engine:
    """An engine that matches the run."""
    engine.info(
        enable_return_routed_experts=False, version=SGLANG_VERSION, max_total_num_tokens=130
    )
    engine.answers["/model_info"] = (200, json.dumps(MODEL))
    return engine


def check(folder: Path, url: str, **changes: object) -> None:
    async def connect_and_check() -> None:
        async with EngineClient(url) as client:
            spec = spec_of(folder, **changes)
            await check_engine(spec.model, spec.servers, client)

    with AsyncRunner() as runner:
        runner.run(connect_and_check())


def requested_paths(engine: Engine) -> list[str]:
    return [path for path, _ in engine.asked]


def test_the_vocabulary_is_asked_of_an_engine_that_takes_requests(matching_engine, tmp_path):
    # This engine scores any token id, so its vocabulary is larger than the run's.
    with pytest.raises(EngineMismatchError, match=r"vocabulary: .* 512"):
        check(tmp_path, matching_engine.url)
    paths = requested_paths(matching_engine)
    assert paths == ["/server_info", "/model_info", "/ready", "/generate", "/generate"]


def test_nothing_is_generated_on_a_paused_engine(matching_engine, tmp_path):
    """A paused engine would hold the request until the run takes the engine for lost."""
    matching_engine.answers["/ready"] = (503, "")
    check(tmp_path, matching_engine.url)
    assert requested_paths(matching_engine) == ["/server_info", "/model_info", "/ready"]


def test_a_server_that_stores_no_recordings_is_refused(matching_engine, tmp_path):
    matching_engine.info(
        enable_return_routed_experts=True, version=SGLANG_VERSION, max_total_num_tokens=130
    )
    matching_engine.answers["/ready"] = (503, "")
    path, replay = f"/routed_experts/{'0' * 32}", {"router_replay": True}
    matching_engine.answers[path] = (404, "{}")
    with pytest.raises(EngineMismatchError, match="recorded routing: "):
        check(tmp_path, matching_engine.url, rollout=replay)
    matching_engine.answers[path] = (204, "")
    check(tmp_path, matching_engine.url, rollout=replay)
    assert requested_paths(matching_engine)[-1] == path


def test_other_differences_are_told_of_a_paused_engine_too(matching_engine, tmp_path):
    matching_engine.answers["/ready"] = (503, "")
    matching_engine.info(version="0.5.22", max_total_num_tokens=130)
    with pytest.raises(EngineMismatchError, match=r"sglang version: '0.5.22'"):
        check(tmp_path, matching_engine.url)


@pytest.mark.parametrize(
    ("path", "answer", "fields"),
    [
        ("/server_info", "{}", "version, dtype, quantization, max_total_num_tokens"),
        ("/server_info", json.dumps(SERVER_INFO), "version, max_total_num_tokens"),
        ("/model_info", "{}", "model_type, architectures"),
        ("/model_info", json.dumps({**MODEL, "architectures": None}), "architectures"),
    ],
)
def test_a_server_of_something_else_is_refused(matching_engine, tmp_path, path, answer, fields):
    matching_engine.answers[path] = (200, answer)
    with pytest.raises(EngineMismatchError, match=rf"{path} .*{fields}"):
        check(tmp_path, matching_engine.url)


@pytest.mark.parametrize("changes", [{"max_total_num_tokens": "many"}, {"dtype": None}])
def test_fields_of_another_type_are_refused(matching_engine, tmp_path, changes):
    matching_engine.info(**{"version": SGLANG_VERSION, "max_total_num_tokens": 130, **changes})
    with pytest.raises(EngineMismatchError, match=f"{next(iter(changes))} as"):
        check(tmp_path, matching_engine.url)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", None, "dtype as"),
        ("tp_size", None, "tp_size as"),
        ("device", None, "device as"),
        # SGLang keeps a float32 model in float16 then.
        ("dtype", "auto", "auto"),
    ],
)
def test_a_layout_that_is_not_told_or_not_fixed_is_refused(field, value, message):
    info = {name: told for name, told in {**SERVER_INFO, field: value}.items() if told is not None}
    with pytest.raises(EngineMismatchError, match=message):
        check_layout("http://elsewhere", info, "float32", model_shape())


@pytest.mark.parametrize(("status", "answers"), [(200, True), (401, True), (503, False)])
def test_an_engine_that_refuses_does_answer(engine: Engine, status: int, answers: bool) -> None:
    engine.answers["/model_info"] = (status, "{}")

    async def ask() -> bool:
        async with EngineClient(engine.url) as client:
            return await client.is_answering()

    with AsyncRunner() as runner:
        assert runner.run(ask()) is answers


def test_a_server_is_not_lost_because_its_watcher_was_stopped(engine: Engine) -> None:
    async def watch() -> None:
        async with EngineClient(engine.url) as client:
            watch_task = asyncio.create_task(client.watch(0.8))
            await asyncio.sleep(0.1)
            time.sleep(2)  # like a SIGSTOP: this process stands still, the server goes on
            # Longer than the limit again. The server has answered meanwhile.
            await asyncio.sleep(1.2)
            assert not watch_task.done()
            engine.answers["/health_generate"] = (503, "")
            with pytest.raises(EngineLostError, match=mentioning(engine.url)):
                await asyncio.wait_for(watch_task, 5)

    asyncio.run(watch())
    assert "/health_generate" in requested_paths(engine)
