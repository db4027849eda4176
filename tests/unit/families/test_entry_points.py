"""Model families are entry points: those of this package, and those of other packages."""

import json
import sys

import pytest

from megatron_dppo.model.errors import ModelConfigError, UnsupportedModelError
from megatron_dppo.model.families import FAMILIES, Family, load_model_shape
from megatron_dppo.system import plugins
from megatron_dppo.system.imports import import_target
from tests.patience import run_patiently
from tests.ranks import ROOT
from tests.unit.test_plugins import plant

QWEN3 = ROOT / "examples" / "model_configs" / "qwen3-1.7b-base"


def test_each_entry_point_is_the_family_of_its_model_type():
    assert {name: family.model_type for name, family in FAMILIES.items()} == {
        name: name for name in FAMILIES
    }
    assert len(FAMILIES) == len({family.architecture for family in FAMILIES.values()}) == 15


def test_a_file_is_read_with_its_family_alone_and_without_torch():
    code = f"""
import sys
from megatron_dppo.model.families import load_model_shape
print(load_model_shape({str(QWEN3)!r}).family)
print(*sorted(name for name in sys.modules if name.startswith("megatron_dppo.families.") and "shared" not in name))
print(*sorted({{"torch", "megatron", "sglang", "transformers"}} & sys.modules.keys()))
"""
    done = run_patiently([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert done.stdout.split("\n") == ["qwen3", "megatron_dppo.families.qwen3", "", ""]


def test_an_unknown_model_type_is_one_error_that_lists_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_shape(tmp_path)
    (fault,) = caught.value.faults
    assert fault == (
        f"{tmp_path}/config.json: model_type 'gpt2'; supported families: {sorted(FAMILIES)}"
    )


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """Plant a distribution with one entry point of a family; its module imports as ``rogue``."""

    def plant_family(entry: str, module: str) -> None:
        plant(tmp_path, "rogue", f"[{plugins.FAMILIES}]\n{entry}\n", module)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(FAMILIES, "loaded", {})
        monkeypatch.delitem(sys.modules, "rogue", raising=False)

    return plant_family


def test_a_family_of_another_package_is_known_beside_those_of_this_one(foreign):
    family = "Family('rogue', 'RogueForCausalLM', lambda facts: None, layer=())"
    foreign(
        "rogue = rogue:FAMILY",
        f"from megatron_dppo.model.families import Family\nFAMILY = {family}",
    )
    assert isinstance(FAMILIES["rogue"], Family)
    assert FAMILIES["rogue"].architecture == "RogueForCausalLM"
    assert {"rogue", "qwen3"} < set(FAMILIES)
    assert FAMILIES.get("no_family") is None


@pytest.mark.parametrize(
    ("entry", "module", "words"),
    [
        ("llama = rogue:FAMILY", "FAMILY = 1", ("llama", "megatron-dppo and rogue")),
        ("rogue = rogue:FAMILY", "FAMILY = 1", ("rogue:FAMILY", "is 1, expected a Family")),
        ("rogue = rogue:FAMILY", "FAMILY = 1 / 0", ("rogue:FAMILY", "ZeroDivisionError")),
        (
            "rogue = rogue:FAMILY",
            "from megatron_dppo.model.families import FAMILIES\nFAMILY = FAMILIES['qwen3']",
            ("rogue:FAMILY", "model_type 'rogue'"),
        ),
    ],
)
def test_a_faulty_family_of_another_package_is_named(foreign, entry, module, words):
    foreign(entry, module)
    with pytest.raises(ModelConfigError) as caught:
        _ = FAMILIES[entry.partition(" ")[0]]
    for word in ("rogue", *words):
        assert word in str(caught.value)


def test_the_hooks_of_families_are_functions():
    import megatron_dppo.trainer  # noqa: F401  (adapts megatron before it is imported)

    hooks = {}
    for name, family in FAMILIES.items():
        found = {family.trainer_layers, family.cpu_engine} - {""}
        assert all(callable(import_target(hook)) for hook in found)
        hooks[name] = {hook.rpartition(".")[2] for hook in found}
    hybrid = {"trainer:use_packed_delta_nets", "cpu_engine:use_pytorch"}
    assert {name: found for name, found in hooks.items() if found} == {
        "olmoe": {"trainer:norm_all_heads"},
        "minimax_m2": {"trainer:norm_all_heads", "cpu_engine:use_pytorch"},
        "deepseek_v3": {"cpu_engine:use_latent_cache"},
        "glm4_moe_lite": {"cpu_engine:use_latent_cache"},
        "gpt_oss": {"cpu_engine:use_sinks"},
        "qwen3_next": hybrid,
        "qwen3_5_moe": hybrid,
        "qwen3_5_moe_text": hybrid,
    }
