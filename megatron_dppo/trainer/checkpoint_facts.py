"""What a checkpoint's manifest says of the trainer that wrote it, and what must agree with the one that loads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.layout import Layout
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.optimizer_state import optimizer_steps
from megatron_dppo.trainer.rng_state import restore_rng_state

if TYPE_CHECKING:
    from megatron_dppo.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_SEED_STRIDE = 1_000_003


def facts(trainer: Trainer) -> dict[str, Any]:
    """Of a manifest: the trainer's counts, model, layout and settings."""
    return {
        "step_count": trainer.step_count,
        "scheduler_steps": trainer.scheduler.num_steps,
        "model": _model_facts(trainer),
        "reference_sha256": trainer.reference_sha256,
        "layout": asdict(trainer.layout),
        "optimizer": trainer.config.optimizer.model_dump(),
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }


def check_step_count(trainer: Trainer) -> None:
    """Raise CheckpointError unless optimizer and trainer count the same steps."""
    counted = optimizer_steps(trainer.optimizer)
    if counted - {trainer.step_count}:
        raise CheckpointError(
            f"the optimizer counts {sorted(counted)} steps, the trainer {trainer.step_count}"
        )


def check_model(trainer: Trainer, manifest: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError for another model; log other optimizer settings, which are allowed."""
    if different := _differences(manifest["model"], _model_facts(trainer)):
        raise CheckpointError(f"{folder} holds another model: {'; '.join(different)}")
    _check_reference(trainer, manifest.get("reference_sha256"), folder)
    changed = _differences(manifest["optimizer"], trainer.config.optimizer.model_dump())
    if changed and trainer.topology.rank == 0:
        log.warning("resuming with other optimizer settings: %s", "; ".join(changed))


def _check_reference(trainer: Trainer, saved: str | None, folder: Path) -> None:
    """Raise CheckpointError where the run would go on with another reference policy.

    One that only one of both has is a difference of the configuration, which ``RunState.check_identity`` names.
    """
    present = trainer.reference_sha256
    if saved is not None and present is not None and saved != present:
        raise CheckpointError(
            f"{folder} was trained with another reference policy: the SHA-256 of what the run started from "
            f"(model.hf_checkpoint, lora.start_from) is {present} here and {saved} in the checkpoint"
        )


def restore_generators(
    trainer: Trainer, manifest: dict[str, Any], folder: Path, saved_state: Callable[[], Any]
) -> None:
    """Set this rank's random generators to ``saved_state()``; under another layout than the saved one, seed them
    from the run's seed and the step count."""
    saved = Layout(**manifest["layout"])
    if saved == trainer.layout:
        restore_rng_state(saved_state())
        return
    seed = (trainer.config.run.seed + _SEED_STRIDE * trainer.step_count) % 2**31
    platform.seed_everything(seed)
    if trainer.topology.rank == 0:
        log.info(
            "%s was written under the layout %s, this run has %s: random generators start from "
            "seed %d",
            folder,
            saved.describe(),
            trainer.layout.describe(),
            seed,
        )


def _model_facts(trainer: Trainer) -> dict[str, Any]:
    """Properties of the model that a resumed run must not change."""
    shape = json.loads(json.dumps(asdict(trainer.shape)))
    adapters = {} if trainer.adapted is None else trainer.adapted.facts()
    return {**shape, "dtype": str(trainer.dtype).removeprefix("torch."), **adapters}


def _differences(saved: dict[str, Any], present: dict[str, Any]) -> list[str]:
    names = sorted(saved.keys() | present.keys())
    return [
        f"{name} is {present.get(name)!r} here and {saved.get(name)!r} in the checkpoint"
        for name in names
        if saved.get(name) != present.get(name)
    ]
