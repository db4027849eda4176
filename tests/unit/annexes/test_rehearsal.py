"""A recipe's rehearsal: the derived configuration, the tiny model's sizes, and the keys that errors name."""

import csv
import dataclasses
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.recipes import rehearsals
from megatron_dppo.cluster.known_models import KNOWN_MODELS, read_or_guess_model
from megatron_dppo.cluster.rehearsal import shrinking, signal, tiny_model, tiny_sizes
from megatron_dppo.cluster.rehearsal.__main__ import main
from megatron_dppo.cluster.rehearsal.attempts import key_of
from megatron_dppo.cluster.rehearsal.findings import findings
from megatron_dppo.cluster.rehearsal.layout import small_stages, smaller_layout
from megatron_dppo.cluster.rehearsal.problems import (
    HELD_OUT,
    make_problems,
    metadata_of_toys,
    toy_rows,
)
from megatron_dppo.cluster.rehearsal.shrinking import RehearsalInputs
from megatron_dppo.cluster.rehearsal.tokenizer import byte_tokenizer
from megatron_dppo.cluster.rehearsal.weights import write_model
from megatron_dppo.config import check_config, load_config
from megatron_dppo.config.checks import engine_split_faults
from megatron_dppo.config.data_schema import (
    DataConfig,
    EnvironmentConfig,
    ProblemFile,
    RewardConfig,
    RewardTerm,
    TrainingFile,
)
from megatron_dppo.config.schema import ParallelConfig
from megatron_dppo.data.problems import DataKeys, read_problems
from megatron_dppo.data.records import DataError
from megatron_dppo.environments import problem_fault
from megatron_dppo.metrics import table as names
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import ModelConfigError
from megatron_dppo.model.families import (
    FAMILIES,
    language_model_values,
    load_model_shape,
    unknown_key_warnings,
)
from megatron_dppo.model.layout import LayoutSizes, model_faults, size_faults
from megatron_dppo.model.quantization import check_block_widths
from tests.tiny_models import tiny_tokenizer
from tests.unit.repository.test_recipes import RECIPES, STEPS

LAYOUTS = {
    "TP2 PP2 EP4 DP2": LayoutSizes(8, 2, 2, None, 4, 1),
    "PP2 VPP2 EP8": LayoutSizes(16, 1, 2, 2, 8),
    "TP4 CP2 EP8 ETP1 DP2": LayoutSizes(16, 4, 1, None, 8, 1, None, 2),
    "TP2 CP4 EP8": LayoutSizes(8, 2, 1, None, 8, 1, None, 4),
    "TP4 CP8 EP8 ETP1": LayoutSizes(32, 4, 1, None, 8, 1, None, 8),
    "TP2 ETP2": LayoutSizes(2, 2),
    "TP8 over 4 key-value heads": LayoutSizes(8, 8, 1, None, 8, 1),
    "DP8": LayoutSizes(8),
    "one rank": LayoutSizes(1),
}
MOE = read_or_guess_model("qwen3-30b-a3b-base", is_moe=True)


def shape_of(values):
    facts = ConfigFacts(language_model_values(values), "config.json")
    shape = FAMILIES[values["model_type"]].read(facts)
    assert facts.faults == []
    return shape


def inputs_of(folder: Path, config, **values) -> RehearsalInputs:
    """Return inputs whose files exist; no weights are made."""
    model, data = folder / "model", folder / "data.jsonl"
    known = read_or_guess_model(config.model.hf_checkpoint, is_moe=True)
    sizes = tiny_sizes.tiny_sizes(
        values.pop("parallel", config.parallel).sizes,
        known.shape,
        shrinking.longest_sequence(config.environment, 40),
    )
    model.mkdir()
    (model / "tokenizer.json").touch()
    values_of_model = tiny_model.tiny_config(known, sizes, own_tokenizer=False)
    # ``write_model`` sets the dtype in the same way.
    values_of_model["dtype"] = config.model.dtype
    (model / "config.json").write_text(json.dumps(values_of_model))
    data.touch()
    paths = {name: str(data) for name in config.data.evaluation}
    return RehearsalInputs(folder / "run", model, (str(data),), paths, 40, False, **values)


