"""An environment of the library verifiers, which asks for a sum until the answer is right. It runs in a Python
environment of its own."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def last_text(completion: list) -> str:
    return str(completion[-1].content).strip()


def is_sum(completion: list, answer: str) -> float:
    return float(last_text(completion) == answer)


class AskingAgain(vf.MultiTurnEnv):
    async def env_response(self, messages: list, state: vf.State, **_: object) -> list:
        return [{"role": "user", "content": f"No, not {last_text(messages)}."}]

    @vf.stop
    async def is_right(self, state: vf.State) -> bool:
        steps = state["trajectory"]
        return bool(steps) and is_sum(steps[-1]["completion"], state["answer"]) == 1.0


def load_environment(max_turns: int = 3) -> vf.Environment:
    rows = [{"question": f"{i}+1", "answer": f"{i + 1}"} for i in range(5)]
    rubric = vf.Rubric(funcs=[is_sum])
    return AskingAgain(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=max_turns)
