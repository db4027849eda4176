"""The architecture's rules about imports, checked in the syntax tree of every module."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_dppo"

LAYERS = (  # from the ground up; a module may import its own package and everything below
    {"logging"},
    {"system"},
    {"tensor_hash"},
    {"model"},
    {"block_fp8"},
    {"metrics"},
    {"algorithms", "vocab_parallel"},
    {"config"},
    {"spec"},
    {"data"},
    {"rewards"},
    {"checkpoint_conversion"},
    {"engine"},
    {"environments"},
    {"fleet", "trainer", "weights"},
    {"agents", "convert", "cpu"},
    {"families"},
    {"launch", "loop"},
    {"own_fleet"},
    {"train", "supervised", "evaluate", "rollout"},
    {"demo"},
    {"__main__"},
    {"cluster"},
    {"diagnostics"},
)
ANNEXES = {"cluster", "diagnostics"}
"""Folders that no module outside them imports, so that the core works without them."""
PLUGINS = {"agents", "convert", "cpu", "families"}
"""Folders whose parts are found by entry points, as the parts of other packages are."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
OWNERS = {
    "megatron": ("trainer", "cpu"),
    "sglang": ("engine", "weights/server", "cpu/engine"),
    "smg": ("fleet",),
}
"""Folders that import a library."""
FILES_OF_FAMILIES = {"megatron": "trainer.py", "sglang": "cpu_engine.py"}
"""Files of a family that import a library, too: its layers, and its parts of an engine on a CPU."""
PEERS = "diagnostics/mask_benchmark/contenders.py"
"""The one module outside ``trainer`` that imports Megatron-Core: it compares speeds with Megatron-Core's functions."""
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """Return the first name under the package, which is a key of ``LEVEL``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> list[str]:
    """Return the dotted names that a file imports, also inside functions. A relative import fails the test."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the absolute one"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_every_module_has_a_layer():
    assert {part_of(p) for p in MODULES} - {"__init__"} <= set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own_part = part_of(path)
    for name in imported(path):
        parts = name.split(".")
        if (
            parts[0] != "megatron_dppo"
            or len(parts) < 2
            or parts[1] not in LEVEL
            or parts[1] == own_part
        ):
            continue
        imported_part = parts[1]
        is_below = LEVEL[imported_part] < LEVEL[own_part]
        assert is_below, (
            f"{path.relative_to(PACKAGE)} ({own_part}) imports {name}: {imported_part} is not below {own_part}"
        )


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_core_imports_no_annex(path):
    if part_of(path) in ANNEXES:
        return
    annexes = {f"megatron_dppo.{name}" for name in ANNEXES}
    assert not [n for n in imported(path) if ".".join(n.split(".")[:2]) in annexes]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_plugins_are_found_by_entry_points_alone(path):
    """Only plugins, which are above the core, and annexes import a module of a plugin."""
    if part_of(path) in ANNEXES | PLUGINS:
        return
    plugins = {f"megatron_dppo.{name}" for name in PLUGINS}
    assert not [n for n in imported(path) if ".".join(n.split(".")[:2]) in plugins]


@pytest.mark.parametrize("library", sorted(OWNERS))
def test_only_the_owner_knows_the_library(library):
    for path in MODULES:
        users = [n for n in imported(path) if n.split(".")[0] == library]
        is_owner = any(path.is_relative_to(PACKAGE / folder) for folder in OWNERS[library])
        if part_of(path) == "families":
            is_owner = path.name == FILES_OF_FAMILIES.get(library)
        is_benchmark = library == "megatron" and path == PACKAGE / PEERS
        assert not users or is_owner or is_benchmark, f"{path} imports {users}"


def test_only_the_platform_module_asks_for_cuda():
    users = {
        str(p.relative_to(PACKAGE))
        for p in MODULES
        if "cuda.is_available" in p.read_text() and p != PACKAGE / "cpu/megatron_shim.py"
    }
    assert users <= {"trainer/platform.py", "cpu/engine/__init__.py"}


def test_the_model_needs_no_torch():
    for path in MODULES:
        users = [n for n in imported(path) if n.split(".")[0] == "torch"]
        assert part_of(path) != "model" or not users, f"{path} imports {users}"


@pytest.mark.parametrize(
    "package",
    [
        "config",
        "spec",
        "data.trajectory",
        "launch.supervisor",
        "launch.status",
        "fleet.record",
        "model.resharding",
        "fleet.supervision",
        "engine.client",
        "supervised",
        "evaluate",
        "rollout",
        "metrics.records",
        "algorithms.table",
        "__main__",
    ],
)
def test_light_packages_load_no_torch(package):
    code = f"import sys, megatron_dppo.{package}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ranks_send_to_each_other_in_batches_alone():
    """Outside a batch NCCL makes a communicator for every pair of ranks; the planner counts no such communicators."""
    names = {"send", "recv", "isend", "irecv"}
    for path in MODULES:
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]  # fmt: skip
        called_names = {ast.unparse(call) for call in calls}
        found = called_names & {
            f"{module}.{name}" for name in names for module in ("dist", "torch.distributed")
        }
        assert not found, f"{path} calls {found}; write dist.P2POp and dist.batch_isend_irecv"


def test_a_public_class_has_a_name_of_its_own():
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert len(files) > 100
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
