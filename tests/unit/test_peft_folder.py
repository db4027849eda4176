"""Folders of adapters in PEFT's format: a written folder is read back, and adapters that do not fit the run are
refused by name."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dppo.checkpoint_conversion.adapters import PeftReader, write_peft
from megatron_dppo.config import ConfigError, load_config
from megatron_dppo.config.lora import PEFT_CONFIG, PEFT_WEIGHTS
from megatron_dppo.convert.merging import merge_adapters
from megatron_dppo.launch.library_checks import check_everything
from megatron_dppo.model.adapters import Adapters, adapter_tensors
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import load_model_shape
from tests.messages import mentioning
from tests.tiny_models import save_tiny_model
from tests.unit.config_files import DENSE, MOE, minimal, write_checkpoint, write_config

PLAIN = Adapters(4, 8.0, ("q_proj", "v_proj"))
SHARED = Adapters(4, 8.0, ("down_proj",), share_experts=True)
LORA_A = "model.layers.2.self_attn.v_proj.lora_A"


@pytest.fixture
def shape(tmp_path):
    return load_model_shape(write_checkpoint(tmp_path / "moe", MOE))


def write_adapters(folder, adapters, shape):
    """Write random adapters in PEFT's format, and return their tensors by name."""
    tensors = {n: torch.randn(dims) for n, dims in adapter_tensors(adapters, shape).items()}
    write_peft(folder, adapters, shape, tensors.items(), base="base", dtype=torch.float32)
    return tensors


@pytest.mark.parametrize("adapters", [PLAIN, SHARED])
def test_what_is_written_is_read(tmp_path, shape, adapters):
    tensors = write_adapters(tmp_path / "out", adapters, shape)
    with PeftReader(tmp_path / "out", adapters, shape) as reader:
        assert all(torch.equal(reader.read(n, tuple(t.shape)), t) for n, t in tensors.items())


def test_names_are_pefts_and_shared_adapters_are_written_for_every_expert(tmp_path, shape):
    tensors = write_adapters(tmp_path / "plain", PLAIN, shape)
    stored = load_file(tmp_path / "plain" / PEFT_WEIGHTS)
    assert torch.equal(stored[f"base_model.model.{LORA_A}.weight"], tensors[LORA_A])
    tensors = write_adapters(tmp_path / "shared", SHARED, shape)
    stored = load_file(tmp_path / "shared" / PEFT_WEIGHTS)
    assert len(stored) == 4 * 8 * 2
    template = "model.layers.1.mlp.experts.{}.down_proj.lora_B"
    for expert in range(8):
        name = f"base_model.model.{template.format(expert)}.weight"
        assert torch.equal(stored[name], tensors[template.format("*")])


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        (Adapters(8, 8.0, ("q_proj", "v_proj")), "r is 4, expected 8; 16 shapes differ"),
        (Adapters(4, 9.0, ("q_proj", "v_proj")), "lora_alpha is 8, expected 9.0"),
        (Adapters(4, 8.0, ("q_proj",)), "target_modules are .*8 tensors are unknown"),
        (Adapters(4, 8.0, ("q_proj", "v_proj", "o_proj")), "8 tensors are missing, first .*o_proj"),
    ],
)
def test_other_adapters_are_refused(tmp_path, shape, adapters, words):
    write_adapters(tmp_path / "out", PLAIN, shape)
    with pytest.raises(CheckpointError, match=words):
        PeftReader(tmp_path / "out", adapters, shape)


def test_adapters_of_another_kind_or_family_are_refused(tmp_path, shape):
    write_adapters(tmp_path / "out", PLAIN, shape)
    dense = load_model_shape(write_checkpoint(tmp_path / "dense", DENSE))
    with pytest.raises(CheckpointError, match=mentioning(tmp_path / "out")):
        PeftReader(tmp_path / "out", PLAIN, dense)
    path = tmp_path / "out" / PEFT_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))
    with pytest.raises(CheckpointError, match=mentioning("use_dora", True, False)):
        PeftReader(tmp_path / "out", PLAIN, shape)


