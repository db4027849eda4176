"""Which answers of an environment are accepted, and how an environment is closed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.environments import ChatCall, observation_of
from megatron_dppo.environments.workers import EnvironmentPool, EnvironmentSpec
from megatron_dppo.loop.credit import with_rewards
from megatron_dppo.rewards.result import LARGEST_REWARD
from megatron_dppo.rewards.verifier import Score
from tests.messages import mentioning
from tests.unit.test_environments import LIMITS, PLANTED, PROBLEM, Engine, play


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"step": "FurtherStep('', 0.5, True, further=len)"}, ""),
        ({"step": "Step(done=True, is_scored=True, scored_text=42)"}, "scored_text: got '42', exp"),
        ({"step": "Step(done='no')"}, "done: got 'no', expected true or false"),
        ({"step": "Step(ChatCall(SAID, branch=-1))"}, "branch: got '-1', expected the number of a"),
        (
            {"step": "UncheckedStep(reward='0.5')"},
            "step: reward: got '0.5', expected a finite number",
        ),
        (
            {"step": "Step(reward=1e308)"},
            "step: ValueError: reward: got '1e+308', expected a finite",
        ),
        (
            {"step": "Step(reward=1e39, done=True)"},
            "step: ValueError: reward: got '1e+39', expected",
        ),
        ({"step": "UncheckedStep(reward=1e39, done=True)"}, "step: reward: got '1e+39', expected"),
        ({"step": "Step(reward=10**400)"}, "step: ValueError: reward: got '1000000"),
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
    if not reason:
        assert t.turn_rewards == (0.5,)


@pytest.mark.parametrize("value", [{"text": "x"}, {"messages": [], "text": "x"}, {"branch": 1}])
def test_an_observation_of_other_fields_names_them_and_what_may_be_there(value):
    with pytest.raises(TypeError, match=mentioning(*value, "messages", "max_tokens")) as error:
        observation_of(value)
    assert "__init__" not in str(error.value)
    assert observation_of({"messages": [], "branch": 1}) == ChatCall([], branch=1)


def test_the_largest_rewards_of_every_turn_have_finite_advantages():
    """A step adds up losses and their squares in float32, so the squares of advantages must be finite in float32."""
    largest = f"Step('1', reward={LARGEST_REWARD})"
    limits = replace(LIMITS, turns=4)
    (t,), _ = play(Engine({0: ["4"]}), "Answering", limits, step=largest)
    assert t.turn_rewards == (LARGEST_REWARD,) * 4
    for credit in ("trajectory", "turn"):
        other = replace(t, turn_rewards=(-LARGEST_REWARD,) * 4)
        as_verified = AlgorithmConfig(truncated_responses="as-verified")
        group = with_rewards([t, other], [Score(0.0)] * 2, 2, as_verified, credit, most_tokens=16)
        squares = [float(np.float32(trajectory.advantage) ** 2) for trajectory in group]
        assert squares == [pytest.approx(16 * LARGEST_REWARD**2)] * 2


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