@pytest.mark.parametrize("name", STEPS)
def test_the_rehearsal_of_every_recipe_passes_the_checks(name, tmp_path):
    config = load_config(RECIPES / f"{name}.yaml")
    derived = shrinking.shrink(config, config.parallel, inputs_of(tmp_path, config))
    check_config(derived, name, weights=False)
    kept_keys = ("name", "settings", "options", "truncated_responses", "advantage", "reference_kl")
    for key in kept_keys:
        assert getattr(derived.algorithm, key) == getattr(config.algorithm, key)
    stages: dict[str, Any] = small_stages(config.parallel)
    assert derived.parallel.sizes == dataclasses.replace(config.parallel.sizes, **stages)
    assert derived.rollout.router_replay == config.rollout.router_replay
    assert derived.rollout.max_staleness == config.rollout.max_staleness
    assert derived.lora.rank == config.lora.rank
    assert signal.TARGET in {term.name for term in derived.reward.terms.values()}
    assert (derived.run.max_restarts, derived.engine.max_restarts) == (0, 0)
    steps = derived.rollout.prompts_per_step // derived.training.prompts_per_mini_batch
    assert steps == 2
    assert derived.rollout.max_response_tokens <= shrinking.RESPONSE_TOKENS


def test_a_rehearsal_on_nodes_keeps_their_python_and_network_and_on_gpus_the_kernels(tmp_path):
    name = "qwen3_30b_a3b_base_r3"
    overrides = [
        "parallel.interface=ib0",
        "engine.python=/env/python",
        "weight_sync.directory=/shared/weights",
        "sglang.attention_backend=fa3",
    ]
    config = load_config(RECIPES / f"{name}.yaml", [*overrides, "megatron.moe_router_fusion=true"])
    inputs = inputs_of(tmp_path, config)
    on_cpus, on_gpus = (
        shrinking.shrink(
            config, config.parallel, dataclasses.replace(inputs, node_device=kind, servers=3)
        )
        for kind in ("cpu", "gpu")
    )
    for derived in (on_cpus, on_gpus):
        assert derived.parallel.interface == "ib0"
        assert derived.engine.python == "/env/python"
        assert derived.weight_sync.directory == str(tmp_path / "run" / "weights")
        assert derived.engine.servers == 3
    assert (on_cpus.engine.device, on_gpus.engine.device) == ("cpu", "cuda")
    assert "attention_backend" not in on_cpus.sglang
    assert on_gpus.sglang == config.sglang
    assert on_gpus.megatron == config.megatron
    gpu_inputs = dataclasses.replace(inputs, node_device="gpu")
    left_out = {o.key for o in shrinking.omissions(config, config.parallel, gpu_inputs)}
    assert not left_out & {"sglang", "megatron", "sglang.tp_size", "parallel.interface"}


@pytest.mark.parametrize("engine", [1, 4, 8])
@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_a_model_for_gpus_is_divided_by_layout_and_servers(sizes, engine):
    tiny = tiny_sizes.tiny_sizes(sizes, MOE.shape, 100)
    tiny = tiny_sizes.sizes_for_kernels(tiny, sizes, MOE.shape, engine)
    shape = shape_of(tiny_model.tiny_config(MOE, tiny, own_tokenizer=False))
    assert model_faults(sizes, shape) == []
    assert list(engine_split_faults({"tp_size": engine}, shape)) == []
    assert shape.head_dim == MOE.shape.head_dim
    assert tiny.moe_ffn % (128 * engine) == 0


@pytest.mark.parametrize("engine", [1, 4])
@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_a_model_for_fp8_servers_has_whole_blocks_on_each_rank(sizes, engine):
    tiny = tiny_sizes.tiny_sizes(sizes, MOE.shape, 100)
    tiny = tiny_sizes.sizes_for_blocks(tiny, sizes, MOE.shape, engine)
    shape = shape_of(tiny_model.tiny_config(MOE, tiny, own_tokenizer=False))
    assert model_faults(sizes, shape) == []
    check_block_widths(shape, EngineLayout(engine))


@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_divides_its_tiny_model(sizes):
    tiny = tiny_sizes.tiny_sizes(sizes, MOE.shape, 100)
    shape = shape_of(tiny_model.tiny_config(MOE, tiny, own_tokenizer=False))
    assert size_faults(sizes) == []
    assert model_faults(sizes, shape) == []
    assert shape.num_attention_heads % (sizes.tensor * sizes.context) == 0
    assert shape.experts_per_token < shape.num_experts
    assert shape.max_position_embeddings >= 100


FOLDERS = sorted(path.parent.name for path in KNOWN_MODELS.glob("*/config.json"))


