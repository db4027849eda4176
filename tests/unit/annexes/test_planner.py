"""The planner's arithmetic, compared with numbers worked by hand and the families' tables, and the command."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_dppo.algorithms.table import PRESETS, Preset, algorithm_facts
from megatron_dppo.cluster import plan as command
from megatron_dppo.cluster.plan import bars, print_plan
from megatron_dppo.cluster.planner.activations import (
    activation_bytes,
    chunks_in_flight,
    layer_bytes,
    logits_bytes,
    statistics_bytes,
)
from megatron_dppo.cluster.planner.batch_memory import column_bytes, routing_bytes_per_token
from megatron_dppo.cluster.planner.colocation import ColocatedBytes
from megatron_dppo.cluster.planner.communicators import (
    PER_COMMUNICATOR,
    engine_communicator_bytes,
    trainer_communicator_bytes,
)
from megatron_dppo.cluster.planner.decode_time import (
    TouchedParameters,
    decode_seconds,
    network_seconds,
    quantized_parameters,
    touched_parameters,
)
from megatron_dppo.cluster.planner.devices import DEVICES, Cluster
from megatron_dppo.cluster.planner.facts import (
    ON_POLICY,
    STALE,
    RunFacts,
    facts_of,
    rank_parameters,
)
from megatron_dppo.cluster.planner.generation_time import prefill_seconds
from megatron_dppo.cluster.planner.host_memory import node_roles, written_bytes
from megatron_dppo.cluster.planner.run_plan import check_memory, device_here, plan_run
from megatron_dppo.cluster.planner.search import Question, nearest, search
from megatron_dppo.cluster.planner.server_memory import (
    engine_bytes,
    kv_bytes_per_token,
    weight_bytes,
)
from megatron_dppo.cluster.planner.step_time import (
    StepSeconds,
    bubble,
    context_bytes,
    head_flops,
    step_seconds,
    training_flops,
)
from megatron_dppo.cluster.planner.traffic import traffic
from megatron_dppo.cluster.planner.trainer_state import state_bytes
from megatron_dppo.cluster.slurm.site import SiteConfig
from megatron_dppo.config import ConfigError, load_config
from megatron_dppo.config.machine import Machine
from megatron_dppo.logging import FatalError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import (
    EngineLayout,
    engine_parameters,
    local_parameters,
    parameter_count,
)
from megatron_dppo.model.quantization import holds_quantized, scale_parameter
from megatron_dppo.model.shape import active_parameters, forward_flops

ROOT = Path(__file__).resolve().parents[3]
RECIPES, MODELS = ROOT / "examples" / "recipes", ROOT / "examples" / "model_configs"
MOE = load_model_shape(MODELS / "qwen3-30b-a3b-base")
H100 = Cluster(DEVICES["h100"], 4)


def recipe(name="qwen3_30b_a3b_base", *overrides):
    return load_config(RECIPES / f"{name}.yaml", overrides)


def facts(name="qwen3_30b_a3b_base", *overrides, shape=MOE, **lengths) -> RunFacts:
    return facts_of(recipe(name, *overrides), shape, **lengths)


LAYOUTS = [
    Layout(tensor=4, expert=8, data=4),
    Layout(tensor=2, pipeline=4, expert=2, data=2),
    Layout(tensor=2, expert_tensor=2, data=2),
    Layout(pipeline=2, virtual_pipeline=2, expert=4, data=4),
    Layout(pipeline=4, expert=8, data=8, first_stage_layers=10, last_stage_layers=14),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_parameters_are_those_of_the_map(layout):
    for stage in range(layout.pipeline):
        rank = stage * layout.stage_ranks + 1
        expected = sum(p.shape[0] * (p.shape[1] if p.shape[1:] else 1) for p in
                       local_parameters(MOE, layout, rank))  # fmt: skip
        assert rank_parameters(MOE, layout, stage).elements == expected


@pytest.mark.parametrize("name", ["qwen3-1.7b-base", "octothinker-3b-hybrid-base", "qwen3-8b-base"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2)], ids=Layout.describe)
def test_parameters_of_dense_and_tied_models(name, layout):
    shape = load_model_shape(MODELS / name)
    for stage in range(layout.pipeline):
        expected = 0
        for p in local_parameters(shape, layout, stage * layout.stage_ranks):
            size = 1
            for dim in p.shape:
                size *= dim
            expected += size
        assert rank_parameters(shape, layout, stage).elements == expected


def test_adam_state_by_hand():
    """With EP8 TP4 on 16 ranks, a rank has 3.62 B of experts, sharded 2 ways, and 0.39 B dense, sharded 4 ways."""
    experts = 48 * 16 * 3 * 2048 * 768
    held = rank_parameters(MOE, Layout(tensor=4, expert=8, data=4), 0)
    assert sum(size * count for size, count in held.experts) == experts == 3_623_878_656
    state = state_bytes(facts().trainer, 0)
    dense = held.elements - experts
    assert state.weights == pytest.approx(2 * held.elements, rel=1e-6)
    assert state.gradients == 2 * state.weights
    assert state.optimizer == pytest.approx(12 * (experts / 2 + dense / 4), rel=1e-6)
    plain = state_bytes(facts("qwen3_30b_a3b_base", "optimizer.distributed=false").trainer, 0)
    assert plain.total == 18 * held.elements  # 65 GB of experts alone
    assert plain.total > 65e9
    full = state_bytes(facts("qwen3_30b_a3b_base", "model.dtype=float32").trainer, 0)
    assert full.optimizer == state.optimizer * 8 // 12
    assert full.weights == 2 * state.weights


def test_a_reference_policys_copy_by_hand():
    lora, penalty = "qwen3_30b_a3b_base_lora", "algorithm.reference_kl=0.1"

    def weights(recipe, *words):
        state = state_bytes(facts(recipe, "optimizer.distributed=false", *words).trainer, 0)
        return state.weights + state.reference

    plain, adapted = weights("qwen3_30b_a3b_base"), weights(lora)
    assert weights("qwen3_30b_a3b_base", penalty) == 2 * plain
    assert weights(lora, penalty) == adapted
    adapters = state_bytes(facts(lora, "optimizer.distributed=false").trainer, 0).gradients // 4
    assert weights(lora, penalty, "lora.start_from=there") == adapted + 2 * adapters


def test_1f1b_and_interleaved_micro_batches_in_flight():
    """Megatron-Core's warm-up plus one: P - p micro-batches, or 2 (P - p - 1) + (v - 1) P + 1 interleaved chunks."""
    plain, chunked = Layout(pipeline=4), Layout(pipeline=4, virtual_pipeline=2)
    assert [chunks_in_flight(plain, p, 8) for p in range(4)] == [4, 3, 2, 1]
    assert [chunks_in_flight(plain, p, 2) for p in range(4)] == [2, 2, 2, 1]
    assert [chunks_in_flight(chunked, p, 8) for p in range(4)] == [11, 9, 7, 5]
    assert chunks_in_flight(chunked, 0, 4) == 8
    assert chunks_in_flight(Layout(), 0, 8) == 1
    assert bubble(plain, 6) == 0.5
    assert bubble(chunked, 6) == 0.25


