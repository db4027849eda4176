"""A bit that flips in a weight, a master or a moment of one of two replicas is found, and its tensor is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.metrics.records import read_records
from megatron_dppo.trainer.checkpoint.directory import read_manifest
from tests.distributed.test_trainer_parity import VOCABULARY
from tests.distributed.test_trainer_steps import error_of
from tests.ranks import run_ranks

MODULE = "tests.distributed.test_memory_checks"
KINDS = ("float32", "bfloat16")


def flip_a_bit(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the first element; a second call restores it."""
    tensor.detach().view(-1)[:1].view(torch.uint8)[0] ^= 1


def flips_worker(folder: str, family: str) -> dict[str, Any]:
    """Return the error of each flip on rank 1, by place; "none" is without a flip."""
    from megatron_dppo.trainer.checkpoint.state import state_slices
    from megatron_dppo.trainer.memory_checks import MemoryChecks
    from tests.distributed.test_checkpoint import make_trainer, train

    found: dict[str, Any] = {}
    for dtype in KINDS:
        trainer = make_trainer(f"{folder}/{family}", {}, dtype == "bfloat16", dtype, 2)
        train(trainer, 2)
        checks = MemoryChecks(trainer)
        is_faulty = trainer.topology.rank == 1
        weights = {name: p for c in trainer.chunks for name, p in c.named_parameters()}
        digest = checks.remember_weights(2)
        checks.remember_optimizer(2)
        found[f"{dtype} digest"] = digest == trainer.weights_digest() == checks.check_weights()
        places = {"norm": next(p for n, p in weights.items() if n.endswith("norm.weight"))}
        if experts := [p for n, p in weights.items() if "experts" in n]:
            places["expert"] = experts[0]
        for place, weight in places.items():
            if is_faulty:
                flip_a_bit(weight)
            found[f"{dtype} {place} later"] = error_of(checks.check_weights)
            found[f"{dtype} {place} after a step"] = error_of(
                lambda checks=checks: checks.remember_weights(3)
            )
            if is_faulty:
                flip_a_bit(weight)
        for name, tensor in state_slices(trainer.optimizer)[0].tensors.items():
            if is_faulty:
                flip_a_bit(tensor)
            found[f"{dtype} {name} later"] = error_of(checks.check_optimizer)
            if dtype == "float32":
                found[f"{dtype} {name} after a step"] = error_of(
                    lambda checks=checks: MemoryChecks(checks._trainer).remember_optimizer(3)
                )
            if is_faulty:
                flip_a_bit(tensor)
        found[f"{dtype} none"] = [error_of(checks.check_weights), error_of(checks.check_optimizer)]
        checks.forget_optimizer()
        train(trainer, 1)
        found[f"{dtype} none later"] = error_of(checks.check_optimizer)
        trainer.close()
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_a_flipped_bit_is_named_on_every_rank(tmp_path: Path, family: str) -> None:
    """``qwen3`` is dense. With ``bfloat16`` the optimizer is distributed, and its masters are cut into slices."""
    from tests.tiny_models import save_tiny_model

    save_tiny_model(tmp_path / family, family, vocab_size=VOCABULARY)
    both = run_ranks(f"{MODULE}:flips_worker", 2, str(tmp_path), family)
    assert both[0] == both[1]
    errors = {}
    for place, result in both[0].items():
        if place.endswith("digest"):
            assert result
        elif place.split()[1] == "none":
            assert result in (("", ""), [("", ""), ("", "")])
        else:
            errors[place] = result
    tensors = {"norm": "norm.weight", "expert": "experts"}
    for place, (kind, text) in errors.items():
        _, tensor, *moment = place.split()
        is_weight = tensor in tensors
        assert kind == ("AlteredWeightsError" if is_weight else "AlteredOptimizerError"), place
        assert tensors.get(tensor, tensor) in text, place
        assert "rank 1" in text, place
        if moment == ["later"]:
            assert "rank 0" not in text, place
            assert "step 2" in text, place
        else:
            # Two replicas without a majority: both are named.
            assert "rank 0" in text, place
            assert "step 3" in text, place
    places = {place.split()[1] for place in errors}
    expected = {"norm", "exp_avg", "exp_avg_sq", "fp32_param"}
    assert places == expected | ({"expert"} if family == "qwen3_moe" else set())


def runs_worker(folder: str, config_file: str) -> list[str]:
    """Return the errors of three runs of two replicas: one without a flip, one that restores twice, one that stops."""
    import torch.distributed as dist

    from megatron_dppo.config import load_config
    from megatron_dppo.logging import FatalError
    from megatron_dppo.loop import run, run_rank
    from megatron_dppo.trainer.checkpoint.state import state_slices
    from megatron_dppo.trainer.topology import destroy_topology

    is_faulty = os.environ["RANK"] == "1"
    plain_step = run.Run.step
    planned: set[str] = set()

    def step_with_flips(self: run.Run) -> None:
        """On rank 1 flip a bit of a weight after step 1, and a bit of a moment after step 2, each once."""
        place = {1: "weight", 2: "moment"}.get(self.state.step)
        if place in planned:
            planned.remove(place)
            if is_faulty and place == "weight":
                flip_a_bit(next(iter(self.trainer.base_weights().values())))
            if is_faulty and place == "moment":
                flip_a_bit(state_slices(self.trainer.optimizer)[0].tensors["exp_avg"])
        plain_step(self)

    run.Run.step = step_with_flips  # type: ignore[method-assign]
    errors = []
    for name, places, reaction in (
        ("calm", set(), "stop"),
        ("restores", {"weight", "moment"}, "restore"),
        ("stops", {"moment"}, "stop"),
    ):
        planned = set(places)
        overrides = [f"run.directory={folder}/{name}", f"memory_checks.on_mismatch={reaction}"]
        try:
            run_rank(load_config(config_file, ["parallel.world_size=2", *overrides]))
            errors.append("")
        except FatalError as error:
            errors.append(str(error))
        destroy_topology()
        dist.barrier()
    return errors


def test_a_run_stops_or_restores_and_no_altered_state_is_saved(tmp_path: Path) -> None:
    from tools.faults.failpoints import history
    from tools.faults.material import make_material

    config = make_material(tmp_path, 3)
    both = run_ranks(f"{MODULE}:runs_worker", 2, str(tmp_path), str(config), timeout=600)
    assert both[0] == both[1]
    calm_error, restored_error, stopped_error = both[0]
    assert (calm_error, restored_error) == ("", "")
    assert stopped_error.startswith("AlteredOptimizerError")
    assert "step 2" in stopped_error
    assert "rank 1" in stopped_error
    # Steps were done again from the checkpoints, and the run ends in the same weights, records and batches.
    calm = history(tmp_path / "calm")
    assert history(tmp_path / "restores") == calm
    assert calm["steps"] == [0, 1, 2, 3]
    restores = [row.get("memory/restores", 0) for row in read_records(tmp_path / "restores")]
    assert restores == [0, 0, 1, 2]
    newest = sorted((tmp_path / "stops" / "checkpoints").iterdir())[-1]
    assert newest.name == "step_000002"
    assert read_manifest(newest)["state"]["weights"] == calm["checkpoints"]["step_000002"]
