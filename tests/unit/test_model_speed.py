"""The model's FLOPs in a second, and their share of a GPU's peak."""

import pytest

from megatron_dppo.loop.learning import arithmetic_speed
from megatron_dppo.metrics import table as names
from megatron_dppo.system.gpus import TERA, peak_flops
from megatron_dppo.trainer import platform


def test_speed_worked_by_hand():
    # 8 ranks take 5 s for 3.2e16 FLOPs: 800 TFLOP/s each, 4/5 of a peak of 1000
    speed = arithmetic_speed(3.2e16, 5.0, 8, 1000 * TERA)
    assert speed == {names.TFLOPS: pytest.approx(800.0), names.MFU: pytest.approx(0.8)}


def test_without_a_peak_there_is_no_share():
    assert arithmetic_speed(1e12, 2.0, 1, None) == {names.TFLOPS: 0.5}
    assert platform.peak_flops() is None


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA H20", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_the_drivers_names(name, tera):
    assert peak_flops(name) == (None if tera is None else tera * TERA)
