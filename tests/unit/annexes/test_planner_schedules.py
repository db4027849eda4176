"""Synchronous, stale and colocated steps: seconds, idle shares and shared GPUs by hand, and the search over all."""

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
from rich.console import Console

from megatron_dppo.cluster import plan as command
from megatron_dppo.cluster.plan import print_plan, print_proposals
from megatron_dppo.cluster.planner import colocation
from megatron_dppo.cluster.planner.activations import ActivationBytes
from megatron_dppo.cluster.planner.decode_time import PREFILL_UTILISATION, decode_seconds
from megatron_dppo.cluster.planner.devices import CONTEXT, DEVICES, GIB, Cluster
from megatron_dppo.cluster.planner.facts import (
    COLOCATED,
    ON_POLICY,
    STALE,
    Schedule,
    facts_of,
    schedule_of,
)
from megatron_dppo.cluster.planner.generation_time import (
    generation_seconds,
    prefill_seconds,
    resumed_seconds,
    sequences_at_once,
)
from megatron_dppo.cluster.planner.memory import RankBytes
from megatron_dppo.cluster.planner.run_plan import plan_run
from megatron_dppo.cluster.planner.search import (
    Proposal,
    Question,
    best_of_each,
    schedules,
    search,
    search_schedules,
)
from megatron_dppo.cluster.planner.server_memory import LEAST_RESERVED, EngineBytes
from megatron_dppo.cluster.planner.step_time import StepSeconds
from megatron_dppo.cluster.planner.trainer_state import StateBytes
from megatron_dppo.config import load_config
from megatron_dppo.model.families import load_model_shape

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "examples" / "recipes" / "qwen3_30b_a3b_base.yaml"
MOE = load_model_shape(ROOT / "examples" / "model_configs" / "qwen3-30b-a3b-base")
H100 = Cluster(DEVICES["h100"], 4)
SIXTEEN = ["engine.servers=16", "parallel.world_size=32", "sglang.mem_fraction_static=0.75"]
"""Settings with which the ranks use all 32 GPUs, and 16 servers of TP 2 use all GPUs, too."""


EIGHT = ["engine.servers=8", "sglang.tp_size=2", "training.recompute=full"]


def facts(schedule, *words, **lengths):
    """Return the facts of the recipe with eight servers of TP 2, and of 16 ranks unless ``words`` change them."""
    settings = [
        f"engine.placement={schedule.placement}",
        f"rollout.max_staleness={schedule.staleness}",
        f"rollout.interrupt={'drain' if schedule.drains else 'retract'}",
        f"weight_sync.strategy={'disk' if schedule.is_colocated else 'distributed'}",
    ]
    return facts_of(load_config(RECIPE, [*EIGHT, *settings, *words]), MOE, **lengths)


def test_a_synchronous_step_by_hand():
    step = StepSeconds(ON_POLICY, 50, 0, 20, 10, 4, 1, tail=10, evaluation=5)
    assert step.total == 50 + 10 + 30 + 4 + 1 + 5 == 100
    assert step.idle == {"trainers": pytest.approx(0.65), "servers": pytest.approx(0.41)}
    assert step.gpu_idle(16, 16) == pytest.approx(0.53)
    assert step.gpu_idle(8, 24) == pytest.approx((8 * 0.65 + 24 * 0.41) / 32)


def test_a_stale_step_by_hand():
    step = StepSeconds(STALE, 50, 0, 20, 10, 4, 1, evaluation=5)
    assert step.total == 50 + 5 + 4 + 1 == 60
    assert step.idle == {"trainers": pytest.approx(25 / 60), "servers": pytest.approx(1 / 60)}
    # A trainer that takes longer hides the evaluation, too.
    slower = replace(step, training=60)
    assert slower.total == 70 + 4 + 1
    assert slower.idle == {"trainers": 0, "servers": pytest.approx(1 - 59 / 75)}


def test_a_colocated_step_by_hand():
    step = StepSeconds(COLOCATED, 25, 0, 10, 5, 4, 1, tail=10, switch=5)
    assert step.total == 25 + 10 + 15 + 5 + 4 + 1 == 60
    assert step.idle == {"GPUs": pytest.approx((10 + 5) / 60)}
    assert step.gpu_idle(32, 32) == step.idle["GPUs"]
    assert list(step.phases) == [
        *("generation", "longest responses", "training", "collectives", "switch"),
        *("weight update", "checkpoint"),
    ]


