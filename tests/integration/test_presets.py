"""Every preset in the real loop: one engine run records a batch with TopK(mu) of the whole
vocabulary, and each preset then trains on that batch through ``rollout.replay_from``.

The replays differ only in the algorithm. At the first mini-batch pi = mu, so all presets take the
same step. At the second mini-batch, all presets that weigh by pi / mu still have equal weights, so
their masks can be compared token by token.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.table import PRESETS
from megatron_dppo.data.batch_file import load_batch, save_batch
from megatron_dppo.data.columns import LOSS_COLUMNS
from megatron_dppo.data.problems import load_tokenizer
from megatron_dppo.demo.material import NUMBERS, WORDS, make_model
from tests.integration.runs import TrainingRun, records_of, summary_of
from tests.ranks import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

VOCABULARY, END = len(WORDS), WORDS.index("<end>")
PROMPTS, GROUP, MINI_BATCHES = 8, 32, 2
TOKENS = "policy/tokens"
BLOCKED, PPO_ONLY, OWN_ONLY = "mask/masked", "mask/ppo_only", "mask/dppo_only"
OTHER_WEIGHTS = {"gspo", "drpo", "bpo", "sapo", "gmpo", "minpro", "score-centering", "troll"}
"""Presets whose weight is not pi / mu, or whose gradient has other terms."""
SAME_RATIO = [name for name in PRESETS if name not in OTHER_WEIGHTS]
UNMASKED = ("pg-is", "pg-tis", "cispo", "drpo", "sapo", "minpro", "score-centering", "troll")
ALGORITHMS = [build_algorithm(name) for name in PRESETS]
TOPK_PARTS = {a.name: "whole" if a.needs_full_distribution else f"top {a.topk}" for a in ALGORITHMS}
"""Preset -> the part of TopK(mu) that its batch has."""


def settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run on a random MoE with a vocabulary of 36, vocab-parallel over two ranks."""
    model = folder / "model"
    make_model(model, seed=1)
    sharpen(model / "model.safetensors")
    prompts = [f"{a}+{b}" for a in range(1, 5) for b in range(1, 5)]
    lines = [json.dumps({"prompt": p, "answer": a}) for p, a in likely_answers(model, prompts)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "run": {"directory": str(folder / "recorded"), "steps": 2},
        "model": {"hf_checkpoint": str(model), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 16},
        "rollout": {
            "prompts_per_step": PROMPTS, "group_size": GROUP, "max_response_tokens": 6,
            "responses_per_call": GROUP,
            "save": True,
        },
        "reward": {"name": "exact_integer"},
        "algorithm": {
            "name": "dppo-topk-tv", "options": {"topk": VOCABULARY},
            "truncated_responses": "as-verified",
        },
        "parallel": {"world_size": 2, "tensor": 2},
        "training": {"prompts_per_mini_batch": PROMPTS // MINI_BATCHES, "micro_batch_tokens": 512},
        "optimizer": {"lr": 1e-4},
        "checkpoint": {"every": 100, "export_hf": False},
    }  # fmt: skip


def sharpen(file: Path) -> None:
    """Make the fresh model less uniform, so that a token can move far, and let it end early.

    Channel 0 of the hidden states becomes a constant. Its column of the output layer is then a bias.
    """
    weights = load_file(file)
    weights["lm_head.weight"] *= 4
    weights["model.embed_tokens.weight"][:, 0] = 0.5
    weights["lm_head.weight"][:, 0] = 0
    weights["lm_head.weight"][END, 0] = 2.5
    save_file(weights, file, {"format": "pt"})


def likely_answers(model: Path, prompts: list[str]) -> list[tuple[str, str]]:
    """Return each prompt with the number that the model most likely samples before the end, so that some
    responses have a reward and groups have an advantage.
    """
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), load_tokenizer(model)
    numbers = torch.arange(VOCABULARY - NUMBERS, VOCABULARY)
    found = []
    for prompt in prompts:
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt").input_ids.expand(NUMBERS, -1)
        with torch.no_grad():
            log_p = policy(torch.cat([ids, numbers[:, None]], 1)).logits[:, -2:].log_softmax(-1)
        log_joint = log_p[0, 0, numbers] + log_p[:, 1, END]
        found.append((prompt, str(int(log_joint.argmax()))))
    return found


@pytest.fixture(scope="module")
def recorded_config(tmp_path_factory) -> dict[str, Any]:
    """The settings of a finished run of ``dppo-topk-tv`` on the engine's TopK(mu)."""
    folder = tmp_path_factory.mktemp("presets")
    config = settings(folder)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with TrainingRun(path) as run:
        run.finish()
    return config