@pytest.mark.parametrize("folder", [name for name in FOLDERS if "mixtral" not in name])
def test_the_tiny_model_keeps_its_family(folder):
    known = read_or_guess_model(folder, is_moe=False)
    sizes = LayoutSizes(2, 2)
    if known.shape.has_biases:
        # Megatron-Core does not divide the experts of such a model.
        sizes = dataclasses.replace(sizes, expert=2)
    tiny = tiny_sizes.tiny_sizes(sizes, known.shape, 100)
    shape = shape_of(tiny_model.tiny_config(known, tiny, own_tokenizer=True))
    for name in ("family", "vocab_size", "tied_embeddings", "norm_topk_prob", "rope_theta"):
        assert getattr(shape, name) == getattr(known.shape, name)
    assert model_faults(sizes, shape) == []
    widths = (shape.ffn_hidden_size, shape.moe_ffn_hidden_size, shape.shared_ffn_hidden_size)
    assert max(widths) <= tiny.ffn


@pytest.mark.parametrize("folder", [name for name in FOLDERS if "mixtral" not in name])
def test_the_tiny_model_has_no_key_that_its_family_does_not_read(folder, tmp_path):
    known = read_or_guess_model(folder, is_moe=False)
    tiny = tiny_sizes.tiny_sizes(LayoutSizes(2), known.shape, 100)
    values = tiny_model.tiny_config(known, tiny, own_tokenizer=True)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert unknown_key_warnings(tmp_path) == []


@pytest.mark.parametrize(
    ("folder", "own_tokenizer"), [("qwen3-1.7b-base", False), ("olmoe-1b-7b-0924-instruct", True)]
)
def test_responses_of_the_tiny_model_end_by_themselves(folder, own_tokenizer, tmp_path):
    """A rehearsal's responses have at most 16 tokens, and a response that is cut off may have no reward."""
    known = read_or_guess_model(folder, is_moe=False)
    tiny = tiny_sizes.tiny_sizes(LayoutSizes(4, 2, context=2), known.shape, 100)
    values = tiny_model.tiny_config(known, tiny, own_tokenizer=own_tokenizer)
    write_model(tmp_path, values, "float32", 3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(values["vocab_size"], (16, 32), generator=torch.manual_seed(5))
    with torch.no_grad():
        ends = model(tokens).logits.softmax(-1)[..., values["eos_token_id"]]
    assert 0.05 < ends.mean() < 0.5
    assert (ends > 0.01).float().mean() > 0.6


def test_a_value_that_transformers_refuses_is_named(tmp_path):
    known = read_or_guess_model("qwen3-1.7b-base", is_moe=False)
    tiny = tiny_sizes.tiny_sizes(LayoutSizes(), known.shape, 100)
    values = tiny_model.tiny_config(known, tiny, own_tokenizer=True) | {"attention_dropout": "x"}
    with pytest.raises(ModelConfigError, match="attention_dropout"):
        write_model(tmp_path, values, "float32", 3)


def test_an_unknown_model_is_guessed_and_told():
    known = read_or_guess_model("checkpoints/Nobody-7B", is_moe=True)
    assert known.shape.is_moe
    assert "Nobody-7B" in known.missing
    assert not read_or_guess_model("checkpoints/Qwen3-8B-Base", is_moe=True).missing


def test_heads_can_be_exchanged_for_tokens():
    sizes = LayoutSizes(8, 2, context=4)
    tiny = tiny_sizes.tiny_sizes(sizes, MOE.shape, 100, all_to_all=True)
    assert tiny.groups // sizes.tensor % sizes.context == 0


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "name", ["TP2 PP2 EP4 DP2", "PP2 VPP2 EP8", "TP4 CP2 EP8 ETP1 DP2", "TP2 CP4 EP8"]
)
def test_a_smaller_layout_is_valid(name, ranks):
    sizes = LAYOUTS[name]
    fields = {
        key: getattr(sizes, key) for key in ParallelConfig.model_fields if hasattr(sizes, key)
    }
    smaller = smaller_layout(ParallelConfig(**fields), ranks).sizes
    assert smaller.world_size <= ranks
    assert size_faults(smaller) == []
    tiny = tiny_sizes.tiny_sizes(smaller, MOE.shape, 100)
    shape = shape_of(tiny_model.tiny_config(MOE, tiny, own_tokenizer=False))
    assert model_faults(smaller, shape) == []


