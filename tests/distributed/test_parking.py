"""A trainer that is parked between its steps trains like a trainer that is never parked, bit for bit. While it is
parked, its memory is free."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_trainer_parity import (
    VOCABULARY,
    own_micro_batches,
    policy_token_loss,
    run_config,
    samples,
)
from tests.layouts import OVERLAP
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

MODULE = "tests.distributed.test_parking"
BFLOAT16 = {"dtype": "bfloat16"}
REFERENCE = {"algorithm": {"reference_kl": 0.1}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DP2 fp32": ("qwen3_moe", {}, REFERENCE),
    "EP2 bf16": ("qwen3_moe", {"expert": 2}, BFLOAT16),
    "EP2 fp32, distributed optimizer, overlap": (
        "qwen3_moe", {"expert": 2}, {"distributed": True, "ddp": OVERLAP},
    ),
    "TP2 bf16, distributed optimizer": (
        "qwen3_moe", {"tensor": 2}, {**BFLOAT16, "distributed": True},
    ),
    "DP2 bf16, distributed optimizer": ("qwen3", {}, {**BFLOAT16, "distributed": True}),
    # With bf16 gradients, the optimizer has fp32 copies of them.
    "DP2 bf16, gradients of bf16": (
        "qwen3", {}, {**BFLOAT16, "ddp": {"grad_reduce_in_fp32": False}},
    ),
    "tied PP2 fp32": ("qwen3", {"pipeline": 2}, {}),
    "EP2 bf16 LoRA": ("qwen3_moe", {"expert": 2}, {**BFLOAT16, "lora": {"rank": 4}}),
}  # fmt: skip
STEPS = 3
EXPERTS = {"num_experts": 32, "moe_intermediate_size": 256}
SIZES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "3M fp32": ("qwen3", {"hidden": 128, "vocab_size": 10_000}, {}, 12 / 16),
    "13M bf16": ("qwen3", {"hidden": 256, "vocab_size": 24_000}, BFLOAT16, 14 / 18),
    "25M bf16 MoE": (
        "qwen3_moe", {"hidden": 256, "vocab_size": 24_000, **EXPERTS}, BFLOAT16, 14 / 18,
    ),
}  # fmt: skip
"""Name -> family, shape, settings, and the share of the parked bytes that the host keeps: all except the gradients."""
TOLERANCE = 0.1


def train(hf_dir: str, parallel: dict[str, Any], changes: dict[str, Any], *, parks: bool) -> Any:
    """Train, and return every result: metrics, norms, log-probabilities, weights and optimizer state."""
    from megatron_dppo.trainer.trainer import Trainer

    trainer = Trainer.read(run_config(hf_dir, {**parallel, "world_size": 2}, changes))
    try:
        batches = own_micro_batches(trainer, samples())
        out: list[Any] = []
        for step in range(STEPS):
            if parks:
                _park_in_the_order_of_a_step(trainer, step)
            result = trainer.train_mini_batch(batches, policy_token_loss, 200.0)
            out += [result.metrics.values(), result.grad_norm, trainer.log_probs(batches)]
        if "algorithm" in changes:
            out.append(trainer.reference_log_probs(batches))
        held = trainer.held_tensors()
        out += [t.detach().clone() for part in ("weights", "optimizer") for t in held[part]]
        return out
    finally:
        trainer.close()


def _park_in_the_order_of_a_step(trainer: Any, step: int) -> None:
    """Park everything at once in even steps. In odd steps park the weights last, after an update has read them."""
    if step % 2:
        trainer.park(["gradients", "optimizer"])
        weights = dict(trainer.weights())
        assert all(bool(w.isfinite().all()) for w in weights.values())
        trainer.park(["weights", "reference"])
    else:
        trainer.park()
    assert {t.untyped_storage().nbytes() for part in trainer.held_tensors().values() for t in part} == {0}  # fmt: skip
    assert sum(g.untyped_storage().nbytes() for g in _optimizer_gradients(trainer)) == 0
    assert trainer.unpark().copied > 0
    assert not any(g.any() for g in trainer.held_tensors()["gradients"])


def _optimizer_gradients(trainer: Any) -> list[torch.Tensor]:
    """Return the gradients of the optimizer's parameters."""
    groups = [
        group
        for part in trainer.optimizer.chained_optimizers
        for group in part.optimizer.param_groups
    ]
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


def same(a: Any, b: Any) -> bool:
    """Whether ``a`` and ``b`` are equal bit for bit. A NaN equals itself."""
    if isinstance(a, torch.Tensor):
        ours, theirs = (t.reshape(-1).view(torch.uint8) for t in (a, b))
        return a.dtype == b.dtype and torch.equal(ours, theirs)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def worker(folder: str, cases: dict[str, Any]) -> dict[str, Any]:
    """Return whether parking keeps each result of each case, the report of ``checkpoint``, and the memory of models of
    several sizes."""
    reports: dict[str, Any] = {}
    for name, (family, parallel, changes) in cases.items():
        hf_dir = str(Path(folder) / family)
        expected = train(hf_dir, parallel, changes, parks=False)
        parked = train(hf_dir, parallel, changes, parks=True)
        reports[name] = [same(a, b) for a, b in zip(expected, parked, strict=True)]
    reports["checkpoint"] = checkpoint(folder)
    for name, (_, _, changes, _) in SIZES.items():
        reports[name] = memory(str(Path(folder) / name), changes)
    return reports


