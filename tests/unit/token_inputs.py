"""``TokenInputs`` from plain probabilities, for tests that are worked by hand."""

import torch

from megatron_dppo.algorithms.inputs import TokenInputs


def inputs(pi, mu, advantages, *, recomputed=None, loss_mask=None, dtype=torch.float64, **more):
    """Return inputs from lists of the sampled tokens' probabilities. ``log_probs`` is a leaf that needs a gradient."""

    def log(p):
        return torch.tensor(p, dtype=dtype).log()

    return TokenInputs(
        log_probs=log(pi).requires_grad_(),
        rollout_log_probs=log(mu),
        advantages=torch.tensor(advantages, dtype=dtype),
        loss_mask=torch.tensor([True] * len(pi) if loss_mask is None else loss_mask),
        recomputed_log_probs=None if recomputed is None else log(recomputed),
        **more,
    )
