"""Checkpoints of adapters: one process resumes those of any layout and trains on in the same way. A trainer with
another base or other adapters refuses them. Exports: transformers computes the trainer's log-probabilities with PEFT's
folder and with the merged folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.whole_tensors import whole_weights

HERE = "tests.distributed.test_lora_checkpoint"
MOE, DENSE = "qwen3_moe", "qwen3"
SECTION = {"rank": 4, "alpha": 6.0}
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "EP2": (MOE, {"expert": 2}, {}),
    "TP2 ETP2 distributed optimizer": (MOE, {"tensor": 2}, {"distributed": True}),
    "PP2 VPP2 router": (MOE, {"pipeline": 2, "virtual_pipeline": 2}, {"train_router": True}),
    "shared TP2 EP2": (MOE, {"tensor": 2, "expert": 2, "expert_tensor": 1}, {"experts": "shared"}),
    "dense TP2 bf16": (DENSE, {"tensor": 2}, {"dtype": "bfloat16"}),
}
"""Name -> (family, layout, other settings that differ from the single process)."""
SLOW_LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_next TP2 EP2": ("qwen3_next", {"tensor": 2, "expert": 2, "expert_tensor": 1}, {}),
    "qwen3_5_moe TP2 ETP2 distributed optimizer": (
        "qwen3_5_moe",
        {"tensor": 2},
        {"distributed": True},
    ),
}
ALL_LAYOUTS = LAYOUTS | SLOW_LAYOUTS


def make_trainer(hf_dir: str, parallel: dict[str, Any], changes: dict[str, Any]) -> Any:
    from megatron_dppo.trainer.trainer import Trainer
    from tests.distributed.test_trainer_parity import run_config

    own = {key: changes[key] for key in ("train_router", "experts") if key in changes}
    lora = {"lora": {**SECTION, **own, **changes.get("lora", {})}}
    return Trainer.read(run_config(hf_dir, parallel, {**changes, **lora}))


def step(trainer: Any) -> float:
    from tests.distributed.test_trainer_parity import own_micro_batches, policy_token_loss, samples

    batches = own_micro_batches(trainer, samples())
    return float(trainer.train_mini_batch(batches, policy_token_loss, denominator=200.0).grad_norm)


def prepare(folder: str, *families: str) -> None:
    from tests.distributed.test_trainer_parity import VOCABULARY
    from tests.tiny_models import save_tiny_model

    for family in families:
        save_tiny_model(Path(folder) / family, family, vocab_size=VOCABULARY, layers=4)


def save_worker(folder: str, world_size: int, cases: list[str]) -> dict[str, list[float]]:
    """In each layout train two steps, save a checkpoint, and train a third step. Return its gradient norm."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    found = {}
    for name in cases:
        family, parallel, changes = ALL_LAYOUTS[name]
        trainer = make_trainer(
            str(Path(folder) / family), {**parallel, "world_size": world_size}, changes
        )
        step(trainer)
        step(trainer)
        CheckpointStore(Path(folder) / name, keep=1).save(trainer, 2, {"name": name})
        found[name] = [step(trainer)]
        trainer.close()
    return found


