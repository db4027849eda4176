"""A bit that flips in a weight, a master or a moment of one of two replicas is found, and its tensor is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.logging import FAILED, REFUSED
from megatron_dppo.spec import RunSpec
from tests.distributed.test_trainer_parity import VOCABULARY
from tests.distributed.test_trainer_steps import error_of
from tests.messages import mentions
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


def runs_worker(folder: str, config_file: str) -> dict[str, list[tuple[Any, str]]]:
    """Return the ends of the starts of two runs of two replicas: one without a flip, and one with two flips.

    After an error the ranks start again, as the supervisor starts them.
    """
    import gc

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
    ends: dict[str, list[tuple[Any, str]]] = {}
    for name, places in (("calm", set()), ("altered", {"weight", "moment"})):
        planned = set(places)
        config = load_config(
            config_file, ["parallel.world_size=2", f"run.directory={folder}/{name}"]
        )
        ends[name] = []
        for _ in range(1 + len(places)):
            try:
                run_rank(config, RunSpec.of_checked(config))
                ends[name].append((0, ""))
            except FatalError as error:
                newest = sorted(Path(folder, name, "checkpoints").iterdir())[-1]
                ends[name].append((error.code, f"{newest.name}: {error}"))
            destroy_topology()
            gc.collect()
            dist.barrier()
    return ends


def test_ranks_with_altered_memory_end_and_their_next_start_is_whole(tmp_path: Path) -> None:
    from tools.faults.failpoints import history
    from tools.faults.material import make_material

    config = make_material(tmp_path, 3)
    both = run_ranks(f"{MODULE}:runs_worker", 2, str(tmp_path), str(config), timeout=600)
    assert both[0] == both[1]
    assert both[0]["calm"] == [(0, "")]
    *failures, end = both[0]["altered"]
    assert end == (0, "")
    for (status, text), error, step in zip(
        failures, ("AlteredWeightsError", "AlteredOptimizerError"), (1, 2), strict=True
    ):
        # Not the status of a refusal, after which the supervisor starts no rank again.
        assert status == FAILED != REFUSED
        assert mentions(text, f"step_00000{step}", error, f"step {step}", "rank 1")
    # Steps were done again from the checkpoints, and the run ends in the same weights, records and batches.
    calm = history(tmp_path / "calm")
    assert history(tmp_path / "altered") == calm
    assert calm["steps"] == [0, 1, 2, 3]