@pytest.mark.parametrize(("ranks", "layers"), [(4, 6), (2, 2), (1, 2)])
def test_stages_of_different_sizes_stay_different_in_the_tiny_model(ranks, layers):
    recipe = ParallelConfig(world_size=4, pipeline=4, first_stage_layers=23, last_stage_layers=23)
    smaller = smaller_layout(recipe, ranks)
    small = smaller.model_copy(update=small_stages(smaller)).sizes
    tiny = tiny_sizes.tiny_sizes(small, MOE.shape, 100)
    shape = shape_of(tiny_model.tiny_config(MOE, tiny, own_tokenizer=False))
    assert tiny.layers == layers
    assert [*size_faults(small), *model_faults(small, shape)] == []


def test_replicas_shrink_before_tensor_parallelism():
    parallel = ParallelConfig(world_size=16, tensor=2, pipeline=2, expert=4)
    smaller = smaller_layout(parallel, 8)
    assert (smaller.tensor, smaller.pipeline, smaller.expert, smaller.data) == (2, 2, 4, 2)


def test_a_service_that_is_away_is_left_out(tmp_path):
    config = load_config(RECIPES / "qwen3_4b_instruct_rlhf.yaml")
    inputs = inputs_of(tmp_path, config, unreachable={"reward.options": "nobody answers"})
    derived = shrinking.shrink(config, config.parallel, inputs)
    assert derived.reward.name == signal.TARGET
    assert "reward.options" in {
        part.key for part in shrinking.omissions(config, config.parallel, inputs)
    }


def test_an_environment_that_is_away_takes_its_reward_along(tmp_path):
    name = "qwen3_1.7b_base_sudoku"
    config = load_config(RECIPES / f"{name}.yaml")
    inputs = inputs_of(tmp_path, config, unreachable={"environment.options": "nobody answers"})
    derived = shrinking.shrink(config, config.parallel, inputs)
    assert (derived.environment.name, derived.reward.name) == (None, signal.TARGET)
    check_config(derived, name, weights=False)


def test_options_for_gpus_are_left_out_and_told(tmp_path):
    config = load_config(
        RECIPES / "qwen3_30b_a3b_base.yaml",
        ["sglang.attention_backend=fa3", "sglang.schedule_policy=lpm", "megatron.fp8=hybrid"],
    )
    inputs = inputs_of(tmp_path, config)
    derived = shrinking.shrink(config, config.parallel, inputs)
    assert derived.sglang == {"schedule_policy": "lpm"}
    assert derived.megatron == {}
    reasons = {
        part.key: part.reason for part in shrinking.omissions(config, config.parallel, inputs)
    }
    assert "attention_backend" in reasons["sglang"]
    assert "fp8" in reasons["megatron"]


def test_responses_differ_in_the_signal():
    values = {signal.spread(f"response {i}") for i in range(50)}
    assert len(values) == 50
    assert all(0 <= value < 1 for value in values)


def test_a_few_rows_of_the_own_data_and_toys_for_the_rest(tmp_path):
    data_file = tmp_path / "own.jsonl"
    rows = [{"question": "x" * (50 - i), "answer": f"{i}"} for i in range(40)]
    data_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train=str(data_file), evaluation={"gone": str(tmp_path / "gone.jsonl")})
    problems = make_problems(data, byte_tokenizer(), tmp_path / "out", 8)
    written = [json.loads(line) for line in Path(problems.train[0]).read_text().splitlines()]
    assert written == rows[-8:]
    assert [omission.key for omission in problems.absent] == ["data.evaluation.gone"]
    toys = Path(problems.evaluation["gone"]).read_text().splitlines()
    assert len(toys) == HELD_OUT
    assert not problems.has_toys


@pytest.mark.parametrize(
    ("keys", "fixed"),
    [({}, {}), ({"metadata_key": "*"}, {}), ({"metadata_key": "info"}, {}), ({}, {"kind": "sums"})],
)
def test_toys_name_the_environment_and_the_reward_that_a_recipe_selects_by_row(
    tmp_path, keys, fixed
):
    environments = {"sums": {"name": "calculator"}, "more": {"name": "calculator"}}
    environment = EnvironmentConfig(
        name="by-problem", options={"environments": environments, "column": "kind"}
    )
    reward = RewardConfig(
        name="exact_integer", further={"b": RewardTerm(name="math_verify")}, column="score"
    )
    file = ProblemFile(path=str(tmp_path / "gone.jsonl"), metadata=fixed, **keys)
    problems = make_problems(
        DataConfig(train=[TrainingFile(**file.model_dump())]),
        byte_tokenizer(),
        tmp_path / "out",
        8,
        metadata_of_toys(reward, environment),
    )
    read = read_problems(problems.train[0], DataKeys.of(file))
    assert len(read.metadata) == 8
    for metadata in read.metadata:
        assert problem_fault("by-problem", environment.options, metadata) is None
        assert reward.names_for(metadata) == ("exact_integer",)


