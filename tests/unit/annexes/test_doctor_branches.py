"""The doctor's reference model on responses of several branches."""

import torch

from megatron_dppo.diagnostics.doctor.reference import Reference
from megatron_dppo.trainer.run_export import examples_of
from tests.tiny_models import save_tiny_model
from tests.unit.test_branches import FIRST, SECOND, V, joined


def test_other_models_read_each_branch_alone(tmp_path):
    """The doctor, explain and the check of an export compare with this model."""
    folder = save_tiny_model(tmp_path / "model", vocab_size=V, dtype=torch.float32)
    t = joined()
    reference = Reference(folder)
    alone = [b for branch in (FIRST, SECOND) for b in reference.sampled_logits([branch])]
    (together,) = reference.sampled_logits([t])
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)
    whole = reference.logits(t)
    assert whole.shape == (11, V)
    # The rows that predict 3 and 4, 7 and 10.
    torch.testing.assert_close(whole[[1, 2, 5, 9]], together, rtol=1e-5, atol=1e-5)
    assert examples_of({0: t}) == [(0, FIRST.token_ids.tolist(), FIRST.loss_mask.tolist())]
