"""A weight update's plan on paper: the recipes' layouts at 256 ranks, and plans that are wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.cluster.plan import main
from megatron_dppo.cluster.planner import weight_plan as weight_plan_module
from megatron_dppo.cluster.planner.devices import DEVICES
from megatron_dppo.cluster.planner.facts import facts_of
from megatron_dppo.cluster.planner.traffic import traffic
from megatron_dppo.cluster.planner.weight_plan import plan_faults, weight_plan
from megatron_dppo.config import load_config
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.gather_plan import hf_buckets_plan
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
    return weight_plan(facts_of(load_config(RECIPE, words), shape), 8)


def test_the_full_model_on_256_ranks():
    plan = plan_of(MOE, "parallel.world_size=256")
    assert (plan.ranks, plan.tensors, plan.problems) == (256, 18_867, ())
    assert plan.weights == 2 * 30_532_122_624
    assert plan.sent == {0: plan.weights}
    assert plan.gathered_between_nodes == 0
    assert plan.gathered > plan.gathered_bound > 0
    assert 512 * MIB < plan.sender_memory < 3 * 594 * MIB
    # Four servers of four GPUs: each server keeps all weights once, and its GPUs receive them four times.
    assert plan.moved == plan.gathered + 16 * plan.weights
    assert 4 * plan.weights < plan.kept < 4.008 * plan.weights
    # A rank sends its share of the experts, and at most one message of the other weights.
    assert plan.weights / 256 < plan.shard_sent < plan.weights / 256 + 2 * 64 * MIB
    assert plan.kept / 16 < plan.shard_steps < 1.2 * plan.kept / 16


@pytest.mark.parametrize(
    ("layout", "senders", "imbalance"),
    [
        ("{world_size: 256, tensor: 4, expert: 8}", [0], 1.0),
        ("{world_size: 256, tensor: 2, pipeline: 2, expert: 8}", [0, 128], 1.05),
        ("{world_size: 256, pipeline: 4, expert: 8}", [0, 64, 128, 192], 1.1),
        ("{world_size: 256, tensor: 2, expert: 8, expert_tensor: 2}", [0, 8], 1.35),
    ],
)
def test_layouts_of_a_small_mixture(layout, senders, imbalance):
    plan = plan_of(SMALL, f"parallel={layout}")
    assert plan.problems == ()
    assert sorted(plan.sent) == senders
    assert plan.imbalance <= imbalance
    assert plan.gathered_between_nodes == 0
    assert sum(plan.sent.values()) == plan.weights
    from_holders = plan_of(SMALL, f"parallel={layout}", "weight_sync.senders=holders")
    assert from_holders.gathered == from_holders.gathered_bound
    assert len(from_holders.sent) >= len(plan.sent)
    assert from_holders.engine_communicators == len(from_holders.sent) * 294 * MIB


@pytest.mark.parametrize("senders", ["nodes", "holders"])
@pytest.mark.parametrize(
    "layout",
    [
        # One sender for all stages, for two of four stages, and for each stage.
        "{world_size: 8, pipeline: 4, expert: 2}",
        "{world_size: 8, tensor: 2, pipeline: 2, expert: 2}",
        "{world_size: 16, pipeline: 4, expert: 2}",
        "{world_size: 256, pipeline: 4, expert: 8}",
    ],
)
def test_the_estimate_of_gathered_bytes_is_close_to_the_plan(layout, senders):
    words = (f"parallel={layout}", f"weight_sync.senders={senders}")
    facts = facts_of(load_config(RECIPE, words), SMALL)
    planned = weight_plan(facts, 8).gathered
    assert traffic(facts, DEVICES["h100"]).gathered == pytest.approx(planned, rel=0.02)


def test_a_tensor_that_comes_twice_or_not_whole_is_told():
    bucket, *others = hf_buckets_plan(
        SMALL, Layout(tensor=2, expert_tensor=2), 10**9, 2, spread=True
    )
    assert not others
    assert list(plan_faults([bucket])) == []
    first, second, *rest = bucket.tensors
    twice = plan_faults([bucket, replace(bucket, tensors=(second,))])
    assert any(f"{second.name} " in fault for fault in twice)
    rows, half = first.shape[0], first.shape[0] // 2
    for pieces, fault in (
        (first.pieces[:1], f"covered up to {half} of {rows} along dim 0"),
        (first.pieces[:1] * 2, "index 0 is provided twice"),
    ):
        broken = replace(bucket, tensors=(replace(first, pieces=pieces), second, *rest))
        assert list(plan_faults([broken])) == [f"{first.name}: {fault}"]


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


def test_the_command_prints_it(capsys):
    words = [str(RECIPE), "parallel.world_size=64", "--gpu", "h100", "--nodes", "9", "--weights"]
    models = ["--model-configs", str(ROOT / "examples" / "model_configs")]
    assert main([*words, *models]) == 0
    out = capsys.readouterr().out
    assert out.startswith("64 ranks, 18867 tensors")
    assert out.endswith("once\n")
