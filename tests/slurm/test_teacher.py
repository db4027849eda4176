"""A real teacher on a node of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.data.batch_file import load_batch
from tests.integration.runs import records_of
from tests.slurm.runs import SlurmRun
from tests.tiny_models import save_tiny_model
from tools.slurm_cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_its_scores_of_the_saved_responses_are_its_own(cluster: Cluster, folder: Path) -> None:
    teacher = save_tiny_model(folder / "teacher", "qwen3", seed=9)
    overrides = (
        f"distillation.teachers={{big: {{hf_checkpoint: {teacher}}}}}",
        "distillation.loss=reverse",
        "distillation.top_k=5",
        "distillation.rewards=false",
    )
    run = SlurmRun(cluster, folder, "run.steps=1", *overrides).submit()
    assert run.wait_for_end()["JobState"] == "COMPLETED", run.log
    assert f"{cluster.nodes[3]}  teacher-big-0" in run.log
    record = records_of(run.directory)[1]
    assert record["loss/mean"] > 0.01
    # In so small a step the mask leaves out no token, so the divergence is the whole loss.
    assert record["loss/mean"] == pytest.approx(record["distillation/distance"], rel=1e-5)
    reference = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    for response in load_batch(run.directory / "rollouts", 1)[::8]:
        tokens = torch.tensor(response.token_ids, dtype=torch.long)
        with torch.no_grad():
            log_probs = torch.log_softmax(reference(tokens[None]).logits[0, :-1], dim=-1)
        expected = log_probs.gather(1, tokens[1:, None])[len(response.prompt_ids) - 1 :, 0]
        assert response.column("teacher_log_probs").tolist() == pytest.approx(
            expected.tolist(), abs=1e-5
        )
