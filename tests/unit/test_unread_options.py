"""Options that nothing reads are named: of a chat template, a reward, an environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.agents.conversation import Conversation
from megatron_dppo.config import TrainConfig, load_config, resolved_yaml
from megatron_dppo.data.problems import PromptForm, template_warnings
from megatron_dppo.data.turn_ends import ResponseEnds
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.unread_options import option_warnings
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from tests.unit.config_files import minimal

PARTS = """
def takes_all(response, **settings):
    return float(settings["scale"])

def takes_one(response, scale=1.0):
    return scale

class Env:
    def __init__(self, size, **settings):
        self.settings = settings

    async def reset(self, problem): ...
    async def step(self, turn): ...
    async def close(self): ...
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    (tmp_path / "own_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return minimal(tmp_path)


def warnings_of(tree: dict[str, Any], **sections: Any) -> list[str]:
    return list(option_warnings(TrainConfig.model_validate(tree | sections)))


def template_warnings_of(template: Any, **arguments: Any) -> list[str]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    ends = ResponseEnds({2: ("config.json",)})
    return list(template_warnings(tokenizer, PromptForm(arguments=arguments), ends))


@pytest.mark.parametrize(
    "mention",
    [
        "{% if enable_thinking is defined and not enable_thinking %}0{% endif %}",
        "{%- set enable_thinking = enable_thinking | default(true) -%}",
        "{% generation %}{{ enable_thinking }}{% endgeneration %}",
    ],
)
def test_an_argument_that_the_template_does_not_mention_is_named(mention):
    template = CHAT_TEMPLATE + "{# enable_thinkin #}enable_thinkin" + mention
    assert not template_warnings_of(template, enable_thinking=False)
    (warning,) = template_warnings_of(template, enable_thinkin=False, enable_thinking=True)
    assert "data.chat_template_arguments.enable_thinkin:" in warning
    assert "similar names in it: enable_thinking" in warning


def test_a_template_of_several_names_and_no_template_are_searched():
    named = {"default": CHAT_TEMPLATE, "tool_use": CHAT_TEMPLATE + "{{ mood }}"}
    assert not template_warnings_of(named, mood="calm")
    (warning,) = template_warnings_of(None, mood="calm")
    assert "chat_template_arguments.mood" in warning


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        ({"name": "own_parts:takes_all", "options": {"scale": 2.0}}, []),
        ({"name": "own_parts:takes_all", "options": {"scal": 2.0}}, ["reward.options.scal:"]),
        ({"name": "own_parts:takes_one", "options": {"scale": 2.0}}, []),
        # A name that is not there is a fault of another check.
        ({"name": "own_parts:none", "options": {"scal": 2.0}}, []),
        ({"name": "own_parts:takes_one", "options": {"scal": 2.0}}, []),
        (
            {"further": {"more": {"name": "own_parts:takes_all", "options": {"scal": 2.0}}}},
            ["reward.further.more.options.scal:"],
        ),
    ],
)
def test_a_rewards_option_that_its_module_does_not_mention_is_named(tree, reward, named):
    warnings = warnings_of(tree, reward=reward)
    assert len(warnings) == len(named)
    assert all(key in warning for key, warning in zip(named, warnings, strict=True))


def test_an_environments_option_that_its_module_does_not_mention_is_named(tree):
    environment = {"name": "own_parts:Env", "options": {"size": 1, "speed": 2, "settings": 3}}
    (warning,) = warnings_of(tree, environment=environment)
    assert warning.startswith("environment.options.speed:")


def test_keys_of_an_environment_without_a_name_are_named(tree, tmp_path):
    (warning,) = warnings_of(tree, environment={"max_turns": 3, "options": {"a": 1}})
    assert "max_turns" in warning
    assert "options" in warning
    # A rank reads a configuration with all values.
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved_yaml(TrainConfig.model_validate(tree)))
    assert not list(option_warnings(load_config(str(path), [])))


@pytest.mark.parametrize(
    ("ignored", "words"),
    [
        (["nope"], ["'nope'", "no known field"]),
        (["temprature"], ["'temprature'", "'temperature'"]),
        (["messages"], ["'messages'", "not dropped"]),
        (["temperature", "max_tokens", "chat_template_kwargs", "n"], []),
    ],
)
def test_a_field_that_an_agent_can_not_drop_is_named(tree, ignored, words):
    options = {"agent": "own_parts:takes_one", "ignored": ignored}
    warnings = warnings_of(tree, environment={"name": "agent", "options": options})
    assert len(warnings) == bool(words)
    for warning in warnings:
        assert warning.startswith("environment.options.ignored:")
        assert all(word in warning for word in words)


def test_options_of_an_environment_by_problem_are_read_too(tree):
    environments = {
        "one": {"name": "own_parts:Env", "options": {"size": 1, "speed": 2}},
        "two": {"name": "agent", "options": {"agent": "own_parts:takes_one", "ignored": ["nope"]}},
    }
    options: dict[str, Any] = {"environments": environments}
    one, two = warnings_of(tree, environment={"name": "by-problem", "options": options})
    assert one.startswith("environment.options.environments.one.options.speed:")
    assert two.startswith("environment.options.environments.two.options.ignored:")
    # Another check reports bad settings.
    options = {"environments": {"one": 5}}
    assert not warnings_of(tree, environment={"name": "by-problem", "options": options})


def test_a_limit_of_tokens_that_is_ignored_is_dropped():
    body = {"max_tokens": 3, "max_completion_tokens": 5}
    assert Conversation()._max_tokens_of(body) == 3
    assert Conversation(frozenset({"max_tokens"}))._max_tokens_of(body) == 5
    assert Conversation(frozenset(body))._max_tokens_of(body) is None


def test_a_run_logs_what_nothing_reads_and_what_nothing_ends(tree, tmp_path, caplog):
    """All commands that read a run's data log it: train with and without --check, evaluate, rollout."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1", "answer": "1"}) + "\n")
    tree["data"]["chat_template_arguments"] = {"mood": "calm"}
    reward = {"name": "own_parts:takes_all", "options": {"scal": 2.0}}
    with caplog.at_level("WARNING"):
        RunData(TrainConfig.model_validate(tree | {"reward": reward}))
    for words in ("chat_template_arguments.mood", "'<|im_end|>' (2)", "reward.options.scal"):
        assert words in caplog.text
    caplog.clear()
    tree["rollout"]["stop_token_ids"] = [2]
    RunData(TrainConfig.model_validate(tree | {"reward": reward}))
    assert "'<|im_end|>' (2)" not in caplog.text
