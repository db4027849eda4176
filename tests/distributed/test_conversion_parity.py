"""Converted weights are the same model: transformers' own log-probabilities against the Megatron trainer's.

The trainer loads the offline converter's checkpoint, and exports Hugging Face's form again: the
log-probabilities agree within 2e-5 in fp32, and the exported tensors are byte-identical.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.layouts import sizes_of
from tests.ranks import run_ranks
from tests.small_config import small_config
from tests.tiny_models import LLAMA3_ROPE, R1_FORM

TOLERANCE = 2e-5
VOCABULARY = 515  # padded under tensor parallelism
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"layers": 4}),
    "qwen3_moe without renormalisation": ("qwen3_moe", {"norm_topk_prob": False}),
    "olmoe": ("olmoe", {"layers": 4}),
    "qwen2_moe": ("qwen2_moe", {"layers": 4}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tied": True}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tied": True}),
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama tied": ("llama", {"tied": True}),
}
SLOW_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("glm4_moe", {"layers": 4}),
    "glm4_moe without norms of heads": ("glm4_moe", {"use_qk_norm": False}),
    "latent attention": ("deepseek_v3", {"layers": 4}),
    "latent of queries, YaRN, groups": ("deepseek_v3", {"layers": 4, **R1_FORM}),
    "glm4_moe_lite": ("glm4_moe_lite", {"layers": 4}),
    "minimax_m2": ("minimax_m2", {"layers": 4}),
    "hy_v3": ("hy_v3", {"layers": 4}),
    "qwen3_next": ("qwen3_next", {"layers": 4}),
    "qwen3_5_moe": ("qwen3_5_moe", {"layers": 4}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {"layers": 4}),
    "gpt_oss": ("gpt_oss", {"layers": 4}),
}
ALL_FAMILIES = FAMILIES | SLOW_FAMILIES
_DENSE_FAMILIES = ("qwen3", "qwen2", "llama")
DENSE_LAYOUTS = ["TP2", "PP2", "CP2"]
MOE_LAYOUTS = ["TP2 ETP2", "PP2", "PP2 VPP2", "EP2", "TP2 EP2", "CP2 EP2"]
_WITHOUT_CONTEXT_PARALLELISM = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families with delta nets. Megatron-Core does not divide a sequence of a delta net among ranks."""


def sequences() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (40, 7, 23)]


def layouts_of(case: str) -> list[str]:
    family, options = ALL_FAMILIES[case]
    left_out = []
    if family == "gpt_oss":
        # Experts with biases are not divided.
        left_out.append("ETP")
    if options.get("layers", 2) < 4:
        left_out.append("VPP")
    if family in _WITHOUT_CONTEXT_PARALLELISM:
        left_out.append("CP")
    layouts = DENSE_LAYOUTS if family in _DENSE_FAMILIES else MOE_LAYOUTS
    return [name for name in layouts if not any(kind in name for kind in left_out)]


def prepare(folder: str, cases: list[str]) -> dict[str, list[torch.Tensor]]:
    """Make and convert every model. Return transformers' log-probabilities of every next token."""
    from transformers import AutoModelForCausalLM

    from megatron_dppo.convert.streaming import hf_to_megatron
    from tests.tiny_models import save_tiny_model

    expected = {}
    for case in cases:
        family, options = ALL_FAMILIES[case]
        hf = save_tiny_model(Path(folder) / case, family, vocab_size=VOCABULARY, **options)
        hf_to_megatron(hf, Path(folder) / f"{case} megatron")
        model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
        expected[case] = []
        for ids in sequences():
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, :-1].double()
            picked = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            expected[case].append(picked.float())
    return expected


def trainer_log_probs(folder: str, cases: list[str]) -> dict[str, list[torch.Tensor]]:
    """Export each model again. Return ``case/layout`` -> the trainer's log-probabilities of the same tokens."""
    from megatron_dppo.data.packing import pack
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.trainer.trainer import Trainer

    samples = [Trajectory.of_response(ids[:1], ids[1:]) for ids in sequences()]
    out = {}
    for case in cases:
        for name in layouts_of(case):
            parallel = {"world_size": 2, **sizes_of(name)}
            trainer = Trainer.read(
                small_config(Path("unused"), Path(folder, f"{case} megatron"), parallel=parallel)
            )
            batch = pack(
                samples,
                pad_multiple=trainer.pad_multiple,
                sequence_multiple=trainer.share.sequence_multiple,
            )
            (log_probs, *_) = trainer.log_probs([batch] * trainer.micro_batch_multiple)
            starts = batch.cu_seqlens.tolist()
            out[f"{case}/{name}"] = [
                log_probs[a : a + len(ids) - 1] for a, ids in zip(starts, sequences(), strict=False)
            ]
            trainer.export_hf(f"{folder}/{case} {name} export")
            trainer.close()
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Path(tmp_path_factory.mktemp("conversion"))


@pytest.fixture(scope="module")
def log_probs_of_both(folder) -> tuple[dict, dict]:
    return compute_log_probs(folder, list(FAMILIES))


def compute_log_probs(folder: Path, cases: list[str]) -> tuple[dict, dict]:
    """Return transformers' and the trainer's log-probabilities. Assert that both ranks of the trainer agree."""
    worker = "tests.distributed.test_conversion_parity:"
    (expected,) = run_ranks(worker + "prepare", 1, str(folder), cases)
    first, second = run_ranks(worker + "trainer_log_probs", 2, str(folder), cases, timeout=600)
    for case, found in first.items():
        for a, b in zip(found, second[case], strict=True):
            assert torch.equal(a, b), case
    return expected, first


@pytest.mark.distributed
@pytest.mark.parametrize("case", FAMILIES)
def test_the_trainer_computes_what_transformers_computes(log_probs_of_both, folder, case):
    compare(log_probs_of_both, folder, case)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_FAMILIES)
def test_the_trainer_computes_further_forms_of_families(tmp_path, case):
    compare(compute_log_probs(tmp_path, [case]), tmp_path, case)


def compare(log_probs_of_both: tuple[dict, dict], folder: Path, case: str) -> None:
    """Assert equal log-probabilities in every layout, and exports of the same bytes."""
    from safetensors.torch import load_file

    expected, found = log_probs_of_both
    original = load_file(folder / case / "model.safetensors")
    for name in layouts_of(case):
        for a, b in zip(found[f"{case}/{name}"], expected[case], strict=True):
            assert a.shape == b.shape
            assert (a - b).abs().max() <= TOLERANCE, name
        back = load_file(folder / f"{case} {name} export" / "model.safetensors")
        assert back.keys() == original.keys()
        assert all(torch.equal(back[k], original[k]) for k in original), name


@pytest.mark.distributed
def test_the_models_are_sharp_enough_to_show_a_mistake(log_probs_of_both):
    """Log-probabilities spread over many nats, far above the tolerance."""
    expected, _ = log_probs_of_both
    for case in FAMILIES:
        assert torch.cat(expected[case]).std() > 0.2, case
