"""Losses with a teacher train alike in every layout, with and without TopK(mu) beside TopK(p_T), and under replay."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_trainer_parity import (
    CHUNKS,
    FAMILIES,
    TOLERANCE,
    VOCABULARY,
    distances,
    far_results,
    own_micro_batches,
    rule_samples,
    run_config,
)
from tests.ranks import run_ranks
from tests.whole_tensors import whole_weights

HERE = "tests.distributed.test_distillation:"
BINARY = ("dppo-binary-tv", {"tv_threshold": 0.001})
TOPK = ("dppo-topk-tv", {"tv_threshold": 0.006, "topk": 4})
CASES: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "sampled": (BINARY, {"loss": "sampled"}),
    "reverse": (BINARY, {"loss": "reverse", "weight": 2.0}),
    "forward": (BINARY, {"loss": "forward", "rewards": False}),
    "sampled beside TopK(mu)": (TOPK, {"loss": "sampled", "masked": False}),
    "reverse beside TopK(mu)": (TOPK, {"loss": "reverse", "rewards": False}),
    "forward beside TopK(mu)": (TOPK, {"loss": "forward"}),
    "forward beside score centering": (("score-centering", {"topk": 4}), {"loss": "forward"}),
}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "packed otherwise": ("qwen3_moe", 1, {}, {"budget": 64}),
    "TP2 EP2": ("qwen3_moe", 2, {"tensor": 2, "expert": 2, "expert_tensor": 1}, {}),
    "PP2": ("qwen3_moe", 2, {"pipeline": 2}, {}),
    "CP2 EP2": ("qwen3_moe", 2, {"context": 2, "expert": 2}, {}),
    "TP3": ("six heads", 3, {"tensor": 3}, {}),
    "adapters TP2": ("adapters", 2, {"tensor": 2}, {}),
}
"""Name -> (model, ranks, sizes, other settings that differ from the reference of one process)."""
ADAPTERS = {"lora": {"rank": 4, "target_modules": ["attention", "head"]}}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"layers": 2, "family": "qwen3_moe"},
    "six heads": FAMILIES["six heads"],
    "adapters": {"layers": 2, "family": "qwen2", "vocab_size": VOCABULARY + 1},
}


def scored_samples() -> list:
    """Return ``rule_samples`` with a teacher's scores: three ids of each token, the first of which TopK(mu) has too.

    In one of three tokens the sampled id is among the teacher's three.
    """
    import numpy as np

    rng, out = np.random.default_rng(5), []
    for trajectory in rule_samples():
        sampled = trajectory.response_ids
        own_ids = trajectory.column("topk_ids")
        ids = np.empty((len(sampled), 3), np.int32)
        ids[:, 0] = own_ids[:, 1]
        for row, token in enumerate(sampled):
            others = np.setdiff1d(np.arange(VOCABULARY), [*own_ids[row], token])
            ids[row, 1:] = rng.choice(others, 2, replace=False)
            if row % 3 == 0 and token != ids[row, 0]:
                ids[row, 2] = token
        log_probs = rng.normal(-4.0, 1.0, ids.shape).astype(np.float32)
        teacher = rng.normal(-6.2, 0.8, len(sampled)).astype(np.float32)
        is_sampled = ids == sampled[:, None]
        teacher = np.where(is_sampled.any(1), (log_probs * is_sampled).sum(1), teacher)
        out.append(
            trajectory.with_columns(
                teacher_log_probs=teacher.astype(np.float32),
                teacher_topk_ids=ids,
                teacher_topk_log_probs=log_probs,
            )
        )
    return out


def routed_samples() -> list:
    """Return ``scored_samples`` with random recordings of two layers of eight experts, far from the natural routing."""
    import numpy as np

    rng, out = np.random.default_rng(6), []
    for trajectory in scored_samples():
        experts = rng.random((trajectory.length - 1, 2, 8)).argsort(-1)[..., :2]
        versions = np.ones(trajectory.sampled, np.int32)
        out.append(
            trajectory.with_columns(
                routed_experts=experts.astype(np.uint8), weight_version=versions
            )
        )
    return out


def dense_step(hf_dir: str, *, replay: bool) -> tuple[float, float]:
    """Return the sum of the reverse KL, and the gradient's norm, of a step on ``routed_samples``.

    A model of transformers with weights in fp64, and autograd of the formula of docs/distillation.md. ``replay``:
    whether the model uses the recorded experts.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    # Else the embedding of this id, which the samples have, gets no gradient.
    model.model.embed_tokens.padding_idx = None
    recorded: list[torch.Tensor] = [torch.empty(0)]

    def use_recording(gate: Any, _: Any, output: Any, layer: int) -> Any:
        logits, _, natural = output
        # The last token's experts are not recorded; no logits of this test depend on them.
        experts = torch.cat([recorded[0][:, layer], natural[-1:]])
        weights = logits.double().softmax(-1).gather(-1, experts)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts

    if replay:
        for layer, block in enumerate(model.model.layers):
            block.mlp.gate.register_forward_hook(partial(use_recording, layer=layer))
    distance = 0.0
    loss = torch.zeros((), dtype=torch.float64)
    for number, t in enumerate(routed_samples()):
        if number % 7 == 3:  # These do not train.
            continue
        recorded[0] = torch.from_numpy(t.column("routed_experts").astype(int))
        logits = model(torch.tensor([t.token_ids.tolist()])).logits[0, :-1].double() / 0.9
        log_pi = logits.log_softmax(-1)[torch.tensor(t.loss_mask[1:].tolist())]
        sampled = torch.tensor(t.response_ids.tolist())[:, None]
        teacher_ids = torch.tensor(t.column("teacher_topk_ids").tolist())
        is_new = ~(teacher_ids == sampled).any(1, keepdim=True)
        ids = torch.cat([teacher_ids, sampled], 1)
        valid = torch.cat([torch.ones_like(teacher_ids, dtype=torch.bool), is_new], 1)
        of_teacher = torch.tensor(t.column("teacher_topk_log_probs").tolist()).double()
        of_sampled = torch.tensor(t.column("teacher_log_probs").tolist()).double()
        log_teacher = torch.cat([of_teacher, of_sampled[:, None]], 1)
        log_columns = log_pi.gather(1, ids)
        pi = log_columns.exp() * valid
        rest = 1 - pi.sum(1)
        rest_of_teacher = 1 - (log_teacher.exp() * valid).sum(1)
        kl = (pi * (log_columns - log_teacher)).sum(1) + rest * (rest / rest_of_teacher).log()
        distance += float(kl.detach().sum())
        loss = loss + kl.mean() / 20.0
    loss.backward()
    squares = [
        float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None
    ]
    return distance, sum(squares) ** 0.5


