"""YAML and overrides become a TrainConfig, or a ConfigError that explains every fault."""

import math
import random
import sys
import time

import pytest

from megatron_dppo.config import ConfigError, load_config, resolved_yaml
from megatron_dppo.metrics.summary import saved_config
from megatron_dppo.system.files import with_hash
from megatron_dppo.system.yaml_core import MAX_VALUES, dump_yaml, parse_scalar, parse_yaml
from tests.messages import mentioning, mentions
from tests.patience import run_patiently
from tests.unit.config_files import minimal, refusals, write_config

VALUES = [
    ("1e-6", 1e-6),
    ("1E3", 1000.0),
    ("-2.5e+3", -2500.0),
    (".5", 0.5),
    ("3.", 3.0),
    (".inf", math.inf),
    ("-.inf", -math.inf),
    ("3", 3),
    ("-3", -3),
    ("1_000", 1000),
    ("010", 10),
    ("0x1F", 31),
    ("0o17", 15),
    ("true", True),
    ("False", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("yes", "yes"),
    ("no", "no"),
    ("off", "off"),
    ("1:30", "1:30"),
    ("2024-01-01", "2024-01-01"),
    ("none", "none"),
    ("1e", "1e"),
    ("e5", "e5"),
    ("1.2.3", "1.2.3"),
    ("_1", "_1"),
    ("1_", "1_"),
]


@pytest.fixture
def tree(tmp_path):
    return minimal(tmp_path)


@pytest.fixture
def load(tmp_path, tree):
    return lambda *overrides: load_config(write_config(tmp_path, tree), overrides)


def problems_of(load, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return list(caught.value.faults)


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_plain_scalars_are_yaml_1_2(text, value):
    parsed_value = parse_yaml(f"key: {text}")["key"]
    assert parsed_value == value
    assert type(parsed_value) is type(value)
    assert parse_scalar(text) == value


def test_not_a_number_is_one():
    assert math.isnan(parse_scalar(".nan"))


@pytest.mark.parametrize(
    "text", [text for text, _ in VALUES] + ["'", "a: b", "#", "é", "- x", "{", "\n", "x\ny"]
)
def test_text_survives_a_dump_and_the_folder_of_a_run(tmp_path, text):
    dumped = dump_yaml({"key": text})
    assert parse_yaml(dumped) == {"key": text}
    (tmp_path / "config.yaml").write_text(with_hash(dumped))
    assert saved_config(tmp_path) == {"key": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("http://[::1]:30000", "http://[::1]:30000"),
        ("a #b: @c", "a #b: @c"),
        ("'1e-6'", "1e-6"),
        ("[a, 1e-3]", ["a", 1e-3]),
        ("{a: 1}", {"a": 1}),
        (" 5 ", 5),
        ("*x", "*x"),
    ],
)
def test_override_values(text, value):
    assert parse_scalar(text) == value


def test_defaults_and_types(load):
    config = load("optimizer.lr=1e-6", "rollout.temperature=1", "algorithm.options.ratio_cap=.inf")
    assert config.optimizer.lr == 1e-6
    assert config.rollout.temperature == 1.0
    assert config.algorithm.options == {"ratio_cap": math.inf}
    assert config.run.seed == 1
    assert config.parallel.world_size == 1


def test_overrides_make_tables_and_the_last_one_wins(load):
    config = load("parallel.tensor=4", "parallel.tensor=2", "megatron.a.b=1e-3", "engine.port=")
    assert config.parallel.tensor == 2
    assert config.megatron == {"a": {"b": 1e-3}}
    assert config.engine.port is None


def test_a_section_with_nothing_in_it_is_empty(tmp_path, tree):
    tree["parallel"] = tree["sglang"] = None
    config = load_config(write_config(tmp_path, tree))
    assert config.parallel.world_size == 1
    assert config.sglang == {}


def test_what_is_resolved_reads_back_as_it_was(tmp_path, load):
    config = load("algorithm.options.ratio_cap=.inf", "run.directory='1e-6'", "sglang.x=no")
    again = load_config(write_config(tmp_path, resolved_yaml(config)))
    assert again == config
    assert again.run.directory == "1e-6"
    assert resolved_yaml(again) == resolved_yaml(config)


def test_every_problem_is_told_at_once(tmp_path, tree):
    del tree["run"]["steps"]
    tree["rollout"] |= {"top_p": "x", "group_size": 1, "topp": 0.9}
    tree["model"]["dtype"] = "fp16"
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(tmp_path, tree), ["optimizer.lr=0", "nonsense", "run.seed=true"])
    assert caught.value.source == f"{tmp_path}/config.yaml"
    faults = dict(fault.split(": ", 1) for fault in caught.value.faults)
    assert faults.keys() == {
        "override 'nonsense'",
        "rollout.top_p",
        "rollout.group_size",
        "rollout.topp",
        "model.dtype",
        "optimizer.lr",
        "run.seed",
        "run.steps",
    }
    assert faults["rollout.top_p"].startswith("got 'x' (str)")
    assert faults["rollout.group_size"].startswith("got 1 (int)")
    assert "65536" in faults["rollout.group_size"]
    assert "'bfloat16'" in faults["model.dtype"]
    assert faults["run.steps"].startswith("missing")
    assert "rollout.top_p?" in faults["rollout.topp"]
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(tmp_path, tree), ["rollout.interrupt=in_place"])
    [fault] = [f for f in caught.value.faults if f.startswith("rollout.interrupt")]
    assert "'in_place'" in fault


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optimizer.warmupsteps=1", "optimizer.warmup_steps"),
        ("training.lr=1", "optimizer.lr"),
        ("paralel=2", "parallel"),
        ("lr=1", "optimizer.lr"),
        ("data.tensor=1", "parallel.tensor"),
        ("data.train=[{path: a, wieght: 2}]", "data.train[0].weight"),
        ("data.evaluation.x={path: a, promptkey: b}", "data.evaluation.x.prompt_key"),
        ("rollout.n=8", "rollout.group_size"),
        ("rollout.num_generations=8", "rollout.group_size"),
        ("training.ppo_mini_batch_size=8", "training.prompts_per_mini_batch"),
        ("algorithm.adv_estimator=grpo", "algorithm.advantage"),
        ("algorithm.kl_loss_type=low_var_kl", "algorithm.reference_estimator"),
        ("training.ppo_max_token_len_per_gpu=8", "training.micro_batch_tokens"),
        ("rollout.gpu_memory_utilization=0.5", "sglang.mem_fraction_static"),
        ("training.epsilon-high=0.28", "algorithm.options.clip_high"),
    ],
)
def test_an_unknown_key_comes_with_a_suggestion(load, override, meant):
    (problem,) = problems_of(load, override)
    assert problem.startswith(override.split("=")[0])
    assert mentions(problem, "unknown", meant)