def test_experts_that_should_share_must_be_alike(tmp_path, shape):
    write_adapters(tmp_path / "out", SHARED, shape)
    stored = load_file(tmp_path / "out" / PEFT_WEIGHTS)
    stored["base_model.model.model.layers.0.mlp.experts.5.down_proj.lora_A.weight"] += 1
    save_file(stored, tmp_path / "out" / PEFT_WEIGHTS)
    with (
        PeftReader(tmp_path / "out", SHARED, shape) as reader,
        pytest.raises(CheckpointError, match=r"experts\.5\.down_proj.* differs"),
    ):
        reader.read("model.layers.0.mlp.experts.*.down_proj.lora_A", (4, 32))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("base"), "qwen3")


def save_changed_adapters(base, folder, **options):
    """Save adapters with changed values by PEFT, and return the tensors of the model into which PEFT merges them."""
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder, save_embedding_layers=False)
    # Load the adapters as a user of the folder does: beside the published base.
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    return loaded.merge_and_unload().state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "pissa"},
        {"target_modules": ["o_proj", "down_proj"], "init_lora_weights": "olora"},
        {"target_modules": ["o_proj"], "init_lora_weights": "orthogonal"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["self_attn.q_proj", "mlp.up_proj"]},
        {"target_modules": r".*_proj", "exclude_modules": ["down_proj"]},
        {"target_modules": ["lm_head", "k_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        {
            "target_modules": ["q_proj", "up_proj"],
            "rank_pattern": {"up_proj": 2, r"layers\.1\..*q_proj": 3},
            "alpha_pattern": {"q_proj": 3},
        },
    ],
)
def test_adapters_are_merged_as_peft_merges_them(base, tmp_path, options):
    expected = save_changed_adapters(base, tmp_path / "peft", **options)
    merge_adapters(base, tmp_path / "peft", tmp_path / "out", lambda count: None)
    merged, plain = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", base))
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-6)
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, plain[name])}
    assert changed == {name for name in plain if not torch.equal(expected[name], plain[name])}


@pytest.fixture(scope="module")
def moe_base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe")


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "options",
    [
        # The router's and the experts' parameters, with a rank and an alpha of their own.
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "use_rslora": True},
        {"target_modules": [], "target_parameters": EXPERTS[1:]},
    ],
    ids=["all-linear", "experts", "one parameter"],
)
def test_adapters_of_experts_are_merged_as_peft_merges_them(moe_base, tmp_path, options):
    expected = save_changed_adapters(moe_base, tmp_path / "peft", **options)
    merge_adapters(moe_base, tmp_path / "peft", tmp_path / "out", lambda count: None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    plain = AutoModelForCausalLM.from_pretrained(moe_base).state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-6)
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, plain[name])}
    assert changed == {name for name in plain if not torch.equal(expected[name], plain[name])}


def test_adapters_of_experts_are_no_start_of_a_run_and_the_way_out_is_named(moe_base, tmp_path):
    save_changed_adapters(moe_base, tmp_path / "peft", target_modules="all-linear")
    shape = load_model_shape(moe_base)
    with pytest.raises(CheckpointError, match=r"target_parameters is .*convert merge-adapters"):
        PeftReader(tmp_path / "peft", PLAIN, shape)


def test_rank_stabilised_adapters_start_a_run_with_their_factor(tmp_path, shape):
    write_adapters(tmp_path / "out", PLAIN, shape)
    change_config(tmp_path / "out", use_rslora=True)
    # 8 / sqrt(4) is the factor of alpha 16 with rank 4.
    PeftReader(tmp_path / "out", Adapters(4, 16.0, PLAIN.modules), shape).close()
    with pytest.raises(CheckpointError, match=r"lora\.alpha=16, expected 8"):
        PeftReader(tmp_path / "out", PLAIN, shape)


