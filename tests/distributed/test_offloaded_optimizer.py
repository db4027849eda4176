"""Adam's state in the host's memory: Megatron-Core's HybridDeviceOptimizer trains, resumes, parks and converts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_checkpoint import distance, same, train
from tests.distributed.test_trainer_parity import run_config
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

MODULE = "tests.distributed.test_offloaded_optimizer"
OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True}
AWARE: dict[str, Any] = {**OFFLOAD, "use_precision_aware_optimizer": True}
HALF: dict[str, Any] = {
    **AWARE,
    "optimizer_offload_fraction": 0.5,
    "overlap_cpu_optimizer_d2h_h2d": True,
}
# Name -> parallel section, and ``megatron_optimizer``.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "masters on both": ({"expert": 2}, OFFLOAD),
    "masters on the host": ({"tensor": 2}, AWARE),
    "half on the host": ({"expert": 2}, HALF),
}
TOLERANCE = 2e-3
"""For bfloat16 weights after four steps: torch's fused Adam rounds in another order than the plain Adam."""


def make_trainer(hf_dir: str, parallel: dict[str, Any], optimizer: dict[str, Any]) -> Any:
    from megatron_dppo.trainer.trainer import Trainer

    changes = {"dtype": "bfloat16", "distributed": True}
    config = run_config(hf_dir, {**parallel, "world_size": 2}, changes)
    return Trainer.read(config.model_copy(update={"megatron_optimizer": optimizer}))


def rank_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the weights of this rank."""
    return {
        f"{i} {name}": p.detach().clone()
        for i, chunk in enumerate(trainer.chunks)
        for name, p in chunk.named_parameters()
    }


def adam_state(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the moments and masters of this rank."""
    from megatron_dppo.trainer.checkpoint.state import optimizer_steps, state_slices

    slices = state_slices(trainer.optimizer)
    state = {f"{i} {k}": t.clone() for i, s in enumerate(slices) for k, t in s.tensors.items()}
    (steps,) = optimizer_steps(trainer.optimizer)
    return state | {"steps": torch.tensor(steps)}


KINDS = ("plain", "offloaded")


def worker(folder: str) -> dict[str, Any]:
    return {name: outcome(folder, name) for name in CASES}


def outcome(folder: str, name: str) -> dict[str, Any]:
    """Train a case. Return the distances from a plain optimizer, and which states are equal after a restart, a
    change of the optimizer, and parking."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    parallel, options = CASES[name]
    hf_dir = f"{folder}/hf"
    plain = make_trainer(hf_dir, parallel, {})
    train(plain, 2)
    folders = {kind: Path(folder) / name.replace(" ", "_") / kind for kind in KINDS}
    stores = {kind: CheckpointStore(path, 1) for kind, path in folders.items()}
    stores["plain"].save(plain, 2, {})
    plain_state = adam_state(plain)
    train(plain, 2)
    plain_weights = rank_weights(plain)
    plain.close()

    offloaded = make_trainer(hf_dir, parallel, options)
    train(offloaded, 2)
    stores["offloaded"].save(offloaded, 2, {})
    saved_state = adam_state(offloaded)
    moved = offloaded.park()
    offloaded.unpark()
    train(offloaded, 2)
    weights, state = rank_weights(offloaded), adam_state(offloaded)
    found: dict[str, Any] = {"distance": distance(weights, plain_weights)}
    held_tensors = {t.data_ptr(): t for t in offloaded.held_tensors()["optimizer"]}
    held = sum(t.nbytes for t in held_tensors.values())
    everything = sum(t.nbytes for t in saved_state.values())
    found["on the device"] = held / everything
    found["parked"] = moved.bytes["optimizer"] == held
    offloaded.close()

    resumed = make_trainer(hf_dir, parallel, options)
    load(stores["offloaded"], resumed)
    found["resumed state"] = same(adam_state(resumed), saved_state)
    train(resumed, 2)
    found["resumed"] = same(rank_weights(resumed), weights) and same(adam_state(resumed), state)
    # The trainer has taken steps of its own, so every copy of a master must be replaced.
    load(stores["plain"], resumed)
    found["from plain"] = same(adam_state(resumed), plain_state)
    train(resumed, 2)
    found["distance from plain"] = distance(rank_weights(resumed), plain_weights)
    resumed.close()

    converted = make_trainer(hf_dir, parallel, {})
    load(stores["offloaded"], converted)
    found["to plain"] = same(adam_state(converted), saved_state)
    converted.close()
    return found


def load(store: Any, trainer: Any) -> None:
    store.load(trainer, store.survey().complete[-1])


@pytest.mark.distributed
def test_an_offloaded_optimizer_trains_resumes_parks_and_converts(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "hf", "qwen3_moe", layers=2, vocab_size=515)
    on_device = {"masters on both": 1 / 3, "masters on the host": 0.0}
    for report in run_ranks(f"{MODULE}:worker", 2, str(tmp_path)):
        for name, found in report.items():
            assert found.pop("distance") <= TOLERANCE, (name, found)
            assert found.pop("distance from plain") <= TOLERANCE, (name, found)
            share = found.pop("on the device")
            if name in on_device:
                assert share == pytest.approx(on_device[name], abs=0.01), name
            else:
                assert 0.2 < share < 0.8
            assert all(found.values()), (name, found)
