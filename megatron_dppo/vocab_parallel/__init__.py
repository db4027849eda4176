"""Per-token statistics of the policy from vocab-parallel logits: log-probabilities, Top-K, entropy,
and their gradient.
"""

from megatron_dppo.vocab_parallel.policy_stats import PolicyStats, policy_stats

__all__ = ["PolicyStats", "policy_stats"]
