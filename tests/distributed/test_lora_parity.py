"""Adapters train in every layout as in one process, and in one process as PEFT's adapters of Hugging Face's model.

The tests compare three optimiser steps of the policy loss in fp32, as in ``test_trainer_parity``, from adapters that
are random in A and B: losses, gradient norms, the first step's gradients of every A and B, and their values after the
last step. PEFT's model is run sequence by sequence, without packing, and updated by torch's AdamW.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.test_trainer_parity import (
    CHUNKS,
    VOCABULARY,
    WIDER,
    distances,
    far_results,
    micro_batches,
    own_micro_batches,
    policy_token_loss,
    samples,
)
from tests.layouts import cases_of
from tests.ranks import run_ranks
from tests.tiny_models import R1_FORM
from tests.whole_tensors import whole_weights

HERE = "tests.distributed.test_lora_parity:"
TOLERANCE = 1e-5
EVERYTHING = {"rank": 4, "alpha": 6.0}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "moe": ("qwen3_moe", {"layers": 4}, EVERYTHING),
    "replayed": ("qwen3_moe", {"layers": 4}, EVERYTHING),
    "shared": ("qwen3_moe", {"layers": 4}, {**EVERYTHING, "experts": "shared"}),
    "shared expert": ("qwen2_moe", {"layers": 2}, EVERYTHING),
    "dense": ("qwen3", {"layers": 4, "tied": True}, EVERYTHING),
    "some": (
        "qwen2",
        {"layers": 2},
        {"rank": 4, "target_modules": ["q_proj", "v_proj", "up_proj"]},
    ),
    "head": (
        "qwen2",
        {"layers": 2, "vocab_size": VOCABULARY + 1},
        {"rank": 4, "target_modules": ["attention", "head"]},
    ),
    "router": (
        "qwen3_moe",
        {"layers": 2},
        {"rank": 4, "target_modules": ["attention"], "train_router": True},
    ),
}
"""Name -> (family, its changes, the ``lora:`` section). ``replayed``: under router replay."""
SLOW_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense layer first": ("glm4_moe", {"layers": 4}, EVERYTHING),
    "latents": ("deepseek_v3", {"layers": 4, **R1_FORM}, EVERYTHING),
    "queries without a latent": ("deepseek_v3", {"layers": 2}, EVERYTHING),
    "shared by experts, latents": (
        "deepseek_v3",
        {"layers": 2, **R1_FORM},
        {**EVERYTHING, "experts": "shared"},
    ),
    "minimax_m2": ("minimax_m2", {"layers": 2}, EVERYTHING),
    "hy_v3": ("hy_v3", {"layers": 2}, EVERYTHING),
    "olmoe": ("olmoe", {"layers": 2}, EVERYTHING),
    "glm4_moe_lite": ("glm4_moe_lite", {"layers": 2}, EVERYTHING),
    "qwen3_next": ("qwen3_next", {"layers": 4}, EVERYTHING),
    "qwen3_5_moe": ("qwen3_5_moe", {"layers": 4}, EVERYTHING),
}
ALL_KINDS = KINDS | SLOW_KINDS
PEFT_KINDS = ("moe", "dense", "some", "head")
SLOW_PEFT_KINDS = (
    "dense layer first",
    "latents",
    "queries without a latent",
    "qwen3_next",
    "qwen3_5_moe",
)
TWO_RANKS = cases_of(
    {
        "moe": [
            "TP2 ETP2",
            "TP2 EP2 ETP1",
            "EP2",
            "EP2 distributed optimizer",
            "PP2 recompute full",
            "PP2 VPP2",
            "TP2 ETP2 recompute selective",
            "DP2 distributed optimizer",
            "CP2 EP2 distributed optimizer",
        ],
        "shared": ["TP2 ETP2", "TP2 EP2", "EP2", "CP2 recompute full"],
        "replayed": ["EP2 recompute full", "PP2 VPP2", "CP2"],
        "shared expert": ["TP2 EP2"],
        "dense": ["TP2", "TP2 SP", "PP2 recompute full", "CP2"],
        "some": ["TP2 SP"],
        "head": [
            "TP2",
            "TP2 SP",
            "PP2 recompute full",
            "DP2 overlap, distributed optimizer",
            "CP2",
        ],
        "router": ["TP2 EP2"],
    }
)
SLOW: dict[str, list[str]] = {
    "dense layer first": ["TP2 EP2", "PP2 VPP2 recompute full", "CP2 EP2 distributed optimizer"],
    "latents": ["TP2 ETP2", "TP2 EP2 recompute full", "PP2", "CP2"],
    "queries without a latent": ["TP2 ETP2", "EP2"],
    "shared by experts, latents": ["TP2 EP2"],
    "minimax_m2": ["TP2 EP2"],
    "hy_v3": ["TP2 EP2"],
    "olmoe": ["TP2 EP2"],
    "glm4_moe_lite": ["TP2 EP2"],
    "qwen3_next": ["TP2 ETP2", "TP2 EP2", "PP2 VPP2 recompute full"],
    "qwen3_5_moe": ["TP2 EP2", "EP2 distributed optimizer"],
}
"""Kind -> layouts of two ranks."""
FOUR_RANKS = cases_of(
    {
        "moe": [
            "TP2 EP2 ETP2",
            "EP2 ETP2",
            "TP2 EP2 DP2 distributed optimizer",
            "TP2 PP2 ETP2",
            "PP2 VPP2 EP2 recompute full",
            "CP2 TP2 EP2",
        ],
        "shared": ["TP2 EP2 ETP2"],
    }
)


def bound_of(kind: str) -> float:
    """Return the largest distance that a kind may have: its family's in WIDER, or TOLERANCE."""
    family, *_ = ALL_KINDS[kind]
    return WIDER.get(family, TOLERANCE)


