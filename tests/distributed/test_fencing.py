"""Real ranks without a supervisor: rank 0 takes the run's lease, and a start that is succeeded saves nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

HERE = "tests.distributed.test_fencing"


def fenced_worker(folder: str) -> dict[str, Any]:
    """Save once. Another start takes over while the second save is written. Then try a third save."""
    import torch.distributed as dist

    from megatron_dppo.loop.ending import run_fence
    from megatron_dppo.system.lease import FencedError, Holder, LeaseFiles
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore
    from tests.distributed.test_checkpoint import make_trainer, names_in, train

    rank, at = int(os.environ["RANK"]), Path(folder) / "run"
    fences = 0
    with run_fence(str(at)) as fence:
        trainer = make_trainer(f"{folder}/hf", {"expert": 2}, False, "float32", 2)
        fence.join()
        fence.check()
        held_by = LeaseFiles(at).holder()
        assert held_by is not None
        out: dict[str, Any] = {"held by rank 0": (held_by.pid == os.getpid()) == (rank == 0)}

        def check(group: dist.ProcessGroup | None) -> None:
            nonlocal fences
            fences += 1
            if fences == 5 and rank == 0:  # the second save is about to get its name
                successor = replace(Holder.of_this_process(), host="b", pid=88)
                LeaseFiles(at).install(successor)
            dist.barrier(group)
            fence.check_together(group)

        train(trainer, 1)
        store = CheckpointStore(at / "checkpoints", 1, check, background=True)
        store.save(trainer, 1, {})
        for step in (2, 3):
            try:
                store.save(trainer, step, {})
                store.finish()
            except FencedError as error:
                out[f"error {step}"] = str(error)
            dist.barrier()
            out[f"left {step}"] = names_in(at / "checkpoints")
        try:
            store.set_aside(at / "checkpoints" / "step_000001")
        except FencedError as error:
            out["error set aside"] = str(error)
        dist.barrier()
        out["left set aside"] = names_in(at / "checkpoints")
    return out


@pytest.mark.distributed
def test_a_succeeded_start_saves_and_renames_no_checkpoint(tmp_path: Path) -> None:
    from tests.tiny_models import save_tiny_model

    save_tiny_model(tmp_path / "hf", "qwen3_moe", layers=4, vocab_size=515)
    for got in run_ranks(f"{HERE}:fenced_worker", 2, str(tmp_path)):
        assert got["held by rank 0"]
        for step in (2, 3, "set aside"):
            assert "process 88 on b" in got[f"error {step}"]
            # The successor removes the unfinished second checkpoint. The third was not begun.
            assert got[f"left {step}"] == ["step_000001", "step_000002.partial-2"]
