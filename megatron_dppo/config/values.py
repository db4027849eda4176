"""Values that are of the right type and can still not be used: text that is no path, ports, shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.expectations import given
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.config.section import Section
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.network import url_problem

LONGEST_TEXT = 4096
"""Characters of a path, as Linux bounds it."""
LONGEST_PROSE = 65536
"""Characters of a text that is for the model."""
PROSE = {"data.system_prompt", "data.prompt_template", "rollout.stop", "prologue"}
"""Keys whose text is for the model, or a script: it may have lines."""
LARGEST_NUMBER = 2**63 - 1
SPARE_POSITIONS = 2
"""Of its context and of its cache SGLang 0.5.23 fills two positions fewer: ``max_req_len`` is one less
(``tp_worker.py``), and a response ends one before that (``scheduler.py``), as a truncated one."""
PROMPT_SPARE_POSITIONS = 7
"""A prompt must be this much shorter than the context, or SGLang refuses it (``max_req_input_len``)."""
LONGEST_WAIT_S = 10**8
"""Three years; ``threading`` takes a hundred times that, ``select`` and timers of C++ less."""


def refuse_unusable_values(config: Section, source: str) -> None:
    """Raise ConfigError naming ``source`` for :func:`unusable_values`. Comes before checks that open paths."""
    if problems := unusable_values(config):
        raise ConfigError(problems, source)


def unusable_values(config: Section) -> list[str]:
    """Texts that no path, name or URL may hold, and numbers that no library takes."""
    return [
        f"{key}: {complaint}"
        for key, value in _leaves(config.model_dump(), "")
        if (complaint := _complaint(key, value))
    ]


def without_os_errors(problems: Iterator[str]) -> Iterator[str]:
    """``problems``; where the file system fails on a path (too long, no permission) that is one."""
    try:
        yield from problems
    except OSError as error:
        yield f"{given(error.filename)}: {error.strerror}"


def url_problems(config: TrainConfig) -> Iterator[str]:
    """``engine.urls`` that no server can have, or that name one server twice."""
    urls = [url.rstrip("/") for url in config.engine.urls]
    problems = [f"engine.urls: {problem}" for url in urls if (problem := url_problem(url))]
    yield from problems
    if not problems and len(set(urls)) < len(urls):
        yield f"engine.urls: got {urls}, expected each server once"


def engine_split_problems(config: TrainConfig, model: ModelShape) -> Iterator[str]:
    """``sglang.tp_size`` against the model's attention heads and key-value heads."""
    heads, groups = model.num_attention_heads, model.num_query_groups
    size = config.sglang.get("tp_size") or 1
    if not isinstance(size, int) or isinstance(size, bool):
        return  # the check against SGLang's own fields says so
    if size < 1:
        yield f"sglang.tp_size: got {size}, expected at least 1"
    elif heads % size:
        yield f"sglang.tp_size: got {size}, expected a divisor of the model's {heads} attention heads"
    elif groups % size and size % groups:
        yield (
            f"sglang.tp_size: got {size}, expected a divisor or a multiple of the model's {groups} "
            "key-value heads"
        )


def length_problems(config: TrainConfig, model: ModelShape) -> Iterator[str]:
    """Prompts and responses against the model's positions, and what a server of them serves.

    A run that replays rollouts asks no server: it has all of the model's positions.
    """
    generates = config.rollout.replay_from is None
    spare, prompt_spare = (SPARE_POSITIONS, PROMPT_SPARE_POSITIONS) if generates else (0, 1)
    limits: dict[str, Any] = {"model's": model.max_position_embeddings}
    if generates:
        for key in ("context_length", "max_total_tokens"):
            limits[f"engine's sglang.{key} of"] = config.sglang.get(key)
    prompt = config.data.max_prompt_tokens
    responses = {"rollout": config.rollout.max_response_tokens}
    if config.evaluation.max_response_tokens is not None:  # else it is the rollout's
        responses["evaluation"] = config.evaluation.max_response_tokens
    why = ", of which SGLang fills all but {}" if generates else ""
    for whose, longest in limits.items():
        if not isinstance(longest, int):
            continue
        if prompt > longest - prompt_spare:
            yield (
                f"data.max_prompt_tokens: got {prompt}, expected at most {longest - prompt_spare}: the "
                f"{whose} {longest} positions{why.format(f'{prompt_spare} with a prompt')}"
            )
            continue
        for section, response in responses.items():
            if prompt + response > longest - spare:
                yield (
                    f"{section}.max_response_tokens: got {response}, with data.max_prompt_tokens {prompt} "
                    f"that is {prompt + response}, expected at most {longest - spare - prompt}: the {whose} "
                    f"{longest} positions{why.format(spare)}"
                )


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every value in a tree of tables and lists that is neither, with its dotted key."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part, key)
    else:
        yield key, value


def _complaint(key: str, value: Any) -> str | None:
    prose = key in PROSE
    longest = LONGEST_PROSE if prose else LONGEST_TEXT
    if isinstance(value, str):
        text = value.translate(_LINES) if prose else value
        if any(map(_unusable, text)):
            return f"got {given(value)}, expected text without control characters"
        if len(value) > longest:
            return f"got {len(value)} characters, expected at most {longest}"
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        return f"got {given(value)}, expected at most {LARGEST_NUMBER}"
    if isinstance(value, int | float) and key.endswith("_s") and value > LONGEST_WAIT_S:
        return f"got {given(value)}, expected at most {LONGEST_WAIT_S} s: clocks can't wait longer"
    return None


_LINES = str.maketrans("\n\t", "  ")


def _unusable(character: str) -> bool:
    return ord(character) < 32 or character == "\x7f" or "\ud800" <= character <= "\udfff"