def test_a_layer_of_transformer_engine_by_hand():
    """Bytes per token with TP4 and sequence parallelism. Hidden size 2048, queries 4096, keys 512, 8 experts of 768."""
    layer = layer_bytes(facts().trainer)
    assert layer.input == 2048 / 4 * 2
    assert layer.norms == 2 * (2 * 2048 * 2 + 4) / 4
    queries, keys = 4096 / 4, 512 / 4
    assert layer.projections == (queries + keys) * 2 + 2 * 4 * 8 + queries * 2
    assert layer.core == (queries + 2 * keys) * 2 + 4 * 8
    assert layer.mlp == 8 / 4 * ((2048 + 3 * 768) * 2 + 4)
    assert layer.kept("full") == layer.input
    # Selective recomputation omits the experts' product and the output of the norm before the router.
    assert layer.kept("selective") == layer.whole - (8 / 4 * 768 * 2 + 2048 / 4 * 2)


def test_activations_by_hand():
    """Full recomputation keeps 48 inputs and one whole layer. Without it, a stage keeps all layers in flight."""
    trainer = facts("qwen3_30b_a3b_base", "training.recompute=full").trainer
    activations = activation_bytes(trainer, 0, busiest=1.0)
    assert activations.layers == 48 * 17408 * 1024
    assert activations.recomputed == round(17408 * layer_bytes(trainer).whole)
    name = "qwen3_30b_a3b_base"
    layout = Layout(tensor=4, pipeline=2, expert=8, data=4)
    none = replace(facts(name, "training.recompute=none").trainer, layout=layout)
    first, last = (activation_bytes(none, stage, busiest=1.0) for stage in (0, 1))
    assert first.layers == 2 * last.layers == 2 * 24 * round(17408 * layer_bytes(none).whole)
    assert first.head == first.recomputed == 0
    assert last.logits == logits_bytes(none) == 4096 * 151936 // 4 * 2
    whole = facts(name, "head.chunk_tokens=20000").trainer
    assert logits_bytes(whole) == 17408 * 151936 // 4 * 2
    in_float32 = facts(name, "head.dtype=float32").trainer
    assert logits_bytes(in_float32) == 4096 * 151936 // 4 * (4 + 2)
    assert last.head > 17408 * 2048 * 2 > first.head == first.logits == 0
    assert last.total - last.saved == last.working + last.logits


ALL_TO_ALL = ("megatron.cp_comm_type=a2a",)


def test_context_parallel_ranks_by_hand():
    """TP4 with sequence parallelism, queries 4096 and keys 512: a ring of two ranks, and an all-to-all of heads."""
    trainer = facts("qwen3_30b_a3b_base", "parallel.context=2").trainer
    one = facts().trainer
    assert (trainer.layout.describe(), trainer.tokens) == ("TP4 CP2 EP8 DP2", one.tokens)
    assert trainer.rank_tokens * 2 == one.tokens
    shared, whole = (activation_bytes(t, 0, busiest=1.0) for t in (trainer, one))
    assert shared.layers * 2 == whole.layers
    # A ring works with keys and values of both ranks twice, and 1.5 outputs. An all-to-all has all tensors twice.
    ring = 8704 * (2 * 128 * 2 + 1024 * 1.5) * 2
    assert shared.working == whole.working / 2 + ring
    by_heads = facts("qwen3_30b_a3b_base", "parallel.context=2", *ALL_TO_ALL).trainer
    exchanged = activation_bytes(by_heads, 0, busiest=1.0)
    assert exchanged.working == whole.working / 2 + 8704 * 2 * (1024 + 2 * 128) * 2
    # Ranks with equal weights share Adam's state as without context parallelism. Each rank has the loss of all tokens.
    assert state_bytes(trainer, 0) == state_bytes(one, 0)
    assert statistics_bytes(trainer, 0) == statistics_bytes(one, 0)
    groups = [
        trainer_communicator_bytes(t.layout, sends=True) // PER_COMMUNICATOR for t in (trainer, one)
    ]
    assert groups[0] == groups[1] + 2  # the context group, and the group that reduces gradients


def test_a_ring_s_traffic_grows_with_its_ranks():
    """Full recomputation has two forward passes. Each sends the keys and values of a token, 2 x 512 / 4 x 2 bytes, to
    each other rank. The backward pass sends them and their gradients."""
    sent = {
        size: context_bytes(
            facts(
                "qwen3_30b_a3b_base", f"parallel.context={size}", "training.recompute=full"
            ).trainer
        )
        for size in (1, 2, 4)
    }
    assert sent == {1: 0, 2: 4 * 2 * 128 * 2, 4: 3 * 4 * 2 * 128 * 2}
    words = ("parallel.context=2", "training.recompute=none", *ALL_TO_ALL)
    exchanged = facts("qwen3_30b_a3b_base", *words).trainer
    assert context_bytes(exchanged) == 2 * 2 * (1024 + 128) * 2 / 2


def test_batches_by_hand():
    counts = facts(mean_response=3744, mean_prompt=256).batches()
    assert (
        counts["responses"],
        counts["optimizer_steps"],
        counts["per_step"],
        counts["replica"],
    ) == (4096, 8, 512, 128)
    assert counts["tokens"] == 4096 * 4000
    assert counts["micro_batches"] == round(128 * 4000 / (17408 * 0.9)) == 33
    assert counts["longest_tokens"] == 4096 * 17408
    assert counts["micro_batch_tokens"] == 17408


def test_columns_by_hand():
    """Routing has 384 bytes a token, also on the wire. Top-20 has 8 bytes an id."""
    assert routing_bytes_per_token(MOE) == 384
    both = facts(
        "qwen3_30b_a3b_base_r3", "algorithm.name=dppo-topk-tv", mean_response=100, mean_prompt=1
    )
    columns = column_bytes(MOE, both.rollout)
    assert columns.routing == 4096 * 100 * 384
    assert columns.routing_wire == columns.routing
    assert columns.topk == 4096 * 100 * 20 * 8
    assert columns.replicas == columns.routing + columns.topk + 4096 * (101 * 5 + 100 * 8)
    assert column_bytes(MOE, facts().rollout).routing_wire == 0


