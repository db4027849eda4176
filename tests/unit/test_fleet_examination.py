"""The examination of an attached server: it fits, it is refused with a reason, or it is examined again. Small HTTP
servers answer the requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_dppo.engine.running_server import check_engine
from megatron_dppo.fleet import membership
from megatron_dppo.fleet.endpoint import FleetEndpoint, RecordClient
from megatron_dppo.fleet.membership import Examination, Examiner, Member, ServerStates, client_of
from megatron_dppo.fleet.record import FleetRecord, Server, attachment_seal
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.async_runner import AsyncRunner
from tests.integration.kept_fleet import config_of
from tests.unit.small_fleet import KEYS, SmallServer
from tests.unit.test_engine_server import MODEL

FITTING = {
    "version": "0.5.23",
    "dtype": "float32",
    "quantization": None,
    "max_total_num_tokens": 4096,
}
MODEL_INFO = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
HTML = "<html><body>It works!</body></html>"


class Bench:
    """An examiner as in a run, and a small server to attach.

    ``states``: the results. ``news``: how often the examiner called ``on_news``. ``fault``: an error that the check
    raises without a request to the server.
    """

    def __init__(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(MODEL))
        self.runner = AsyncRunner()
        self.small = self.runner.run(SmallServer("elsewhere").start())
        self.record = FleetRecord(directory)
        self.endpoint = FleetEndpoint(self.record, "admin", "127.0.0.1")
        self.endpoint.start()
        self.states = ServerStates()
        self.news = 0
        self.fault: Exception | None = None
        config = config_of(directory, directory)
        self._spec = RunSpec.of_checked(config)
        self.examiner = Examiner(
            RecordClient(self.endpoint.url, KEYS),
            config.engine,
            self.states,
            self.check,
            self._count,
        )

    async def check(self, member: Member) -> None:
        if self.fault is not None:
            raise self.fault
        async with client_of(member) as client:
            await check_engine(self._spec.model, self._spec.servers, client)

    def _count(self) -> None:
        self.news += 1

    def examination(self, *, at_once: bool = False) -> Examination:
        [server] = self.record.servers() or [self.attach()]
        return self.runner.run(self.examiner.examine(server, at_once=at_once))

    def attach(self, url: str | None = None) -> Server:
        url = url or self.small.url
        return self.record.attach(url, attachment_seal(url))

    def watch_until(self, condition: Callable[[], object]) -> None:
        async def watch() -> None:
            task = asyncio.create_task(self.examiner.watch())
            async with asyncio.timeout(30):
                while not condition():
                    await asyncio.sleep(0.01)
            task.cancel()

        self.runner.run(watch())

    def close(self) -> None:
        self.runner.run(self.small.die())
        self.runner.close()
        self.endpoint.stop()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(membership, "_LOOK_S", 0.02)
    monkeypatch.setenv("MEGATRON_DPPO_ADMIN_API_KEY", "admin")
    opened = Bench(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (401, "Unauthorized", r"/server_info answered 401: Unauthorized; the run's keys are its"),
        (200, HTML, r"/server_info: answered no JSON object: '<html>"),
        (200, "{}", r"/server_info does not say version, dtype, .* is it a server of SGLang\?"),
        (404, "no such page", r"/server_info answered 404"),
        (200, json.dumps(FITTING | {"version": "0.4.1"}), r"sglang version: '0.4.1', expected"),
        (200, json.dumps(FITTING | {"dtype": "bfloat16"}), r"dtype .*: 'bfloat16', expected"),
    ],
    ids=["key", "HTML", "empty", "path", "version", "dtype"],
)
def test_who_does_not_fit_is_refused_with_the_reason(bench, caplog, status, text, reason):
    bench.small.info = {
        "/server_info": (status, text),
        "/model_info": (200, json.dumps(MODEL_INFO)),
    }
    examination = bench.examination()
    assert examination.state == "refused"
    assert str(examination).startswith("refused: ")
    assert re.search(reason, str(examination))
    assert str(examination) in caplog.text
    before = bench.small.asked["/server_info"]
    assert bench.examination(at_once=True) is examination
    assert bench.small.asked["/server_info"] == before
    assert bench.news == 1


@pytest.mark.parametrize(
    "fault",
    [
        AttributeError("'NoneType' object has no attribute 'get'"),
        KeyError("tp_size"),
        TypeError("an integer is required"),
        ValueError("another model"),
        OverflowError("too large"),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_whatever_an_answer_ends_in_is_a_refusal(bench, fault):
    bench.fault = fault
    assert bench.examination() == Examination("refused", f"{type(fault).__name__}: {fault}")


def test_who_does_not_answer_is_asked_again_and_logged_once(bench, monkeypatch, caplog):
    monkeypatch.setattr(membership, "ASK_AGAIN_S", 0.05)
    bench.small.info["/server_info"] = (503, "starting")
    bench.examination()
    bench.watch_until(lambda: bench.small.asked["/server_info"] > 4)
    [line] = [r.getMessage() for r in caplog.records if "503: starting" in r.getMessage()]
    assert "not yet usable, asked again every 0 s" in line
    assert bench.news == 2  # the first examination, and the start of the watch
    bench.fault = AttributeError("now it answers nonsense")
    server = bench.record.servers()[0]
    bench.watch_until(lambda: bench.states[server].examination.state == "refused")


def test_nobody_listens_there(bench):
    bench.runner.run(bench.small.die())
    assert bench.examination().state == "waits"
    assert "Connect" in bench.examination().reason


def test_the_watch_leaves_members_alone_and_examines_who_is_attached_anew(bench):
    bench.fault = ValueError("another model")
    first = bench.attach()
    bench.watch_until(lambda: bench.states[first].examination)
    bench.record.detach(first.url)
    second = bench.attach(first.url)
    assert second != first
    bench.states[second].is_member = True
    bench.attach("http://127.0.0.1:9")
    other = next(s for s in bench.record.servers() if s.url.endswith(":9"))
    bench.watch_until(lambda: bench.states[other].examination)
    assert bench.states[second].examination is None
    assert first not in bench.states