def test_servers_that_are_never_empty_have_no_tail_and_prefill_again():
    """A server runs 100 sequences of 256 + 4,096 tokens, at 2 x 3.04 B + 0.39 M x 4,352 FLOPs a token."""
    waits, goes_on = facts(ON_POLICY), facts(STALE)
    running = sequences_at_once(waits, H100)
    assert running == sequences_at_once(goes_on, H100) == 100
    step = decode_seconds(waits, H100, running, 256 + 4096)
    steady = 4096 * 8192 / 8 / running * step + prefill_seconds(waits, H100)
    tail = (16384 - 8192) * decode_seconds(waits, H100, 10, 16384)
    generation = generation_seconds(waits, H100)
    assert (generation.steady, generation.tail) == (pytest.approx(steady), pytest.approx(tail))
    again = 100 * 4352 * (6.0832e9 + 2 * 4096 * 48 * 4352) / (2 * 989e12 * PREFILL_UTILISATION)
    assert resumed_seconds(waits, H100, running) == pytest.approx(again, rel=1e-3)
    generation = generation_seconds(goes_on, H100)
    assert (generation.steady, generation.tail) == (pytest.approx(steady + again, rel=1e-3), 0)


def test_servers_empty_before_the_next_batch_where_the_longest_responses_end_late():
    """The mean response takes 8 s, the longest 40 s, the trainer 30 s. With decoding d: x = 40 + 30 - d."""
    step = StepSeconds(STALE, 60, 0, 30, 0, 4, 1, mean_response=8, last_response=40)
    x = 8 * (sqrt(1 + 2 * 10 / 8) - 1)
    assert step.decoding == pytest.approx(70 - x)
    assert step.decoding - 60 == pytest.approx(x**2 / 16)
    assert step.total == step.decoding + 5
    # x > 8: d = 40 + x - 4 = 70 - x
    assert replace(step, generation=40).decoding == 53
    # Two batches ahead: 40 + 30 < 2 x 60.
    assert replace(step, schedule=replace(STALE, staleness=2)).decoding == 60
    # All of a few responses run at once, so a batch and its training have two steps.
    assert replace(step, generation=5, mean_response=1).decoding == pytest.approx(37.25)
    assert replace(step, generation=1, mean_response=4).decoding == 35
    # Colocated servers pause while the trainer works: x = 40 - d.
    colocated = replace(step, schedule=replace(COLOCATED, staleness=1, drains=False))
    assert colocated.decoding == 60
    assert replace(colocated, generation=10).decoding == 23
    assert replace(step, schedule=replace(STALE, drains=True)).decoding == 60


def test_a_batch_of_few_responses_runs_at_once():
    few = (
        "rollout.prompts_per_step=16",
        "rollout.group_size=2",
        "training.prompts_per_mini_batch=16",
    )
    for staleness in (1, 3):
        run = facts(replace(STALE, staleness=staleness), *few, mean_response=100.0)
        running = sequences_at_once(run, H100)
        assert running == 4 * staleness  # batches in flight on each of eight servers
        step = decode_seconds(run, H100, running, 256 + 50)
        generation = generation_seconds(run, H100)
        tail = (16384 - 100) * decode_seconds(run, H100, max(1, running / 10), 16384)
        assert (generation.mean_response, generation.last_response) == (
            100 * step,
            100 * step + tail,
        )


def rank(weights, gradients, optimizer, working=8):
    live = ActivationBytes(working * GIB, 0, 0, 0, 0)
    state = StateBytes(weights * GIB, 0, gradients * GIB, optimizer * GIB)
    return RankBytes(0, state, live, 0, GIB, GIB, 0)


@pytest.mark.parametrize(
    ("room", "parked", "travels", "left", "read"),
    [
        (116, (), 0, 60, 60),
        (96, ("gradients",), 0, 40, 40),
        (95, ("gradients", "reference", "optimizer"), 60, 10, 10),
        (65, ("gradients", "reference", "optimizer", "weights"), 80, 0, 10),
    ],
)
def test_the_least_is_parked_that_lets_both_fit(room, parked, travels, left, read):
    """In GiB, the server has weights of 20, a KV cache of 30, work space of 3, and a context of 0.5. The rank has 2
    that stay, and weights of 10, gradients of 20 and an optimizer of 30."""
    engine = EngineBytes(20 * GIB, 30 * GIB, 0, 0.9, 1, 1, 1)
    shared = colocation.shared_bytes(rank(10, 20, 30), engine, 0, room * GIB)
    assert (shared.parked, shared.travels) == (parked, travels * GIB)
    assert LEAST_RESERVED == 3 * GIB
    assert shared.generating == CONTEXT + (20 + 30 + 3 + 2 + left) * GIB <= room * GIB
    assert shared.training == (60 + 8 + 2) * GIB + CONTEXT + colocation.KEPT_BY_SERVER
    assert shared.updating == CONTEXT + (20 + 2 + 2 + read) * GIB


