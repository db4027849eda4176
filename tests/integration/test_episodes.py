"""Episodes of several turns in real runs: at every sampled token, the trainer's log-probabilities, routing and Top-K
are the engine's. This holds in every kind of layout, with adapters, and with weight updates in the middle of a turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dppo.config.loading import load_config
from megatron_dppo.convert.__main__ import main as convert
from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.data.columns import usable_rows
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.explain.seen_step import SeenStep, check_agreement
from megatron_dppo.environments import calculate
from tests.adapters import peft_model, save_random_adapters
from tests.chat_templates import QWEN3
from tests.integration.runs import TrainingRun, records_of, write_material
from tests.unit.planted_rewards import of_every_character

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

STEPS = (1, 2, 3)
CALL, CALL_REWARD = " ", 0.25
TOOL_TURN = "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
TOPK = 4
ADAPTERS = {"rank": 4}


def material(folder: Path, environment: dict[str, Any], **sections: dict[str, Any]) -> Path:
    """Write a configuration with one mini-batch per step, at the rollout's weights, without evaluations and exports."""
    path = write_material(folder)
    settings = yaml.safe_load(path.read_text())
    settings["environment"] = environment
    settings["rollout"]["router_replay"] = True
    settings["training"]["prompts_per_mini_batch"] = settings["rollout"]["prompts_per_step"]
    settings["data"].pop("evaluation")
    settings.pop("evaluation")
    settings["checkpoint"] = {"every": 100, "export_hf": False}
    for name, section in sections.items():
        settings.setdefault(name, {}).update(section)
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return material(
        tmp_path_factory.mktemp("episodes"),
        {
            "name": "tests.unit.planted_environments:Counting",
            "credit": "turn",
            "max_turns": 4,
            "max_observation_tokens": 24,
        },
        # A random policy ends a turn about every third token. Some turns are cut off, and their episodes have smaller
        # rewards.
        rollout={"stop_token_ids": list(range(3, 180)), "max_response_tokens": 4},
    )


@pytest.fixture(scope="module")
def run(config) -> TrainingRun:
    with TrainingRun(config, "run.steps=2") as run:
        run.finish()
    return run


# --- the trainer's values


def check_step(directory: Path, step: int, advantages: Callable[..., Sequence[float]]) -> None:
    """Assert that pi is mu, and that only sampled tokens count. The only mini-batch has the rollout's weights."""
    batch = load_batch(directory / "rollouts", step)
    (record,) = [r for r in records_of(directory) if r["step"] == step]
    assert max(gap_of(t).max() for t in batch) < 5e-6
    assert record["r3/agreement_first"] == 1.0
    assert record["r3/unrecorded_share"] == record["r3/discarded_tokens"] == 0
    assert record["policy/tokens"] == sum(t.sampled for t in batch)
    # The loss saw each turn's own advantage: the recorded signs of masked tokens, and all recorded means, follow from
    # the saved advantages.
    settings = load_config(directory / "config.yaml").algorithm
    seen = SeenStep.of(batch, settings)
    assert seen.inputs.advantages.any()
    expected = [t.by_token(advantages(t, group_of(t, batch))) for t in batch]
    torch.testing.assert_close(
        seen.inputs.advantages, torch.from_numpy(np.concatenate(expected)), atol=1e-6, rtol=0
    )
    check_agreement(seen, directory, step)


def gap_of(t: Trajectory) -> np.ndarray:
    """Return |log pi - log mu| of each sampled token, as the loss saw it."""
    return np.abs(t.column("loss_log_probs") - t.column("rollout_log_probs"))


def group_of(t: Trajectory, batch: Sequence[Trajectory]) -> list[Trajectory]:
    return [other for other in batch if other.problem_id == t.problem_id]


def of_counted_turns(t: Trajectory, group: Sequence[Trajectory]) -> list[float]:
    """Return the advantage of each turn. Turn i of ``Counting`` has the reward i / 10, and its return is the sum of the
    rewards from turn i on."""
    group_returns = [returns_of_turns(other) for other in group]
    advantages = []
    for turn, own_return in enumerate(returns_of_turns(t)):
        # A shorter episode counts with the return of its last turn.
        baseline = [returns[min(turn, len(returns) - 1)] for returns in group_returns]
        advantages.append(own_return - sum(baseline) / len(baseline))
    return advantages


