"""Hooks for SGLang's functions in SGLang's own registry, and the answer of several attention replicas to a flush."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from megatron_dppo.engine.errors import EngineAnswerError
from megatron_dppo.engine.server import flushing, hooks
from megatron_dppo.weights.server import server_state

MODULE = "hooked_module"
TARGET = f"{MODULE}.count"


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    module = types.ModuleType(MODULE)
    module.count = lambda number: number  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]
    HookRegistry._hooks.pop(TARGET, None)
    HookRegistry._patched.discard(TARGET)


def add_one(result: int, *_: Any) -> int:
    return result + 1


def double(original: Any, number: int) -> int:
    return 2 * int(original(number))


def test_hooks_that_are_registered_after_others_were_applied_run_too(
    module: types.ModuleType,
) -> None:
    hooks.register(TARGET, add_one, "after")
    HookRegistry.apply_hooks()
    assert module.count(3) == 4
    hooks.register(TARGET, double, "around")
    HookRegistry.apply_hooks()
    assert module.count(3) == 8


def test_a_hook_runs_once_where_it_is_registered_again(module: types.ModuleType) -> None:
    for _ in range(2):
        hooks.register(TARGET, add_one, "after")
        HookRegistry.apply_hooks()
    hooks.register(TARGET, add_one, "after")
    assert module.count(3) == 4


@dataclass
class Answer:
    success: bool


@pytest.mark.parametrize("successes", [(True, True), (True, False), (False, True)])
def test_a_flush_has_the_answer_of_all_replicas(successes: tuple[bool, ...]) -> None:
    timeouts: list[Any] = []

    async def answer_all(request: Any) -> list[Answer]:
        timeouts.append(request.timeout_s)
        return [Answer(success) for success in successes]

    manager = SimpleNamespace(
        auto_create_handle_loop=lambda: None, flush_cache_communicator=answer_all, mm_processor=None
    )
    answer = asyncio.run(flushing.flush_all_replicas(manager, 3.0))
    assert answer.success is all(successes)
    assert timeouts == [3.0]


def report(**changes: Any) -> dict[str, Any]:
    state = {
        "is_paused": False,
        "released": [],
        "has_session": False,
        "groups": [],
        "places_directly": True,
    }
    return {server_state.FIELD: state | changes}


def test_the_state_of_a_server_is_that_of_all_its_replicas() -> None:
    reports = [report(), report(is_paused=True, released=["weights"], groups=["a"])]
    for replica_reports in (reports, reports[::-1]):
        state = server_state.state_of("url", {"internal_states": replica_reports})
        assert state == server_state.SchedulerState(True, ("weights",), False, ("a",), True)
    reports.append(report(places_directly=False))
    state = server_state.state_of("url", {"internal_states": reports})
    assert state is not None
    assert not state.places_directly
    assert server_state.state_of("url", {"internal_states": [report(), {}]}) is None
    assert server_state.state_of("url", {}) is None
    with pytest.raises(EngineAnswerError):
        server_state.state_of("url", {"internal_states": [report(groups=3)]})
