"""transformers computes log pi of exactly those tokens that are sampled according to the trajectory."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.trainer.run_export import transformers_log_probs
from tests.tiny_models import save_tiny_model


def test_a_turn_of_an_environment_is_context_and_not_compared(tmp_path):
    """Two sampled turns of two tokens, with a turn of the environment between them."""
    folder = save_tiny_model(tmp_path / "hf", "qwen2", hidden=16, layers=1)
    ids = [20, 21, 30, 31, 40, 41, 42, 32, 33]
    mask = np.isin(np.arange(9), [2, 3, 7, 8])
    turns = Trajectory(0, 0, np.array(ids, np.int32), mask)
    whole = Trajectory.of_response(ids[:2], ids[2:])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([ids])).logits[0] / 0.5, -1)
    expected = {i: float(table[i - 1, ids[i]]) for i in range(1, 9)}
    of_turns, of_whole = transformers_log_probs(folder, [turns, whole], 0.5)
    assert of_turns.tolist() == pytest.approx([expected[i] for i in (2, 3, 7, 8)], abs=1e-5)
    assert of_whole.tolist() == pytest.approx([expected[i] for i in range(2, 9)], abs=1e-5)
