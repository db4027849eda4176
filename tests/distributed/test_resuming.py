"""The step from which real ranks continue if checkpoints are damaged or gone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

HERE = "tests.distributed.test_resuming"


def flip_a_bit(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def resume_worker(folder: str) -> dict[str, Any]:
    """Save checkpoints of steps 1 and 2. Then start with the second one damaged, and with all checkpoints gone."""
    import torch.distributed as dist

    from megatron_dppo.loop.input_hashes import BackgroundHashes
    from megatron_dppo.loop.inputs import model_files
    from megatron_dppo.loop.resuming import resume
    from megatron_dppo.loop.run_identity import identity_of
    from megatron_dppo.loop.run_state import RunState
    from megatron_dppo.metrics.records import remember_checkpoint
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore
    from tests.distributed.test_checkpoint import make_trainer, names_in, train

    trainer = make_trainer(f"{folder}/hf", {"tensor": 2}, False, "float32", 2)
    run_folder, rank = Path(folder) / "run", trainer.topology.rank
    store = CheckpointStore(run_folder / "checkpoints", 2)
    identity = identity_of(trainer.config, "abc")
    for step in (1, 2):
        train(trainer, 1)
        weights = {trainer.weights_form(): trainer.weights_digest()}
        store.save(trainer, step, RunState(step, {}, identity, weights=weights).to_json())
    if rank == 0:
        remember_checkpoint(run_folder, 2)
        records = "".join(json.dumps({"step": step}) + "\n" for step in range(3))
        (run_folder / "metrics.jsonl").write_text(records)
        flip_a_bit(run_folder / "checkpoints" / "step_000002" / "__1_0.distcp")
    dist.barrier()

    def start(resume_word: str = "auto", on_damage: str = "refuse") -> str:
        run = trainer.config.run.model_copy(
            update={"directory": str(run_folder), "resume": resume_word}
        )
        checkpoint = trainer.config.checkpoint.model_copy(update={"on_damage": on_damage})
        try:
            state = resume(
                run, checkpoint, trainer, store, identity, replays=False, nonce=resume_word
            )
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
        return f"step {0 if state is None else state.step} of {trainer.step_count}"

    hashes = BackgroundHashes(
        model_files(trainer.config.model.hf_checkpoint, None), trainer.topology
    ).wait()
    out: dict[str, Any] = {
        "hashes": hashes,
        "refused": start(),
        "previous": start(on_damage="previous"),
    }
    out["renamed"] = names_in(run_folder / "checkpoints")
    out["again"] = start()
    # Save weights with another step's hash, as if memory had changed before they were written.
    train(trainer, 2)
    store.save(trainer, 3, RunState(3, {}, identity, weights=weights).to_json())
    out["unknown"] = start()
    out["known"] = start(on_damage="previous")
    # A numerical fault ends a run with a suspect checkpoint. No start loads it, and it replaces no checkpoint.
    store.save(trainer, 4, RunState(4, {}, identity).to_json(), suspect=True)
    out["suspect"] = start()
    out["kept"] = names_in(run_folder / "checkpoints")
    if rank == 0:
        shutil.rmtree(run_folder / "checkpoints")
    dist.barrier()
    out["gone"] = start()
    out["never"] = start("never")
    out["left"] = [name for name in names_in(run_folder) if not name.startswith("earlier-")]
    out["earlier"] = [
        (path / "metrics.jsonl").read_text().count("\n")
        for path in sorted(run_folder.glob("earlier-*"))
    ]
    return out


@pytest.mark.distributed
def test_starts_over_damaged_and_missing_checkpoints(tmp_path: Path) -> None:
    from tests.tiny_models import save_tiny_model

    save_tiny_model(tmp_path / "hf", "qwen3_moe", layers=4, vocab_size=515)
    for got in run_ranks(f"{HERE}:resume_worker", 2, str(tmp_path)):
        assert got["hashes"] == {
            f"model.hf_checkpoint/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (tmp_path / "hf").iterdir()
        }
        assert got["refused"].startswith("DamagedCheckpointError: rank ")
        assert "step_000002/__1_0.distcp: altered" in got["refused"]
        assert "checkpoint.on_damage=previous" in got["refused"]
        assert got["previous"] == got["again"] == "step 1 of 1"
        assert got["renamed"] == ["step_000001", "step_000002.damaged-1"]
        assert got["unknown"].startswith("DamagedCheckpointError: ")
        assert "step_000003: " in got["unknown"]
        assert "checkpoint.on_damage=previous" in got["unknown"]
        assert got["known"] == got["suspect"] == "step 1 of 1"
        assert got["kept"] == [
            "step_000001",
            "step_000002.damaged-1",
            "step_000003.damaged-1",
            "step_000004.suspect",
        ]
        assert "step 2" in got["gone"]
        assert got["never"].startswith("step 0")
        assert got["left"] == ["beginning.json"]
        # Each of the two starts that fell back copied the records, and the fresh start set them aside.
        assert got["earlier"] == [3, 3, 3]
