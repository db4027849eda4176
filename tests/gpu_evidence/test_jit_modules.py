"""SGLang's kernels that it compiles at a server's start compile for an H100 with this machine's toolkit, and load."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from megatron_dppo.system.toolkit import toolkit_home
from tests.gpu_evidence.jit_modules import MODULES
from tests.patience import run_patiently

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(toolkit_home(os.environ) is None, reason="no CUDA toolkit here"),
]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_built_for_an_h100(name: str, tmp_path: Path) -> None:
    done = run_patiently(
        [sys.executable, "-m", "tests.gpu_evidence.jit_modules", name, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    functions = json.loads(done.stdout.splitlines()[-1])
    assert functions == [True] * len(MODULES[name][2])
    (library,) = tmp_path.rglob("*.so")
    assert b"sm_90a" in library.read_bytes()