def section_of(folder: str, kind: str) -> dict[str, Any]:
    """Return the kind's ``lora:`` section, which starts from its random adapters."""
    return {**ALL_KINDS[kind][2], "start_from": str(Path(folder) / f"{kind}-adapters")}


def train(folder: str, kind: str, parallel: dict[str, Any], changes: dict[str, Any]) -> dict:
    """Train three steps. Return the results, on global rank 0 also gradients and adapters by name."""
    from tests.distributed.test_router_replay import make_trainer, recorded_samples

    is_replayed = kind == "replayed"
    settings = {**changes, "lora": section_of(folder, kind)}
    trainer = make_trainer(str(Path(folder) / kind), parallel, settings, replay=is_replayed)
    try:
        data = recorded_samples() if is_replayed else samples()
        batches = own_micro_batches(trainer, data)
        out: dict[str, Any] = {"metrics": [], "norms": []}
        for step in range(3):
            result = trainer.train_mini_batch(batches, policy_token_loss, denominator=200.0)
            out["metrics"].append(result.metrics.values())
            out["norms"].append(result.grad_norm)
            if step == 0 and not changes.get("distributed"):
                out["gradients"] = whole_gradients(trainer)
        out["parameters"] = named_tensors(trainer.adapted.tensors())
        out["parameters"] |= {f"merged {n}": t for n, t in whole_weights(trainer).items()}
        return out
    finally:
        trainer.close()


