"""The most often masked tokens: counts worked by hand."""

import json
from pathlib import Path

import pytest
import torch

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.metrics.masked_tokens import (
    MaskedResponses,
    MaskedTokenCounts,
    most_masked,
    read_masked_tokens,
)
from megatron_dppo.metrics.records import RecordsError, StepLines


def test_counts_by_sign_over_micro_batches() -> None:
    counts = MaskedTokenCounts(vocab_size=6)
    blocked = torch.tensor([True, True, False, True, True])
    counts.add(torch.tensor([3, 3, 3, 5, 1]), torch.tensor([1.0, -1.0, 1.0, 2.0, 0.0]), blocked)
    counts.add(torch.tensor([5, 2]), torch.tensor([1.0, -2.0]), torch.tensor([True, True]))
    assert counts.counts is not None
    assert most_masked(counts.counts) == [
        {"id": 3, "raised": 1, "lowered": 1},
        {"id": 5, "raised": 2, "lowered": 0},
        {"id": 2, "raised": 0, "lowered": 1},
    ]
    # One id of each sign: 5 at A > 0, and 2 at A < 0, where 3 has the same count.
    assert [t["id"] for t in most_masked(counts.counts, limit=1)] == [5, 2]
    counts.clear()
    assert most_masked(counts.counts) == []


def test_a_line_has_the_fifty_most_masked_tokens_of_each_sign() -> None:
    counts = torch.zeros(2, 200, dtype=torch.int32)
    counts[0, :60] = torch.arange(200, 140, -1)
    counts[1, 100:160] = torch.arange(60, 0, -1)
    ids = [t["id"] for t in most_masked(counts)]
    assert ids == [*range(50), *range(100, 150)]


def test_the_loss_says_what_its_mask_blocked() -> None:
    pi, mu = torch.tensor([0.9, 0.9, 0.1, 0.9]), torch.tensor([0.5, 0.5, 0.5, 0.5])
    inputs = TokenInputs(
        log_probs=pi.log().requires_grad_(),
        rollout_log_probs=mu.log(),
        advantages=torch.tensor([1.0, -1.0, -1.0, 1.0]),
        loss_mask=torch.tensor([True, True, True, False]),
    )
    blocked = policy_loss(build_algorithm("dppo-binary-tv", {}), inputs).blocked
    # TV is 0.4 > 0.15. Tokens that move away from mu are blocked, for either sign of A. The token that moves towards
    # mu trains. A token outside the loss mask does not count as blocked.
    assert blocked is not None
    assert blocked.tolist() == [True, False, True, False]


def test_blocked_tokens_are_counted_by_response() -> None:
    # The first micro-batch has sequences of 3 and 2 tokens, and 2 tokens of padding. The second has one sequence.
    masked = MaskedResponses()
    masked.add(
        torch.tensor([7, 4, -1]),
        torch.tensor([0, 3, 5, 7], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 0.0, -1.0, -1.0, 1.0, 1.0]),
        torch.tensor([True, True, True, False, True, True, True]),
    )
    masked.add(
        torch.tensor([2]),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([1.0, 1.0]),
        torch.tensor([False, False]),
    )
    assert masked.counts() == {7: 2, 4: 1}  # A = 0 doesn't count, nor does padding


def test_a_resumed_run_drops_the_lines_that_it_will_write_again(tmp_path: Path) -> None:
    path = tmp_path / "masked_tokens.jsonl"
    file = StepLines(path, 0)
    for step in (1, 2, 3):
        file.write([{"step": step, "tokens": [{"id": step, "raised": 1, "lowered": 0}]}])
    path.write_text(path.read_text() + '{"step": 4, "tok')
    StepLines(path, 3).write([{"step": 3, "tokens": []}])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert read_masked_tokens(tmp_path, 2) == [{"id": 2, "raised": 1, "lowered": 0}]
    assert read_masked_tokens(tmp_path, 3) == []
    assert read_masked_tokens(tmp_path, 4) is None


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "masked_tokens.jsonl"
    path.write_text('{"step": 1, "tokens": []}\nnonsense\n')
    with pytest.raises(RecordsError, match="line 2"):
        StepLines(path, 2)
