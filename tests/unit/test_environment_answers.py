"""Environments at their ends: what one may answer, and that it is closed."""

from __future__ import annotations

import asyncio

import pytest

from megatron_dppo.environments.workers import EnvironmentPool, EnvironmentSpec
from tests.unit.test_environments import PLANTED, PROBLEM, Engine, play


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"step": "FurtherStep('', 0.5, True, further=len)"}, ""),
        ({"step": "Step(done=True, is_scored=True, scored_text=42)"}, "scored_text: got '42', exp"),
        ({"step": "Step(done='no')"}, "done: got 'no', expected true or false"),
        ({"step": "Step(ChatCall(SAID, branch=-1))"}, "branch: got '-1', expected the number of a"),
        ({"step": "UncheckedStep(reward='0.5')"}, "step: must be real number, not str"),
        ({"step": "SAID[0]"}, "step: TypeError: a dict, expected a Step"),
        ({"first": "ChatCall(SAID, max_tokens=0)"}, "max_tokens: got '0', expected 1 or more"),
        ({"first": "ChatCall(SAID, max_tokens='5')"}, "max_tokens: got '5', expected 1 or more"),
        ({"first": "ChatCall('hello')"}, "messages: got 'hello', expected a list of objects"),
        ({"first": "Step('hello')"}, "reset: TypeError: a Step, expected a ChatCall"),
    ],
)
def test_whatever_an_environment_answers_ends_no_run(answers, reason):
    (t,), _ = play(Engine({0: ["4"]}), "Answering", **answers)
    assert t.finish_reason == ("failed" if reason else "stop")
    assert reason in t.reason
    assert reason or t.turn_rewards == (0.5,)


@pytest.mark.parametrize("alone", [False, True])
def test_an_environment_is_closed_before_its_process_ends(tmp_path, alone):
    flag = tmp_path / "flag"

    async def work() -> None:
        pool = EnvironmentPool(EnvironmentSpec(f"{PLANTED}:Closing", {"flag": str(flag)}, 60.0), 1)
        environment = await pool.open(alone=alone)
        await environment.reset(PROBLEM)
        await environment.close()
        for _ in range(1000):
            if flag.exists():
                break
            await asyncio.sleep(0.01)
        pool.close()

    asyncio.run(work())
    assert flag.exists()
