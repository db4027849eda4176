"""Agents that use OpenAI's own client and know nothing of training. They have a file of their own, because the
processes of environments import it, and run it as a program."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from openai import AsyncOpenAI, OpenAI

from tests.unit.planted_environments import map_untouched

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def first_messages(problem: Any) -> list[Any]:
    return [{"role": "system", "content": "sums"}, {"role": "user", "content": problem.prompt}]


def client_of(session: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=600)


async def asking_twice(problem: Any, session: Any) -> float:
    """Make two calls, the second of them streamed. Each response whose text is the expected one earns a quarter."""
    client, messages = client_of(session), first_messages(problem)
    answer = await client.chat.completions.create(model=session.model, messages=messages)
    message = answer.choices[0].message
    messages += [message.to_dict(), {"role": "user", "content": "sure?"}]
    stream = await client.chat.completions.create(
        model="any", messages=messages, stream=True, max_tokens=9
    )
    text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    return 0.25 * ((message.content == "4 and") + (text == "5"))


async def calling_tools(problem: Any, session: Any) -> str:
    """Run the tool calls of the policy until a response has none. The text of that response is the answer."""
    client, messages = client_of(session), first_messages(problem)
    while True:
        answer = await client.chat.completions.create(
            model=session.model, messages=messages, tools=[TOOL]
        )
        message: Any = answer.choices[0].message
        messages.append(message)
        if answer.choices[0].finish_reason != "tool_calls":
            return f"= {message.content}"
        for call in message.tool_calls:
            content = str(sum(json.loads(call.function.arguments).values()))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def talking(problem: Any, session: Any) -> float:
    """Take three turns, whatever the policy responds."""
    client, messages = client_of(session), first_messages(problem)
    for _ in range(3):
        answer = await client.chat.completions.create(model=session.model, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
    return len(messages[-2].content) % 3 / 10


async def shortening(problem: Any, session: Any) -> float:
    """Take two turns with the whole history, two with a shortened one, and one more with the whole history. The length
    of the last response modulo 3 is the reward in tenths."""
    client, whole = client_of(session), first_messages(problem)

    async def say(messages: list[Any]) -> None:
        answer = await client.chat.completions.create(model=session.model, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "sure?"}]

    await say(whole)
    shortened = [{"role": "system", "content": "so far"}, *whole[2:4]]
    await say(whole)
    for messages in (shortened, shortened, whole):
        await say(messages)
    return len(whole[-2].content) % 3 / 10


async def asking_together(problem: Any, session: Any) -> float:
    client = client_of(session)
    answers = await asyncio.gather(
        *(
            client.chat.completions.create(model=session.model, messages=first_messages(problem))
            for _ in range(2)
        )
    )
    return float(len({answer.choices[0].message.content for answer in answers}) == 2)


async def asking_for_more(problem: Any, session: Any) -> None:
    client, messages = client_of(session), first_messages(problem)
    further: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.5})
    for settings in further:
        await client.chat.completions.create(model=session.model, messages=messages, **settings)


async def crashing(problem: Any, session: Any) -> None:
    await client_of(session).chat.completions.create(
        model=session.model, messages=first_messages(problem)
    )
    raise ZeroDivisionError("planted")


async def listing(problem: Any, session: Any) -> Any:
    await client_of(session).chat.completions.create(
        model=session.model, messages=first_messages(problem)
    )
    return [1]


async def silent(problem: Any, session: Any) -> float:
    return 1.0


async def hanging(problem: Any, session: Any) -> None:
    await asyncio.sleep(3600)


def by_a_framework(prompt: str, doubts: int = 0) -> str:
    """Run an agent of pydantic-ai with a tool. It rejects the first ``doubts`` answers of the policy."""
    from pydantic_ai import Agent, ModelRetry
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), system_prompt="sums", retries=20)
    answers: list[str] = []

    @agent.output_validator
    def check(answer: str) -> str:
        answers.append(answer)
        if len(answers) <= doubts:
            raise ModelRetry("sure?")
        return answer

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b

    return agent.run_sync(prompt).output


def main() -> None:
    """Run as a command, which finds the policy by the environment variables of OpenAI's client alone."""
    problem = json.load(sys.stdin)
    (mode,) = sys.argv[1:]
    if mode == "framework":
        print(json.dumps({"answer": by_a_framework(problem["prompt"])}))
        return
    if mode == "map":
        map_untouched(6)
    if mode == "doubtful":
        print(json.dumps({"reward": len(by_a_framework(problem["prompt"], 1)) % 3 / 10}))
        return
    messages: Any = [{"role": "user", "content": problem["prompt"]}]
    answer = OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    print("said", answer.choices[0].message.content, flush=True)
    if mode == "fail":
        sys.exit("planted")
    print(json.dumps({"reward": 0.5}), flush=True)
    if mode == "complain":
        print("deprecated", file=sys.stderr)


if __name__ == "__main__":
    main()


def synchronous(problem: Any, session: Any) -> float:
    return 1.0


async def of_the_problem_alone(problem: Any) -> float:
    return 1.0


CONSTANT = 5