def test_a_table_of_another_package_is_translated(load):
    words = (
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.hybrid_engine=true",
        "actor_rollout_ref.actor.no_such=1",
    )
    (problem,) = problems_of(load, *words)
    assert "rollout.n is rollout.group_size, hybrid_engine is engine.placement. " in problem
    assert "no_such is" not in problem


def test_an_unknown_key_that_resembles_nothing(load):
    (problem,) = problems_of(load, "model.zzz=1")
    assert mentions(problem, "model.zzz", "unknown", 1, "hf_checkpoint", "dtype")
    assert "mean" not in problem


WRONG_VALUES = refusals(
    """
algorithm.options.x=y
    algorithm.options.x: got 'y' (str), expected a number or true or false
data.evaluation.aime=3
    data.evaluation.aime: got 3 (int), expected text or a table
data.evaluation=3
    data.evaluation: got 3 (int), expected a table of name: text or a table
data.train=3
    data.train: got 3 (int), expected text or a list, each item a table
'data.train=[{path: a}, {path: b, weight: 0}]'
    data.train[1].weight: got 0 (int), expected a number > 0 or null
data.train=[a]
    data.train[0]: got 'a' (str), expected a table
'data.train=[{weight: 1}]'
    data.train[0].path: missing, expected text (JSONL, JSON, CSV, TSV or Parquet file (text also compressed), a
        folder of these, or a glob (docs/data.md))
'data.evaluation.x={path: 3}'
    data.evaluation.x.path: got 3 (int), expected text
rollout.stop=x
    rollout.stop: got 'x' (str), expected a list, each item text
parallel=3
    parallel: got 3 (int), expected a table
optimizer.lr=.nan
    optimizer.lr: got nan (float), expected a number > 0
optimizer.lr=.inf
    optimizer.lr: got inf (float), expected a number > 0
run.seed=1.0
    run.seed: got 1.0 (float), expected a whole number >= 0 and < 2147483648
engine.port=x
    engine.port: got 'x' (str), expected a whole number > 0 and < 65536 or null
run.steps.x=1
    override run.steps.x: run.steps is 10 (int), not a table
'run steps=1'
    override 'run steps=1': expected key.path=value
"""
)


@pytest.mark.parametrize(("overrides", "problem"), WRONG_VALUES)
def test_what_was_given_and_what_was_expected(load, overrides, problem):
    assert problems_of(load, *overrides) == [problem]


