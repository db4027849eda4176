"""A Trainer in this process: its reference policy, its learning rates, and its adapters against PEFT's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.trainer.topology import destroy_topology
from tests.adapters import save_random_adapters
from tests.distributed.test_lora_parity import KINDS, TOLERANCE, judge, train
from tests.distributed.test_trainer_parity import (
    VOCABULARY,
    distances,
    own_micro_batches,
    policy_token_loss,
    run_config,
    samples,
)
from tests.distributed.test_trainer_steps import make_trainer
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.usefixtures("ends_process_group")

CHANGES: dict[str, dict[str, Any]] = {
    "full": {},
    "adapters": {"lora": {"rank": 4, "dropout": 0.5, "train_router": True}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of one-layer models, with experts and without, and random adapters for both."""
    models = tmp_path_factory.mktemp("models")
    for kind in ("moe", "dense"):
        family, _, section = KINDS[kind]
        hf_dir = save_tiny_model(models / kind, family, vocab_size=VOCABULARY, layers=1)
        save_random_adapters(models / f"{kind}-adapters", hf_dir, section)
    return models


def trained_log_probs(score: Callable[[list], list], batches: list) -> torch.Tensor:
    """Return the log-probabilities that ``score`` computes, of the tokens that train."""
    return torch.cat([row[b.loss_mask] for row, b in zip(score(batches), batches, strict=True)])


@pytest.mark.parametrize("kind", CHANGES)
def test_the_reference_is_the_start_whatever_is_trained(folder: Path, kind: str) -> None:
    """The reference has no trained adapters, and no pass that computes log-probabilities has dropout."""
    changes = {**CHANGES[kind], "algorithm": {"reference_kl": 0.1}}
    trainer = make_trainer(str(folder / "moe"), {}, changes)
    batches = own_micro_batches(trainer, samples())
    start = trained_log_probs(trainer.log_probs, batches)
    trainer.train_mini_batch(batches, policy_token_loss, 200.0)
    now = trained_log_probs(trainer.log_probs, batches)
    assert (now - start).abs().max() > 1e-3
    assert torch.equal(trained_log_probs(trainer.reference_log_probs, batches), start)
    assert torch.equal(trained_log_probs(trainer.log_probs, batches), now)
    trainer.close()