def test_a_switch_moves_what_is_parked_out_and_back():
    run = facts(COLOCATED, *SIXTEEN)
    (shared,) = colocation.shared_ranks(run, H100.device)
    assert shared.parked == ("gradients", "reference", "optimizer")
    # 12 bytes for each parameter move: 3.6 B of experts over four ranks, and 0.39 B over eight.
    assert shared.travels == pytest.approx(2 * 12 * (3.624e9 / 4 + 0.39e9 / 8), rel=0.02)
    seconds = shared.travels / colocation.HOST_LINK + colocation.SWITCH_OVERHEAD
    assert colocation.switch_seconds(run, H100.device) == pytest.approx(seconds)
    assert colocation.switch_seconds(facts(ON_POLICY), H100.device) == 0
    fuller = facts(COLOCATED, *SIXTEEN, "sglang.mem_fraction_static=0.85")
    (shared,) = colocation.shared_ranks(fuller, H100.device)
    assert shared.parked == ("gradients", "reference", "optimizer", "weights")


def test_a_colocated_plan_tells_what_is_parked_and_what_does_not_fit():
    run = facts(COLOCATED, *SIXTEEN)
    plan = plan_run(run, H100)
    assert plan.faults == ()
    assert plan.gpus == 32
    assert all((n.trainer, n.engine, n.idle) == (8, 8, 0) for n in plan.nodes)
    assert all(host.parked == 8 * 16 * GIB for host in plan.hosts)  # 10.7 GiB, pinned in 16
    console = Console(record=True, width=200)
    print_plan(console, plan)
    assert (
        "Parked while servers generate (engine.parked): gradients, reference, optimizer, 21."
        in console.export_text()
    )
    crowded = plan_run(facts(COLOCATED, *SIXTEEN, "sglang.mem_fraction_static=0.955"), H100)
    assert any("stage 0" in fault for fault in crowded.faults)
    full = plan_run(facts(COLOCATED, *SIXTEEN, "training.micro_batch_tokens=400000"), H100)
    assert any("beside a server that released its memory" in fault for fault in full.faults)


def test_both_copies_of_the_weights_must_fit_in_an_update():
    """In GiB, rank and server have weights of 30 each. The rank keeps 2, and the server 2 and a context of 0.5. The
    KV cache is released."""
    engine = EngineBytes(30 * GIB, 30 * GIB, 0, 0.9, 1, 1, 1)
    shared = colocation.shared_bytes(rank(30, 0, 0, working=0), engine, 0, 66 * GIB)
    assert shared.parked[-1] == "weights"
    assert shared.updating == CONTEXT + (30 + 30 + 2 + 2) * GIB
    small = replace(DEVICES["h100"], memory=63 * GIB)
    assert any(
        "in a weight update" in fault for fault in colocation.sharing_faults((shared,), small)
    )


def test_the_recipe_s_own_schedule_is_ranked_too():
    config = load_config(RECIPE)
    assert schedule_of(config) == ON_POLICY
    assert schedule_of(load_config(RECIPE, ["rollout.interrupt=retract"])) == ON_POLICY
    assert schedules(Question(config, MOE, H100)) == (ON_POLICY, STALE, COLOCATED)
    ahead = Question(load_config(RECIPE, ["rollout.max_staleness=1"]), MOE, H100)
    assert schedules(ahead) == (ON_POLICY, STALE, COLOCATED, Schedule(staleness=1))
    words = ["rollout.max_staleness=1", "rollout.interrupt=retract"]
    assert schedule_of(load_config(RECIPE, words)) == STALE


def test_search_ranks_all_schedules_and_says_how_to_get_there():
    question = Question(load_config(RECIPE), MOE, Cluster(DEVICES["h200"], 2))
    proposals = search_schedules(question)
    seconds = [p.seconds for p in proposals]
    assert seconds == sorted(seconds)
    best = {p.question.schedule: p for p in reversed(proposals)}
    assert set(best) == {ON_POLICY, STALE, COLOCATED}
    assert best[ON_POLICY].changes == search(question)[0].changes
    assert "engine.placement=colocated" in best[COLOCATED].changes
    assert {"rollout.max_staleness=1", "rollout.interrupt=retract"} <= set(best[STALE].changes)
    shown = best_of_each(proposals, 2)
    assert len(shown) == 6
    assert [p.seconds for p in shown] == sorted(p.seconds for p in shown)