def returns_of_turns(t: Trajectory) -> list[float]:
    return [sum(range(turn, t.turns + 1)) / 10 for turn in range(1, t.turns + 1)]


def test_the_trainer_has_the_engines_log_probabilities_and_routing(run):
    for step in (1, 2):
        check_step(run.directory, step, of_counted_turns)


def test_the_record_tells_of_turns_and_of_the_prefix_cache(run):
    for step in (1, 2):
        batch = load_batch(run.directory / "rollouts", step)
        (record,) = [r for r in records_of(run.directory) if r["step"] == step]
        turns = [t.turns for t in batch]
        assert record["rollout/turns"] == sum(turns) / len(turns)
        assert sum(n == 3 for n in turns) > len(turns) / 4
        # For a later turn, the cache has all tokens except the last observation. For a first turn it has nothing.
        assert record["rollout/prefix_cached"] > 0.4
        assert record["environment/faults"] == 0
        # A whole episode has the reward .1 + .2 + .3.
        for t in batch:
            if t.finish_reason == "stop":
                assert (t.turns, t.reward) == (3, pytest.approx(0.6))
            assert t.loss_mask[-1]


@pytest.mark.slow
def test_a_session_of_openais_client_has_them_too(config, tmp_path):
    """The prompts are the agent's, and the seals of the batches take this into account."""
    overrides = (
        f"run.directory={tmp_path / 'run'}", "run.steps=1",
        "environment.name=agent", "environment.options.agent=tests.unit.planted_agents:talking",
        "environment.max_tokens=300", "environment.max_observation_tokens=48",
    )  # fmt: skip
    with TrainingRun(config, *overrides) as run:
        run.finish()
    # The agent gives a reward only at the end, so every turn has the advantage of the whole episode.
    check_step(run.directory, 1, of_the_whole)
    batch = load_batch(run.directory / "rollouts", 1)
    assert sum(t.turns == 3 for t in batch) > len(batch) / 4
    assert {t.finish_reason for t in batch} <= {"stop", "length"}
    assert records_of(run.directory)[-1]["environment/faults"] == 0


def of_the_whole(t: Trajectory, group: Sequence[Trajectory]) -> list[float]:
    return [t.reward - sum(other.reward for other in group) / len(group)] * t.turns


# --- a tool, Top-K, and batches that are sampled ahead while weights are updated


