"""Options of rewards and environments that nothing reads, for example because their names are misspelt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_dppo.config.data_schema import EnvironmentConfig, RewardTerm
from megatron_dppo.config.option_values import unread_options
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.environments import environments_of, find_environment
from megatron_dppo.rewards import find_reward


def option_warnings(config: TrainConfig) -> Iterator[str]:
    """Yield a warning for each option of a reward or an environment that nothing seems to read.

    A name that can't be imported yields nothing: another check reports it.
    """
    terms: dict[str, RewardTerm] = {"reward": config.reward}
    for name, further_term in config.reward.further.items():
        terms[f"reward.further.{name}"] = further_term
    for key, term in terms.items():
        yield from _of_target(f"{key}.options", term.options, _reward_function, term.name)
    yield from _of_environment(config.environment)


def _reward_function(name: str) -> Callable[..., Any]:
    return find_reward(name).load()


def _of_environment(environment: EnvironmentConfig) -> Iterator[str]:
    if environment.name is None:
        # The ranks' configuration has every key, so it does not tell which keys the user has set. Compare values.
        defaults = EnvironmentConfig()
        unread_keys = [key for key, value in environment if value != getattr(defaults, key)]
        if unread_keys:
            yield (
                f"environment: got {', '.join(unread_keys)} without environment.name, so nothing reads them: a run "
                "without an environment has one turn"
            )
        return
    for member in environments_of(environment.name, environment.options):
        yield from _of_target(member.key, member.options, find_environment, member.name)
        try:
            describe = getattr(find_environment(member.name), "option_warnings", None)
            warnings: Sequence[str] = describe(**member.options) if describe is not None else ()
        # Other checks report an environment that can't be imported, and options that it does not take.
        except (TypeError, ValueError):
            continue
        for warning in warnings:
            yield f"{member.key}.{warning}"


def _of_target(
    key: str, options: Mapping[str, Any], find: Callable[[str], Callable[..., Any]], name: str
) -> Iterator[str]:
    try:
        target = find(name)
    except ValueError:
        return
    for option in unread_options(target, options):
        yield (
            f"{key}.{option}: {name} accepts options of any name, but the module of {name} does not mention this one, "
            "so it seems that nothing reads it; expected the name of an option"
        )