def resume_worker(folder: str, cases: list[str]) -> dict[str, list[float]]:
    """Resume each checkpoint in one process. Return the third step's gradient norm. Check the refusals."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    found: dict[str, Any] = {}
    for name in cases:
        family, _, changes = ALL_LAYOUTS[name]
        plain = {**changes, "distributed": False}
        trainer = make_trainer(str(Path(folder) / family), {}, plain)
        store = CheckpointStore(Path(folder) / name, keep=1)
        (stored,) = store.survey().complete
        assert store.load(trainer, stored) == {"name": name}
        found[name] = [step(trainer)]
        trainer.close()
    if "EP2" in cases:
        check_refusals(folder)
    return found


def check_refusals(folder: str) -> None:
    """Assert that the checkpoint of EP2 is loaded with no other base and no other adapters."""
    from megatron_dppo.model.errors import CheckpointError
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    store = CheckpointStore(Path(folder) / "EP2", keep=1)
    (stored,) = store.survey().complete
    for what, hf_dir, changes in (
        ("base_sha256", "other", {}),
        ("lora.rank", MOE, {"lora": {"rank": 8}}),
        ("lora.experts", MOE, {"experts": "shared"}),
    ):
        trainer = make_trainer(str(Path(folder) / hf_dir), {}, changes)
        with pytest.raises(CheckpointError, match=f"holds another model.*{what} is"):
            store.load(trainer, stored)
        trainer.close()


def export_worker(folder: str, family: str, world_size: int) -> dict[str, Any]:
    """Train a policy and export it in both forms. Return its log-probabilities of one sequence."""
    from megatron_dppo.data.packing import pack
    from megatron_dppo.data.trajectory import Trajectory

    trainer = make_trainer(
        str(Path(folder) / family), {"tensor": 2, "expert": 2, "world_size": world_size}, {}
    )
    step(trainer)
    trainer.export_hf(Path(folder) / f"{family} merged")
    trainer.adapted.export(Path(folder) / f"{family} peft", trainer.config.model.hf_checkpoint)
    moved = whole_weights(trainer)
    batch = pack([Trajectory.of_response(PROMPT[:1], PROMPT[1:])], pad_multiple=2)
    log_probs = trainer.log_probs([batch])[0][batch.loss_mask]
    trainer.close()
    reference = as_reference(Path(folder), family, world_size, batch)[batch.loss_mask]
    matrix = moved.get(MOVED_BY_FAMILY[family])
    return {"log_probs": log_probs, "moved": matrix, "reference": reference}


def as_reference(folder: Path, family: str, world_size: int, batch: Any) -> torch.Tensor:
    """Train from the exported adapters, and return the log-probabilities of the reference policy, which stays at the
    exported adapters. Check that a checkpoint of this run is not resumed with another reference."""
    from megatron_dppo.config.schema import AlgorithmConfig
    from megatron_dppo.model.errors import CheckpointError
    from megatron_dppo.trainer.checkpoint.directory import read_manifest
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore, check_model
    from megatron_dppo.trainer.trainer import Trainer
    from tests.distributed.test_trainer_parity import run_config

    parallel = {"tensor": 2, "expert": 2, "world_size": world_size}
    section = {"lora": {**SECTION, "start_from": str(folder / f"{family} peft")}}
    config = run_config(str(folder / family), parallel, section)
    algorithm = AlgorithmConfig(reference_kl=0.1)
    trainer = Trainer.read(config.model_copy(update={"algorithm": algorithm}))
    step(trainer)
    step(trainer)
    (log_probs,) = trainer.reference_log_probs([batch])
    assert (trainer.log_probs([batch])[0] - log_probs).abs().max() > 1e-3
    store = CheckpointStore(folder / f"{family} referring", keep=1)
    store.save(trainer, 2, {})
    (stored,) = store.survey().complete
    store.load(trainer, stored)
    manifest = read_manifest(stored.path)
    del manifest["reference_sha256"]
    with pytest.raises(CheckpointError, match="has no reference_sha256"):
        check_model(trainer, manifest, stored.path)
    assert trainer.reference_sha256 != trainer.adapted.base_sha256
    trainer.reference_sha256 = trainer.adapted.base_sha256
    with pytest.raises(CheckpointError, match="another reference policy"):
        store.load(trainer, stored)
    trainer.close()
    return log_probs


PROMPT = [5, 77, 300, 12, 8, 411, 90, 33, 250, 2]


def transformers_log_probs(model: Any) -> torch.Tensor:
    ids = torch.tensor(PROMPT)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1] / 0.9
    return logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.distributed.test_trainer_parity import VOCABULARY
    from tests.tiny_models import save_tiny_model

    folder = tmp_path_factory.mktemp("lora")
    prepare(str(folder), MOE, DENSE)
    save_tiny_model(folder / "other", MOE, vocab_size=VOCABULARY, layers=4, seed=1)
    return folder


@pytest.mark.distributed
def test_every_layout_is_resumed_by_one_process_and_other_bases_are_refused(folder: Path) -> None:
    check_resumed(folder, list(LAYOUTS))
    check_conversion_by_tool(folder)
    stored = next((folder / "EP2").glob("*/manifest.json"))
    assert len(json.loads(stored.read_text())["model"]["base_sha256"]) == 64
    weights = sum(p.stat().st_size for p in stored.parent.glob("*.distcp"))
    assert weights < (folder / MOE / "model.safetensors").stat().st_size


def check_resumed(folder: Path, cases: list[str]) -> None:
    """Assert that one process, resumed from the checkpoint of each layout, trains on as that layout does."""
    saved, *_ = run_ranks(f"{HERE}:save_worker", 2, str(folder), 2, cases)
    (resumed,) = run_ranks(f"{HERE}:resume_worker", 1, str(folder), cases)
    for name in cases:
        is_rough = "bf16" in name
        assert resumed[name] == pytest.approx(saved[name], rel=2e-2 if is_rough else 1e-5), name


@pytest.mark.distributed
@pytest.mark.slow
def test_adapters_of_delta_nets_are_resumed_and_converted(tmp_path: Path) -> None:
    """Each of two ranks holds three parts of B of a delta net's queries, keys and values."""
    from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
    from megatron_dppo.convert import __main__ as convert

    prepare(str(tmp_path), "qwen3_next", "qwen3_5_moe")
    check_resumed(tmp_path, list(SLOW_LAYOUTS))
    for name, (family, *_) in SLOW_LAYOUTS.items():
        (step_folder,) = (p.parent for p in (tmp_path / name).glob("*/manifest.json"))
        base, peft, merged = str(tmp_path / family), f"{step_folder} peft", f"{step_folder} merged"
        tool = ["adapters-to-peft", "--checkpoint", str(step_folder), "--out", peft, "--hf", base]
        assert convert.main(tool) == 0
        tool = ["merge-adapters", "--hf", base, "--adapters", peft, "--out", merged]
        assert convert.main(tool) == 0
        with open_checkpoint(merged) as reader, open_checkpoint(base) as plain:
            weight = MOVED_BY_FAMILY[family]
            assert not torch.equal(reader.read(weight), plain.read(weight))