@pytest.fixture(scope="module")
def tools_config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    path = material(
        folder,
        {
            "name": "calculator",
            "role": "tool",
            "options": {"call": CALL, "call_reward": CALL_REWARD},
            "max_turns": 4,
            "max_observation_tokens": 120,
        },
        run={"steps": len(STEPS)},
        # Few requests at a time, and turns of a dozen tokens: updates come in the middle of some turns.
        rollout={
            "stop_token_ids": list(range(3, 45)),
            "max_response_tokens": 32,
            "max_concurrent_requests": 8,
            "max_staleness": 1,
            "interrupt": "retract",
            "topk_log_probs": TOPK,
        },
        reward={"name": "tests.unit.planted_rewards:of_every_character"},
        algorithm={"name": "dppo-topk-tv", "options": {"topk": TOPK}},
        checkpoint={"every": 1, "keep": len(STEPS)},
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = QWEN3
    tokenizer.save_pretrained(folder / "model")
    return path


@pytest.fixture(scope="module")
def ahead_run(tools_config) -> TrainingRun:
    with TrainingRun(tools_config) as run:
        run.finish(timeout=600)
    return run


@pytest.fixture(scope="module")
def batches(ahead_run) -> dict[int, list[Trajectory]]:
    return {step: load_batch(ahead_run.directory / "rollouts", step) for step in STEPS}


@pytest.mark.slow
def test_what_a_tool_said_is_the_templates_and_what_it_earned_the_trajectorys(ahead_run, batches):
    tokenizer = AutoTokenizer.from_pretrained(ahead_run.directory.parent / "model")
    counts = {"error": 0, "number": 0}
    for t in (t for batch in batches.values() for t in batch):
        edges = np.flatnonzero(np.diff(t.loss_mask, prepend=False, append=False))
        turns = edges.reshape(-1, 2).tolist()
        texts = [
            tokenizer.decode(t.token_ids[a : b - 1], skip_special_tokens=True) for a, b in turns
        ]
        answers = [answer_to(text) for text in texts[:-1]]
        for (_, end), (begin, _), answer in zip(turns[:-1], turns[1:], answers, strict=True):
            # The token that ends a turn occurs once: either the policy or the template wrote it.
            after = end - (t.token_ids[end - 1] == tokenizer.eos_token_id)
            assert tokenizer.decode(t.token_ids[after:begin]) == TOOL_TURN.format(answer)
            counts["error" if answer == "error" else "number"] += 1
        if t.finish_reason == "stop":
            expected = of_every_character(str(texts[-1]), "")
            assert answer_to(texts[-1]) is None
            calls = sum(answer != "error" for answer in answers)
            assert t.reward == pytest.approx(CALL_REWARD * calls + expected)
    assert min(counts.values()) > 0
    assert sum(counts.values()) > 20


def answer_to(turn: Any) -> str | None:
    """Return the calculator's answer to a turn, or None if the turn has no call."""
    _, call, expression = turn.rpartition(CALL)
    if not call:
        return None
    try:
        return str(calculate(expression))
    except ValueError:
        return "error"


@pytest.mark.slow
def test_a_tools_trajectories_have_them_too_and_the_engines_topk(ahead_run, batches):
    check_step(ahead_run.directory, 1, of_the_whole)
    gaps = [t.column("loss_topk_log_probs") - t.column("topk_log_probs") for t in batches[1]]
    assert max(np.abs(gap).max() for gap in gaps) < 5e-6
    assert sum(t.turns > 1 for t in batches[1]) > len(batches[1]) / 4


class ReferenceOutput(NamedTuple):
    """transformers' results for a trajectory: log p [S - 1, V] and the routers' logits [S - 1, layers, experts]."""

    log_probs: torch.Tensor
    routers: torch.Tensor


@torch.no_grad()
def reference_output(model: nn.Module, t: Trajectory) -> ReferenceOutput:
    out = model(torch.from_numpy(t.token_ids.astype(np.int64))[None], output_router_logits=True)
    return ReferenceOutput(
        out.logits[0, :-1].log_softmax(-1), torch.stack([r[:-1] for r in out.router_logits], 1)
    )


def check_own_version(t: Trajectory, models: Sequence[nn.Module]) -> None:
    """Assert that each token's log-probability and Top-K come from the whole model at the version that sampled it, and
    each row of the routing from the version that recorded it. ``models``: the models by version."""
    predicting = np.flatnonzero(t.loss_mask) - 1
    versions, recorded = t.column("weight_version"), recorded_by(t)
    by_version = {
        v: reference_output(models[v], t) for v in {*versions.tolist(), *recorded.tolist()}
    }
    for version in np.unique(versions):
        own = versions == version
        log_probs = by_version[version].log_probs[predicting[own]]
        mu = log_probs.gather(1, torch.from_numpy(t.response_ids[own].astype(np.int64))[:, None])
        assert np.abs(mu[:, 0].numpy() - t.column("rollout_log_probs")[own]).max() < 1e-5
        if "topk_ids" in t.columns:
            topk = t.column("topk_log_probs")[own]
            ids = torch.from_numpy(t.column("topk_ids")[own].astype(np.int64))
            assert np.abs(log_probs.gather(1, ids).numpy() - topk).max() < 1e-5
            assert np.abs(log_probs.topk(ids.shape[1]).values.numpy() - topk).max() < 1e-5
    recorded_experts = np.sort(t.column("routed_experts"), -1)
    for version in np.unique(recorded):
        rows = recorded == version
        ordered = by_version[version].routers[rows].sort(-1, descending=True)
        # If two experts' logits differ only by rounding, either expert is right.
        k = recorded_experts.shape[-1]
        clear = (ordered.values[..., k - 1] - ordered.values[..., k] > 1e-5).numpy()
        expected = np.sort(ordered.indices[..., :k].numpy(), -1)
        assert clear.mean() > 0.9
        np.testing.assert_array_equal(recorded_experts[rows][clear], expected[clear])


def recorded_by(t: Trajectory) -> np.ndarray:
    """Return the version that recorded each row: that of the routing of the next sampled token."""
    versions = t.column("weight_version")
    by_token = t.columns.get("routing_version", np.full_like(versions, versions[-1]))
    return by_token[np.cumsum(t.loss_mask)[:-1]]


@pytest.mark.slow
def test_tokens_and_routing_are_of_their_own_version_where_updates_interrupt_turns(
    ahead_run, batches, tmp_path
):
    folders = [ahead_run.directory.parent / "model"]
    for step in STEPS[:-1]:
        folders.append(tmp_path / f"{step}")
        source = ahead_run.directory / "checkpoints" / f"step_{step:06d}"
        words = ("--megatron", source, "--hf-config", folders[0], "--out", folders[-1])
        assert convert(["megatron-to-hf", *map(str, words)]) == 0
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    models = [load(folder).eval() for folder in folders]
    interrupted = between = discarded = 0
    for step, batch in batches.items():
        for t in batch:
            check_own_version(t, models)
            changes = len(t.version_spans) - 1
            interrupted += len(t.interruptions)
            between += changes - len(t.interruptions)
            lost = ~usable_rows(t.loss_mask, t.columns)
            # The weights after an update recorded the rows of tokens that were sampled before it.
            predicted = t.column("weight_version")[np.cumsum(t.loss_mask)[:-1][lost]]
            assert (recorded_by(t)[lost] > predicted).all()
            discarded += lost.sum()
        (record,) = [r for r in records_of(ahead_run.directory) if r["step"] == step]
        assert record["rollout/staleness_max"] == (0 if step == 1 else 1)
        # If the trainer's weights sampled a whole response and recorded all its rows, pi is mu here too.
        newest = [t for t in batch if (t.column("weight_version") == step - 1).all()]
        assert all(gap_of(t).max() < 5e-6 for t in newest)
    assert min(interrupted, between, discarded) > 0


# --- other layouts, and adapters

LAYOUTS = {
    "PP2": ("parallel.tensor=1", "parallel.pipeline=2"),
    "EP2": ("parallel.tensor=1", "parallel.expert=2"),
    "CP2": ("parallel.tensor=1", "parallel.context=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_have_them_too(ahead_run, batches, tools_config, tmp_path, layout):
    """This holds also for the second batch, which was sampled ahead. The run's steps change no weights, so version 0,
    which began this batch, also trains on it."""
    overrides = (
        f"run.directory={tmp_path / 'again'}", f"rollout.replay_from={ahead_run.directory}/rollouts",
        "run.steps=2", "rollout.max_staleness=0", "optimizer.lr=1e-30", "checkpoint.every=100",
        *LAYOUTS[layout],
    )  # fmt: skip
    with TrainingRun(tools_config, *overrides) as again:
        again.finish()
    check_step(again.directory, 1, of_the_whole)
    gaps = [gap_of(t)[of_version_0(t)] for t in load_batch(again.directory / "rollouts", 2)]
    assert len(np.concatenate(gaps)) > 0
    assert np.concatenate(gaps).max() < 5e-6


def of_version_0(t: Trajectory) -> np.ndarray:
    """Whether version 0 sampled each token and recorded all routing before it."""
    recorded = np.maximum.accumulate(recorded_by(t))[np.flatnonzero(t.loss_mask) - 1]
    return (t.column("weight_version") == 0) & (recorded == 0)


@pytest.mark.slow
def test_adapters_that_the_engine_generates_with_have_them_too(config, tmp_path):
    """The merged model samples and trains. PEFT's model is the reference; the base alone has other
    log-probabilities."""
    base = config.parent / "model"
    adapters = save_random_adapters(tmp_path / "adapters", base, ADAPTERS)
    overrides = (
        f"run.directory={tmp_path / 'run'}", "run.steps=1", *LAYOUTS["CP2"],
        f"lora.rank={ADAPTERS['rank']}", f"lora.start_from={adapters}",
    )  # fmt: skip
    with TrainingRun(config, *overrides) as run:
        run.finish()
    check_step(run.directory, 1, of_counted_turns)
    merged, _ = peft_model(str(base), str(adapters))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    for t in load_batch(run.directory / "rollouts", 1):
        predicting, ids = np.flatnonzero(t.loss_mask) - 1, t.response_ids.astype(np.int64)
        with torch.no_grad():
            logits = [
                model(torch.from_numpy(t.token_ids.astype(np.int64))[None]).logits[0]
                for model in (merged, plain)
            ]
        own, other = (x.log_softmax(-1).numpy()[predicting, ids] for x in logits)
        assert np.abs(own - t.column("rollout_log_probs")).max() < 1e-5
        assert np.abs(other - t.column("rollout_log_probs")).max() > 1e-2