def test_weights_that_are_no_numbers_are_named_when_they_are_loaded(folder: Path, tmp_path) -> None:
    hf = Path(shutil.copytree(folder / "dense", tmp_path / "nan"))
    tensors = load_file(hf / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight\[3\] is nan"):
        make_trainer(str(hf), {}, {})
    # The failed constructor left no Trainer that could be closed.
    destroy_topology()


def test_adapters_start_apart_within_their_bound(folder: Path) -> None:
    trainer = make_trainer(str(folder / "moe"), {}, CHANGES["adapters"])
    adapters = {name: t.clone() for bucket in trainer.adapted.tensors() for name, t in bucket}
    trainer.close()
    a_matrices = [t for name, t in adapters.items() if name.endswith("lora_A")]
    first_rows = {tuple(a[0, :32].tolist()) for a in a_matrices}
    assert len(first_rows) == len(a_matrices) == len(adapters) / 2
    for a in a_matrices:  # uniform within 1 / sqrt(in)
        assert 0.8 < a.abs().max() * a.shape[1] ** 0.5 <= 1
    assert not any(t.any() for name, t in adapters.items() if name.endswith("lora_B"))


def test_an_update_is_compared_at_temperature_1(folder: Path) -> None:
    """The run itself samples at another temperature."""
    from transformers import AutoModelForCausalLM

    from megatron_dppo.trainer.weight_source import TrainerWeights

    trainer = make_trainer(str(folder / "moe"), {})
    prompts = [[3, 50, 77, 120, 9], [7, 8]]
    scores = TrainerWeights(trainer).score(prompts)
    trainer.close()
    model = AutoModelForCausalLM.from_pretrained(folder / "moe", dtype=torch.float32)
    for prompt, found in zip(prompts, scores, strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        expected = rows[range(len(prompt) - 1), prompt[1:]]
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_has_merged_weights_and_reports_which_part_of_the_adapters_they_hold(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    from megatron_dppo.model.engine_layout import EngineLayout
    from megatron_dppo.trainer.weight_source import TrainerWeights
    from megatron_dppo.weights.server.shards import PlanFacts, slices_in
    from megatron_dppo.weights.shards import Shards

    section = {"rank": 4, "alpha": 0.01, "target_modules": ["all-linear"]}
    start = save_random_adapters(tmp_path / "adapters", folder / "dense", section)
    changes = {"lora": {**section, "start_from": str(start)}, "dtype": dtype}
    trainer = make_trainer(str(folder / "dense"), {}, changes)
    source = TrainerWeights(trainer)
    gathered: dict[str, torch.Tensor] = {}
    for bucket in source.gather(source.plan(1 << 20)):
        gathered |= {name: tensor.clone() for name, tensor in bucket.tensors}
    along, size = source.held_update()
    assert source.held_update() == (0, 0)
    # An update in shards has the same weights, in the blocks of two engine ranks.
    facts = PlanFacts(source.layout, (EngineLayout(2),), 1 << 16, dtype, quantized=False)
    shards = Shards(source.shape, facts, "cpu", 0)
    values = source.values()
    for message in shards.messages:
        (data,) = shards.pack([message], values)
        for part, found in slices_in(message, data, shards.dtype_of):
            whole_block = part.block.of_hf(gathered[part.name])
            assert torch.equal(found, part.of_block(whole_block))
    assert source.held_update() == pytest.approx((along, size))
    trainer.close()

    number_type = getattr(torch, dtype)
    base = load_file(folder / "dense" / "model.safetensors")
    adapters = load_file(start / "adapter_model.safetensors")
    expected_along = expected_size = 0.0
    for name, a in adapters.items():
        if ".lora_A." not in name:
            continue
        b = adapters[name.replace("lora_A", "lora_B")]
        delta = 0.01 / 4 * (b.to(number_type).float() @ a.to(number_type).float())
        weight_name = name.removeprefix("base_model.model.").replace(".lora_A", "")
        weight = base[weight_name].to(number_type)
        merged = (weight.float() + delta).to(number_type)
        torch.testing.assert_close(gathered[weight_name], merged)
        held = merged.float() - weight.float()
        expected_along += float((held * delta).sum())
        expected_size += float((delta * delta).sum())
    assert size == pytest.approx(expected_size, rel=1e-3)
    assert along == pytest.approx(expected_along, rel=0.05)
    assert along / size > 0.999 if dtype == "float32" else 0.02 < along / size < 0.6


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_adapters_train_as_peft_s(folder: Path, kind: str) -> None:
    expected = judge(str(folder), kind)
    found = train(str(folder), kind, {}, {})
    found["parameters"] = {n: found["parameters"][n] for n in expected["parameters"]}
    errors = distances(found, expected)
    assert max(chain(*(values[:1] for values in errors.values()))) <= TOLERANCE, errors


def test_a_step_is_penalised_for_leaving_the_start_not_the_step_before(folder: Path) -> None:
    """Each step has one update, and pi is still the rollout policy there, so a KL to that policy would be 0."""
    from megatron_dppo.algorithms.algorithm import build_algorithm
    from megatron_dppo.data.trajectory import Outline
    from megatron_dppo.loop.learning import Learner
    from megatron_dppo.loop.rollout_sources import RolloutBatch
    from megatron_dppo.trainer.trainer import Trainer

    config = run_config(str(folder / "moe"), {}, {"algorithm": {"reference_kl": 0.1}})
    trainer = Trainer.read(config)
    learner = Learner(config, trainer, build_algorithm("pg-is"), 0)
    data, estimates = samples(), []
    for _ in range(3):
        batch = RolloutBatch([Outline.of(t) for t in data], dict(enumerate(data)), {}, {})
        estimates.append(learner.learn(learner.plan(batch))["reference/kl"])
    trainer.close()
    assert estimates[0] == pytest.approx(0, abs=1e-9)
    assert 1e-6 < estimates[1] < estimates[2] < 1


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [  # lr 1e-3, min_lr 2e-4: two steps of warmup, four of decay, then constant
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", [0.5, 1, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2, 0.2]),
    ],
)
def test_the_rate_follows_its_schedule_also_after_a_resume(
    folder: Path, tmp_path: Path, schedule: str, rates: list[float]
) -> None:
    decay = {} if schedule == "constant" else {"decay_steps": 6, "min_lr": 2e-4}
    found = []
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    for steps in (range(3), range(3, 7)):
        trainer = make_trainer(
            str(folder / "dense"), {}, {"schedule": {"schedule": schedule, **decay}}
        )
        store = CheckpointStore(tmp_path, 1)
        if steps.start:
            store.load(trainer, store.survey().complete[-1])
        batches = own_micro_batches(trainer, samples()[:2])
        found += [trainer.train_mini_batch(batches, policy_token_loss, 200.0).lr for _ in steps]
        store.save(trainer, steps.stop, {})
        store.close()
        trainer.close()
    assert found == pytest.approx([1e-3 * rate for rate in rates])
