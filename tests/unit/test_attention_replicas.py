"""Padded rows of an engine's batch: a replica with fewer requests than another replica has them."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from megatron_dppo.cpu.engine import attention_replicas


def test_a_padded_row_reads_the_first_slot_and_nothing_else() -> None:
    """SGLang pads the numbers of requests with 0, and the lengths of sequences with the length of a padded row."""
    torch.manual_seed(0)
    backend = object.__new__(TorchNativeAttnBackend)
    length = attention_replicas.padded_length(backend)
    keys, values = torch.randn(8, 1, 4), torch.randn(8, 1, 4)
    # Slot 0 is no request's. Request 0 does not exist, so that its row has old slots of other requests.
    slots = torch.tensor([[0, 3, 4], [5, 6, 7]])
    query = torch.randn(3, 1, 4)
    output = backend._run_sdpa_forward_decode(
        query, torch.full_like(query, torch.nan), keys, values, slots,
        torch.tensor([1, 0, 0]), torch.tensor([3, length, length]),
    )  # fmt: skip
    assert torch.equal(output[1:], values[[0, 0]])
    scores = torch.einsum("d,sd->s", query[0, 0], keys[5:, 0]) / 2
    expected = scores.softmax(0) @ values[5:, 0]
    torch.testing.assert_close(output[0, 0], expected)
