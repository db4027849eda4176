"""Evaluation on held-out sets: avg@k, the mean reward over k responses to each problem of a set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.requests import SamplingParams
from megatron_dppo.fleet.generation import GenerationJob
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.loop.rollouts.scored_generation import ScoredGeneration
from megatron_dppo.loop.rollouts.sources import own_positions, seeds_of
from megatron_dppo.metrics import names
from megatron_dppo.rewards.arrivals import ArrivalScorer
from megatron_dppo.trainer.collectives import all_gather_json
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.types import Problem


def evaluate(
    step: int,
    sets: Mapping[str, Sequence[Problem]],
    config: TrainConfig,
    topology: Topology,
    engine: EngineSession,
    scorer: ArrivalScorer,
) -> dict[str, float]:
    """Generate and score responses to every held-out problem. Collective.

    Args:
        step: that the policy has been trained for.
        sets: name -> problems.
        config: of the run; ``evaluation`` holds k and the sampling (the paper's: temperature 0.7,
            top_p 0.95).
        topology: position of this rank; each leader takes its share of the problems.
        engine: servers that generate.
        scorer: checks each response as soon as it is there.

    Returns:
        metric name -> avg@k, the same on every rank.
    """
    settings = config.evaluation
    sampling = SamplingParams(
        max_new_tokens=settings.max_response_tokens or config.rollout.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        stop_token_ids=tuple(config.rollout.stop_token_ids),
        stop=tuple(config.rollout.stop),
    )
    accuracies = {}
    for name, problems in sets.items():
        positions = own_positions(range(len(problems)), topology)
        own = [problems[p] for p in positions]
        seeds = seeds_of(config, f"evaluation on {name} after step {step}", positions)
        job = GenerationJob(own, settings.samples_per_prompt, sampling, seeds=seeds)
        generation = ScoredGeneration(engine, scorer, job, f"evaluate on {name}")
        generation.wait()
        scored = generation.scored(config.algorithm)
        parts = all_gather_json([sum(t.reward for t in scored), len(scored)])
        total, count = (sum(column) for column in zip(*parts, strict=True))
        accuracies[names.accuracy(name)] = total / count
    return accuracies
