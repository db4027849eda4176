"""The frequency canary: whether the engine samples tokens as often as their log-probabilities say."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from megatron_dppo.algorithms.token_metrics import LONGEST_SURPRISE
from megatron_dppo.config.schema import AlgorithmConfig, RolloutConfig
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.sums import FREQUENCY_SUMS
from megatron_dppo.system.errors import RunError

log = logging.getLogger(__name__)


class FrequencyError(RunError):
    """Tokens were not sampled from the distribution that trainer and engine both compute."""


LARGEST_EVIDENCE = 6.0
"""Log10 of the evidence at which a run stops. At most one healthy run in a million stops, however long the runs are."""
_FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
"""The values of a, the parameter of the test (``FrequencyCanary``).

Small values notice a small bias over many tokens, large values notice a large bias over few tokens.
"""
_SIDES = {"more": FREQUENCY_SUMS[:2], "less": FREQUENCY_SUMS[2:]}
"""Whether tokens are "more" or "less" surprising than mu predicts -> names of two sums (see ``FrequencyCanary``)."""


class FrequencyCanary:
    """Tests whether sampled tokens are as frequent as mu, the engine's reported distribution, predicts.

    The test is a martingale over all tokens since the ranks started. ``token_metrics._surprise`` computes two numbers
    xi for each token, one for each side. ``_SIDES`` has the names of their sums: of xi, and of xi^2. Each xi is at
    least -c, with c = LONGEST_SURPRISE. If a token is drawn from mu, the mean of xi is at most 0. For 0 <= a < 1 (Fan,
    Grama and Liu, 2015),

        exp(a xi / c - psi(a) xi^2 / c^2) <= 1 + a xi / c,    psi(a) = -log(1 - a) - a.

    The right-hand side has a mean of at most 1. So the product over tokens, exp(a sum xi / c - psi(a) sum xi^2 / c^2),
    is a nonnegative supermartingale that begins at 1. The evidence is the mean of these products over both sides and
    the values of a in ``_FRACTIONS``. So the evidence is a supermartingale too. The probability that it ever reaches
    10^6 is at most 10^-6 (Ville), without an assumption on lengths, on the spread of surprises or on the number of
    checks.

    The test skips batches that are selected by rewards or lengths (``rollout.drop_zero_variance_groups``,
    ``algorithm.truncated_responses: drop``), because their tokens are not distributed as mu. For a replayed batch, and
    for tokens that other weights sampled (``at_equal_weights`` False), it only warns. With other weights, r = pi / mu
    may be large at a rare token. ``_surprise`` subtracts |1 - r| |log pi|, so xi would be far below -c and is raised to
    -c. This raises the mean of xi. The mean may be positive even though the tokens were drawn from mu.
    """

    def __init__(
        self, rollout: RolloutConfig, algorithm: AlgorithmConfig, *, at_equal_weights: bool = True
    ) -> None:
        drops_responses = algorithm.truncated_responses == "drop"
        self._is_filtered = rollout.drop_zero_variance_groups or drops_responses
        self._stops_run = not rollout.replays and at_equal_weights
        self._sums = dict.fromkeys(FREQUENCY_SUMS, 0.0)
        self._tokens = 0.0
        self._has_warned = False

    def check(self, sums: Mapping[str, float]) -> None:
        """Add a mini-batch's sums before training on it. Raises FrequencyError, on every rank."""
        has_sums = self._sums.keys() <= sums.keys()
        if self._is_filtered or not has_sums:
            return
        for name in FREQUENCY_SUMS:
            self._sums[name] += float(sums[name])
        self._tokens += float(sums[metric_names.TRAINED_TOKENS])
        if self.evidence < LARGEST_EVIDENCE:
            return
        # The message names the side with the larger sum.
        surprise_of_side = {side: self._sums[name] for side, (name, _) in _SIDES.items()}
        side = max(surprise_of_side, key=surprise_of_side.__getitem__)
        mean_surprise = surprise_of_side[side] / self._tokens
        message = (
            f"sampled tokens are {mean_surprise:.3g} nats {side} surprising than they should be under the "
            f"distribution that trainer and engine report, mean of {self._tokens:.0f} tokens; the evidence is "
            f"10^{self.evidence:.1f}, expected below 10^{LARGEST_EVIDENCE:g}"
        )
        if self._stops_run:
            raise FrequencyError(
                f"{message}; the last mini-batch was not trained on. Likely causes: a temperature that is missing in "
                "both log-probabilities, or top-p or top-k in the sampler; see docs/replay.md"
            )
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s", message)

    @property
    def evidence(self) -> float:
        """The log10 of the evidence. The evidence is the mean over sides and values of a."""
        c = LONGEST_SURPRISE
        exponents: list[float] = []
        for surprise_name, square_name in _SIDES.values():
            surprise = self._sums[surprise_name]
            square = self._sums[square_name]
            for a in _FRACTIONS:
                minus_psi = math.log1p(-a) + a
                exponents.append(a * surprise / c + minus_psi * square / c**2)
        # Subtract the largest exponent first, so that every exponential is at most 1.
        largest_exponent = max(exponents)
        mean_exponential = sum(math.exp(e - largest_exponent) for e in exponents) / len(exponents)
        return (largest_exponent + math.log(mean_exponential)) / math.log(10)

    def figures(self) -> dict[str, float]:
        if self._tokens:
            return {metric_names.FREQUENCY_EVIDENCE: self.evidence}
        return {}
