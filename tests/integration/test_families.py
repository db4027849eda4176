"""Families beside the demo's: two steps of the whole loop with router replay, in both types of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.demo.material import EXPORT_BOUNDS
from tests.integration.runs import ROOT, TrainingRun, records_of, summary_of, write_material

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

COIN = '''"""A reward that a random policy earns every other time, so that there is something to learn from."""


def even_length(response: str, answer: str) -> float:
    """1 where the response's number of characters is even."""
    return float(len(response) % 2 == 0)
'''
FAMILIES = [
    "olmoe",
    pytest.param("qwen2_moe", marks=pytest.mark.slow),
    pytest.param("glm4_moe", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", marks=pytest.mark.slow),
    pytest.param("glm4_moe_lite", marks=pytest.mark.slow),
    pytest.param("qwen3_next", marks=pytest.mark.slow),
]
STEPS = 2
ROUTER_BIAS = "e_score_correction_bias"
"""A constant of the model in float32, which training does not move."""
FLOAT32 = (ROUTER_BIAS, "linear_attn.norm.weight")
"""Ends of the names of tensors that are float32 in a model of any type."""
BOUNDS = {
    "float32": {"gap": 1e-6, "agreement": 1.0, "export": EXPORT_BOUNDS["float32"]},
    # A token whose router chooses another expert in the export's library differs by tenths of a nat.
    "bfloat16": {"gap": 1e-3, "agreement": 0.95, "export": EXPORT_BOUNDS["bfloat16"]},
}
"""Weights' type -> bounds of mean |pi - mu|, of the share of equal routing and of the export's log-probabilities."""


@pytest.fixture(scope="module", params=FAMILIES)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "coin.py").write_text(COIN)
    return write_material(folder, request.param)


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def run(request: pytest.FixtureRequest, config: Path) -> tuple[Path, str]:
    """The directory of a finished run, and its type of weights."""
    dtype, directory = request.param, config.parent / request.param
    overrides = (
        f"run.directory={directory}", f"run.steps={STEPS}", f"model.dtype={dtype}", "data.evaluation={}",
        "evaluation.every=100", "rollout.router_replay=true", "parallel.tensor=1", "parallel.expert=2",
        "reward.name=coin:even_length",
    )  # fmt: skip
    variables = {"PYTHONPATH": f"{ROOT}:{config.parent}"}
    with TrainingRun(config, *overrides, variables=variables) as training:
        training.finish()
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


def test_the_engines_log_probs_are_those_of_transformers(
    config: Path, run: tuple[Path, str]
) -> None:
    """Of every token that the first step's responses have, under the weights that the run started with."""
    directory, dtype = run
    if dtype != "float32":
        pytest.skip("rounding to bfloat16 hides small errors")
    model = AutoModelForCausalLM.from_pretrained(config.parent / "model", dtype=torch.float32)
    for trajectory in load_batch(directory / "rollouts", 1):
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
    for name, tensor in export.items():
        assert tensor.dtype == (torch.float32 if name.endswith(FLOAT32) else expected_dtype)
    if dtype == "float32":
        unmoved = {name for name, tensor in start.items() if torch.equal(tensor, export[name])}
        assert unmoved == {name for name in start if name.endswith(ROUTER_BIAS)}