def checkpoint(folder: str) -> dict[str, Any]:
    """Write a checkpoint in the background while its trainer is parked. Return whether the checkpoint restores each
    tensor, and the errors of uses of a parked trainer."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore
    from megatron_dppo.trainer.trainer import Trainer
    from megatron_dppo.trainer.weight_source import TrainerWeights
    from tests.distributed.test_trainer_steps import error_of

    config = run_config(str(Path(folder) / "qwen3"), {"world_size": 2}, {**BFLOAT16})
    trainer = Trainer.read(config)
    batches = own_micro_batches(trainer, samples())
    trainer.train_mini_batch(batches, policy_token_loss, 200.0)
    before = {k: [t.clone() for t in ts] for k, ts in trainer.held_tensors().items()}
    store = CheckpointStore(Path(folder) / "checkpoints", keep=1, background=True)
    store.save(trainer, 1, {"step": 1})
    trainer.park()
    uses = {
        "train": lambda: trainer.train_mini_batch(batches, policy_token_loss, 200.0),
        "score": lambda: trainer.log_probs(batches),
        "read": trainer.weights,
        "gather": lambda: TrainerWeights(trainer).gather([]),
        "export": lambda: trainer.export_hf(Path(folder) / "exported"),
        "save": lambda: store.save(trainer, 2, {}),
        "park": trainer.park,
    }
    refused = {name: error_of(use) for name, use in uses.items()}
    store.finish()
    trainer.unpark()
    refused["unpark"] = error_of(trainer.unpark)
    trainer.close()

    trainer = Trainer.read(config)
    trainer.park()
    trainer.unpark()
    store.load(trainer, store.survey().complete[-1])
    after = trainer.held_tensors()
    restored = [
        same(a, b)
        for part in ("weights", "optimizer")
        for a, b in zip(before[part], after[part], strict=True)
    ]
    store.close()
    trainer.close()
    return {"restored": restored, "refused": refused}


def memory(hf_dir: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the resident bytes before, while and after a trainer is parked, and the bytes of its parked storages."""
    from megatron_dppo.trainer import platform
    from megatron_dppo.trainer.trainer import Trainer

    trainer = Trainer.read(run_config(hf_dir, {"world_size": 2}, changes))
    batches = own_micro_batches(trainer, samples())
    trainer.train_mini_batch(batches, policy_token_loss, 200.0)
    gc.collect()
    platform.return_unused_memory()
    resident = [resident_bytes()]
    moved = trainer.park()
    resident.append(resident_bytes())
    left = {t.untyped_storage().nbytes() for part in trainer.held_tensors().values() for t in part}
    back = trainer.unpark()
    resident.append(resident_bytes())
    trainer.close()
    return {
        "resident": resident, "left": sorted(left), "moved": dict(moved.bytes), "copied": moved.copied,
        "seconds": [moved.seconds, back.seconds],
    }  # fmt: skip


def resident_bytes() -> int:
    """Return this process's resident bytes without pages of files. Libraries' code is loaded when it first runs, and
    dropped when other processes need memory."""
    status = Path("/proc/self/status").read_text()
    sizes = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)
    assert len(sizes) == 2
    return sum(map(int, sizes)) * 1024


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "qwen3_moe", "qwen3_moe", vocab_size=VOCABULARY)
    save_tiny_model(folder / "qwen3", "qwen3", vocab_size=VOCABULARY, tied=True)
    for name, (family, shape, _, _) in SIZES.items():
        save_tiny_model(folder / name, family, **shape)
    return folder, run_ranks(f"{MODULE}:worker", 2, str(folder), CASES)


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_parking_changes_no_bit(case: str, reports: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in reports[1]:
        assert len(rank[case]) > 3 * STEPS
        assert all(rank[case])


@pytest.mark.distributed
def test_a_checkpoint_in_the_background_and_a_parked_trainer(
    reports: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in reports[1]:
        report = rank["checkpoint"]
        assert all(report["restored"])
        assert {kind for kind, _ in report["refused"].values()} == {"ParkedError"}
        assert report["refused"]["gather"][1].startswith("can't read weights: ")


@pytest.mark.distributed
@pytest.mark.parametrize("size", SIZES)
def test_memory_falls_by_what_the_planner_says(
    size: str, reports: tuple[Path, list[dict[str, Any]]]
) -> None:
    from megatron_dppo.cluster.planner.facts import trainer_facts
    from megatron_dppo.cluster.planner.trainer_state import parked_bytes, state_bytes
    from megatron_dppo.model.families import load_model_shape
    from megatron_dppo.spec import TrainerSpec

    folder, ranks = reports
    _, _, changes, copied = SIZES[size]
    config = run_config(str(folder / size), {"world_size": 2}, changes)
    shape = load_model_shape(folder / size)
    job = trainer_facts(config, TrainerSpec.of(config, shape), shape, 1, 256, gpu=False)
    planned = parked_bytes(state_bytes(job, 0)).device
    for rank in ranks:
        report = rank[size]
        resident, parked, back = report["resident"]
        print(
            f"{size}: planned {planned:,}, resident {resident:,}, parked {parked:,}, back {back:,}, {report}"
        )
        assert report["left"] == [0]
        assert sum(report["moved"].values()) == pytest.approx(planned, rel=0.01)
        assert report["copied"] == pytest.approx(planned * copied, rel=0.01)
        # The process's other memory may only shrink meanwhile: a thread of gloo releases buffers of the step whenever
        # it gets a core. So parking frees no less than planned, and unparking takes no more.
        assert resident - parked > planned * (1 - TOLERANCE)
        assert back - parked < planned * (1 + TOLERANCE)
