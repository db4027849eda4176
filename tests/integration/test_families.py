"""Families other than the demo's: two steps of the whole loop with router replay, in both types of weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.demo.material import EXPORT_BOUNDS
from megatron_dppo.diagnostics.doctor.__main__ import main as doctor
from megatron_dppo.diagnostics.explain.__main__ import main as explain
from megatron_dppo.model.families import FAMILIES as FAMILY_TABLES
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.mapping import hf_tensors
from tests.integration.runs import TrainingRun, records_of, summary_of, write_material
from tests.tiny_models import R1_FORM, save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

FORMS: dict[str, tuple[str, dict[str, Any]]] = {"R1's form": ("deepseek_v3", R1_FORM)}
"""Case -> the family, and changes to its tiny model. Other cases are names of families."""
FAMILIES = [
    "olmoe",
    pytest.param("qwen2_moe", marks=pytest.mark.slow),
    pytest.param("glm4_moe", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", marks=pytest.mark.slow),
    pytest.param("R1's form", marks=pytest.mark.slow),
    pytest.param("glm4_moe_lite", marks=pytest.mark.slow),
    pytest.param("minimax_m2", marks=pytest.mark.slow),
    pytest.param("hy_v3", marks=pytest.mark.slow),
    pytest.param("qwen3_next", marks=pytest.mark.slow),
    pytest.param("qwen3_5_moe", marks=pytest.mark.slow),
    pytest.param("qwen3_5_moe_text", marks=pytest.mark.slow),
    pytest.param("gpt_oss", marks=pytest.mark.slow),
]
STEPS = 2
CARRIED = ("mtp.", "model.visual.")
"""Beginnings of the names of tensors that are only copied: not trained, and not sent."""
EXPERT_PARALLEL = ("parallel.tensor=1", "parallel.expert=2")
TENSOR_AND_EXPERT_PARALLEL = ("parallel.tensor=2", "parallel.expert=2")
ROUTER_BIASES = ("e_score_correction_bias", "mlp.expert_bias")
"""Ends of the names of constants in float32. Training does not move them."""
FLOAT32 = (*ROUTER_BIASES, "linear_attn.norm.weight")
"""Ends of the names of tensors that are float32 in a model of any type."""
BOUNDS = {
    "float32": {"gap": 1e-6, "agreement": 1.0, "export": EXPORT_BOUNDS["float32"]},
    # A token whose router chooses another expert in the export's library differs by tenths of a nat.
    "bfloat16": {"gap": 1e-3, "agreement": 0.95, "export": EXPORT_BOUNDS["bfloat16"]},
}
"""Weights' type -> bounds of mean |pi - mu|, of the share of equal routing and of the export's log-probabilities."""


def write_config(folder: Path, case: str) -> Path:
    """Write a tiny model of ``case`` and its data into ``folder``; return the configuration's path."""
    family, options = FORMS.get(case, (case, {}))
    return write_material(folder, family, **options)


def train(config: Path, directory: Path, *overrides: str) -> None:
    """Run the whole loop with router replay on two ranks until it ends."""
    settings = (
        f"run.directory={directory}", "data.evaluation={}", "evaluation.every=100", "rollout.router_replay=true",
        "reward.name=tests.unit.planted_rewards:even_length",
    )  # fmt: skip
    with TrainingRun(config, *settings, *overrides) as training:
        training.finish()


@pytest.fixture(scope="module", params=FAMILIES)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("family"), request.param)


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def run(request: pytest.FixtureRequest, config: Path) -> tuple[Path, str]:
    """The directory of a finished run, and its type of weights."""
    dtype, directory = request.param, config.parent / request.param
    overrides: tuple[str, ...] = (f"run.steps={STEPS}", f"model.dtype={dtype}", *EXPERT_PARALLEL)
    family = load_model_shape(config.parent / "model").family
    if dtype != "float32" and FAMILY_TABLES[family].engine_has_config_dtype:
        start = config.parent / f"model in {dtype}"
        save_tiny_model(start, family, seed=1, dtype=getattr(torch, dtype))
        overrides = (*overrides, f"model.hf_checkpoint={start}")
    train(config, directory, *overrides)
    return directory, dtype


def test_updates_are_verified_and_the_engine_agrees(run: tuple[Path, str]) -> None:
    directory, dtype = run
    bounds, summary = BOUNDS[dtype], summary_of(directory)
    assert summary["weight_updates"] == summary["weight_updates_verified"] == STEPS + 1
    assert summary["mean_abs_prob_gap"] <= bounds["gap"]
    assert summary["hf_export_max_logprob_diff"] <= bounds["export"]
    records = [record for record in records_of(directory) if record["step"] >= 1]
    assert len(records) == STEPS
    for record in records:
        assert record["r3/agreement_first"] >= bounds["agreement"]
        assert record["optimizer/grad_norm"] > 1e-3


@pytest.mark.parametrize("run", ["float32"], indirect=True)
def test_the_engines_log_probs_are_those_of_transformers(
    config: Path, run: tuple[Path, str]
) -> None:
    """Check every token of the first step's responses, with the weights that the run started with.

    Rounding to bfloat16 would hide small errors, so only runs in float32 are compared.
    """
    directory, _ = run
    compare_with_transformers(config.parent / "model", directory, 1)


