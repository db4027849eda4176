"""A weight update's plan on paper: the recipes' layouts at 256 ranks, and plans that are wrong."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.cluster.plan import main
from megatron_dppo.cluster.planner import weight_plan as weight_plan_module
from megatron_dppo.cluster.planner.devices import DEVICES, Cluster
from megatron_dppo.cluster.planner.facts import facts_of
from megatron_dppo.cluster.planner.weight_plan import weight_plan
from megatron_dppo.config import load_config
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shard_plan import prove_shards, shard_plan

ROOT = Path(__file__).resolve().parents[3]
MOE = load_model_shape(ROOT / "examples" / "model_configs" / "qwen3-30b-a3b-base")
RECIPE = ROOT / "examples" / "recipes" / "qwen3_30b_a3b_base.yaml"
RECIPES = sorted(
    path for path in (ROOT / "examples" / "recipes").glob("*.yaml") if path.stem != "scaling"
)
SMALL = replace(MOE, num_layers=4, num_experts=8, vocab_size=1000)
MIB = 2**20


def plan_of(shape, *words):
    cluster = Cluster(DEVICES["h100"], 4)
    return weight_plan(facts_of(load_config(RECIPE, words), shape), cluster)


def test_the_full_model_on_256_ranks():
    plan = plan_of(MOE, "parallel.world_size=256", "weight_sync.bucket_mib=64")
    assert (plan.ranks, plan.tensors, plan.problems) == (256, 18_867, ())
    assert plan.weights == 2 * 30_532_122_624
    # Four servers of four GPUs: each server keeps all weights once, and norms and routers four times.
    assert plan.moved == plan.kept
    assert 4 * plan.weights < plan.kept < 4.008 * plan.weights
    # A rank sends its share of the experts, and at most one message of the other weights.
    assert plan.weights / 256 < plan.sent < plan.weights / 256 + 2 * 64 * MIB
    # A node has two servers, and each GPU receives half of its bytes from the other server.
    assert plan.kept / 32 < plan.steps < 1.2 * plan.kept / 32
    assert plan.received == plan.received_mean == plan.kept / 16


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_what_engines_keep_arrives_in_the_layouts_of_the_recipes(recipe):
    config = load_config(recipe)
    name = Path(config.model.hf_checkpoint).name.lower()
    shape = load_model_shape(ROOT / "examples" / "model_configs" / name)
    facts = facts_of(config, shape)
    layout, engine = facts.trainer.layout, facts.engine
    servers = [engine.layout] * engine.started
    if shape.is_moe:
        shape = replace(shape, num_experts=max(layout.expert, engine.layout.expert))
    plan = shard_plan(shape, layout, servers, 64 * MIB, 2, quantized=engine.is_quantized)
    prove_shards(plan, shape, layout, servers, quantized=engine.is_quantized)
    assert tuple(plan.received[rank] for rank in range(len(plan.kept))) == plan.kept
    # Stages send their own layers. The ranks of a stage send alike, up to two messages.
    assert max(plan.sent.values()) < 2 * sum(plan.sent.values()) / layout.world_size + 128 * MIB


def test_an_element_that_no_engine_gpu_receives_is_told(monkeypatch):
    def incomplete(*facts, **options):
        plan = shard_plan(*facts, **options)
        return replace(plan, messages=plan.messages[:-1])

    monkeypatch.setattr(weight_plan_module, "shard_plan", incomplete)
    (fault,) = plan_of(SMALL, "parallel={world_size: 8, tensor: 4, expert: 8}").problems
    assert (
        "receive it, expected" in fault or "is provided never" in fault or "covered up to" in fault
    )


def test_the_figure_of_the_documentation_is_a_plan():
    servers = [EngineLayout(2)] * 2
    plan = shard_plan(MOE, Layout(tensor=2, expert_tensor=2), servers, 10**12, 2)
    page = (ROOT / "docs" / "weight_sync.md").read_text(encoding="utf-8")
    for message in plan.messages:
        ranks = "".join(f" -> engine {rank}" for rank in message.column)
        line = f"step {message.step}   trainer {message.sender}{ranks} "
        assert re.search(f"{line} *{message.bytes / 1e9:.2f} GB", page)


def test_the_command_prints_it(capsys):
    words = [str(RECIPE), "parallel.world_size=64", "--gpu", "h100", "--nodes", "9", "--weights"]
    models = ["--model-configs", str(ROOT / "examples" / "model_configs")]
    assert main([*words, *models]) == 0
    out = capsys.readouterr().out
    assert out.startswith("64 ranks, 18867 tensors")
    assert re.search(r"servers have changed: \d+\.\d CPU s on this machine\n", out)
    assert out.endswith("once\n")