def named_tensors(buckets: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def whole_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of every A and B, gathered like the adapters themselves."""
    parameters = [p for m in trainer.adapted.modules for p in m.parameters()]
    held = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad
    try:
        return named_tensors(trainer.adapted.tensors())
    finally:
        for p, data in zip(parameters, held, strict=True):
            p.data = data


def reference_worker(folder: str, kinds: list[str], peft_kinds: list[str]) -> dict[str, Any]:
    """Make models and adapters. Train each kind in one process, and ``peft_kinds`` also by PEFT."""
    from tests.adapters import save_random_adapters
    from tests.tiny_models import save_tiny_model

    for kind in kinds:
        family, options, section = ALL_KINDS[kind]
        made = {"vocab_size": VOCABULARY, **options}
        hf_dir = save_tiny_model(Path(folder) / kind, family, **made)
        save_random_adapters(Path(folder) / f"{kind}-adapters", hf_dir, section)
        torch.save(train(folder, kind, {}, {}), Path(folder) / f"{kind}.pt")
        if kind in peft_kinds:
            torch.save(judge(folder, kind), Path(folder) / f"{kind}-peft.pt")
    return {}


def layout_worker(folder: str, cases: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Train every case. On rank 0 return the distances from the single process."""
    report = {}
    for name, (kind, parallel, changes) in cases.items():
        got = train(folder, kind, {**parallel, "world_size": world_size}, CHUNKS | changes)
        if torch.distributed.get_rank() == 0:
            expected = torch.load(Path(folder) / f"{kind}.pt", weights_only=True)
            report[name] = distances(got, expected)
    return report


def judge(folder: str, kind: str) -> dict[str, Any]:
    """Train the same three steps by PEFT. Return gradients, norms, losses and adapters."""
    from tests.adapters import peft_model

    model, trained = peft_model(str(Path(folder) / kind), str(Path(folder) / f"{kind}-adapters"))
    named = {
        n.removeprefix("base_model.model.").removesuffix(".weight"): p for n, p in trained.items()
    }
    optimizer = torch.optim.AdamW(
        named.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01
    )
    out: dict[str, Any] = {"metrics": [], "norms": []}
    for step in range(3):
        optimizer.zero_grad()
        total = None
        for batch in micro_batches(samples(), 0, 1, 1, 1):
            sums = policy_token_loss(SimpleNamespace(log_probs=log_probs(model, batch)), batch)
            (sums.loss / 200.0).backward()
            total = sums.metrics if total is None else total + sums.metrics
        norm = torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        if step == 0:  # The trainer's gradients are read after clipping, too.
            out["gradients"] = {n: p.grad.clone() for n, p in named.items()}
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 2)
        optimizer.step()
        out["metrics"].append(total.values())
        out["norms"].append(float(norm))
    out["parameters"] = {n: p.detach().clone() for n, p in named.items()}
    return out


def log_probs(model: Any, batch: Any) -> torch.Tensor:
    """Return log pi of a pack's targets, computed one sequence at a time."""
    bounds = batch.cu_seqlens.tolist()
    rows = [
        model(batch.token_ids[None, low:high]).logits[0] / 0.9 for low, high in pairwise(bounds)
    ]
    return torch.cat(rows).log_softmax(-1).gather(1, batch.target_ids[:, None]).squeeze(1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    run_ranks(HERE + "reference_worker", 1, str(folder), list(KINDS), list(PEFT_KINDS))
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("kind", PEFT_KINDS)
def test_one_process_trains_as_peft_does(reference: Path, kind: str) -> None:
    check_against_peft(reference, kind)


def check_against_peft(reference: Path, kind: str) -> None:
    """Assert that one process has trained adapters of ``kind`` as PEFT has."""
    got = torch.load(reference / f"{kind}.pt", weights_only=True)
    expected = torch.load(reference / f"{kind}-peft.pt", weights_only=True)
    got["parameters"] = {n: got["parameters"][n] for n in expected["parameters"]}
    found = distances(got, expected)
    assert not {what: far for what, far in found.items() if not far[0] <= bound_of(kind)}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "cases"), [pytest.param(2, TWO_RANKS, marks=pytest.mark.slow), (4, FOUR_RANKS)]
)
def test_layouts_train_as_one_process_does(
    reference: Path, world_size: int, cases: dict[str, Any]
) -> None:
    check_layouts(reference, world_size, cases)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW)
def test_adapters_of_mixed_stacks_train_as_one_process_and_as_peft_does(
    tmp_path: Path, kind: str
) -> None:
    peft_kinds = [kind] if kind in SLOW_PEFT_KINDS else []
    run_ranks(HERE + "reference_worker", 1, str(tmp_path), [kind], peft_kinds)
    if peft_kinds:
        check_against_peft(tmp_path, kind)
    check_layouts(tmp_path, 2, cases_of({kind: SLOW[kind]}))


def check_layouts(reference: Path, world_size: int, cases: dict[str, Any]) -> None:
    """Assert that each of ``cases`` trains on ``world_size`` ranks as one process has."""
    arguments = (str(reference), cases, world_size)
    (report, *_) = run_ranks(HERE + "layout_worker", world_size, *arguments, timeout=600)
    assert report.keys() == cases.keys()
    assert not far_results(report, lambda name, _: bound_of(cases[name][0]))