def compare_with_transformers(model_folder: Path, directory: Path, step: int) -> None:
    """Assert that the engine's log-probabilities of the responses of ``step`` equal a float32 model's."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for trajectory in load_batch(directory / "rollouts", step):
        ids = torch.from_numpy(trajectory.token_ids.astype("int64"))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        log_probs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        expected = log_probs[-len(trajectory.response_ids) :]
        found = torch.tensor(trajectory.columns["rollout_log_probs"])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_export_has_the_tensors_of_the_start_and_all_moved(
    config: Path, run: tuple[Path, str]
) -> None:
    directory, dtype = run
    start, export = (
        load_file(folder / "model.safetensors")
        for folder in (config.parent / "model", directory / "hf")
    )
    assert {name: t.shape for name, t in start.items()} == {n: t.shape for n, t in export.items()}
    expected_dtype: Any = getattr(torch, dtype)
    carried = {name for name in start if name.startswith(CARRIED)}
    assert all(torch.equal(export[name], start[name]) for name in carried)
    for name in export.keys() - carried:
        tensor = export[name]
        assert tensor.dtype == (torch.float32 if name.endswith(FLOAT32) else expected_dtype)
    if dtype == "float32":
        unmoved = {name for name, tensor in start.items() if torch.equal(tensor, export[name])}
        assert unmoved == carried | {name for name in start if name.endswith(ROUTER_BIASES)}


def test_explain_and_the_doctor_find_nothing_wrong(run: tuple[Path, str]) -> None:
    """Both commands read the last step, because a checkpoint has its weights."""
    directory, _ = run
    figures = directory / "doctor.json"
    assert explain([str(directory), "--step", str(STEPS), "--rows", "0"]) == 0
    assert doctor([str(directory), "--step", str(STEPS), "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert {side["side"]: side["axis"] for side in found["sides"]} == {
        "engine": "healthy",
        "trainer": "healthy",
        "recording": "healthy",
    }
    assert found["findings"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "qwen2_moe",
        "olmoe",
        "glm4_moe",
        "deepseek_v3",
        "R1's form",
        "glm4_moe_lite",
        "minimax_m2",
        "hy_v3",
        "qwen3_next",
        "gpt_oss",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    ],
)
def test_a_run_is_resumed_in_another_layout(tmp_path: Path, case: str) -> None:
    """The first step runs with EP2. The second continues from its checkpoint with TP2 EP2, and with a server of two
    ranks if SGLang's model is right on two. The second step's responses are sampled with the first step's weights."""
    config = write_config(tmp_path, case)
    family = load_model_shape(tmp_path / "model").family
    server_ranks = min(2, FAMILY_TABLES[family].most_engine_ranks or 2)
    directory, after_one_step = tmp_path / "run", tmp_path / "after one step"
    train(config, directory, "run.steps=1", *EXPERT_PARALLEL)
    shutil.copytree(directory / "hf", after_one_step)
    server = f"sglang.tp_size={server_ranks}"
    train(config, directory, "run.steps=2", server, *TENSOR_AND_EXPERT_PARALLEL)
    compare_with_transformers(after_one_step, directory, 2)
    summary = summary_of(directory)
    # The first run sent versions 0 and 1, the second run sent versions 1 and 2.
    assert summary["weight_updates"] == summary["weight_updates_verified"] == 4
    assert summary["mean_abs_prob_gap"] <= BOUNDS["float32"]["gap"]
    assert summary["hf_export_max_logprob_diff"] <= BOUNDS["float32"]["export"]
    (record,) = (record for record in records_of(directory) if record["step"] == 2)
    assert record["r3/agreement_first"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "olmoe",
        "qwen2_moe",
        "glm4_moe",
        "deepseek_v3",
        "R1's form",
        "glm4_moe_lite",
        "minimax_m2",
        "hy_v3",
        "gpt_oss",
        "qwen3_next",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    ],
)
def test_adapters_train_and_are_sent_merged(tmp_path: Path, case: str) -> None:
    """All matrices have adapters. The engine agrees with the trainer, and the export is the base plus the adapters."""
    config = write_config(tmp_path, case)
    directory = tmp_path / "run"
    lora = ("lora.rank=4", "optimizer.lr=1e-2", f"run.steps={STEPS}")
    train(config, directory, *lora, *EXPERT_PARALLEL)
    summary = summary_of(directory)
    assert summary["weight_updates"] == summary["weight_updates_verified"] == STEPS + 1
    assert summary["mean_abs_prob_gap"] <= BOUNDS["float32"]["gap"]
    assert summary["hf_export_max_logprob_diff"] <= BOUNDS["float32"]["export"]
    base, export = model_tensors(tmp_path / "model"), model_tensors(directory / "hf")
    adapters = load_file(directory / "adapters" / "adapter_model.safetensors")
    adapted = set()
    for name, a in adapters.items():
        if name.endswith(".lora_A.weight"):
            matrix = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = adapters[name.replace(".lora_A.", ".lora_B.")]
            merged = base[f"{matrix}.weight"] + 2.0 * b @ a
            torch.testing.assert_close(export[f"{matrix}.weight"], merged, atol=1e-6, rtol=0)
            adapted.add(f"{matrix}.weight")
    linears = {name for name, t in base.items() if t.dim() == 2 and "_proj" in name}
    if case == "gpt_oss":
        linears = {name for name in linears if ".experts." not in name}
    # MiniMax-M2 has other names of its experts' matrices.
    linears |= {name for name in base if name.endswith((".w1.weight", ".w2.weight", ".w3.weight"))}
    assert adapted == linears
    moved = {name for name in base if not torch.equal(base[name], export[name])}
    assert moved <= linears
    # An expert that has had no token keeps its weights.
    assert all(".experts." in name for name in linears - moved)


def model_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the model in ``folder`` that are trained or constants, and each expert's by its own name,
    also if the file has all experts of a layer in one tensor."""
    with open_checkpoint(folder) as reader:
        return {name: reader.read(name) for name in hf_tensors(load_model_shape(folder))}