def test_a_broken_override_value(load):
    (problem,) = problems_of(load, "megatron.x=[1, 2")
    assert mentions(problem, "'megatron.x=[1, 2'", "YAML")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("run: {}\nmodel: {}\nrun: {}\n", ("config.yaml:3:1", "'run'", 1, 3)),
        ("run:\n  seed: 1\n  seed: 2\n", ("config.yaml:3:3", "'seed'", 2, 3)),
        ("run: {1: 2}\n", ("'1'", "text", "quotes")),
        ("- run\n", ("['run'] (list)", "run", "model")),
        ("", ("null", "run", "model")),
        ("run: [1\n", ("config.yaml:2:1", "YAML")),
        ("run: !!python/object:os.system {}\n", ("YAML", "constructor")),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, values):
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(tmp_path, text))
    assert mentions(str(caught.value), *values)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{key}: &{key} [{', '.join(['*' + below] * 10)}]\n"
    for below, key in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (BOMB, ("config.yaml:5:4", "YAML", 100_000)),
        ("a: &a {x: 1}\n" + "b: {<<: [" + "*a, " * 60_000 + "]}\n", ("YAML", 100_000)),
        ("a: &a [*a]\n", ("config.yaml:1:4", "YAML", "alias")),
        ("a: &a {b: {c: *a}}\n", ("YAML", "alias")),
        ("a: " + "[" * 5000, ("YAML", "nested")),
    ],
)
def test_a_small_file_that_stands_for_a_huge_one(tmp_path, text, values):
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(tmp_path, text))
    assert mentions(str(caught.value), *values)
    assert time.process_time() - started < 60


def test_aliases_within_the_bound():
    shared = parse_yaml("a: &a [1, 2]\nb: [*a, *a]\nc: {x: *a}\n")
    assert shared == {"a": [1, 2], "b": [[1, 2], [1, 2]], "c": {"x": [1, 2]}}
    assert len(parse_yaml(f"a: [{'1, ' * (MAX_VALUES - 3)}]")["a"]) == MAX_VALUES - 3


def test_a_merged_key_may_be_set_again():
    text = "base: &b {x: 1, y: 2}\nother:\n  <<: *b\n  y: 3\n"
    assert parse_yaml(text)["other"] == {"x": 1, "y": 3}


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=mentioning(tmp_path / "none.yaml")):
        load_config(tmp_path / "none.yaml")


def test_nothing_heavy_is_imported():
    code = (
        "import sys, megatron_dppo.config, megatron_dppo.train, megatron_dppo.launch.local\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'sglang', 'megatron') if m in "
        "sys.modules])"
    )
    answer = run_patiently([sys.executable, "-c", code], check=True)
    assert answer.stdout.strip() == "[]"


def test_the_directory_may_be_named_after_other_values(load, tree):
    tree["run"]["directory"] = "runs/{algorithm.name}-{run.seed}"
    config = load("algorithm.name=ppo", "run.seed=7")
    assert config.run.directory == "runs/ppo-7"
    (problem,) = problems_of(load, "run.directory=runs/{algorithm.nme}")
    assert mentions(problem, "run.directory", "{algorithm.nme}")


def test_null_takes_an_evaluation_set_away(tmp_path):
    tree = minimal(tmp_path)
    tree["data"]["evaluation"] = {"one": "1.jsonl", "two": "2.jsonl"}
    path = write_config(tmp_path, tree)
    assert load_config(path, ["data.evaluation.one="]).data.evaluation == {"two": "2.jsonl"}
    assert load_config(path, ["data.evaluation.no="]).data.evaluation.keys() == {"one", "two"}


def test_every_form_of_the_data_is_written_back_as_it_was(load, tmp_path):
    for train in (
        "a.jsonl",
        "[{path: a.parquet, answer_key: label, weight: 2}, {path: b, weight: 1}]",
    ):
        config = load(f"data.train={train}", "data.evaluation={x: e.jsonl, y: {path: f}}")
        path = write_config(tmp_path, resolved_yaml(config))
        assert load_config(path) == config
    assert [file.path for file in config.data.train_files] == ["a.parquet", "b"]
    assert config.data.train_files[0].weight == 2
    assert {name: file.path for name, file in config.data.evaluation_files.items()} == {
        "x": "e.jsonl",
        "y": "f",
    }


def test_a_flipped_bit_in_a_run_s_configuration_is_refused(tmp_path):
    """Whatever bit flips, the file is refused or has the same values."""
    from megatron_dppo.system.files import with_hash

    config = load_config(str(write_config(tmp_path, minimal(tmp_path))))
    path = tmp_path / "run.yaml"
    intact, rng = with_hash(resolved_yaml(config)).encode(), random.Random(1)
    path.write_bytes(intact)
    assert load_config(str(path)) == config
    refused = 0
    for _ in range(60):
        content = bytearray(intact)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            assert load_config(str(path)) == config
        except ConfigError:
            refused += 1
    assert refused > 50


def test_a_former_key_that_nobody_set_is_no_fault_of_a_saved_configuration(tmp_path, tree):
    tree["weight_sync"] = {"senders": None, "bucket_mib": 512}
    config = load_config(write_config(tmp_path, tree))
    assert config.weight_sync.bucket_mib == 512
    tree["weight_sync"]["senders"] = "nodes"
    with pytest.raises(ConfigError, match=mentioning("weight_sync.senders", "unknown")):
        load_config(write_config(tmp_path, tree))
