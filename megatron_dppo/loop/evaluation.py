"""Evaluation on held-out sets: avg@k, the mean reward over k responses to each problem of a set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_dppo.config.schema import AlgorithmConfig, EvaluationConfig
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.fleet.generation import GenerationJob
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.loop.exchange import own_positions
from megatron_dppo.loop.recorder import SampleMaker, chosen
from megatron_dppo.loop.scoring import ScoredGeneration
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.samples import Sample
from megatron_dppo.rewards.verifier import Verifier
from megatron_dppo.trainer.collectives import all_gather_json
from megatron_dppo.trainer.topology import Topology


def evaluate(
    step: int,
    sets: Mapping[str, Sequence[Problem]],
    settings: EvaluationConfig,
    template: GenerationJob,
    algorithm: AlgorithmConfig,
    topology: Topology,
    engine: EngineSession,
    verifier: Verifier,
    samples: SampleMaker,
) -> tuple[dict[str, float], list[Sample]]:
    """Generate and score responses to every held-out problem. Collective.

    Args:
        step: that the policy has been trained for.
        sets: name -> problems.
        settings: k and the sampling (the paper's: temperature 0.7, top_p 0.95).
        template: of the training's jobs; what ends a response, and the seeds, hold here too.
        algorithm: says what a truncated response earns.
        topology: position of this rank; each leader takes its share of the problems.
        engine: servers that generate.
        verifier: checks each response as soon as it is there.
        samples: makes texts of a few responses to each set.

    Returns:
        metric name -> avg@k, and the samples; the same on every rank.
    """
    sampling = replace(
        template.sampling,
        max_new_tokens=settings.max_response_tokens or template.sampling.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
    )
    accuracies, sample_lines = {}, []
    for name, problems in sets.items():
        positions = own_positions(range(len(problems)), topology)
        own_problems = [problems[p] for p in positions]
        seeds = template.seeds
        if seeds is not None:
            purpose = f"evaluation on {name} after step {step}"
            seeds = replace(seeds, purpose=purpose, positions=positions)
        job = GenerationJob(own_problems, settings.samples_per_prompt, sampling, seeds=seeds)
        generation = ScoredGeneration(engine, verifier, job, f"evaluate on {name}")
        generation.wait()
        scored = generation.scored(algorithm)
        size = settings.samples_per_prompt
        repeated_problems = [problem for problem in own_problems for _ in range(size)]
        lines = [s.to_json() for s in samples.of_evaluation(step, name, repeated_problems, scored)]
        parts = all_gather_json([sum(t.reward for t in scored), len(scored), lines])
        total, count = (sum(part[i] for part in parts) for i in range(2))
        accuracies[names.accuracy(name)] = total / count
        shown = [Sample.from_json(line) for *_, lines in parts for line in lines]
        sample_lines += [shown[i] for i in chosen(shown, step)]
    return accuracies, sample_lines
