"""Verifiable rewards: one function a file, the table of them, and the verifier that bounds their
time.
"""

from megatron_dppo.rewards.registry import REWARDS, Reward, RewardFunction, find_reward
from megatron_dppo.rewards.verifier import Score, Verifier, VerifierError

__all__ = [
    "REWARDS",
    "Reward",
    "RewardFunction",
    "Score",
    "Verifier",
    "VerifierError",
    "find_reward",
]
