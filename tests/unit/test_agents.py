"""Agents that call the policy by OpenAI's client: trajectories of sessions, and the calls that a session refuses."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from megatron_dppo.agents import programs, server
from megatron_dppo.agents.agent import Agent
from megatron_dppo.agents.conversation import Conversation
from megatron_dppo.agents.programs import AgentSession, _run_command, result_of
from megatron_dppo.data.columns import usable_rows
from megatron_dppo.data.seal import Origin
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.environments import (
    ChatCall,
    PolicyFormat,
    Step,
    Turn,
    check_environment,
    makes_prompts,
)
from megatron_dppo.environments import sandbox as sandbox_module
from megatron_dppo.environments.episodes import Episodes
from megatron_dppo.environments.sandbox import SandboxError
from megatron_dppo.system.processes import child_ids, process_start
from tests.extras import environment_with
from tests.unit import test_environments as environments
from tests.unit.planted_agents import TOOL
from tests.unit.test_environments import IM_END, LIMITS, PROBLEM, Engine

pytestmark = pytest.mark.second

PLANTED = "tests.unit.planted_agents"
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 5}}\n</tool_call>'


class ChatEngine(Engine):
    def __init__(self, *texts: str) -> None:
        super().__init__({0: list(texts)})
        self.tokenizer = copy.deepcopy(self.tokenizer)
        self.tokenizer.chat_template = TEMPLATE

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def play(engine: Engine, agent: str, **settings: Any) -> tuple[Trajectory, Episodes]:
    """Return the trajectory of problem 0, with an agent of ``planted_agents`` or a command, and the episodes."""
    name = agent if " " in agent else f"{PLANTED}:{agent}"
    (trajectory,), episodes = environments.play(
        engine, "agent", agent=name, tool_format="hermes", **settings
    )
    return trajectory, episodes


def tokens_and_mask(engine: ChatEngine, *pieces: tuple[str, bool]) -> tuple[list[int], list[bool]]:
    """Return the tokens of the texts, one after another, and their loss mask."""
    tokens: list[int] = []
    mask: list[bool] = []
    for text, is_sampled in pieces:
        ids = [*engine.ids(text), IM_END] if is_sampled else engine.ids(text)
        tokens += ids
        mask += [is_sampled] * len(ids)
    return tokens, mask


BEGIN = (
    "<|im_start|>system\nsums<|im_end|>\n<|im_start|>user\n3+5<|im_end|>\n<|im_start|>assistant\n"
)


def test_turns_with_a_call_that_cant_be_read_are_counted(caplog):
    bad = ADD.replace("}}", "}")
    t, episodes = play(ChatEngine(bad, "8"), "calling_tools", turn_tokens=200)
    assert t.text == f"= {bad}"
    assert (episodes.take_unread_calls(), episodes.take_unread_calls()) == (1, 0)
    assert "environment/unread_calls" in caplog.text


def test_a_session_is_an_exact_trajectory():
    t, episodes = play(engine := ChatEngine("4 and", "5"), "asking_twice")
    sure = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    tokens, mask = tokens_and_mask(
        engine, (BEGIN, False), ("4 and", True), (sure, False), ("5", True)
    )
    assert t.token_ids.tolist() == tokens
    assert t.loss_mask.tolist() == mask
    turns = len(engine.ids("4 and")) + 1, len(engine.ids("5")) + 1
    assert t.columns["weight_version"].tolist() == [1] * turns[0] + [2] * turns[1]
    assert (t.turn_rewards, t.wants_score, t.finish_reason) == ((0.0, 0.5), False, "stop")
    # The run's limit is 16 tokens, and the second call asks for 9.
    assert [r.sampling.max_new_tokens for r in engine.asked] == [16, 9]
    assert not episodes.faults
    # The prompt is the agent's, not the data's. Only a run whose environment makes prompts may have such a prompt.
    origin = Origin({}, "", 1, {0: PROBLEM})
    assert not origin.has_prompt(t)
    assert replace(origin, makes_prompts=makes_prompts("agent", {})).has_prompt(t)
    assert not replace(origin, problems={}, makes_prompts=True).has_prompt(t)
    assert [makes_prompts(name, {}) for name in ("calculator", None)] == [False, False]


def test_tools_are_the_templates_and_their_calls_openais():
    t, _ = play(engine := ChatEngine(f"well {ADD}{ADD}", "8"), "calling_tools", turn_tokens=200)
    tools = f"<|im_start|>tools\n{json.dumps(TOOL)}\n<|im_end|>\n"
    tool_results = (
        "".join("\n<|im_start|>tool\n8<|im_end|>" for _ in range(2)) + "\n<|im_start|>assistant\n"
    )
    pieces = (tools + BEGIN, False), (f"well {ADD}{ADD}", True), (tool_results, False), ("8", True)
    tokens, mask = tokens_and_mask(engine, *pieces)
    assert t.token_ids.tolist() == tokens
    assert t.loss_mask.tolist() == mask
    # The run's rewards score the text that the agent returned.
    assert (t.text, t.wants_score, t.turn_rewards) == ("= 8", True, (0.0, 0.0))


def test_an_edited_history_is_a_branch_in_which_nothing_is_trained_again():
    """The five turns are of the branches 0, 0, 1, 1, 0. Each sampled token is trained once: where a branch repeats it,
    it is part of the prompt."""
    texts = ["4 and", "5", "6 is", "7", "8 and"]
    t, episodes = play(engine := ChatEngine(*texts), "shortening", turn_tokens=40)
    sure = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    shorter = "<|im_start|>system\nso far<|im_end|>\n<|im_start|>assistant\n4 and<|im_end|>\n"
    first_pieces = (
        (BEGIN, False),
        ("4 and", True),
        (sure, False),
        ("5", True),
        (sure, False),
        ("8 and", True),
    )
    second_pieces = (shorter + sure[1:], False), ("6 is", True), (sure, False), ("7", True)
    assert not episodes.faults
    for branch, pieces in zip(t.branches, (first_pieces, second_pieces), strict=True):
        tokens, mask = tokens_and_mask(engine, *pieces)
        assert branch.token_ids.tolist() == tokens
        assert branch.loss_mask.tolist() == mask
        # Routing rows have the number of the call that recorded them, versions that of the call that sampled.
        assert usable_rows(branch.loss_mask, branch.columns).all()
        calls = branch.columns["routed_experts"][:, 0, 0]
        predicting = np.flatnonzero(branch.loss_mask) - 1
        assert calls[predicting].tolist() == branch.columns["weight_version"].tolist()
    calls, tokens_of = np.unique(t.columns["weight_version"], return_counts=True)
    assert calls.tolist() == [1, 2, 3, 4, 5]
    assert tokens_of.tolist() == [len(engine.ids(text)) + 1 for text in texts]
    assert (t.turn_times, t.turn_rewards) == ((0, 1, 4, 2, 3), (0, 0, 0.2, 0, 0))
    assert (t.turns, t.text, t.finish_reason) == (5, "8 and", "stop")
    # Only the first call of a branch asks for all rows of its routing.
    assert [r.columns["routed_experts"].start == 0 for r in engine.asked] == [1, 0, 1, 0, 0]
    assert t.stamp is not None
    assert t.stamp.digests == t.digests()


def test_calls_that_come_together_are_branches():
    t, episodes = play(engine := ChatEngine("4 and", "5"), "asking_together")
    assert not episodes.faults
    expected = [tokens_and_mask(engine, (BEGIN, False), (text, True)) for text in ("4 and", "5")]
    assert [(b.token_ids.tolist(), b.loss_mask.tolist()) for b in t.branches] == expected
    assert t.turn_rewards == (0.0, 1.0)


def test_the_tokens_of_all_branches_are_bounded_together():
    engine = ChatEngine("4 and", "5")
    t, _ = play(engine, "shortening", turn_tokens=40)
    lengths = t.branch_lengths
    turn_length = len(engine.ids("5")) + 1
    third_prompt_length = len(engine.asked[2].prompt_ids)
    first_branch_length = len(engine.asked[1].prompt_ids) + turn_length
    assert lengths[0] > first_branch_length
    for tokens, turns in (
        (first_branch_length + third_prompt_length, 2),
        (first_branch_length + third_prompt_length + 1, 3),
    ):
        limits, engine = replace(LIMITS, tokens=tokens), ChatEngine("4 and", "5")
        t, _ = play(engine, "shortening", limits=limits, turn_tokens=40)
        assert (t.turns, t.finish_reason) == (turns, "length")
    assert engine.asked[-1].sampling.max_new_tokens == 1
    assert t.length == tokens


def test_what_the_template_can_not_say_is_a_fault():
    engine = ChatEngine("4")
    engine.tokenizer.chat_template = TEMPLATE.replace("in messages", "in messages[1:]")
    t, episodes = play(engine, "asking_twice", limits=replace(LIMITS, retries=0), role="user")
    assert t.finish_reason == "failed"
    (fault,) = episodes.faults
    assert "the chat template leaves out, or alters, a message of system" in fault


# --- agents and commands, without a policy


@asynccontextmanager
async def started_agent(agent: str) -> AsyncIterator[tuple[Agent, ChatCall]]:
    """Start an agent of ``planted_agents`` or a command; yield it with its first call. In the end it must be done."""
    path = agent if " " in agent else f"{PLANTED}:{agent}"
    environment = Agent(path, tool_format="hermes")
    try:
        yield environment, await environment.reset(PROBLEM)
    finally:
        await environment.close()
        assert environment._task is not None
        assert environment._task.done()


def test_a_command_has_openais_variables_and_the_problem():
    before = child_ids()

    async def work() -> None:
        command = f"{sys.executable} -m {PLANTED}"
        async with started_agent(f"{command} reward") as (agent, call):
            assert call == ChatCall([user("3+5")], [], None)
            assert await agent.step(Turn("4", (1,))) == Step(done=True, reward=0.5)
        async with started_agent(f"{command} fail") as (agent, _):
            with pytest.raises(RuntimeError, match=r"\b1: planted"):
                await agent.step(Turn("4", (1,)))
        async with started_agent(f"{command} fail"):
            assert len(child_ids() - before) == 1

    run(work)
    assert child_ids() == before


@pytest.mark.parametrize("ends", ["exit 0", "exec sleep 600"])
def test_nothing_that_a_command_starts_outlives_it(ends, tmp_path):
    """This includes a process in a session of its own, whether the command ends or the episode is cancelled before."""
    id_file = tmp_path / "pid"
    start = f"setsid sh -c 'echo $$ > {id_file}.new; mv {id_file}.new {id_file}; exec sleep 600' &"
    command = ["sh", "-c", f"{start} while ! [ -e {id_file} ]; do sleep 0.1; done; {ends}"]

    async def work() -> None:
        task = asyncio.create_task(_run_command(command, PROBLEM, AgentSession("", "")))
        while not id_file.exists():
            await asyncio.sleep(0.01)
        if ends != "exit 0":
            task.cancel()
        await asyncio.wait([task])

    run(work)
    assert process_start(int(id_file.read_text())) is None


def test_a_command_is_not_bound_by_its_workers_address_space():
    """The command maps 6 GiB, and its worker may map 4."""
    command = f"{sys.executable} -m {PLANTED} map"
    t, episodes = play(ChatEngine("4"), command)
    assert (t.finish_reason, t.turn_rewards) == ("stop", (0.5,)), episodes.faults


SPY = f"{sys.executable} {Path(__file__).with_name('spying_agent.py')} -"


def spy_report(command: str, sandbox_paths: list[str] | None = None) -> dict[str, Any]:
    """Return the report of ``spying_agent`` as a command."""

    async def work() -> Any:
        session = AgentSession("", "the session's key")
        return await _run_command(command.split(), PROBLEM, session, sandbox_paths)

    return json.loads(asyncio.run(work()))


def test_a_command_gets_no_keys(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    monkeypatch.setenv("MEGATRON_DPPO_LEASE", "a nonce")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    variables = spy_report(SPY)["variables"]
    assert variables["OPENAI_API_KEY"] == "the session's key"
    assert variables["LC_ALL"] == "C.UTF-8"
    assert not {"WANDB_API_KEY", "MEGATRON_DPPO_LEASE"} & variables.keys()


@pytest.fixture
def sandbox() -> None:
    """Skip the test if this machine has no sandbox, or let it fail if ``CI`` is set."""
    try:
        programs.check_sandbox(())
    except SandboxError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.mark.usefixtures("sandbox")
def test_a_command_in_a_sandbox_sees_neither_processes_nor_files_of_others(tmp_path, monkeypatch):
    home_folder, shown_folder = tmp_path / "home", tmp_path / "shown"
    for folder in (home_folder, shown_folder):
        folder.mkdir()
        (folder / ".netrc").write_text("password secret")
    monkeypatch.setenv("HOME", str(home_folder))
    paths = [home_folder / ".netrc", shown_folder / ".netrc", Path(__file__), Path("/etc/shadow")]
    command = " ".join([SPY, *map(str, paths)])
    report = spy_report(command, [str(shown_folder)])
    # The command itself, and bubblewrap's first process in the sandbox.
    assert len(report["processes"]) == 2
    assert report["readable"] == [str(shown_folder / ".netrc"), str(Path(__file__))]
    assert report["variables"]["HOME"] == "/tmp"


@pytest.mark.usefixtures("sandbox")
def test_a_command_in_a_sandbox_plays_an_episode():
    """The command can start processes and threads, and reaches the server of its session."""
    command = f"{sys.executable} -m {PLANTED} reward"
    t, episodes = play(ChatEngine("4"), command, sandbox=True, sandbox_paths=[sys.base_prefix])
    assert (t.finish_reason, t.turn_rewards) == ("stop", (0.5,)), episodes.faults


def test_a_sandbox_that_can_not_be_is_refused_before_a_run(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"{PLANTED}:silent.*command"):
        check_environment("agent", {"agent": f"{PLANTED}:silent", "sandbox": True})
    for options, key in (
        ({"sandbox": "yes"}, "sandbox"),
        ({"sandbox_paths": "/x"}, "sandbox_paths"),
        ({"sandbox_paths": [3]}, "sandbox_paths"),
        ({"sandbox_paths": [""]}, "sandbox_paths"),
    ):
        with pytest.raises(ValueError, match=f"options: {key}: got"):
            check_environment("agent", {"agent": SPY, **options})
    home = os.environ["HOME"]
    monkeypatch.setenv("HOME", str(Path.cwd() / "home"))
    with pytest.raises(SandboxError, match="home"):
        check_environment("agent", {"agent": SPY, "sandbox": True})
    monkeypatch.setenv("HOME", home)
    with pytest.raises(SandboxError, match="/no/such/path"):
        check_environment(
            "agent", {"agent": SPY, "sandbox": True, "sandbox_paths": ["/no/such/path"]}
        )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="bubblewrap"):
        check_environment("agent", {"agent": SPY, "sandbox": True})


@pytest.mark.parametrize(
    "path",
    ["/", "/root", "/home", "~", "/proc", "/proc/self", "/dev/shm", "/etc", "/tmp", "/var", "link"],
)
def test_a_sandbox_shows_no_private_folder(tmp_path, path):
    if path == "~":
        path = os.environ["HOME"]
    if path == "link":
        (tmp_path / "link").symlink_to("/")
        path = str(tmp_path / "link")
    with pytest.raises(SandboxError, match=f"sandbox_paths: got '{path}'"):
        list(sandbox_module._program_files([path]))


@pytest.mark.parametrize("folder", ["/", "/etc", "/tmp"])
def test_a_sandbox_does_not_start_in_a_folder_with_private_folders(monkeypatch, folder):
    monkeypatch.chdir(folder)
    with pytest.raises(SandboxError, match=f"current folder {folder}"):
        list(sandbox_module._program_files([]))


def test_a_sandbox_has_certificates_and_no_private_keys_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = list(sandbox_module._program_files(["/etc/hostname"]))
    shown_paths = {
        Path(words[i + 2]) for i, word in enumerate(words) if word.startswith("--ro-bind")
    }
    assert Path("/etc/ssl/certs") in shown_paths
    for key in (
        "/etc/ssl/private/a.key",
        "/etc/pki/tls/private/a.key",
        "/etc/pki/CA/private/a.key",
    ):
        assert not any(Path(key).is_relative_to(path) for path in shown_paths)


NODE_AGENT = """
const body = {model: "m", messages: [{role: "user", content: "3+5"}]};
const headers = {"Authorization": `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json"};
const url = `${process.env.OPENAI_BASE_URL}/chat/completions`;
fetch(url, {method: "POST", headers, body: JSON.stringify(body)}).then(answer => answer.json()).then(answer =>
  console.log(JSON.stringify({reward: answer.choices[0].message.content == "4" ? 0.25 : 0})));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_command_may_be_of_node(tmp_path):
    """Node's ``fetch`` reserves 10 GiB of address space, more than a worker may have."""
    (tmp_path / "agent.js").write_text(NODE_AGENT)
    t, episodes = play(ChatEngine("4"), f"node {tmp_path / 'agent.js'}")
    assert (t.finish_reason, t.turn_rewards) == ("stop", (0.25,)), episodes.faults


async def test_a_framework_needs_no_more_than_openais_variables():
    """pydantic-ai has the newest client in packages of its own. It calls a tool, and goes on with the tool's result."""
    path = environment_with("agents")["PYTHONPATH"]
    command = f"env PYTHONPATH={path} {sys.executable} -m {PLANTED} framework"
    async with started_agent(command) as (agent, call):
        assert call.messages == [{"role": "system", "content": "sums"}, user("3+5")]
        assert [tool["function"]["name"] for tool in call.tools] == ["add"]
        step = await agent.step(Turn(ADD, (1,)))
        result = {"role": "tool", "content": "8", "tool_call_id": "call_0_0"}
        assert isinstance(step.observation, ChatCall)
        assert step.observation.messages == [result]
        assert step.observation.tools == call.tools
        last_step = await agent.step(Turn("It is 8.", (1,)))
        assert last_step == Step(done=True, is_scored=True, scored_text="It is 8.")


def test_the_last_line_of_a_command_may_be_its_result():
    results = {
        '{"reward": 1}': 1,
        'x\n{"reward": 0.5, "a": 1}': 0.5,
        '{"answer": "8"}': "8",
        "8": None,
        "{": None,
        "[8]": None,
        "{}": None,
        '{"answer": 8}': "8",
        "[" * 100_000: None,
    }
    for output, result in results.items():
        assert result_of(output) == result
    for output, message in (
        ('{"reward": "0.5"}', 'reward: got "0.5", expected a number'),
        ('{"reward": true}', "reward: got true, expected a number"),
        ('{"answer": [8]}', r"answer: got \[8\], expected text or a number"),
    ):
        with pytest.raises(ValueError, match=message):
            result_of(output)


async def test_what_a_command_says_to_standard_error_is_no_result():
    async with started_agent(f"{sys.executable} -m {PLANTED} complain") as (agent, _):
        assert await agent.step(Turn("4", (1,))) == Step(done=True, reward=0.5)


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("crashing", "ZeroDivisionError: planted"),
        ("asking_for_more", "temperature: got 0.5.*BadRequestError"),
        ("listing", r"\[1\], expected .*None"),
    ],
)
async def test_what_an_agent_fails_with_is_no_reward(agent, reason):
    async with started_agent(agent) as (environment, _):
        with pytest.raises((RuntimeError, TypeError), match=reason):
            await environment.step(Turn("4", (1,)))


async def test_an_agent_that_never_calls_is_no_episode():
    # The agent ends before its first call, so there is no turn.
    with pytest.raises(RuntimeError, match="ended"):
        async with started_agent("silent"):
            pytest.fail("an agent without a call began")
    # A worker ends the wait in this way after environment.step_timeout_s.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), started_agent("hanging"):
            pass


# --- what a session answers and refuses


@asynccontextmanager
async def session(
    *turns: Turn, key: str = "key", **options: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Conversation]]:
    """Serve a conversation in which the policy answers with ``turns``, and yield a client with the session's key."""
    conversation = Conversation(**{"policy_format": PolicyFormat("hermes"), **options})
    runner, url = await server.serve(conversation, key, "127.0.0.1")

    async def policy() -> None:
        for turn in turns:
            await conversation.calls.get()
            conversation.answer(turn)

    policy_task = asyncio.create_task(policy())
    client = AsyncOpenAI(base_url=url, api_key=key, timeout=30)
    try:
        yield client, conversation
    finally:
        await client.close()
        policy_task.cancel()
        await runner.cleanup()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def say(client: AsyncOpenAI, *messages: Any, **settings: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=list(messages), **settings)


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(work())  # type: ignore[arg-type]


async def test_an_answer_is_openais_streamed_or_not():
    turns = Turn(ADD, (5, 6, 7), False, 11), Turn("8 an", (8, 9), True, 20)
    async with session(*turns) as (client, _):
        first = await say(client, user("3+5"), tools=[TOOL])
        (choice,) = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert (call.id, call.function.name) == ("call_0_0", "add")
        assert json.loads(call.function.arguments) == {"a": 3, "b": 5}
        assert first.usage.to_dict() == {
            "prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14,
        }  # fmt: skip
        # The client may send the same messages back in another form.
        text = [{"type": "text", "text": "8"}]
        sent = {**choice.message.to_dict(), "content": "", "refusal": None}
        sent["tool_calls"][0]["function"]["arguments"] = '{ "b":5, "a":3 }'
        reply = {"role": "tool", "tool_call_id": call.id, "content": text}
        stream = await say(
            client, user("3+5"), sent, reply, tools=[TOOL], stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        pieces = [piece async for piece in stream]
        assert [p.choices[0].delta.content for p in pieces[:2]] == ["8 an", None]
        assert [p.choices[0].finish_reason for p in pieces[:2]] == [None, "length"]
        assert (len(pieces), pieces[2].choices, pieces[2].usage.total_tokens) == (3, [], 22)


async def test_calls_of_tools_are_streamed_and_only_where_there_are_tools():
    async with session(Turn(f"so {ADD} and", (1,))) as (client, _):
        stream = await say(client, user("3+5"), tools=[TOOL], stream=True)
        first, last = [piece.choices[0] async for piece in stream]
        (call,) = first.delta.tool_calls
        assert (first.delta.content, call.index, call.function.name) == ("so", 0, "add")
        assert last.finish_reason == "tool_calls"
    bad = ADD.replace("}}", "}")
    for text, tools in ((ADD, []), (bad, [TOOL]), (ADD.replace('"name"', '"nam"'), [TOOL])):
        async with session(Turn(text, (1,))) as (client, _):
            message = (await say(client, user("3+5"), tools=tools)).choices[0].message
            assert (message.content, message.tool_calls) == (text, None)


async def test_a_session_has_one_key_and_one_model():
    async with session() as (client, _), session(key="other") as (other, _):
        assert [model.id async for model in client.models.list()] == ["policy"]
        for key in ("wrong", "Key", "ke", other.api_key):
            stranger = client.with_options(api_key=key)
            with pytest.raises(openai.AuthenticationError):
                await say(stranger, user("3+5"))
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.5}, "temperature: got 0.5"),
        ({"n": 2}, "n: got 2"),
        ({"stop": ["x"]}, "stop: got"),
        ({"tool_choice": "none", "tools": [TOOL]}, 'tool_choice: got "none"'),
        ({"max_tokens": 0}, r"max_completion_tokens: got \[0\]"),
        ({"messages": []}, "messages: got none"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"content": "3"}]}, "role and content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "id, name and arguments",
        ),
        ({"extra_body": {"tools": TOOL}}, "tools: got .*, expected a list"),
        # The form of tools in OpenAI's Responses interface.
        (
            {"tools": [{"type": "function", "name": "add", "parameters": {}}]},
            'tools: got .*, expected .*"function": .*"name"',
        ),
    ],
)
async def test_what_a_session_can_not_do_is_refused(settings, message):
    async with session(Turn("8", (1,))) as (client, conversation):
        with pytest.raises(openai.BadRequestError, match=message):
            await client.chat.completions.create(
                **{"model": "m", "messages": [user("3+5")], **settings}
            )
        assert re.search(message, conversation.refusal)
        # The session goes on, and accepts settings that change nothing.
        await say(client, user("3+5"), n=1, tool_choice="auto", temperature=None)


async def test_the_runs_own_sampling_settings_may_be_repeated():
    turns = Turn("8", (1,)), Turn("9", (2,))
    async with session(*turns, sampling={"temperature": 0.5, "top_p": 1.0}) as (client, _):
        completion = await say(client, user("3+5"), temperature=0.5, top_p=1)
        assert completion.choices[0].message.content == "8"
        for other in ({"temperature": 0.7}, {"top_p": 0.5}, {"temperature": "0.5"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(other))):
                await say(client, user("3+6"), extra_body=other)


async def test_settings_with_a_neutral_value_are_accepted():
    """Some clients send every field of the API with its default."""
    neutral_values = {
        **{
            "stop": [],
            "logit_bias": {},
            "tools": [],
            "functions": [],
            "metadata": {},
            "seed": None,
        },
        **{"top_logprobs": 0, "service_tier": "auto", "modalities": ["text"], "min_p": 0.0},
        **{"repetition_penalty": 1.0, "frequency_penalty": 0.0, "logprobs": False, "n": 1},
    }
    async with session(Turn("8", (1,))) as (client, _):
        completion = await say(client, user("3+5"), extra_body=neutral_values)
        assert completion.choices[0].message.content == "8"
        for name, value in {"stop": "x", "logit_bias": {"7": 1}, "top_logprobs": 1}.items():
            with pytest.raises(openai.BadRequestError, match=f"{name}: got"):
                await say(client, user("3+6"), extra_body={name: value})


def test_an_episode_knows_the_sampling_settings_of_its_run():
    engine = ChatEngine("4 and", "5")
    (t,), episodes = environments.play(
        engine, "agent", agent=f"{PLANTED}:asking_for_more", sampling={"temperature": 0.5}
    )
    assert not episodes.faults
    assert t.turns == 2


async def test_fields_are_ignored_where_the_options_say_so():
    async with session(Turn("8", (1,)), ignored=frozenset({"temperature"})) as (client, _):
        completion = await say(client, user("3+5"), temperature=0.5)
        assert completion.choices[0].message.content == "8"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([user("3+6"), "said", user("sure?")], "message 0: got .*3\\+6.*, expected .*3\\+5"),
        ([user("3+5"), {"role": "assistant", "content": "9"}, user("sure?")], "message 1: got"),
        ([user("3+5")], "message 1: got null, expected .*assistant"),
        ([user("3+5"), "said"], "others .*message 1"),
        ([user("3+5"), "said", {"role": "assistant", "content": "9"}, user("x")], "of others"),
    ],
)
async def test_a_history_that_no_branch_has_is_refused_where_there_may_be_no_more(
    messages, message
):
    message += ".*1 branches, and there may be no more"
    turns = Turn(" 8", (1,)), Turn("9", (2,))
    async with session(*turns, most_branches=1) as (client, _):
        sampled = (await say(client, user("3+5"))).choices[0].message
        sent = [sampled if m == "said" else m for m in messages]
        with pytest.raises(openai.ConflictError, match=message):
            await say(client, *sent)
        with pytest.raises(openai.ConflictError, match="tools: "):
            await say(client, user("3+5"), sampled, user("sure?"), tools=[TOOL])
        again = {"role": "assistant", "content": "8"}
        completion = await say(client, user("3+5"), again, user("sure?"))
        assert completion.choices[0].message.content == "9"


async def test_calls_are_answered_in_their_order_and_one_whose_caller_has_gone_may_come_again():
    async with session() as (client, conversation):
        first = asyncio.create_task(say(client, user("3+5")))
        call = await conversation.calls.get()
        assert call == ChatCall([user("3+5")], [], None, 0)
        other = asyncio.create_task(say(client, user("3+6")))
        assert await conversation.calls.get() == ChatCall([user("3+6")], [], None, 1)
        first.cancel()
        await asyncio.wait([first])
        while conversation._undelivered[0].has_client:
            await asyncio.sleep(0.01)
        again = asyncio.create_task(say(client, user("3+5")))
        while not conversation._undelivered[0].has_client:
            await asyncio.sleep(0.01)
        for text in ("8", "9"):
            conversation.answer(Turn(text, (1,)))
        assert (await again).choices[0].message.content == "8"
        assert (await other).choices[0].message.content == "9"
        assert conversation.calls.empty()
        # The turn of a call whose caller has gone may arrive before the caller sends the call again.
        cancelled_call = asyncio.create_task(say(client, user("3+7")))
        assert (await conversation.calls.get()).branch == 2
        cancelled_call.cancel()
        while conversation._undelivered[0].has_client:
            await asyncio.sleep(0.01)
        conversation.answer(Turn("10", (1,)))
        assert (await say(client, user("3+7"))).choices[0].message.content == "10"
        assert conversation._undelivered == []


def test_a_branch_goes_on_where_it_was():
    """A call continues the newest branch that is a prefix of its messages. A call with other tools, or with a turn that
    the policy did not sample, begins a branch."""
    turns = [Turn(text, (1,)) for text in "aacdefg"]
    sure = user("sure?")

    def policy(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    async def work() -> None:
        async with session() as (client, conversation):

            async def branch(*messages: Any, **settings: Any) -> tuple[int, list[Any]]:
                call_task = asyncio.create_task(say(client, *messages, **settings))
                call = await conversation.calls.get()
                conversation.answer(turns.pop(0))
                await call_task
                return call.branch, list(call.messages)

            assert await branch(user("x")) == (0, [user("x")])
            assert await branch(user("x")) == (1, [user("x")])
            assert await branch(user("x"), policy("a"), sure) == (1, [sure])
            whole = [user("x"), policy("a"), sure, policy("c"), sure]
            assert await branch(*whole) == (1, [sure])
            assert await branch(*whole) == (2, whole)
            assert await branch(*whole, policy("e"), sure, tools=[TOOL]) == (
                3,
                [*whole, policy("e"), sure],
            )
            assert await branch(*whole, policy("e"), policy("y"), sure) == (
                4, [*whole, policy("e"), policy("y"), sure],
            )  # fmt: skip

    run(work)


async def test_a_stream_begins_before_its_turn_is_there():
    async with session() as (client, conversation), aiohttp.ClientSession() as http:
        body = {"messages": [user("3+5")], "stream": True}
        key = {"Authorization": "Bearer key"}
        async with http.post(f"{client.base_url}chat/completions", json=body, headers=key) as r:
            assert (r.status, r.content_type) == (200, "text/event-stream")
            assert (await r.content.readline()).startswith(b": ")
            await conversation.calls.get()
            conversation.answer(Turn("8", (1,)))
            assert b'"content": "8"' in await r.content.read()


async def test_a_body_that_is_too_large_is_a_refusal():
    async with session() as (client, conversation):
        with pytest.raises(openai.APIStatusError, match="1048576") as error:
            await say(client, user("x" * (1 << 20)))
        assert error.value.status_code == 413
        assert isinstance(error.value.body, dict)
        assert error.value.body["type"] == "invalid_request_error"
        assert "1048576" in conversation.refusal


def body_of(*messages: Any, **fields: Any) -> str:
    return json.dumps({"model": "m", "messages": list(messages), **fields})


def body_with_calls(calls: Any) -> str:
    return body_of({"role": "assistant", "content": None, "tool_calls": calls})


def tool_call(**changes: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {**call, **changes}


DEEP = "[" * 100_000 + "]" * 100_000
NESTED = json.loads("[" * 500 + "]" * 500)


@pytest.mark.parametrize(
    "body",
    {
        "brackets": DEEP,
        "open brackets": "[" * 100_000,
        "brackets below": f'{{"model": "m", "messages": {DEEP}}}',
        "500 levels": body_of(user("3+5"), tools=[{"function": NESTED}]),
        "a list": "[1]",
        "a long number": '{"messages": [' + "1" * 5000 + "]}",
        "half a character": b'{"messages": ["\xff"]}',
        "part without text": body_of({"role": "user", "content": [{"type": "text"}]}),
        "part of null": body_of({"role": "user", "content": [{"type": "text", "text": None}]}),
        "part of a number": body_of({"role": "user", "content": [{"type": "text", "text": 5}]}),
        "textual part": body_of({"role": "user", "content": ["3"]}),
        "content 5": body_of({"role": "user", "content": 5}),
        "content of a turn": body_of({"role": "assistant", "content": 5}),
        "content object": body_of({"role": "tool", "tool_call_id": "a", "content": {"a": 1}}),
        "role": body_of({"role": "emperor", "content": "3"}),
        "control token": body_of({"role": "user<|im_end|>", "content": "3"}),
        "name": body_of({"role": "user", "name": ["a"], "content": "3"}),
        "tool_calls 5": body_with_calls(5),
        "tool_calls of null": body_with_calls([None]),
        "tool_calls of text": body_with_calls("ab"),
        "name of a call": body_with_calls([tool_call(function={"name": 5, "arguments": "{}"})]),
        "deep arguments": body_with_calls([tool_call(function={"name": "f", "arguments": DEEP})]),
        "tools 5": body_of(user("3+5"), tools=5),
        "stream_options 5": body_of(user("3+5"), stream=True, stream_options=5),
    }.items(),
    ids=lambda body: body[0],
)
async def test_what_no_session_can_read_is_refused_once(body):
    """The status is 400, because OpenAI's clients repeat a call that ends with 500."""
    async with session(Turn("8", (1,))) as (client, conversation):
        headers = {"Authorization": "Bearer key", "Content-Type": "application/json"}
        async with aiohttp.ClientSession(headers=headers) as other:
            url = f"{client.base_url}chat/completions"
            async with other.post(url, data=body[1]) as answer:
                content = await answer.json()
        assert (answer.status, answer.headers["x-should-retry"]) == (400, "false")
        assert content["error"]["message"] == conversation.refusal != ""
        assert (await say(client, user("3+5"))).choices[0].message.content == "8"


async def test_a_key_and_a_charset_that_are_no_text_are_refused():
    async with session(Turn("8", (1,))) as (client, _):
        url = f"{client.base_url}chat/completions"
        good = {"Authorization": "Bearer key", "Content-Type": "application/json"}
        bad = [
            (401, good | {"Authorization": "Bearer \udcff"}),
            (400, good | {"Content-Type": "application/json; charset=klingon"}),
        ]
        async with aiohttp.ClientSession() as other:
            for status, headers in bad:
                sent = other.post(url, data=body_of(user("3+5")), headers=headers)
                async with sent as answer:
                    assert answer.status == status


async def test_calls_that_policy_nests_too_deeply_stay_text():
    """Such a call is treated like one that is no JSON. What the policy says must be no reason to replace a sample."""
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": {json.dumps(NESTED)}}}}}</tool_call>'
    async with session(Turn(text, (1,)), Turn("8", (2,))) as (client, _):
        message = (await say(client, user("3+5"), tools=[TOOL])).choices[0].message
        assert (message.content, message.tool_calls) == (text, None)
        again = await say(client, user("3+5"), message, user("sure?"), tools=[TOOL])
        assert again.choices[0].message.content == "8"


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('{"name": "add", "parameters": {"a": 3}}', None, {"a": 3}),
        ('\n{"name": "add", "parameters": {}} ', None, {}),
        # The following texts are no calls.
        ('so {"name": "add", "parameters": {"a": 3}}', ..., None),
        ('{"name": "add", "parameters": 3}', ..., None),
        ('["add"]', ..., None),
        ("8", ..., None),
        (ADD, ..., None),
        ("[" * 100_000, ..., None),
    ],
)
async def test_llama_calls_tools_by_a_whole_message(text, content, arguments):
    async with session(Turn(text, (1,)), policy_format=PolicyFormat("llama3")) as (client, _):
        message = (await say(client, user("3+5"), tools=[TOOL])).choices[0].message
        assert message.content == (text if content is ... else content)
        calls = [c.function for c in message.tool_calls or ()]
        expected = [] if arguments is None else [("add", arguments)]
        assert [(c.name, json.loads(c.arguments)) for c in calls] == expected


def test_an_agent_that_is_not_there_is_refused_before_a_run():
    check_environment("agent", {"agent": f"{PLANTED}:silent", "ignored": ["temperature"]})
    check_environment("agent", {"agent": f"{sys.executable} agent.py"})
    for agent, message in (
        ("nodee agent.js", "there is no program 'nodee' here"),
        (f"{PLANTED}:nobody", "nobody'"),
        ("", "got no command"),
    ):
        with pytest.raises(ValueError, match=message):
            check_environment("agent", {"agent": agent})
    for options, message in (
        ({"branches": 0}, "branches: got 0, expected 1 or more"),
        ({"tool_format": "gwen"}, "tool_format: got 'gwen', expected .*hermes"),
        ({"ignored": "temperature"}, "ignored: got 'temperature', expected a list"),
    ):
        with pytest.raises(ValueError, match=message):
            check_environment("agent", {"agent": f"{PLANTED}:silent", **options})
    with pytest.raises(ValueError, match="'agent'"):
        check_environment("agent", {})