def test_flops_by_hand():
    """A token uses 3.04 B weights without the embedding, and 0.39 MFLOP x S of attention."""
    layer = 2048 * (2 * 4096 + 2 * 512) + 8 * 3 * 2048 * 768 + 2048 * 128
    assert active_parameters(MOE) == 48 * layer + 2048 * 151936
    flops = forward_flops(MOE)
    assert flops.linear / 1e9 == pytest.approx(6.083, abs=0.001)
    assert flops.quadratic == 2 * 4096 * 48
    assert training_flops(MOE, 0, "full") == 4 * flops.linear
    assert training_flops(MOE, 0, "none") == 3 * flops.linear


@pytest.mark.parametrize("layout", [EngineLayout(2), EngineLayout(8, 8), EngineLayout(8, 2),
                                    EngineLayout(8, 8, 4), EngineLayout(4, 2, 2, True)],
                         ids=EngineLayout.describe)  # fmt: skip
def test_engine_weights_are_those_of_the_engines_map(layout):
    expected = 0
    for p in engine_parameters(MOE, layout, 0):
        expected += 2 * p.shape[0] * (p.shape[1] if p.shape[1:] else 1)
    assert weight_bytes(MOE, layout) == expected


def test_weights_of_an_fp8_server_are_those_of_the_engines_map():
    layout = EngineLayout(2)
    expected = 0
    for p in engine_parameters(MOE, layout, 0):
        elements = math.prod(p.shape)
        if holds_quantized(p):
            expected += elements + 4 * math.prod(scale_parameter(p).shape)
        else:
            expected += 2 * elements
    assert weight_bytes(MOE, layout, quantized=True) == expected
    assert weight_bytes(MOE, layout, quantized=True) == pytest.approx(
        weight_bytes(MOE, layout) / 2, rel=0.03
    )


def test_fp8_rollouts_in_the_plan():
    """FP8 halves the bytes on servers and in updates. The KV cache is larger, and decode steps are shorter. The trainer
    does not change."""
    plain = facts("qwen3_30b_a3b_base", "sglang.tp_size=2", mean_response=8192, mean_prompt=256)
    fp8 = facts(
        "qwen3_30b_a3b_base",
        "sglang.tp_size=2",
        "engine.quantization=fp8",
        mean_response=8192,
        mean_prompt=256,
    )
    assert replace(fp8.trainer, config=plain.config) == plain.trainer
    before, after = (engine_bytes(MOE, f.engine, f.rollout, DEVICES["h100"]) for f in (plain, fp8))
    assert after.kv_pool - before.kv_pool == before.weights - after.weights > 14e9
    assert after.kv_tokens > before.kv_tokens
    seconds = [decode_seconds(f, H100, running=8, context=4096) for f in (plain, fp8)]
    assert 0.5 < seconds[1] / seconds[0] < 0.95
    assert quantized_parameters(MOE) == 48 * 2048 * (2 * 4096 + 2 * 512)
    updates = [traffic(f, H100).update for f in (plain, fp8)]
    # 29.9 G elements have one byte, and 1 / 4096 byte in scales. Embedding, output matrix and routers have two bytes.
    quantized = 48 * (2048 * 9216 + 128 * 3 * 2048 * 768)
    assert updates[0] == 2 * parameter_count(MOE)
    assert updates[0] - updates[1] == quantized - 4 * quantized // 128**2


def test_kv_cache_by_hand():
    run = facts("qwen3_30b_a3b_base", "sglang.tp_size=2", mean_response=8192, mean_prompt=256)
    assert kv_bytes_per_token(MOE, run.engine) == 2 * 48 * 2 * 128 * 2
    assert (
        kv_bytes_per_token(MOE, replace(run.engine, layout=EngineLayout(8))) == 2 * 48 * 1 * 128 * 2
    )
    server = engine_bytes(MOE, run.engine, run.rollout, DEVICES["h100"])
    assert server.kv_tokens == server.kv_pool // 49152
    assert server.sequences == server.kv_tokens // 8448
    assert server.longest == server.kv_tokens // 17408


