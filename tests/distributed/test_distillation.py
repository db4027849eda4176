"""Losses with a teacher train alike in every layout, with and without TopK(mu) beside TopK(p_T)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_trainer_parity import (
    CHUNKS,
    CP2,
    FAMILIES,
    TOLERANCE,
    VOCABULARY,
    distances,
    own_micro_batches,
    rule_samples,
    run_config,
)
from tests.ranks import run_ranks
from tests.whole_tensors import hf_buckets

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
    "CP2 EP2": ("qwen3_moe", 2, {**CP2, "expert": 2}, {}),
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


def train_with_a_teacher(
    hf_dir: str,
    parallel: dict[str, Any],
    changes: dict[str, Any],
    cases: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]],
    *,
    with_topk: bool = True,
) -> dict[str, Any]:
    """Train a step with each case, one after the other. Return metrics, norms and parameters.

    ``with_topk``: whether the statistics have TopK(mu), too.
    """
    from megatron_dppo.algorithms.algorithm import build_algorithm
    from megatron_dppo.algorithms.distillation import Distillation
    from megatron_dppo.trainer.step import StatsSpec
    from megatron_dppo.trainer.token_loss import make_token_loss
    from megatron_dppo.trainer.trainer import Trainer

    spec = StatsSpec(topk=with_topk, entropy=True, topk_gradient=with_topk, teacher_topk=True)
    trainer = Trainer(run_config(hf_dir, parallel, changes), spec)
    out: dict[str, Any] = {"metrics": [], "norms": []}
    try:
        batches = own_micro_batches(trainer, scored_samples(), changes.get("budget", 120))
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
        out["parameters"] = dict(pair for bucket in hf_buckets(trainer, 50_000) for pair in bucket)
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
    wrong = {
        (name, kind): found
        for name, kinds in report.items()
        for kind, found in kinds.items()
        if not found[0] <= 4 * TOLERANCE
    }
    assert report.keys() == set(layouts)
    assert not wrong


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