def damage(folder, changes):
    """Replace tensors of the folder; None removes a tensor."""
    stored = load_file(folder / PEFT_WEIGHTS) | changes
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / PEFT_WEIGHTS)


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{Q_PROJ}.lora_A.weight": None}, r"1 tensors are unknown.*q_proj\.lora_B"),
        (
            {f"{Q_PROJ}.lora_A.weight": None, f"{Q_PROJ}.lora_B.weight": None},
            "adapters are missing",
        ),
        ({f"{Q_PROJ}.lora_A.weight": torch.ones(4, 63)}, r"A of shape \(4, 63\)"),
        ({f"{Q_PROJ}.other": torch.ones(1)}, r"q_proj\.other"),
    ],
)
def test_damaged_adapters_are_not_merged(base, tmp_path, changes, words):
    save_changed_adapters(base, tmp_path / "peft", target_modules=["q_proj"])
    damage(tmp_path / "peft", changes)
    with pytest.raises(CheckpointError, match=words):
        merge_adapters(base, tmp_path / "peft", tmp_path / "out", lambda count: None)
    assert not (tmp_path / "out").exists()


def test_the_configuration_s_word_for_all_linears_is_read_as_it_stands(base, tmp_path):
    """PEFT saves the names of all linear modules. A file may have the word ``all-linear`` instead."""
    expected = save_changed_adapters(base, tmp_path / "peft", target_modules="all-linear")
    change_config(tmp_path / "peft", target_modules="all-linear")
    merge_adapters(base, tmp_path / "peft", tmp_path / "out", lambda count: None)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-6)


def change_config(folder, **entries):
    """Change entries of the folder's adapter_config.json."""
    path = folder / PEFT_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize(
    "initial", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"]
)
def test_adapters_of_a_changed_base_are_no_start_of_a_run(tmp_path, shape, initial):
    write_adapters(tmp_path / "out", PLAIN, shape)
    change_config(tmp_path / "out", init_lora_weights=initial)
    with pytest.raises(
        CheckpointError, match=f"'{initial}'.*path_initial_model_for_weight_conversion"
    ):
        PeftReader(tmp_path / "out", PLAIN, shape)


@pytest.mark.parametrize("initial", ["pissa_niter_4", "corda", "loftq", "lora_ga"])
def test_a_base_that_its_weights_do_not_tell_is_not_merged(base, tmp_path, initial):
    """With these values PEFT changes the base, and the change cannot be computed from the base's weights."""
    save_changed_adapters(base, tmp_path / "peft", target_modules=["q_proj"])
    change_config(tmp_path / "peft", init_lora_weights=initial)
    with pytest.raises(CheckpointError, match=f"init_lora_weights is '{initial}'"):
        merge_adapters(base, tmp_path / "peft", tmp_path / "out", lambda count: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("initial", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_adapters_beside_an_unchanged_base_are_a_start(tmp_path, shape, initial):
    write_adapters(tmp_path / "out", PLAIN, shape)
    change_config(tmp_path / "out", init_lora_weights=initial, target_modules=r".*(q|v)_proj")
    PeftReader(tmp_path / "out", PLAIN, shape).close()


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (r".*layers\.0\..*(q|v)_proj", "leave out model.layers.1.self_attn.q_proj"),
        ("(", "not a regex"),
        (r".*z_proj", "name nothing"),
        (["q_proj", "v_proj", "z_proj"], r"\['z_proj'\] name nothing"),
        (7, "expected a list of names or a regex"),
    ],
)
def test_modules_that_can_not_be_adapted_are_named(tmp_path, shape, targets, words):
    write_adapters(tmp_path / "out", PLAIN, shape)
    change_config(tmp_path / "out", target_modules=targets)
    with pytest.raises(CheckpointError, match=words):
        PeftReader(tmp_path / "out", PLAIN, shape)


def test_they_are_refused_before_the_start(tmp_path, shape):
    """The adapters in the folder have rank 4, and the run asks for rank 8."""
    write_adapters(tmp_path / "out", PLAIN, shape)
    overrides = ["lora.rank=8", "lora.target_modules=[q_proj,v_proj]"]
    config = load_config(
        write_config(tmp_path, minimal(tmp_path)),
        [*overrides, f"lora.start_from={tmp_path / 'out'}", "reward.name=exact_integer"],
    )
    with pytest.raises(ConfigError, match=mentioning("lora.start_from", tmp_path / "out")):
        check_everything(config, "configuration", weights=False)
