"""The sizes in the report: each recipe on the cluster that it is written for, and the fullest step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.recipes.verdicts import HERE, MODELS, NODES
from megatron_dppo.cluster.known_models import read_model
from megatron_dppo.cluster.planner.devices import DEVICES, Cluster
from megatron_dppo.cluster.planner.facts import facts_of
from megatron_dppo.cluster.planner.run_plan import RunPlan, plan_run
from megatron_dppo.config import load_config

GPU = "h100"
FULLEST = "30B-A3B R3, fullest step"
"""Every response at its limit, with Top-K 20 and R3: 67 million response tokens."""


@dataclass(frozen=True)
class Size:
    """One column of the report."""

    name: str
    plan: RunPlan


def sizes() -> list[Size]:
    """One size for each recipe with a size of its own, and the fullest step."""
    return [
        Size("30B-A3B", _plan("qwen3_30b_a3b_base")),
        Size(
            FULLEST,
            _plan("qwen3_30b_a3b_base_r3", ["algorithm.name=dppo-topk-tv"], mean_response=16_384.0),
        ),
        Size("8B", _plan("qwen3_8b_base")),
        Size("1.5B stability", _plan("r1_distill_qwen_1.5b_stability")),
        Size("1.7B efficiency", _plan("qwen3_1.7b_base_efficiency")),
        Size("OctoThinker 3B", _plan("octothinker_3b")),
    ]


def _plan(
    recipe: str, overrides: Sequence[str] = (), mean_response: float | None = None
) -> RunPlan:
    config = load_config(HERE / f"{recipe}.yaml", list(overrides))
    shape = read_model(config.model.hf_checkpoint, MODELS).shape
    facts = facts_of(config, shape, mean_response=mean_response)
    return plan_run(facts, Cluster(DEVICES[GPU], NODES[recipe]))