@pytest.fixture(scope="module")
def batches(recorded_config) -> dict[str, str]:
    """Folders with the first recorded batch. Half of each group has a positive advantage."""
    directory = Path(recorded_config["run"]["directory"])
    batch = [
        t.without(*LOSS_COLUMNS).scored(t.reward, 0.5 if i % 2 else -0.5)
        for i, t in enumerate(load_batch(directory / "rollouts", 1))
    ]
    both = ("topk_ids", "topk_log_probs")
    widths = {"whole": VOCABULARY, **{f"top {a.topk}": a.topk for a in ALGORITHMS}}
    for name, k in widths.items():
        cut = [
            t.without(*both) if k == 0 else t.with_columns(**{n: t.columns[n][:, :k] for n in both})
            for t in batch
        ]
        save_batch(directory.parent / name, 1, cut)
    return {name: str(directory.parent / name) for name in widths}


def worker(config: dict[str, Any], batches: dict[str, str]) -> dict[str, Any]:
    """Train a step with each preset. Return its calls of log_probs, and every mini-batch's figures."""
    from megatron_dppo.config.schema import TrainConfig
    from megatron_dppo.loop.ending import StopFlag, run_fence
    from megatron_dppo.loop.run import Run, RunData
    from megatron_dppo.spec import RunSpec
    from megatron_dppo.trainer.trainer import Trainer

    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    train_mini_batch, log_probs = Trainer.train_mini_batch, Trainer.log_probs

    def watched_train(self, *inputs, **words):
        result = train_mini_batch(self, *inputs, **words)
        weights = hashlib.sha256()
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                weights.update(parameter.detach().numpy().tobytes())
        figures = {**result.metrics.values(), "grad_norm": result.grad_norm}
        seen["mini_batches"].append({**figures, "weights": weights.hexdigest()})
        return result

    def watched_log_probs(self, micro_batches):
        seen["recomputed"] += 1
        return log_probs(self, micro_batches)

    trainer_class: Any = Trainer
    trainer_class.train_mini_batch, trainer_class.log_probs = watched_train, watched_log_probs
    found = {}
    for name, topk_part in TOPK_PARTS.items():
        own = {
            **config,
            "run": {"directory": f"{config['run']['directory']}-{name}", "steps": 1},
            "algorithm": {**config["algorithm"], "name": name, "options": {}},
            "rollout": {**config["rollout"], "save": False, "replay_from": batches[topk_part]},
        }
        seen = {"recomputed": 0, "mini_batches": []}
        parsed = TrainConfig.model_validate(own)
        with ExitStack() as stack:
            fence = stack.enter_context(run_fence(parsed.run.directory))
            run = Run(parsed, RunSpec.of_checked(parsed), RunData(parsed), StopFlag(), fence, stack)
            run.begin()
            run.step()
            run.trainer.close()
        found[name] = {**seen, "record": records_of(Path(own["run"]["directory"]))[-1]}
    return found


@pytest.fixture(scope="module")
def replays(recorded_config, batches) -> dict[str, Any]:
    """``worker``'s result on rank 0. The ranks' results differ only in the shards of the weights."""
    target = "tests.integration.test_presets:worker"
    return run_ranks(target, 2, recorded_config, batches, timeout=600)[0]


@pytest.fixture
def second(replays) -> dict[str, dict[str, float]]:
    """The second mini-batch by preset: one optimiser step away from mu."""
    return {name: found["mini_batches"][1] for name, found in replays.items()}


def test_topk_of_the_engine_reaches_the_loss(recorded_config):
    """Run ``dppo-topk-tv`` from the engine to the update. TopK(mu) is the whole vocabulary here."""
    directory = Path(recorded_config["run"]["directory"])
    steps = records_of(directory)[1:]
    assert [r["step"] for r in steps] == [1, 2]
    for record in steps:
        assert record["policy/topk_mass"] == pytest.approx(1, abs=1e-5)
        assert record["mismatch/mean_abs_prob_gap"] < 1e-5
    assert 0 < steps[0]["optimizer/grad_norm"] < 1e3
    assert steps[0]["mask/masked"] > 0
    summary = summary_of(directory)
    assert summary["weight_updates"] == summary["weight_updates_verified"] == 3


