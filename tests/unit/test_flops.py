"""FLOPs of a forward pass, worked by hand from config.json."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.shape import TOKENS, SequenceCost, forward_flops

CONFIGS = Path(__file__).parents[2] / "examples" / "model_configs"


def test_a_mixture_of_experts():
    # h 2048, q 32 x 128 = 4096, k and v 4 x 128 = 512 each, 8 of 128 experts of 768, 48 layers:
    # attention 2*2048*5120 + 2*4096*2048 = 37,748,736; experts 6*2048*768*8 = 75,497,472; router
    # 2*2048*128 = 524,288; output 2*2048*151,936 = 622,329,856.
    cost = forward_flops(load_model_shape(CONFIGS / "qwen3-30b-a3b"))
    assert cost.linear == 48 * (37_748_736 + 75_497_472 + 524_288) + 622_329_856 == 6_083_313_664
    assert cost.quadratic == 2 * 4096 * 48 == 393_216


def test_a_dense_model():
    # h 4096, q 4096, k and v 1024 each, MLP 12,288, 36 layers.
    cost = forward_flops(load_model_shape(CONFIGS / "qwen3-8b-base"))
    attention = 2 * 4096 * (4096 + 2048) + 2 * 4096 * 4096
    assert cost.linear == 36 * (attention + 6 * 4096 * 12_288) + 2 * 4096 * 151_936
    assert cost.quadratic == 2 * 4096 * 36


def test_windows_of_attention():
    # h 2880, q 64 x 64 = 4096, k and v 8 x 64 = 512 each, 4 of 32 experts of 2880, 24 layers, of which 12 attend to
    # 128 tokens. These 12 have S * 128 pairs of a query and a key in place of S^2 / 2, with 2 * 4096 + 2 * 4096 each.
    cost = forward_flops(load_model_shape(CONFIGS / "gpt-oss-20b"))
    attention = 2 * 2880 * (4096 + 1024) + 2 * 4096 * 2880
    layer = attention + 6 * 2880 * 2880 * 4 + 2 * 2880 * 32
    assert cost.linear == 24 * layer + 2 * 2880 * 201_088 + 12 * 128 * 4 * 4096
    assert cost.quadratic == 2 * 4096 * 12


def test_a_sequence():
    assert SequenceCost(3.0, 0.5)(4) == 3 * 4 + 0.5 * 16
    assert TOKENS(7) == 7