def train_with_a_teacher(
    hf_dir: str,
    parallel: dict[str, Any],
    changes: dict[str, Any],
    cases: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]],
    *,
    with_topk: bool = True,
    replay: bool = False,
) -> dict[str, Any]:
    """Train a step with each case, one after the other. Return metrics, norms and parameters.

    ``with_topk``: whether the statistics have TopK(mu), too. ``replay``: whether the experts are the recorded ones.
    """
    from megatron_dppo.algorithms.algorithm import build_algorithm
    from megatron_dppo.algorithms.distillation import Distillation
    from megatron_dppo.trainer.step import StatsSpec
    from megatron_dppo.trainer.token_loss import make_token_loss
    from megatron_dppo.trainer.trainer import Trainer

    spec = StatsSpec(topk=with_topk, entropy=True, topk_gradient=with_topk, teacher_topk=True)
    config = run_config(hf_dir, parallel, changes)
    rollout = config.rollout.model_copy(update={"router_replay": replay})
    trainer = Trainer.read(config.model_copy(update={"rollout": rollout}), spec)
    data = routed_samples() if replay else scored_samples()
    out: dict[str, Any] = {"metrics": [], "norms": []}
    try:
        batches = own_micro_batches(trainer, data, changes.get("budget", 120))
        for (algorithm_name, numbers), settings in cases.values():
            algorithm = build_algorithm(algorithm_name, numbers)
            loss = make_token_loss(
                algorithm,
                "sequence-mean-token-mean",
                distillation=Distillation(algorithm, **settings),
            )
            result = trainer.train_mini_batch(batches, loss, denominator=20.0)
            out["metrics"].append(result.metrics.values())
            out["norms"].append(result.grad_norm)
        out["parameters"] = whole_weights(trainer)
        return out
    finally:
        trainer.close()


def changes_of(model: str) -> dict[str, Any]:
    return ADAPTERS if model == "adapters" else {}


def reference_worker(folder: str) -> dict[str, Any]:
    """Make the models, train each in one process, and save the results in ``folder``."""
    from tests.tiny_models import save_tiny_model

    for name, options in MODELS.items():
        hf_dir = save_tiny_model(Path(folder) / name, **{"vocab_size": VOCABULARY, **options})
        results = train_with_a_teacher(str(hf_dir), {}, changes_of(name), CASES)
        torch.save(results, Path(folder) / f"{name}.pt")
    return {}


