"""Checks, before a start, of the environments, rewards and agents that a recipe names, and of their options. Every
wrong value is a fault with its key, never a traceback."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_dppo.config import ConfigError
from megatron_dppo.config.loading import merged
from megatron_dppo.config.machine import this_machine
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.environments import ChatCall
from megatron_dppo.environments.over_http import absent_services
from megatron_dppo.environments.turn_template import TurnTemplate, TurnTemplateError
from megatron_dppo.launch.library_checks import check_everything
from megatron_dppo.launch.start_checks import check_start
from megatron_dppo.system.network import host_fault, url_fault
from tests.extras import NEEDS_REASONING_GYM
from tests.tiny_models import tiny_tokenizer
from tests.unit.config_files import minimal_config

PLANTED = "tests.unit.planted_environments"
AGENTS = "tests.unit.planted_agents"
BROKEN = "tests.unit.planted_broken"


def config_with(folder: Path, **sections: Any) -> TrainConfig:
    limits = {"environment": {"max_turns": 2, "max_observation_tokens": 64}}
    return minimal_config(folder, **merged(limits, sections))


def faults_of(folder: Path, **sections: Any) -> list[str]:
    """Return the faults of all checks, including the checks that need libraries."""
    try:
        check_everything(config_with(folder, **sections), "c.yaml", weights=False)
    except ConfigError as error:
        return list(error.faults)
    return []


NAN, INFINITY = float("nan"), float("inf")
NOT_ENVIRONMENTS = [
    "..os:X",
    ":X",
    "os:",
    "os",
    "a b:c",
    "os:getcwd",
    "sys:exit",
    "os:PathLike",
    "json:JSONDecoder",
    "no_such_module:X",
    f"{BROKEN}:X",
    f"{PLANTED}:nobody",
    f"{PLANTED}:CONSTANT",
    f"{PLANTED}:Synchronous",
    f"{PLANTED}:Unchecked",
]


@pytest.mark.parametrize("name", NOT_ENVIRONMENTS)
def test_what_is_no_environment_is_refused_by_its_name(tmp_path, name):
    (fault,) = faults_of(tmp_path, environment={"name": name})
    assert fault.startswith("environment.name: ")
    assert name in fault


@pytest.mark.parametrize("name", ["Counting", "Wrapping", "made_by_a_function"])
def test_what_is_an_environment_is_accepted(tmp_path, name):
    assert not faults_of(tmp_path, environment={"name": f"{PLANTED}:{name}"})


@pytest.mark.parametrize(
    ("name", "options", "key", "value"),
    [
        ("over-http", {"url": 5}, "url", "5 (int)"),
        ("calculator", {"call_reward": "abc"}, "call_reward", "'abc' (str)"),
        ("calculator", {"call_reward": NAN}, "call_reward", "nan (float)"),
        ("calculator", {"call_reward": INFINITY}, "call_reward", "inf (float)"),
        ("calculator", {"call_reward": True}, "call_reward", "true (bool)"),
        ("calculator", {"call": None}, "call", "null"),
        ("agent", {"agent": 5}, "agent", "5 (int)"),
        ("agent", {"agent": f"{AGENTS}:silent", "host": 5}, "host", "5 (int)"),
        ("agent", {"agent": f"{AGENTS}:silent", "ignored": "n"}, "ignored", "'n' (str)"),
        ("agent", {"agent": f"{AGENTS}:silent", "branches": 1.5}, "branches", "1.5 (float)"),
        ("python", {"seconds": "5"}, "seconds", "'5' (str)"),
    ],
)
def test_an_option_of_another_type_is_named(tmp_path, name, options, key, value):
    (fault,) = faults_of(tmp_path, environment={"name": name, "options": options})
    assert fault.startswith(f"environment.options.{key}: got {value}, expected ")


JUDGE = {"url": "http://127.0.0.1:1", "model": "m"}


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("judge", {**JUDGE, "unparsed": "abc"}, "unparsed"),
        ("judge", {**JUDGE, "unparsed": NAN}, "unparsed"),
        ("judge", {**JUDGE, "lowest": INFINITY}, "lowest"),
        ("judge", {**JUDGE, "request": [1]}, "request"),
        ("judge", {**JUDGE, "model": 5}, "model"),
        ("reward_model", {"url": 5, "tokenizer": "t"}, "url"),
        pytest.param("reasoning_gym", {"answer_in": 5}, "answer_in", marks=NEEDS_REASONING_GYM),
    ],
)
def test_a_rewards_option_of_another_type_is_named(tmp_path, name, options, key):
    (fault,) = faults_of(tmp_path, reward={"name": name, "options": options})
    assert fault.startswith(f"reward.options.{key}: got ")
    further = {"further": {"other": {"name": name, "options": options}}}
    (fault,) = faults_of(tmp_path, reward={"name": "exact_integer", **further})
    assert fault.startswith(f"reward.further.other.options.{key}: got ")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("judge", JUDGE),
        ("judge", {**JUDGE, "unparsed": 0, "lowest": 1, "request": {"top_k": 1}}),
        ("judge", {**JUDGE, "unparsed": None}),
    ],
)
def test_options_of_the_declared_types_are_accepted(tmp_path, name, options):
    assert not faults_of(tmp_path, reward={"name": name, "options": options})


@pytest.mark.parametrize("tokenizer", ["no_such_folder", "bare"])
def test_a_reward_model_without_its_tokenizer_is_refused(tmp_path, tokenizer):
    bare = tiny_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    folder = str(tmp_path / tokenizer)
    options = {"url": "http://127.0.0.1:1", "tokenizer": folder}
    (fault,) = faults_of(tmp_path, reward={"name": "reward_model", "options": options})
    assert fault.startswith("reward.name: ")
    assert folder in fault


@pytest.mark.parametrize(
    "name", ["..os:X", f"{BROKEN}:X", "sys:exit", "tests.unit.planted_rewards:FailingToStart"]
)
def test_what_is_no_reward_is_refused_by_its_name(tmp_path, name):
    (fault,) = faults_of(tmp_path, reward={"name": name})
    assert fault.startswith("reward.name: ")
    assert name in fault


@pytest.mark.parametrize(
    "agent", ["CONSTANT", "synchronous", "of_the_problem_alone", "TOOL", "nobody"]
)
def test_what_is_no_agent_is_refused_by_its_name(tmp_path, agent):
    options = {"agent": f"{AGENTS}:{agent}"}
    (fault,) = faults_of(tmp_path, environment={"name": "agent", "options": options})
    assert fault.startswith("environment.name: options: ")
    assert f"{AGENTS}:{agent}" in fault


@pytest.mark.parametrize("host", ["999.1.1.1", "", "a b", "http://x", "x" * 300, "no-such.invalid"])
def test_an_agent_can_not_listen_on_what_is_no_address(tmp_path, host):
    options = {"agent": f"{AGENTS}:silent", "host": host}
    (fault,) = faults_of(tmp_path, environment={"name": "agent", "options": options})
    assert fault.startswith("environment.name: options: host: ")
    assert repr(host) in fault


def test_addresses_of_hosts():
    # The last address is another machine's: a run may be checked on a machine on which it does not run.
    for host in ("127.0.0.1", "0.0.0.0", "::1", "localhost", "10.255.255.1"):
        assert host_fault(host) is None
    assert url_fault("http://999.1.1.1:80")
    assert url_fault("http://10.1.1.1:80") is None


@pytest.mark.parametrize("role", ["", "user<|im_end|>", "user\n", "a b", "5"])
def test_a_role_that_is_no_name_is_refused(tmp_path, role):
    (fault,) = faults_of(tmp_path, environment={"name": "calculator", "role": role})
    assert fault.startswith("environment.role: ")


ANY_ROLE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_role_that_no_template_names_is_refused_though_the_template_writes_it():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = ANY_ROLE
    for role in ("emperor", "user<|im_end|>", ""):
        with pytest.raises(TurnTemplateError, match=r"environment\.role"):
            TurnTemplate(tokenizer, role)
    template = TurnTemplate(tokenizer, "tool")
    message = {"role": "emperor", "content": "x"}
    for call in (ChatCall([message]), ChatCall([{"role": "user<|im_end|>", "content": "x"}])):
        with pytest.raises(TurnTemplateError):
            template.prompt(call)
        with pytest.raises(TurnTemplateError):
            template.delta([5], call)
    tokenizer.chat_template = ANY_ROLE + "{# roles: emperor #}"
    TurnTemplate(tokenizer, "emperor").delta([5], ChatCall([message]))


def test_colocated_trainers_need_a_server(tmp_path):
    engine = {"placement": "colocated", "servers": 0}
    (fault,) = faults_of(tmp_path, engine=engine)
    assert fault.startswith("engine.servers: got 0 ")
    assert not faults_of(tmp_path, engine={"placement": "colocated"})


# --- servers that give rewards or play environments


def sections_of(url: str, tokenizer: str) -> dict[str, Any]:
    reward = {"name": "judge", "options": {"url": url, "model": "m"}}
    reward["further"] = {
        "x": {"name": "reward_model", "options": {"url": url, "tokenizer": tokenizer}}
    }
    return {"environment": {"name": "over-http", "options": {"url": url}}, "reward": reward}


KEYS = ["environment.options.url", "reward.options.url", "reward.further.x.options.url"]


def test_a_server_that_is_away_is_named_before_a_start(tmp_path):
    with socket.socket() as silent_socket:
        silent_socket.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent_socket.getsockname()[1]}"
        config = config_with(tmp_path, **sections_of(url, str(tmp_path)))
        faults = absent_services(config)
        assert [fault.partition(": ")[0] for fault in faults] == KEYS
        assert all(url in fault for fault in faults)
        assert set(faults) <= set(check_start(config, this_machine()).faults)
        # A replay needs none of the servers.
        replayed = config.rollout.model_copy(update={"replay_from": str(tmp_path)})
        assert not absent_services(config.model_copy(update={"rollout": replayed}))


def test_a_server_that_answers_whatever_it_is_is_there(tmp_path):
    """The check sends a GET. A server that serves only POST answers 404 or 401, which also shows that it runs."""

    async def run() -> list[str]:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        config = config_with(tmp_path, **sections_of(url, str(tmp_path)))
        try:
            return await asyncio.to_thread(absent_services, config)
        finally:
            await runner.cleanup()

    assert asyncio.run(run()) == []