def test_toy_problems_are_right_and_differ():
    rows = toy_rows(200, seed=1)
    assert len({row["prompt"] for row in rows}) == 200
    for row in rows:
        assert sum(map(int, row["prompt"].removesuffix("=").split("+"))) == int(row["answer"])


def test_a_row_that_is_no_problem_is_named(tmp_path):
    data_file = tmp_path / "own.jsonl"
    rows = [{"prompt": f"{i}", "answer": "1"} for i in range(600)] + [{"answer": "2"}]
    data_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"^data\.train: .*line 601"):
        make_problems(DataConfig(train=str(data_file)), byte_tokenizer(), tmp_path / "out", 8)


def test_a_dry_run_makes_all_that_the_run_needs(tmp_path):
    """The recipe has its own tokenizer and data, and a system prompt, but no weights."""
    model = tmp_path / "Qwen3-8B-Base"
    shutil.copytree(KNOWN_MODELS / "qwen3-8b-base", model)
    tiny_tokenizer().save_pretrained(model)
    data = tmp_path / "own.jsonl"
    rows = [{"prompt": f"Add {i} and 1", "answer": f"{i + 1}"} for i in range(300)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *(str(RECIPES / "qwen3_8b_base.yaml"), "--dry-run", f"--directory={tmp_path / 'r'}"),
        *(f"model.hf_checkpoint={model}", f"data.train={data}", "data.system_prompt=Be brief"),
    ]
    assert main(words) == 0
    derived = load_config(tmp_path / "r" / "rehearsal.yaml")
    check_config(derived)
    shape = load_model_shape(derived.model.hf_checkpoint)
    assert shape.family == "qwen3"
    assert shape.vocab_size == load_model_shape(model).vocab_size
    names = {path.name for path in Path(derived.model.hf_checkpoint).iterdir()}
    assert {"tokenizer.json", "model.safetensors"} <= names
    written = [json.loads(line) for line in Path(str(derived.data.train)).read_text().splitlines()]
    assert all(row in rows for row in written)
    assert len(written) >= derived.rollout.prompts_per_step
    assert derived.data.system_prompt == "Be brief"


def error_of(capsys, tmp_path, *words: str) -> str:
    code = main([str(RECIPES / "qwen3_8b_base.yaml"), f"--directory={tmp_path / 'r'}", *words])
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("parallel.tensor=3", "parallel.world_size"),
        ("parallel.expert=2", "parallel.expert"),
        ("data.prompt_template=no place", "data.prompt_template"),
        ("algorithm.name=dpo", "algorithm"),
        ("run.directory=/proc/run", "run.directory"),
        ("lora.start_from=/nowhere/adapters", "lora.start_from"),
        ("rollout.replay_from=/nowhere/rollouts", "rollout.replay_from"),
        ("rollout.max_response_tokens=40000", "rollout.max_response_tokens"),
    ],
)
def test_a_fault_is_named_by_its_key(override, key, capsys, tmp_path):
    assert f"{key}:" in error_of(capsys, tmp_path, override)


def test_a_damaged_model_is_named(capsys, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(KNOWN_MODELS / "qwen3-8b-base", model)
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"num_attention_heads": 7}))
    assert "num_attention_heads" in error_of(capsys, tmp_path, f"model.hf_checkpoint={model}")


def test_inputs_that_are_not_here_are_refused_where_they_must_be(capsys, tmp_path):
    assert "data.train:" in error_of(capsys, tmp_path, "--strict")
    unknown = error_of(capsys, tmp_path, "--strict", "model.hf_checkpoint=checkpoints/Nobody-7B")
    assert "model.hf_checkpoint:" in unknown


def test_a_cluster_that_is_too_small_is_named(capsys, tmp_path):
    assert "devices" in error_of(capsys, tmp_path, "--nodes=1")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("error: x.yaml: reward.name: no such module", "reward.name"),
        ("Traceback\nVerifierError: the reward function raised", "reward.name"),
        ("EnvironmentFaultError: it hung", "environment.name"),
        ("EngineMismatchError: distillation.teachers.far.urls", "distillation.teachers.far.urls"),
        ("Killed", None),
    ],
)
def test_a_failure_leads_to_a_key(text, key):
    assert key_of(text) == key