def test_topk_of_the_engine_is_ordered_and_sums_to_one(recorded_config):
    """Because of this order, the first K columns equal the engine's answer for K."""
    for trajectory in load_batch(Path(recorded_config["run"]["directory"]) / "rollouts", 2):
        ids, log_probs = trajectory.columns["topk_ids"], trajectory.columns["topk_log_probs"]
        assert ids.shape == (trajectory.sampled, VOCABULARY)
        assert (np.sort(ids, 1) == np.arange(VOCABULARY)).all()
        assert (np.diff(log_probs, axis=1) <= 0).all()
        np.testing.assert_allclose(np.exp(log_probs).sum(1), 1, atol=1e-5)
        sampled_log_probs = log_probs[ids == trajectory.response_ids[:, None]]
        np.testing.assert_allclose(
            sampled_log_probs, trajectory.columns["rollout_log_probs"], atol=1e-6
        )


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_trains_in_the_real_loop(name, replays):
    found, algorithm = replays[name], build_algorithm(name)
    assert len(found["mini_batches"]) == MINI_BATCHES
    scores = algorithm.needs_recomputed or algorithm.step_bound is not None
    assert found["recomputed"] == (MINI_BATCHES if scores else 0)
    figures = {**found["record"], **found["mini_batches"][0]}
    del figures["weights"]
    assert all(np.isfinite(v) for v in figures.values() if isinstance(v, int | float))
    assert figures["grad_norm"] > 0
    assert ("policy/topk_mass" in figures) == algorithm.reads_topk
    assert found["record"]["optimizer/steps"] == MINI_BATCHES


@pytest.mark.parametrize("name", list(PRESETS))
def test_nothing_is_blocked_where_pi_is_mu(name, replays):
    first, reference = replays[name]["mini_batches"][0], replays["pg-is"]["mini_batches"][0]
    assert first["policy/abs_prob_gap"] / first[TOKENS] < 1e-5
    assert (first[BLOCKED], first["mask/cap_hit"], first[PPO_ONLY]) == (0, 0, 0)
    assert first["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)
    if name in SAME_RATIO:
        assert first["weights"] == reference["weights"]


def test_the_second_mini_batch_is_off_policy_and_masks_act(second):
    assert second["pg-is"]["policy/abs_prob_gap"] / second["pg-is"][TOKENS] > 0.01
    acting = (
        "grpo", "grpo-clip-higher", "minirl", "dppo-binary-tv", "dppo-topk-kl", "gspo", "bpo",
        "cppo-binary-tv", "cppo-topk-tv", "geometric-mask", "vaco", "m2po", "m2po-areal",
    )  # fmt: skip
    assert all(second[name][BLOCKED] > 0 for name in acting), second
    assert all(second[name][BLOCKED] == 0 for name in UNMASKED)


def test_exact_on_mu_and_on_the_recomputed_policy_agree_where_engine_and_trainer_do(second):
    for kind in ("tv", "kl"):
        engine, recomputed = second[f"dppo-exact-{kind}"], second[f"recomputed-exact-{kind}"]
        assert recomputed[BLOCKED] == engine[BLOCKED] > 0
        assert recomputed["grad_norm"] == pytest.approx(engine["grad_norm"], rel=1e-4)
        assert recomputed["policy/topk_mass"] / recomputed[TOKENS] == pytest.approx(1, abs=1e-5)


def test_masks_that_contain_each_other(second):
    """A larger threshold, a relaxed bound or a coarser divergence never blocks more."""
    chains = [
        ("grpo-clip-higher", "grpo"),
        ("relax-both", "relax-low", "grpo-clip-higher"),
        ("relax-both", "relax-high", "grpo-clip-higher"),
        ("mask-0.8", "mask-0.5"),
        ("dppo-topk-tv", "dppo-exact-tv"),
        ("dppo-binary-kl", "dppo-topk-kl", "dppo-exact-kl"),
    ]
    for chain in chains:
        blocked = [second[name][BLOCKED] for name in chain]
        assert blocked == sorted(blocked), (chain, blocked)
    assert second["ppo"] == second["grpo"]


def test_masks_on_recomputed_log_probs_agree_where_engine_and_trainer_do(second):
    pairs = {
        "minirl": "grpo-clip-higher",
        "icepop": "grpo",
        "dppo-decoupled-binary-tv": "dppo-binary-tv",
        "dppo-decoupled-binary-kl": "dppo-binary-kl",
        "mask-0.5-recompute": "mask-0.5",
    }
    for name, twin in pairs.items():
        assert second[name][BLOCKED] == second[twin][BLOCKED]
        assert second[name]["weights"] == second[twin]["weights"]


@pytest.mark.parametrize("name", SAME_RATIO)
def test_disagreements_with_ppo_add_up(name, second):
    """For each mask, blocked tokens less those that only this mask blocks are the tokens that both block."""
    found, clip = second[name], second["grpo-clip-higher"]
    assert found[BLOCKED] - found[OWN_ONLY] == clip[BLOCKED] - found[PPO_ONLY]
    assert (clip[PPO_ONLY], clip[OWN_ONLY]) == (0, 0)