def layout_worker(folder: str, layouts: list[str], world_size: int) -> dict[str, Any]:
    """Train in each of ``layouts``. On rank 0 return the distances from the reference of one process."""
    report = {}
    for name in layouts:
        model, _, sizes, changes = LAYOUTS[name]
        parallel = {**sizes, "world_size": world_size}
        all_changes = CHUNKS | changes_of(model) | changes
        got = train_with_a_teacher(str(Path(folder) / model), parallel, all_changes, CASES)
        if torch.distributed.get_rank() == 0:
            expected = torch.load(Path(folder) / f"{model}.pt", weights_only=True)
            report[name] = distances(got, expected)
    return report


def two_first_steps(folder: str) -> dict[str, Any]:
    """Train the first step with and without TopK(mu) beside the teacher's. No mask reads it."""
    cases = {"alone": (BINARY, {"loss": "reverse", "rewards": False, "masked": False})}
    hf_dir = str(Path(folder) / "qwen3_moe")
    return {
        "alone": train_with_a_teacher(hf_dir, {}, {}, cases, with_topk=False),
        "beside": train_with_a_teacher(hf_dir, {}, {}, cases),
    }


def replayed_first_steps(folder: str, world_size: int) -> dict[str, tuple[float, float]]:
    """Train the first step under replay in each layout of ``qwen3_moe``. Return the sum of the KL, and the norm."""
    cases = {"alone": (BINARY, {"loss": "reverse", "rewards": False, "masked": False})}
    steps: dict[str, tuple[float, float]] = {}
    for name, (model, ranks, sizes, changes) in LAYOUTS.items():
        if model == "qwen3_moe" and ranks == world_size:
            parallel = {**sizes, "world_size": world_size}
            hf_dir = str(Path(folder) / model)
            got = train_with_a_teacher(
                hf_dir, parallel, changes, cases, with_topk=False, replay=True
            )
            steps[name] = (got["metrics"][0]["distillation/distance"], got["norms"][0])
    return steps


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distillation")
    run_ranks(HERE + "reference_worker", 1, str(folder))
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_layout_trains_as_one_process_does(reference: Path, world_size: int) -> None:
    layouts = [name for name, layout in LAYOUTS.items() if layout[1] == world_size]
    report, *_ = run_ranks(HERE + "layout_worker", world_size, str(reference), layouts, world_size)
    assert report.keys() == set(layouts)
    assert not far_results(report, lambda *_: 4 * TOLERANCE)


@pytest.fixture(scope="module")
def dense(reference: Path) -> tuple[float, float]:
    """The step of ``dense_step`` under replay. Without it, the step is another one."""
    hf_dir = str(reference / "qwen3_moe")
    replayed, natural = (dense_step(hf_dir, replay=replay) for replay in (True, False))
    for with_replay, without in zip(replayed, natural, strict=True):
        assert abs(without / with_replay - 1) > 50 * 1e-5
    return replayed


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_teacher_under_router_replay_gives_the_dense_loss_and_gradient(
    reference: Path, dense: tuple[float, float], world_size: int
) -> None:
    steps, *_ = run_ranks(HERE + "replayed_first_steps", world_size, str(reference), world_size)
    assert len(steps) == {1: 1, 2: 3}[world_size]
    for name, step in steps.items():
        assert step == pytest.approx(dense, rel=1e-5), name


@pytest.mark.distributed
def test_ids_that_both_top_k_have_are_read_once_and_give_the_same_loss(reference: Path) -> None:
    (steps,) = run_ranks(HERE + "two_first_steps", 1, str(reference))
    alone, beside = steps["alone"], steps["beside"]
    name = "distillation/distance"
    assert beside["metrics"][0][name] == pytest.approx(alone["metrics"][0][name], rel=1e-6)
    assert beside["norms"] == pytest.approx(alone["norms"], rel=1e-5)


@pytest.mark.distributed
def test_the_mask_leaves_out_some_of_the_teachers_tokens(reference: Path) -> None:
    metrics = torch.load(reference / "qwen3_moe.pt", weights_only=True)["metrics"]
    for name, values in zip(CASES, metrics, strict=True):
        settings = CASES[name][1]
        if settings["loss"] != "sampled" and "centering" not in name:
            share = values["distillation/masked"] / values["policy/tokens"]
            assert 0.02 < share < 0.98, name
