"""check_engine with the real client against a canned server: what it asks, and of whom."""

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
from tests.unit.test_engine_server import MODEL, sections
from tests.unit.test_engine_weights import SERVER_INFO, Engine, engine

__all__ = ["engine"]  # a fixture


@pytest.fixture
def fitting(engine: Engine) -> Engine:
    engine.info(
        enable_return_routed_experts=False, version=SGLANG_VERSION, max_total_num_tokens=130
    )
    engine.answers["/model_info"] = (200, json.dumps(MODEL))
    return engine


def check(folder: Path, url: str, **given: object) -> None:
    async def connect_and_check() -> None:
        async with EngineClient(url) as client:
            await check_engine(sections(folder, **given), client)

    with AsyncRunner() as runner:
        runner.run(connect_and_check())


def asked(engine: Engine) -> list[str]:
    return [path for path, _ in engine.asked]


def test_the_vocabulary_is_asked_of_an_engine_that_takes_requests(fitting, tmp_path):
    # This one scores any token id: its vocabulary is larger than the run's.
    with pytest.raises(EngineMismatchError, match=r"vocabulary: .* 512"):
        check(tmp_path, fitting.url)
    assert asked(fitting) == ["/server_info", "/model_info", "/ready", "/generate", "/generate"]


def test_nothing_is_generated_on_a_paused_engine(fitting, tmp_path):
    """It would hold the request until the run gives it up for lost."""
    fitting.answers["/ready"] = (503, "")
    check(tmp_path, fitting.url)
    assert asked(fitting) == ["/server_info", "/model_info", "/ready"]


def test_a_server_that_stores_no_recordings_is_refused(fitting, tmp_path):
    fitting.info(
        enable_return_routed_experts=True, version=SGLANG_VERSION, max_total_num_tokens=130
    )
    fitting.answers["/ready"] = (503, "")
    path, replay = f"/routed_experts/{'0' * 32}", {"router_replay": True}
    fitting.answers[path] = (404, "{}")
    with pytest.raises(EngineMismatchError, match="recorded routing: "):
        check(tmp_path, fitting.url, rollout=replay)
    fitting.answers[path] = (204, "")
    check(tmp_path, fitting.url, rollout=replay)
    assert asked(fitting)[-1] == path


def test_other_differences_are_told_of_a_paused_engine_too(fitting, tmp_path):
    fitting.answers["/ready"] = (503, "")
    fitting.info(version="0.5.22", max_total_num_tokens=130)
    with pytest.raises(EngineMismatchError, match=r"sglang version: '0.5.22'"):
        check(tmp_path, fitting.url)


@pytest.mark.parametrize(
    ("path", "answer", "told"),
    [
        ("/server_info", "{}", "version, dtype, quantization, max_total_num_tokens"),
        ("/server_info", json.dumps(SERVER_INFO), "version, max_total_num_tokens"),
        ("/model_info", "{}", "model_type, architectures"),
        ("/model_info", json.dumps({**MODEL, "architectures": None}), "architectures"),
    ],
)
def test_a_server_of_something_else_is_refused(fitting, tmp_path, path, answer, told):
    fitting.answers[path] = (200, answer)
    with pytest.raises(EngineMismatchError, match=rf"{path} .*{told}"):
        check(tmp_path, fitting.url)


@pytest.mark.parametrize("changes", [{"max_total_num_tokens": "many"}, {"dtype": None}])
def test_fields_of_another_type_are_refused(fitting, tmp_path, changes):
    fitting.info(**{"version": SGLANG_VERSION, "max_total_num_tokens": 130, **changes})
    with pytest.raises(EngineMismatchError, match=f"{next(iter(changes))} as"):
        check(tmp_path, fitting.url)


@pytest.mark.parametrize("field", ["dtype", "tp_size", "device"])
def test_a_layout_that_is_not_told_is_refused(field):
    info = {name: value for name, value in SERVER_INFO.items() if name != field}
    with pytest.raises(EngineMismatchError, match=f"{field} as"):
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
            watching = asyncio.create_task(client.watch(0.8))
            await asyncio.sleep(0.1)
            time.sleep(2)  # as a SIGSTOP: this process does nothing, the server goes on
            await asyncio.sleep(1.2)  # beyond the limit once more: it was asked, and answered
            assert not watching.done()
            engine.answers["/health_generate"] = (503, "")
            with pytest.raises(EngineLostError, match=mentioning(engine.url)):
                await asyncio.wait_for(watching, 5)

    asyncio.run(watch())
    assert "/health_generate" in asked(engine)
