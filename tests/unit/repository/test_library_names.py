"""The names of SGLang and Megatron-Core that the package relies on, against the installed versions."""

import sys

import pytest

from tests.patience import run_patiently
from tests.ranks import ROOT
from tools.library_names import UncheckedError, fault_of, names_in, names_of_package

SOURCE = """
import megatron.core.parallel_state
from sglang.srt import server_args as arguments

HOOKED = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
KEY = "sglang.tp_size"
"""


def test_imports_and_targets_of_hooks_are_names_and_keys_of_the_configuration_are_not(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    assert set(names_in(path)) == {
        "megatron.core.parallel_state",
        "sglang.srt.server_args",
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
    }


def test_the_package_s_hooks_are_among_its_names():
    files = names_of_package()["sglang.srt.model_executor.model_runner.ModelRunner.load_model"]
    assert "megatron_dppo/cpu/engine/platform.py" in files


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("megatron.core.parallel_state.initialize_model_parallel", None),
        ("megatron.core.parallel_state.no_such_function", "megatron.core.parallel_state has no"),
        ("megatron.core.no_such_module.function", "megatron.core has no no_such_module.function"),
    ],
)
def test_a_name_that_a_version_lacks_is_told(name, fault):
    found = fault_of(name)
    assert found is None if fault is None else found.startswith(fault)


def test_a_module_that_needs_a_missing_package_is_not_judged(tmp_path, monkeypatch):
    package = tmp_path / "sglang_like"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_kernels\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UncheckedError, match="no_such_kernels"):
        fault_of("sglang_like.kernel")


def test_the_installed_versions_have_every_name():
    command = [sys.executable, "tools/library_names.py"]
    done = run_patiently(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert " 0 are not" in done.stdout