def test_a_colocated_recipe_is_searched_for_separate_layouts_too():
    """The servers of a separate layout do not begin on the ranks' devices, nor share their hosts' memory."""
    cluster = Cluster(DEVICES["h200"], 2)
    config = load_config(RECIPE, ["engine.placement=colocated", "weight_sync.strategy=tensor"])
    proposals = search_schedules(Question(config, MOE, cluster))
    separate = [p for p in proposals if p.question.schedule == ON_POLICY]
    own_question = Question(load_config(RECIPE), MOE, cluster)
    assert [p.seconds for p in separate] == [p.seconds for p in search(own_question)]
    changes = {"engine.placement=separate", "weight_sync.strategy=distributed"}
    assert changes <= set(separate[0].changes)


FOLDER = "weight_sync.directory=runs/qwen3-30b-a3b-base/dppo-binary-tv-seed-1/weights"


@pytest.mark.parametrize(
    ("nodes", "recipe", "expected"),
    [
        (2, [], ["weight_sync.strategy=tensor"]),
        (2, ["weight_sync.strategy=tensor"], []),
        (2, ["weight_sync.strategy=disk"], [FOLDER]),
        (2, ["weight_sync.strategy=disk", "weight_sync.directory=/shared"], []),
        (1, [], ["weight_sync.strategy=tensor"]),
        (1, ["weight_sync.strategy=tensor"], []),
        (
            *(1, ["weight_sync.changes_only=true", "engine.atomic_updates=true"]),
            [
                *("engine.atomic_updates=false", "weight_sync.strategy=tensor"),
                "weight_sync.changes_only=false",
            ],
        ),
    ],
)
def test_a_colocated_proposal_names_how_weights_reach_its_servers(nodes, recipe, expected):
    """NCCL takes no two ranks on one GPU, and every host of servers has trainer ranks that share memory with them."""
    question = Question(load_config(RECIPE, recipe), MOE, Cluster(DEVICES["h200"], nodes))
    (best,) = best_of_each([p for p in search_schedules(question) if is_colocated(p)], 1)
    named = [c for c in best.changes if c.startswith(("weight_sync.", "engine.atomic_updates"))]
    assert named == expected
    proposed = replace(question, config=load_config(RECIPE, [*recipe, *best.changes]))
    assert proposed.layout_faults() == []
    assert proposed.plan().seconds == best.plan.seconds


def is_colocated(proposal):
    return proposal.question.schedule.is_colocated


def test_a_recipe_with_a_draft_model_has_no_colocated_proposal():
    draft = [
        *("sglang.speculative_algorithm=EAGLE3", "sglang.speculative_draft_model_path=draft"),
        *("sglang.speculative_eagle_topk=1", "sglang.speculative_num_steps=2"),
    ]
    question = Question(load_config(RECIPE, draft), MOE, Cluster(DEVICES["h200"], 2))
    assert {p.question.schedule for p in search_schedules(question)} == {ON_POLICY}


def test_a_plan_refuses_a_colocated_recipe_whose_weights_reach_no_server():
    config = load_config(RECIPE, ["engine.placement=colocated"])
    (fault,) = Question(config, MOE, H100).layout_faults()
    assert fault.startswith("weight_sync.strategy: got distributed with engine.placement colocated")


def test_the_command_tells_seconds_idle_placement_and_staleness(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    layout = ["parallel.world_size=8", "engine.servers=2", "training.recompute=full"]
    words = [str(RECIPE), *layout, "--gpu", "h200", "--nodes", "2", "--search"]
    assert command.main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["proposals"]
    assert {(row["placement"], row["staleness"]) for row in rows} == {
        *(("separate", 0), ("separate", 1), ("colocated", 0))
    }
    assert all(0 < row["gpu_idle"] < 1 and row["seconds"] > 0 for row in rows)


def test_a_search_is_shown_with_idle_placement_and_staleness():
    question = Question(load_config(RECIPE), MOE, H100)
    plan = plan_run(facts(COLOCATED, *SIXTEEN), H100)
    console = Console(record=True, width=200)
    print_proposals(console, [Proposal(("engine.placement=colocated",), question, plan)])
    out = console.export_text()
    assert all(heading in out for heading in ("GPU idle", "placement", "staleness"))
    assert f"{plan.gpu_idle:.0%} │ colocated │         0" in out
    assert "1: engine.placement=colocated" in out
