"""Verifiers of rewards for tests: one response a call, and one attempt."""

from typing import Any

from megatron_dppo.config.data_schema import RewardTerm
from megatron_dppo.rewards.verifier import Verifier


def verifier_of(name: str, timeout_s: float = 60.0, workers: int = 1, **settings: Any) -> Verifier:
    """Return the verifier of a reward with ``settings``, further fields of RewardTerm."""
    once = {"batch_size": 1, "attempts": 1}
    term = {"name": name, "timeout_s": timeout_s, "workers": workers, **once, **settings}
    return Verifier(RewardTerm(**term))
