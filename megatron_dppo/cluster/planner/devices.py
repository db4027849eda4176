"""Describe the machines of a plan: GPUs by name, with their makers' figures, and the units of the plan."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_dppo.system.gpus import PEAKS

GIB = 2**30
GB = 10**9
MIB = 2**20


def gib(count: float) -> str:
    """Format bytes of memory in GiB with one decimal, three decimals below 0.1 GiB, or in MiB below 0.001 GiB."""
    value = count / GIB
    if 0 < value < 0.001:
        return f"{count / MIB:.3f} MiB"
    if value >= 0.1 or not value:
        return f"{value:.1f} GiB"
    return f"{value:.3f} GiB"


def gb(count: float) -> str:
    """Format bytes of a transfer or of storage in GB."""
    value = count / GB
    if value >= 0.1 or not value:
        return f"{value:.1f} GB"
    return f"{value:.3f} GB"


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least ``count``; 0 for a ``count`` of 0."""
    return 1 << (count - 1).bit_length() if count else 0


@dataclass(frozen=True)
class Device:
    """A kind of GPU, and the nodes that it is usually in.

    Attributes:
        memory: bytes that nvidia-smi shows as total.
        flops: bf16 FLOP/s without sparsity.
        hbm: bytes/s of the GPU's memory.
        nvlink: bytes/s to the other GPUs of the node in one direction.
        network: bytes/s of the GPU's network port.
        host_memory: bytes of host memory of a node with eight GPUs.
        source: the documents that the figures are from.
    """

    name: str
    memory: int
    flops: float
    hbm: float
    nvlink: float
    network: float
    host_memory: int
    source: str


DEVICES: dict[str, Device] = {
    "a100": Device(
        "A100 SXM 80GB", 81_920 * MIB, PEAKS["A100"], 2039 * GB, 300 * GB, 25 * GB, 2000 * GB,
        "NVIDIA A100 datasheet (312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s both ways); DGX A100 640GB (200 Gb/s, 2 TB)",
    ),
    "h100": Device(
        "H100 SXM 80GB", 81_559 * MIB, PEAKS["H100"], 3350 * GB, 450 * GB, 50 * GB, 2000 * GB,
        "NVIDIA H100 datasheet (989 TFLOPS without sparsity, 3.35 TB/s, NVLink 900 GB/s); DGX H100 (400 Gb/s, 2 TB)",
    ),
    "h200": Device(
        "H200 SXM 141GB", 143_771 * MIB, PEAKS["H200"], 4800 * GB, 450 * GB, 50 * GB, 2000 * GB,
        "NVIDIA H200 datasheet (989 TFLOPS without sparsity, 4.8 TB/s, NVLink 900 GB/s); DGX H200 (400 Gb/s, 2 TB)",
    ),
    "b200": Device(
        "B200 SXM 180GB", 183_359 * MIB, PEAKS["B200"], 8000 * GB, 900 * GB, 50 * GB, 2000 * GB,
        "NVIDIA DGX B200 datasheet (sums of 8 GPUs: 18 PFLOPS bf16 without sparsity, 64 TB/s, NVLink 14.4 TB/s; "
        "400 Gb/s, 2 TB)",
    ),
    "a100-40gb": Device(
        "A100 SXM 40GB", 40_960 * MIB, PEAKS["A100"], 1555 * GB, 300 * GB, 25 * GB, 1000 * GB,
        "NVIDIA A100 datasheet (312 TFLOPS, 1,555 GB/s, NVLink 600 GB/s both ways); DGX A100 320GB (200 Gb/s, 1 TB)",
    ),
    "h100-pcie": Device(
        "H100 PCIe 80GB", 81_559 * MIB, PEAKS["H100 PCIe"], 2000 * GB, 64 * GB, 50 * GB, 2000 * GB,
        "NVIDIA H100 PCIe datasheet (756 TFLOPS without sparsity, 2 TB/s, PCIe 5.0 x16: NVLink joins only pairs); "
        "network and host as DGX H100's",
    ),
    "h100-nvl": Device(
        "H100 NVL 94GB", 95_830 * MIB, PEAKS["H100 NVL"], 3900 * GB, 64 * GB, 50 * GB, 2000 * GB,
        "NVIDIA H100 NVL datasheet (835 TFLOPS without sparsity, 3.9 TB/s, PCIe 5.0 x16: NVLink joins only pairs); "
        "network and host as DGX H100's",
    ),
    "h200-nvl": Device(
        "H200 NVL 141GB", 143_771 * MIB, PEAKS["H200 NVL"], 4800 * GB, 64 * GB, 50 * GB, 2000 * GB,
        "NVIDIA H200 NVL datasheet (835 TFLOPS without sparsity, 4.8 TB/s, PCIe 5.0 x16: NVLink joins two or four); "
        "network and host as DGX H200's",
    ),
}  # fmt: skip
"""GPUs by the name that ``--gpu`` accepts. The memory is the total that nvidia-smi shows for these boards."""

_BOARDS = {
    r"A100\b.*40GB": "a100-40gb",
    r"A100\b.*80GB": "a100",
    r"H100 PCIe": "h100-pcie",
    r"H100 NVL": "h100-nvl",
    r"H100\b.*80GB": "h100",
    r"H200 NVL": "h200-nvl",
    r"H200": "h200",
    r"B200": "b200",
}
"""Patterns of the names that drivers report, with the key of ``DEVICES``."""


def device_named(name: str) -> Device | None:
    """Return the GPU for the name that its driver reports, such as ``NVIDIA H100 80GB HBM3``.

    The result is None for a GPU that is not in the table: a GH200 is not an H200, and some A100s have 64 GB.
    """
    # The table has the more specific patterns first: an H100 PCIe has 80 GB, too.
    for pattern, board in _BOARDS.items():
        if re.search(rf"\b{pattern}\b", name, re.IGNORECASE):
            return DEVICES[board]
    return None


LINK_EFFICIENCY = 0.7
"""Share of NVLink's or the network's rate that collectives reach: an assumption. No collective overlaps computation."""
NETWORK_LATENCY = 5e-6
"""Seconds from one node to the next in a small collective. The value is NCCL's entry in the table ``hwLat`` for the
network, the tree algorithm and the protocol LL (``src/graph/tuning.cc``). ``--network-latency-us`` replaces the value.
"""

CONTEXT = GIB // 2
"""Bytes of a process's CUDA context, kernels and libraries (cuBLAS workspace included). Assumption: 0.3 to 0.6 GiB on
these boards."""
FRAGMENTATION = 0.05
"""Share of activations and working memory that torch's caching allocator loses to fragmentation. Assumption, with
expandable segments; see docs/planner.md."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of ``nodes`` nodes with ``gpus_per_node`` GPUs of one kind.

    ``host_memory``: bytes of each node, 0 for the device's default. ``network_latency``: seconds from one node to the
    next.
    """

    device: Device
    nodes: int
    gpus_per_node: int = 8
    host_memory: int = 0
    network_latency: float = NETWORK_LATENCY

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def node_memory(self) -> int:
        """Bytes of host memory of each node: ``host_memory``, or the device's default."""
        return self.host_memory or self.device.host_memory
