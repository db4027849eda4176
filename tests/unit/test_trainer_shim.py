"""The shim's rewriting of megatron's modules, in interpreters that see no CUDA."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.cpu import megatron_shim
from megatron_dppo.system import gpus
from megatron_dppo.system.toolkit import TORCH_LAYERS_VARIABLE
from megatron_dppo.trainer import platform
from tests.patience import run_patiently
from tests.ranks import run_ranks

SOURCE = """
def f():
    inner = lambda d='cuda': (d, {'cuda', 'other'}, 'torch.cuda.HalfTensor')
    return 'cuda', inner()
"""


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_literals_are_rewritten_at_any_depth() -> None:
    scope: dict[str, Any] = {}
    exec(megatron_shim._on_cpu(compile(SOURCE, "x", "exec")), scope)
    assert scope["f"]() == ("cpu", ("cpu", {"cpu", "other"}, "torch.HalfTensor"))


def plant_sglangs_deep_ep(folder: Path) -> None:
    """Write SGLang's package ``deep_ep``, whose import fails with an AssertionError, and its distribution's name."""
    (folder / "deep_ep.py").write_text("raise AssertionError('NCCL')\n")
    dist_info = folder / "sgl_deep_ep-0.1.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-deep-ep\nVersion: 0.1\n")


def worker() -> dict[str, bool]:
    import megatron_dppo.trainer

    assert megatron_dppo.trainer is not None
    from megatron.core.jit import jit_fuser, noop_decorator
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import attention
    from megatron.core.transformer.moe import fused_a2a, moe_utils

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("experts", 7)
    before = torch.get_rng_state()
    with tracker.fork("experts"):
        first = torch.rand(3)
    with tracker.fork("experts"):
        second = torch.rand(3)
    outside = torch.get_rng_state()
    torch.manual_seed(7)
    return {
        "a library that asks for a driver is left out": not attention.HAVE_FMLA,
        "a library that compares NCCL's files is left out": not fused_a2a.HAVE_DEEP_EP,
        "nothing is compiled": jit_fuser is noop_decorator,
        "modules come from the loader": type(moe_utils.__loader__) is megatron_shim._ShimLoader,
        "the device is the CPU": torch.cuda.current_device() == torch.device("cpu"),
        "tensors stay": torch.zeros(1).cuda().device.type == "cpu",
        "a fork leaves the default stream": torch.equal(before, outside),
        "a fork goes on where it was left": not torch.equal(first, second),
        "a fork is its own seed's stream": torch.equal(torch.rand(3), first),
    }


def test_megatron_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import works also beside SGLang's GPU packages flash_mla and deep_ep, which raise other errors than
    ImportError."""
    (tmp_path / "flash_mla.py").write_text("raise OSError('libcuda.so.1: cannot open')\n")
    plant_sglangs_deep_ep(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (results,) = run_ranks("tests.unit.test_trainer_shim:worker", 1, own_interpreter=True)
    assert results == dict.fromkeys(results, True)


def test_deep_ep_is_left_out_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_sglangs_deep_ep(tmp_path)
    script = (
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "import megatron_dppo.trainer\n"
        "try:\n"
        "    import deep_ep\n"
        "except ImportError:\n"
        "    print('left out')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    result = run_patiently([sys.executable, "-c", script])
    assert result.stdout.strip().endswith("left out"), result.stderr


def test_deep_ep_of_its_own_package_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_ep.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    assert gpus.has_megatrons_deep_ep()
    platform.leave_out_deep_ep()
    assert "deep_ep" not in sys.modules
    (tmp_path / "second").mkdir()
    plant_sglangs_deep_ep(tmp_path / "second")
    monkeypatch.syspath_prepend(tmp_path / "second")
    assert not gpus.has_megatrons_deep_ep()


def test_a_broken_transformer_engine_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudnn_graph.so.9')\n")
    script = (
        "import megatron_dppo.trainer\n"
        "from megatron_dppo.trainer import platform\n"
        "from megatron.core.models.gpt.gpt_model import GPTModel\n"
        "print('has it' if platform.has_transformer_engine() else 'left out')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv(TORCH_LAYERS_VARIABLE, "1")
    result = run_patiently([sys.executable, "-c", script], 300)
    assert result.stdout.strip() == "left out", result.stderr


def test_megatron_imported_before_is_an_error() -> None:
    script = (
        "import sys, types\n"
        "sys.modules['megatron'] = types.ModuleType('megatron')\n"
        "sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "import megatron_dppo.trainer\n"
    )
    result = run_patiently([sys.executable, "-c", script], 300)
    assert result.returncode == 1
    assert "RuntimeError: megatron.core " in result.stderr
