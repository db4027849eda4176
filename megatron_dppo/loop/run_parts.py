"""Parts of a run, built from its configuration: the line that describes it, the generation job and the episodes."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from megatron_dppo.algorithms.algorithm import Algorithm
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.protocol import RoutedShape, SamplingParams
from megatron_dppo.environments.episodes import EpisodeLimits, Episodes
from megatron_dppo.environments.workers import EnvironmentPool, EnvironmentSpec
from megatron_dppo.fleet.generation import GenerationJob, SamplingSeeds
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.model.layout import Layout
from megatron_dppo.spec import RunSpec
from megatron_dppo.trainer.step import StatsSpec


def active_line(config: TrainConfig, algorithm: Algorithm, layout: Layout) -> str:
    """Return the line of the console that describes the run.

    Example: ``active: dppo-binary-tv (tv_threshold 0.15), R3 off, filter off, staleness 0, TP2 EP2, float32``.
    """
    rollout = config.rollout
    placement = config.engine.placement
    numbers = ", ".join(
        f"{name} {value:g}" for name, value in algorithm.numbers.items() if math.isfinite(value)
    )
    algorithm_text = algorithm.name
    if numbers:
        algorithm_text += f" ({numbers})"
    parts = [
        algorithm_text,
        f"R3 {_on_or_off(rollout.router_replay)}",
        f"filter {_on_or_off(rollout.drop_zero_variance_groups)}",
        f"staleness {rollout.max_staleness}",
    ]
    if rollout.max_staleness:
        parts.append(rollout.interrupt)
    if placement != "separate":
        parts.append(placement)
    if rollout.replays:
        parts.append(f"replaying {rollout.replay_from}")
    parts += [layout.describe(), config.model.dtype]
    return "active: " + ", ".join(part for part in parts if part)


def _on_or_off(is_on: bool) -> str:
    return "on" if is_on else "off"


def stats_spec(algorithm: Algorithm, topk: int, teacher_topk: int = 0) -> StatsSpec:
    """Return the statistics that a forward pass computes for ``algorithm``.

    ``topk``: K of the batches' TopK(mu). ``teacher_topk``: K of a teacher's scores. 0: none.
    """
    return StatsSpec(
        topk=topk > 0 or algorithm.needs_recomputed_distribution,
        entropy=True,
        topk_gradient=algorithm.needs_topk_gradient,
        squares=algorithm.needs_sum_squares,
        teacher_topk=teacher_topk > 0,
    )


def generation_job(
    config: TrainConfig,
    data: RunData,
    spec: RunSpec,
    episodes: Episodes | None,
    topk: int | None = None,
) -> GenerationJob:
    """Return the job without problems that is the template of the run's generations.

    Each generation adds its problems. If the job has seeds, the generation also sets the purpose of these seeds and the
    positions of its problems.
    """
    rollout = config.rollout
    if topk is None:
        topk = spec.rollout.topk
    columns: dict[str, Any] = {"topk": topk} if topk else {}
    if rollout.router_replay:
        columns["routed_experts"] = RoutedShape.of_model(spec.model.shape)
    sampling = SamplingParams(
        rollout.max_response_tokens,
        temperature=rollout.temperature,
        stop_token_ids=tuple(rollout.stop_token_ids),
        stop=tuple(rollout.stop),
    )
    seeds = None
    if config.engine.deterministic:
        seeds = SamplingSeeds(config.run.seed, "", ())
    decode = None
    if rollout.interrupt == "abort":
        # Weight updates then abort responses. To continue a response, its kept tokens must be decoded to text.
        decode = data.text_of
    play = None if episodes is None else episodes.play
    return GenerationJob((), rollout.group_size, sampling, columns, seeds, decode, play)


def open_episodes(config: TrainConfig, spec: RunSpec, data: RunData) -> Episodes | None:
    """Return the player of this rank's episodes; None without an environment."""
    environment = config.environment
    turns = data.turns
    if environment.name is None or turns is None:
        return None
    environment_spec = EnvironmentSpec(
        environment.name,
        dict(environment.options),
        environment.step_timeout_s,
        environment.memory_gib,
        passed_variables=tuple(environment.passed_variables),
        sampling={"temperature": config.rollout.temperature, "top_p": config.rollout.top_p},
        policy_format=asdict(data.policy_format),
    )
    # With "answer", an episode continues after a turn that was cut off: the environment answers the turn.
    continues_after_cut = environment.cut_turns == "answer"
    limits = EpisodeLimits(
        environment.max_turns,
        spec.rollout.sequence_tokens,
        environment.max_observation_tokens,
        environment.retries,
        continues_after_cut=continues_after_cut,
    )
    return Episodes(
        EnvironmentPool(environment_spec, environment.workers), turns, limits, data.reader
    )