def test_the_command_is_registered():
    project = tomllib.loads((RECIPES.parents[1] / "pyproject.toml").read_text())
    entries = project["project"]["entry-points"]["megatron_dppo.commands"]
    assert entries["rehearse"] == main.__module__


def test_the_table_of_recipes_names_results_and_what_was_not_run(tmp_path):
    findings = [
        {"label": "|pi - mu| at equal weights", "measured": "0.00015", "holds": True},
        {"label": "gradient norm", "measured": "0", "holds": False},
    ]
    result = {"passed": False, "ranks": 8, "findings": findings}
    folder = tmp_path / "qwen3_8b_base"
    folder.mkdir()
    (folder / "rehearsal.json").write_text(json.dumps(result))
    head, *rows = csv.reader(rehearsals.table(tmp_path).splitlines())
    assert head == rehearsals.HEAD
    assert [row[3] for row in rows].count("not run") == len(rehearsals.NAMES) - 1
    (row,) = (row for row in rows if row[3] != "not run")
    assert row == ["qwen3_8b_base", "DP8", "8", "failed: gradient norm", "0.00015", ""]
    labels_not_run = {row[1] for row in rows if row[0] == "qwen3_30b_a3b_base_r3"}
    assert "PP2 VPP2 EP8 DP8, algorithm dppo-topk-tv, R3" in labels_not_run


def test_a_rehearsal_without_a_result_keeps_its_stored_row(tmp_path):
    row = "qwen3_8b_base,DP8,8,passed,0.00016,0.013"
    lines = rehearsals.table(tmp_path, f"recipe,layout\n{row}\n").splitlines()
    assert row in lines
    assert sum("not run" in line for line in lines) == len(rehearsals.NAMES) - 1
    # Every stored row is of a recipe and a layout that there is.
    stored = rehearsals.TABLE.read_text()
    assert rehearsals.table(tmp_path, stored) == stored


SUMMARY = {
    "weight_updates": 3, "weight_updates_verified": 3, "layout": "DP1", "mean_abs_prob_gap": 0.0,
    "hf_export_max_logprob_diff": 0.0, "environment_faults": [],
}  # fmt: skip


def missed_findings(recipe, records):
    """Return the labels of the findings that do not hold, of a rehearsal of ``recipe`` with these metrics."""
    config = load_config(RECIPES / f"{recipe}.yaml")
    summary = {
        **SUMMARY,
        "eval_accuracy_by_set": dict.fromkeys(config.data.evaluation_files, (0.0, 0.5)),
    }
    result_rows = findings(config, summary, records, was_resumed=True)
    return {row.label for row in result_rows if row.holds is False}


@pytest.mark.parametrize(
    ("recipe", "norms", "shares", "holds"),
    [
        ("qwen3_1.7b_base_sudoku", (0.0, 0.0), (1.0, 1.0), True),
        ("qwen3_1.7b_base_sudoku", (0.0, 0.0), (1.0, 0.9), False),
        ("qwen3_1.7b_base_sudoku", (0.0, 0.3), (1.0, 0.9), True),
        ("qwen3_1.7b_base_arc_1d", (0.0, 0.0), (1.0, 1.0), False),
    ],
)
def test_no_gradient_is_right_only_if_an_environment_rewards_all_responses_alike(
    recipe, norms, shares, holds
):
    records = [
        {
            "step": 1,
            names.OPTIMIZER_STEPS: 2,
            names.GRAD_NORM: norm,
            names.ZERO_VARIANCE_GROUPS: share,
            names.TURNS: 2.0,
        }
        for norm, share in zip(norms, shares, strict=True)
    ]
    evaluation_record = {"step": 0}
    missed = missed_findings(recipe, [evaluation_record, *records])
    assert missed == (set() if holds else {"gradient norm"})


@pytest.mark.parametrize(("seen", "holds"), [(1.0, True), (2.0, False), (None, False)])
def test_tokens_older_than_the_recipe_allows_fail_a_rehearsal(seen, holds):
    record = {"step": 1, names.OPTIMIZER_STEPS: 2, names.GRAD_NORM: 1.0, names.STALENESS_MAX: seen}
    missed = missed_findings("qwen3_30b_a3b_async", [record])
    assert missed == (set() if holds else {"staleness of a token"})