def check_conversion_by_tool(folder: Path) -> None:
    """Assert that the tool converts and merges adapters of each kind of experts. It refuses other bases and routers."""
    from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
    from megatron_dppo.convert import __main__ as convert

    for name in ("EP2", "shared TP2 EP2", "TP2 ETP2 distributed optimizer"):
        (step_folder,) = (p.parent for p in (folder / name).glob("*/manifest.json"))
        base, peft = str(folder / MOE), str(folder / f"{name} peft")
        tool = ["adapters-to-peft", "--checkpoint", str(step_folder), "--out", peft, "--hf"]
        assert convert.main([*tool, str(folder / "other")]) == 2
        assert convert.main([*tool, base]) == 0
        merged = str(folder / f"{name} merged")
        tool = ["merge-adapters", "--hf", base, "--adapters", peft, "--out", merged]
        assert convert.main(tool) == 0
        with open_checkpoint(merged) as reader, open_checkpoint(base) as plain:
            for weight, changes in ((MOVED, True), (KEPT, False)):
                assert torch.equal(reader.read(weight), plain.read(weight)) is not changes
    (routers,) = (p.parent for p in (folder / "PP2 VPP2 router").glob("*/manifest.json"))
    tool = ["--checkpoint", str(routers), "--hf", base, "--out", str(folder / "routers")]
    assert convert.main(["adapters-to-peft", *tool]) == 2


MOVED, KEPT = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.gate.weight"
MOVED_BY_FAMILY = {
    MOE: MOVED,
    "qwen3_next": "model.layers.0.linear_attn.in_proj_qkvz.weight",
    "qwen3_5_moe": "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
}


@pytest.mark.distributed
def test_exports_are_loaded_by_transformers_and_peft(folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    log_probs = check_exports(folder, MOE)
    base = AutoModelForCausalLM.from_pretrained(folder / MOE)
    adapted = PeftModel.from_pretrained(base, folder / f"{MOE} peft")
    assert torch.allclose(transformers_log_probs(adapted), log_probs, atol=2e-5)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_exported_adapters_of_delta_nets_are_peft_s(tmp_path: Path, family: str) -> None:
    from tests.adapters import peft_model

    prepare(str(tmp_path), family)
    log_probs = check_exports(tmp_path, family)
    adapted, _ = peft_model(str(tmp_path / family), str(tmp_path / f"{family} peft"))
    assert torch.allclose(transformers_log_probs(adapted), log_probs, atol=2e-5)


def check_exports(folder: Path, family: str) -> torch.Tensor:
    """Return the log-probabilities of a trained policy of two ranks. Assert that its merged export gives them in
    transformers, and that the tool merges its adapters into the same weights."""
    from transformers import AutoModelForCausalLM

    from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
    from megatron_dppo.convert.merging import merge_adapters

    found, *_ = run_ranks(f"{HERE}:export_worker", 2, str(folder), family, 2)
    log_probs: torch.Tensor = found["log_probs"]
    merged = AutoModelForCausalLM.from_pretrained(folder / f"{family} merged")
    assert torch.allclose(transformers_log_probs(merged), log_probs, atol=2e-5)
    assert torch.allclose(found["reference"], log_probs, atol=1e-6)
    plain = transformers_log_probs(AutoModelForCausalLM.from_pretrained(folder / family))
    assert not torch.allclose(plain, log_probs, atol=1e-3)
    by_tool = folder / f"{family} by tool"
    merge_adapters(folder / family, folder / f"{family} peft", by_tool, lambda count: None)
    with open_checkpoint(by_tool) as reader:
        moved = reader.read(MOVED_BY_FAMILY[family])
        assert torch.allclose(moved, found["moved"], atol=1e-7)
    return log_probs