def test_attention_replicas_in_the_plan():
    """A replica holds the heads of a sequence on fewer ranks, and runs its share of the requests."""
    overrides = ("sglang.tp_size=8", "sglang.ep_size=8", "sglang.mem_fraction_static=0.8")
    lengths = {"mean_response": 8192, "mean_prompt": 256}
    plain = facts("qwen3_30b_a3b_base", *overrides, **lengths)
    replicas = facts(
        "qwen3_30b_a3b_base",
        *overrides,
        "sglang.attn_dp_size=4",
        "sglang.max_running_requests=1000",
        **lengths,
    )
    assert replicas.engine.layout == EngineLayout(8, 8, 4)
    assert kv_bytes_per_token(MOE, plain.engine) == 2 * 48 * 1 * 128 * 2
    assert kv_bytes_per_token(MOE, replicas.engine) == 2 * 48 * 2 * 128 * 2
    before, after = (
        engine_bytes(MOE, f.engine, f.rollout, DEVICES["h100"]) for f in (plain, replicas)
    )
    assert after.kv_tokens == 4 * (after.kv_pool // (2 * 48 * 2 * 128 * 2))
    # Without replicas, each of the four key-value heads is on two ranks. With four replicas, each is on one rank.
    assert 1.8 * before.kv_tokens < after.kv_tokens < 2 * before.kv_tokens
    assert after.sequences == min(1000, 4 * (after.kv_tokens // 4 // 8448))
    embedding = MOE.vocab_size * MOE.hidden_size
    assert after.weights > before.weights + 2 * embedding // 4
    seconds = [decode_seconds(f, H100, running=512, context=8192) for f in (plain, replicas)]
    assert seconds[1] < seconds[0]


def test_update_and_checkpoint_by_hand():
    sent = traffic(facts(), H100, storage=10e9)
    assert parameter_count(MOE) == 30_532_122_624
    assert sent.update == 2 * parameter_count(MOE)
    assert sent.checkpoint == 14 * parameter_count(MOE)
    assert sent.checkpoint_seconds == pytest.approx(42.7, abs=0.1)
    colocated = facts("qwen3_30b_a3b_base", "weight_sync.strategy=disk")
    whole = traffic(colocated, H100)
    assert whole.received == sent.update
    assert whole.messages == 114  # all 61.06 GB in buckets of 512 MiB
    assert whole.update_seconds == pytest.approx(61.06 / 30 + 114 * 0.02 + 1, abs=0.01)
    # The folder on storage is written once, and read by both nodes of the four servers.
    stored = facts(
        "qwen3_30b_a3b_base", "weight_sync.strategy=disk", "weight_sync.directory=/shared"
    )
    seconds = traffic(stored, H100, storage=10e9).update_seconds
    assert seconds == pytest.approx(whole.update_seconds + 3 * 61.06 / 10, abs=0.01)


def test_an_update_in_shards_by_hand():
    """A GPU of a server of four keeps a quarter of the matrices, and all norms and routers."""
    planned = facts("qwen3_30b_a3b_base")
    assert planned.engine.layout.tensor == 4
    replicated = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    kept = 2 * ((parameter_count(MOE) - replicated) / 4 + replicated)
    assert kept == pytest.approx(15.28e9, rel=1e-3)
    alone = replace(H100, gpus_per_node=4)
    sent = traffic(planned, alone)
    assert sent.received == kept
    assert sent.messages == 114  # of 134 MB, which take 3.35 ms at 80% of 50 GB/s
    # The last of four servers receives each message three steps later.
    assert planned.engine.started == 4
    assert sent.update_seconds == pytest.approx(117 * kept / 114 / 40e9 + 1)
    # Small messages take the time of their copies, 2 ms.
    small_messages = facts("qwen3_30b_a3b_base", "weight_sync.bucket_mib=16")
    small = traffic(small_messages, alone)
    assert small.messages == 912
    assert small.update_seconds == pytest.approx(915 * 0.002 + 1)
    # Two servers in a node: half of the messages comes from the other server, at the same time. Two copies take 4 ms.
    assert traffic(planned, H100).update_seconds == pytest.approx(60 * 0.004 + 1)
    assert traffic(small_messages, H100).update_seconds == pytest.approx(459 * 0.004 + 1)
    # Eight servers of one GPU in a node: of eight messages, one comes from the network at 40 GB/s, one beside it from
    # the node, and six from the node alone, at 70% of 450 GB/s.
    single = facts(
        "qwen3_30b_a3b_base", "weight_sync.bucket_mib=2048", "sglang.tp_size=1", "engine.servers=16"
    )
    whole = 2 * parameter_count(MOE)
    sent = traffic(single, H100)
    assert sent.received == whole
    assert sent.messages == 29
    assert sent.update_seconds == pytest.approx(
        (29 / 8 + 15) * whole / 29 / 40e9 + 29 * 6 / 8 * whole / 29 / 315e9 + 1
    )


def test_an_update_of_adapters_by_hand():
    attention = ("lora.target_modules=[attention]", "weight_sync.strategy=disk")
    sent = traffic(facts("qwen3_30b_a3b_base_lora", "lora.update=adapters", *attention), H100, 5e9)
    widths = (2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048)  # of q, k and v, o
    assert sent.update == sent.received == 2 * 48 * 32 * widths
    assert sent.messages == 1
    assert sent.update_seconds == pytest.approx(1 + 2 * sent.update / 5e9)
    merged = traffic(facts("qwen3_30b_a3b_base_lora", *attention), H100, 5e9)
    assert merged.update == 2 * parameter_count(MOE)
    assert merged.checkpoint == sent.checkpoint == 7 * sent.update


AWARE = [
    "megatron_optimizer.use_precision_aware_optimizer=true",
    "megatron_optimizer.exp_avg_dtype=bfloat16",
    "megatron_optimizer.exp_avg_sq_dtype=bfloat16",
]


@pytest.mark.parametrize(
    ("overrides", "gradient", "optimizer"),
    [
        ([], 4, 12),
        (["megatron_ddp.grad_reduce_in_fp32=false"], 2, 12),
        (["model.dtype=float32"], 4, 8),
        (AWARE, 4, 8),
        ([AWARE[0], "megatron_optimizer.optimizer_cpu_offload=true"], 4, 0),
        (["megatron_optimizer.optimizer_cpu_offload=true"], 4, 4),
        (["megatron_optimizer={optimizer_cpu_offload: true, optimizer_offload_fraction: 0.25}"], 4, 10),
    ],
)  # fmt: skip
def test_forwarded_options_change_a_parameters_bytes(overrides, gradient, optimizer):
    trainer = facts("qwen3_30b_a3b_base", *overrides).trainer
    assert (trainer.gradient_bytes, trainer.adam.device) == (gradient, optimizer)
    weights = state_bytes(trainer, 0).weights
    assert state_bytes(trainer, 0).gradients == weights // trainer.item_bytes * gradient


def test_offloaded_state_moves_to_the_hosts_and_costs_their_memorys_rate():
    def plan_with(*words):
        return plan_run(facts("qwen3_30b_a3b_base", *words), H100)

    plain, offloaded = plan_with(), plan_with("megatron_optimizer.optimizer_cpu_offload=true")
    moved = plain.ranks[0].state.optimizer - offloaded.ranks[0].state.optimizer
    # Two of the three fp32 tensors move. The host also has a copy of the master weights, and gradients.
    assert moved == offloaded.ranks[0].state.offloaded_elements * 8
    assert offloaded.hosts[0].offloaded == offloaded.ranks[0].state.offloaded_elements * 24 * 8
    assert plain.hosts[0].offloaded == 0
    assert offloaded.seconds.training > plain.seconds.training
    # A checkpoint has both moments in bfloat16, their own type.
    assert plan_with(*AWARE).traffic.checkpoint == plain.traffic.checkpoint * 10 // 14


def test_the_optimizer_is_sharded_where_several_replicas_train_in_bfloat16():
    def shards(*words):
        return recipe(
            "qwen3_30b_a3b_base", "optimizer.distributed=null", *words
        ).distributed_optimizer

    assert shards()
    assert not shards("model.dtype=float32")
    assert not shards("parallel={world_size: 4, tensor: 4}")
    assert not recipe("qwen3_30b_a3b_base", "optimizer.distributed=false").distributed_optimizer


def test_fp8_training_holds_two_bytes_of_each_linear_weight():
    plain = plan_run(facts(), H100).ranks[0]
    fp8 = plan_run(facts("qwen3_30b_a3b_base", *FP8), H100).ranks[0]
    trainer = facts().trainer
    # 48 layers: attention in four parts, and 16 whole experts of three matrices.
    attention = (2 * 32 + 2 * 4) * 128 * 2048 // 4
    assert fp8.quantised == 2 * 48 * (attention + 16 * 3 * 768 * 2048)
    assert plain.quantised == 0
    assert trainer.layout.tensor == 4
    assert fp8.total >= plain.total + fp8.quantised


FP8 = ("megatron={fp8: e4m3, fp8_recipe: blockwise}",)


def test_fp8_pads_each_ranks_tokens():
    assert recipe().token_multiple == 1
    assert recipe("qwen3_30b_a3b_base", "megatron.fp8=hybrid").token_multiple == 16
    both = "megatron={fp8: e4m3, fp8_recipe: mxfp8}"
    assert recipe("qwen3_30b_a3b_base", both).token_multiple == 32
    longest = facts(
        "qwen3_30b_a3b_base", "megatron.fp8=hybrid", "training.micro_batch_tokens=40001"
    ).trainer
    assert longest.tokens == 40_064  # the next multiple of TP4 x 16


def test_communicators_by_hand():
    assert PER_COMMUNICATOR == 16 * 2 * (8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + 4 * 2**20)
    # An engine rank of TP4 is in its server's group, and in one with the trainer.
    assert engine_communicator_bytes(4, receives=True) == 2 * PER_COMMUNICATOR
    assert engine_communicator_bytes(4, receives=False) == PER_COMMUNICATOR
    assert engine_communicator_bytes(1, receives=True) == PER_COMMUNICATOR


@pytest.mark.parametrize("name", PRESETS)
def test_what_an_algorithm_needs_is_what_its_row_says(name):
    row = algorithm_facts(name)
    run = facts_of(recipe("qwen3_30b_a3b_base", f"algorithm.name={name}"), MOE)
    rollout = run.rollout
    assert run.spec.algorithm.extra_pass == (
        row.needs_recomputed or row.needs_recomputed_distribution or name in ("m2po", "m2po-areal")
    )
    assert rollout.topk == (MOE.vocab_size if row.preset.whole_vocabulary else row.topk)


@pytest.mark.parametrize(
    ("row", "topk", "recomputes"),
    [
        (Preset("factor", {"clip_high": 1.0}), 0, False),
        (Preset("factor", {"clip_high": 1.0}, anchor="recomputed"), 0, True),
        (Preset("topk_tv", {"tv_threshold": 0.1, "topk": 7}, divergence="topk_tv"), 7, False),
        (Preset("topk_tv", divergence="topk_tv", whole_vocabulary=True), MOE.vocab_size, False),
    ],
)
def test_a_row_that_docs_extending_adds_is_planned_by_what_it_says(
    monkeypatch, row, topk, recomputes
):
    """The planner reads the needs of an algorithm from its row, and does not guess them from its name."""
    monkeypatch.setitem(PRESETS, "factor", row)
    plan = plan_run(facts("qwen3_30b_a3b_base", "algorithm.name=factor"), H100)
    assert plan.facts.rollout.topk == topk
    assert (plan.seconds.recompute_pass > 0) == recomputes
    assert (plan.columns.topk > 0) == (topk > 0)


def test_an_algorithm_that_nobody_knows_is_refused(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["examples/recipes/qwen3_30b_a3b_base.yaml", "--gpu", "h100", "--nodes", "4"]
    with pytest.raises(FatalError, match="'factor'"):
        command.main([*words, "algorithm.name=factor"])


def test_trainers_and_servers_of_four_nodes():
    nodes, faults = node_roles(facts().spec.roles, H100)
    assert faults == []
    assert [(n.trainer, n.engine, n.servers, n.idle) for n in nodes] == [
        (8, 0, (), 0), (8, 0, (), 0), (0, 8, (0, 1), 0), (0, 8, (2, 3), 0),
    ]  # fmt: skip
    half = facts("qwen3_30b_a3b_base", "parallel.world_size=4", "parallel.expert=4", "engine.servers=3",
               "sglang.tp_size=3")  # fmt: skip
    nodes, _ = node_roles(half.spec.roles, Cluster(DEVICES["h100"], 2))
    assert [(n.trainer, n.engine, n.servers, n.idle) for n in nodes] == [
        (4, 3, (0,), 1),
        (0, 6, (1, 2), 2),
    ]
    nodes, faults = node_roles(facts().spec.roles, Cluster(DEVICES["h100"], 3))
    assert nodes == ()
    assert faults[0].startswith("devices: 16 ranks")


def test_what_does_not_fit_is_refused_by_part():
    plain = ["optimizer.distributed=false", "training.recompute=none"]
    plan = plan_run(facts("qwen3_30b_a3b_base", *plain), H100)
    (problem,) = plan.faults
    assert problem.startswith("trainer GPU memory: ")
    assert "optimizer 4" in problem
    assert problem.endswith("80GB")
    assert plan_run(facts(), H100).fits
    crowded = plan_run(facts("qwen3_30b_a3b_base", "sglang.mem_fraction_static=0.97"), H100)
    assert "mem_fraction_static 0.97 leaves" in crowded.faults[0]
    single = plan_run(facts("qwen3_30b_a3b_base", "sglang.mem_fraction_static=0.18"), H100)
    assert "sequence of 17,408" in single.faults[0]
    shared = plan_run(
        facts("qwen3_30b_a3b_base", "training.recompute=full", "sglang.base_gpu_id=0"), H100
    )
    (problem,) = shared.faults
    assert problem.startswith("GPU memory: sglang.base_gpu_id 0 ")
    poor = plan_run(facts(), replace(H100, host_memory=2**34))
    assert poor.faults[0].startswith("host memory: node 0 ")
    assert len(poor.faults) == 4


def test_every_rank_copies_its_share_of_a_checkpoint():
    hosts = plan_run(facts(), H100).hosts
    trainers = [host.checkpoint for host in hosts if host.checkpoint]
    assert len(set(trainers)) == 1
    # 14 bytes x 30.53 B / 16 ranks are 24.9 GiB (and replicated norms); a pinned buffer of 32 GiB holds them.
    assert trainers == [8 * 32 * 2**30] * 2
    assert written_bytes(facts()) * 16 == pytest.approx(14 * parameter_count(MOE), rel=0.02)
    lora = facts("qwen3_30b_a3b_base_lora")
    share = 14 * lora.trainer.trained.elements(MOE) / 16
    assert written_bytes(lora) == pytest.approx(share, rel=1e-6)
    copied = plan_run(lora, H100).hosts[0].checkpoint / 8
    assert share <= copied < 2 * share
    assert math.log2(copied).is_integer()
    waiting = plan_run(facts("qwen3_30b_a3b_base", "checkpoint.background=false"), H100)
    assert not any(host.checkpoint for host in waiting.hosts)


def test_senders_keep_what_they_sent_where_updates_send_only_changes():
    run = facts()
    plain = plan_run(run, H100)
    changes = plan_run(facts("qwen3_30b_a3b_base", "weight_sync.changes_only=true"), H100)
    assert not any(host.sent for host in plain.hosts)
    sent = [host.sent for host in changes.hosts]
    assert max(sent) <= changes.traffic.update <= sum(sent)
    assert all(
        bool(size) == bool(node.ranks) for size, node in zip(sent, changes.nodes, strict=True)
    )
    assert [host.total - host.sent for host in changes.hosts] == [h.total for h in plain.hosts]


def test_servers_keep_an_update_until_its_end_where_updates_are_atomic():
    run = facts()
    plain = plan_run(run, H100)
    atomic = plan_run(facts("qwen3_30b_a3b_base", "engine.atomic_updates=true"), H100)
    kept = [host.kept for host in atomic.hosts]
    assert kept == [node.engine * atomic.engine.weights for node in atomic.nodes]
    assert any(kept)
    assert [host.total - host.kept for host in atomic.hosts] == [h.total for h in plain.hosts]


def test_evaluation_is_the_generation_of_its_responses(tmp_path):
    """avg@32 on 60 problems takes as long as such a rollout batch. The time is spread over the 5 steps between two
    evaluations."""
    sets = [tmp_path / "a.jsonl", tmp_path / "b.parquet"]
    sets[0].write_text("{}\n" * 30 + "\n")
    words = ["evaluation.every=5", "evaluation.samples_per_prompt=32"]
    held_out = f"data.evaluation={{a: {sets[0]}, b: {sets[1]}}}"
    evaluated = facts("qwen3_30b_a3b_base", held_out, *words)
    assert evaluated.evaluated_problems == 60
    assert evaluated.rollout.longest_evaluated == evaluated.rollout.longest_response
    assert evaluated.config.evaluation.samples_per_prompt == 32
    batch = (
        "rollout.prompts_per_step=60",
        "rollout.group_size=32",
        "training.prompts_per_mini_batch=60",
    )
    alike = step_seconds(facts("qwen3_30b_a3b_base", *batch), H100, traffic(evaluated, H100))
    plan = plan_run(evaluated, H100)
    assert plan.seconds.evaluation == (alike.generation + alike.tail) / 5 > 20
    without_evaluation = plan_run(replace(evaluated, evaluated_problems=0), H100).seconds
    assert plan.seconds.total == pytest.approx(without_evaluation.total + plan.seconds.evaluation)
    shorter = facts("qwen3_30b_a3b_base", held_out, *words, "evaluation.max_response_tokens=2048")
    assert 0 < plan_run(shorter, H100).seconds.evaluation < plan.seconds.evaluation / 2
    assert plan_run(facts("qwen3_30b_a3b_base", "data.evaluation={}"), H100).seconds.evaluation == 0
    console = Console(record=True, width=200)
    print_plan(console, plan)
    seconds_per_step = plan.seconds.evaluation
    sentence = (
        f"60 problems x 32 take {5 * seconds_per_step:.0f} s, before the first step and every 5 steps: "
        f"{seconds_per_step:.0f} s for each"
    )
    assert sentence in console.export_text()


def test_search_ranks_what_fits_and_says_how_to_get_there():
    proposals = search(Question(recipe(), MOE, H100))
    seconds = [p.seconds for p in proposals]
    assert seconds == sorted(seconds)
    assert all(p.plan.fullest.total <= 0.9 * H100.device.memory for p in proposals)
    best = proposals[0]
    best_facts = facts_of(recipe("qwen3_30b_a3b_base", *best.changes), MOE)
    assert plan_run(best_facts, H100).seconds == best.plan.seconds
    close = nearest(proposals, 3)
    assert len(close) == 3
    assert len(close[0].changes) == min(len(p.changes) for p in proposals)


def test_search_keeps_the_experts_and_replicas_of_servers():
    options = ("sglang.tp_size=4", "sglang.ep_size=4", "sglang.attn_dp_size=2")
    proposals = search(Question(recipe("qwen3_30b_a3b_base", *options), MOE, H100))
    layouts = {p.plan.facts.engine.layout for p in proposals}
    assert {(layout.expert, layout.attention_replicas) for layout in layouts} == {(4, 2)}
    assert {layout.tensor for layout in layouts} <= {4, 8}


@pytest.mark.parametrize(("given", "is_suggested"), [("null", False), ("false", True)])
def test_a_proposal_names_no_value_that_the_recipe_has_already(given, is_suggested):
    """With null, the optimizer is distributed by default, because several replicas train in bfloat16."""
    overrides = (f"optimizer.distributed={given}",)
    base = recipe("qwen3_30b_a3b_base", *overrides)
    proposals = nearest(search(Question(base, MOE, H100)), 40)
    replicated = [p for p in proposals if p.question.config.parallel.data > 1]
    assert replicated
    for proposal in replicated:
        assert ("optimizer.distributed=true" in proposal.changes) == is_suggested
    for change in {change for proposal in proposals for change in proposal.changes}:
        changed = recipe("qwen3_30b_a3b_base", *overrides, change)
        assert changed.model_dump() != base.model_dump()


@pytest.mark.parametrize(
    ("spare", "words"), [(0.021, "It fits: "), (0.019, "It fits on paper only")]
)
def test_the_verdict_says_by_how_little_the_plan_fits(spare, words):
    plan = plan_run(facts(), H100)
    device = replace(H100.device, memory=int(plan.fullest.total / (1 - spare)))
    tight_plan = replace(plan, cluster=replace(H100, device=device), hosts=(), shared=())
    verdict = command.verdict_of(tight_plan)
    assert verdict.startswith(words)
    assert f"({spare:.1%}) of the" in verdict


def test_the_fullest_memory_may_be_that_of_generation():
    plan = plan_run(facts(), H100)
    shared = ColocatedBytes((), 0, 0, training=1, generating=H100.device.memory - 2**20, updating=1)
    use = replace(plan, shared=(shared,)).fullest_memory
    assert use.name == "shared GPUs while servers generate"


def test_bars_of_a_picture_add_up_to_the_plan():
    plan = plan_run(facts(), H100)
    segments = bars(plan)
    assert list(segments) == ["trainer, stage 0", "server"]
    assert sum(segments["trainer, stage 0"].values()) == pytest.approx(
        plan.fullest.total / 2**30, rel=1e-6
    )
    assert sum(segments["server"].values()) == pytest.approx(
        (H100.device.memory - 2**29) / 2**30, rel=1e-6
    )


def test_the_command_prints_every_part_and_exits_0(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["examples/recipes/qwen3_30b_a3b_base_r3.yaml", "--gpu", "h100", "--nodes", "4"]
    assert command.main(words) == 0
    out = capsys.readouterr().out
    for part in ("Roles of the GPUs", "A trainer rank's GPU", "A server's GPU", "Host memory", "Transfers",
                 "after a rank's death", "A step, seconds", "It fits: "):  # fmt: skip
        assert part in out
    assert command.main([*words, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["fits"]
    assert (
        tree["plan"]["ranks"][0]["total"]
        == plan_run(facts("qwen3_30b_a3b_base_r3"), H100).fullest.total
    )


def test_the_command_refuses_with_what_would_fit_and_exits_2(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["examples/recipes/qwen3_30b_a3b_base.yaml", "--gpu", "h100"]
    assert (
        command.main(
            [*words, "--nodes", "4", "optimizer.distributed=false", "training.recompute=none"]
        )
        == 2
    )
    out = capsys.readouterr().out
    assert "It can't work:" in out
    assert "What would" in out
    assert "optimizer.distributed=true" in out
    one_gpu = ["--nodes", "1", "--gpus-per-node", "1"]
    assert command.main([*words, *one_gpu, "parallel.tensor=3"]) == 2
    out = capsys.readouterr().out
    assert "parallel.tensor: got 3" in out
    assert "1 x 1 h100" in out


def test_where_no_layout_fits_the_least_that_does_is_named(capsys, monkeypatch):
    """With ``--search``, the exit code says whether a layout fits, also if the recipe itself has no fault."""
    monkeypatch.chdir(ROOT)
    words = ["examples/recipes/qwen3_30b_a3b_base.yaml", "--gpu", "h100"]
    assert command.main([*words, "--nodes", "1", "--json"]) == 2
    tree = json.loads(capsys.readouterr().out)
    assert (tree["fits"], tree["proposals"]) == (False, [])
    least = tree["least_nodes"]
    assert search(Question(recipe(), MOE, replace(H100, nodes=least)))
    assert not search(Question(recipe(), MOE, replace(H100, nodes=least - 1)))
    assert command.main([*words, "--nodes", "1"]) == 2
    out = capsys.readouterr().out
    assert (
        f"No layout of 1 x 8 h100 fits; the least that does: {least} x 8 (--nodes {least})." in out
    )
    monkeypatch.setattr(command, "search_schedules", lambda *_: [])
    monkeypatch.setattr(command, "least_nodes", lambda *_: None)
    # Without --search, only the plan counts.
    assert command.main([*words, "--nodes", "4", "--json"]) == 0
    assert command.main([*words, "--nodes", "4", "--search", "--json"]) == 2


def test_router_replay_costs_the_seconds_of_its_bytes():
    with_routing, without = (
        replace(facts(), rollout=replace(facts().rollout, routing=has_routing))
        for has_routing in (True, False)
    )
    # A token's routing has 48 layers x 8 experts of one byte. The last token of a response has none.
    routing_bytes = 384 * (with_routing.rollout.tokens - with_routing.rollout.responses)
    ranks = with_routing.trainer.layout.world_size
    added = plan_run(with_routing, H100).seconds.total - plan_run(without, H100).seconds.total
    assert added == pytest.approx(routing_bytes / (ranks * 0.144e9), rel=1e-3)
    assert added > 1


def test_who_waits_for_whom_and_the_gpu_hours_by_hand(capsys, monkeypatch):
    seconds = StepSeconds(ON_POLICY, 60, 4, 20, 6, 5, 5)
    assert seconds.total == 100
    assert seconds.idle == {"trainers": pytest.approx(0.6), "servers": pytest.approx(0.35)}
    ahead = replace(seconds, schedule=STALE)
    assert ahead.total == 70
    assert ahead.idle == {"trainers": pytest.approx(3 / 7), "servers": pytest.approx(1 / 14)}
    plan = replace(plan_run(facts(), H100), seconds=seconds)
    assert plan.gpu_hours == pytest.approx(100 * 32 / 3600)
    monkeypatch.chdir(ROOT)
    words = ["examples/recipes/qwen3_30b_a3b_base.yaml", "--gpu", "h100", "--nodes", "4"]
    monkeypatch.setattr(Question, "plan", lambda _: plan)
    assert command.main(words) == 0
    out = capsys.readouterr().out
    steps = recipe().run.steps
    assert f"The run's {steps:,} steps: {steps * 100 * 32 / 3600:,.0f} GPU-hours, idle" in out
    assert "60%" in out
    assert "35%" in out
    assert command.main([*words, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["plan"]["idle"] == seconds.idle
    assert tree["gpu_hours"] == pytest.approx(steps * plan.gpu_hours)


def test_memory_where_there_is_no_gpu(tmp_path):
    """In bf16, a trainer rank has 18 bytes for each parameter, and the server has 2."""
    shape = MODELS / "qwen3-1.7b-base"
    words = [
        f"model.hf_checkpoint={shape}",
        "parallel={world_size: 2, tensor: 1}",
        "engine={servers: 1}",
    ]
    config = recipe("qwen3_1.7b_base_efficiency", *words, "optimizer.distributed=false")
    # Tied embeddings: the engine holds 1,720,574,976 parameters, as the trainer's ranks do.
    needed = 1_720_574_976 * (2 * 18 + 2)
    machine = Machine(cores=2, gpus=0, memory_bytes=needed, open_files=1024)
    fits = check_memory(config, machine)
    assert fits.faults == ()
    (fault,) = check_memory(config, replace(machine, memory_bytes=needed - 1)).faults
    assert fault.startswith("memory: ")
    assert "weights 3.2 GiB, gradients 6.4 GiB" in fits.summary


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H20", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_machine_with_gpus_is_judged_by_their_name(tmp_path, name, known):
    information = tmp_path / "gpus" / "0000:01:00.0" / "information"
    information.parent.mkdir(parents=True)
    information.write_text(f"Model: \t\t {name}\nIRQ: 1\n")
    assert device_here(tmp_path) is (None if known is None else DEVICES[known])


def test_a_site_file_names_every_kind_of_gpu():
    for name in DEVICES:
        assert SiteConfig.model_validate({"gpu": name}).gpu == name


@pytest.mark.parametrize(
    ("nodes", "each", "seconds"),
    [
        # 97 reductions of 256 x 2,048 x 2 bytes, twice, and logits of 256 x 151,936 x 2 bytes: 281,214,976 bytes, of
        # which 15/16 leave a GPU, 263,639,040, on the ports of a node's GPUs at 0.7 of 50 GB/s each.
        (2, 8, 263_639_040 / (8 * 35e9) + 98 * 2 * 5e-6),
        (4, 4, 263_639_040 / (4 * 35e9) + 98 * 4 * 5e-6),  # a tree of two levels
        (3, 6, 263_639_040 / (16 / 3 * 35e9) + 98 * 4 * 5e-6),
        (1, 16, 0.0),
    ],
)
def test_a_decoded_token_of_a_server_over_nodes(nodes, each, seconds):
    run = facts("qwen3_30b_a3b_base", "sglang.tp_size=16")
    assert (MOE.num_layers, MOE.hidden_size, MOE.vocab_size) == (48, 2048, 151_936)
    cluster = Cluster(DEVICES["h100"], nodes, each)
    seconds_across_nodes = network_seconds(MOE, run.engine, cluster, 256, 256)
    assert seconds_across_nodes == pytest.approx(seconds, rel=1e-12)
    whole = Cluster(DEVICES["h100"], 1, 16)
    step = decode_seconds(run, cluster, 256, 1000) - decode_seconds(run, whole, 256, 1000)
    assert step == pytest.approx(seconds)


def test_weights_that_a_decode_step_touches():
    """One token uses 8 of 128 experts, 3 x 2,048 x 768, in each of 48 layers. A hundred tokens use all but 0.16%."""
    one, all_of_them = 48 * 8 * 3 * 2048 * 768, 48 * 128 * 3 * 2048 * 768
    touched = touched_parameters(MOE, 1)
    assert touched.experts == pytest.approx(one)
    assert touched.dense == active_parameters(MOE) - one
    assert touched_parameters(MOE, 100).experts == pytest.approx(all_of_them * 0.9984, rel=1e-4)
    dense = load_model_shape(MODELS / "qwen3-8b-base")
    assert touched_parameters(dense, 100) == TouchedParameters(active_parameters(dense), 0)


def test_prompts_of_a_server_over_nodes():
    """Two passes have 8,192 tokens and 64 prompts each: 97 x 8,192 x 4,096 bytes twice, and 64 x 303,872 bytes."""
    run = facts("qwen3_30b_a3b_base", "sglang.tp_size=16")
    rollout = replace(run.rollout, prompts=128, mean_prompt=128.0)
    run = replace(run, rollout=rollout, engine=replace(run.engine, started=1))
    over, inside = (Cluster(DEVICES["h100"], n, 16 // n, network_latency=1e-5) for n in (2, 1))
    difference = prefill_seconds(run, over) - prefill_seconds(run, inside)
    assert difference == pytest.approx(2 * (6_120_944_640 / 280e9 + 98 * 2 * 1e-5))


def test_head_flops_by_hand():
    """3 of 4 tokens are of responses: 60,000 of 80,000 in a micro-batch, 56,000 of them outside the last chunk."""

    def run_with(chunk_tokens):
        words = (f"head.chunk_tokens={chunk_tokens}",)
        run = facts("qwen3_30b_a3b_base", *words, mean_response=768, mean_prompt=256)
        return replace(run, trainer=replace(run.trainer, tokens=80_000))

    run = run_with(4_000)
    trainer = run.trainer
    product = 2 * 2048 * 151936
    flops = head_flops(trainer, run.rollout)
    assert flops.forward == pytest.approx(-product / 4)
    assert flops.training == pytest.approx(product * (-3 / 4 + 3 / 4 * 56 / 60))
    trainer = run_with(60_000).trainer
    once = head_flops(trainer, run.rollout)
    assert once.training == pytest.approx(-product * 3 / 4)
    adapters: Any = object()
    frozen = head_flops(replace(trainer, trained=adapters), run.rollout)
    assert frozen.training == pytest.approx(-product * 2 / 4)


TEACHER = (
    "distillation.teachers={big: {hf_checkpoint: models/Qwen3-235B-A22B, servers: 2, sglang: {tp_size: 8}}}",
    "distillation.loss=reverse",
    "distillation.top_k=64",
)


def test_a_teacher_has_gpus_and_bytes_of_its_own():
    name = "qwen3_30b_a3b_base"
    cluster = Cluster(DEVICES["h200"], 6, 8)
    alone = plan_run(facts(name), cluster)
    plan = plan_run(facts(name, *TEACHER), cluster)
    # Two servers of eight GPUs.
    assert plan.gpus == alone.gpus + 16
    assert sum(node.engine for node in plan.nodes) == sum(node.engine for node in alone.nodes) + 16
    assert plan.fits
    # 235.1 B parameters in bf16; eight ranks hold the same norms and routers.
    assert plan.teachers["big"].weights * 8 == pytest.approx(2 * 235.1e9, rel=0.01)
    sampled = plan.facts.rollout.responses * plan.facts.rollout.mean_response
    # An fp32 log-probability of the token; an int32 id and an fp32 log-probability for each of K.
    assert plan.columns.teacher == sampled * (4 + 64 * 8)
    assert plan.columns.replicas == alone.columns.replicas + plan.columns.teacher
    # The trainer computes log pi at the teacher's ids.
    assert plan.fullest.activations.total > alone.fullest.activations.total
    assert alone.columns.teacher == 0
    # One GPU cannot hold the teacher.
    small = plan_run(facts(name, TEACHER[0].replace("8", "1")), cluster)
    assert any(fault.startswith("teacher big: engine GPU memory") for fault in small.faults)
    with pytest.raises(ConfigError, match=r"distillation\.teachers: no config\.json in none"):
        facts(name, "distillation.teachers={t: {hf_checkpoint: none}}")


def test_the_seconds_of_teachers_by_hand(monkeypatch, capsys):
    """A response costs one pass of the teacher's 22 B active parameters over prompt and response."""
    name = "qwen3_30b_a3b_base"
    cluster = Cluster(DEVICES["h200"], 6, 8)
    alone = plan_run(facts(name), cluster).seconds
    run = facts(name, *TEACHER)
    layer = 4096 * (2 * 64 * 128 + 2 * 4 * 128) + 8 * 3 * 4096 * 1536 + 4096 * 128
    active = 94 * layer + 4096 * 151936
    assert active == pytest.approx(21.6e9, rel=0.01)
    length = run.rollout.mean_prompt + run.rollout.mean_response
    flops = 2 * active + 2 * 64 * 128 * 94 * length
    # Two servers of eight GPUs of 989 TFLOP/s, of which a prefill reaches 40%.
    expected = run.rollout.responses * length * flops / (16 * 989e12 * 0.4)
    seconds = plan_run(run, cluster).seconds
    assert seconds.teachers == pytest.approx(expected, rel=1e-3)
    assert seconds.phases["teachers"] == seconds.teachers
    # The teacher is faster than the policy's servers, so the batch takes no longer.
    assert seconds.teachers < seconds.servers == alone.servers
    slow = replace(seconds, teachers=seconds.servers + 50)
    assert slow.servers == seconds.servers + 50
    # Two teachers of one server each share the problems.
    pair = ", ".join(
        f"t{i}: {{hf_checkpoint: models/Qwen3-235B-A22B, sglang: {{tp_size: 8}}}}" for i in (1, 2)
    )
    two = plan_run(facts(name, f"distillation.teachers={{{pair}}}"), cluster).seconds
    assert two.teachers == pytest.approx(expected, rel=1e-3)
    far = (
        "distillation.teachers={far: {hf_checkpoint: models/Qwen3-235B-A22B, urls: [http://far:1]}}"
    )
    attached = plan_run(facts(name, far), cluster).seconds
    assert attached.teachers == 0
    assert "teachers" not in attached.phases
    monkeypatch.chdir(ROOT)
    words = [f"examples/recipes/{name}.yaml", *TEACHER, "--gpu", "h200", "--nodes", "6", "--json"]
    assert command.main(words) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["seconds"]["teachers"] == pytest.approx(
        expected, rel=1e-3
    )
