"""Every check across sections: the smallest change of a valid configuration that it refuses, and its message."""

import json

import pytest

from megatron_dppo.config import ConfigError, check_config, load_config
from megatron_dppo.config.checks import check_supervised_config
from megatron_dppo.config.layout import describe
from megatron_dppo.config.schema import EngineConfig, SupervisedConfig
from megatron_dppo.launch.library_checks import check_everything_supervised
from megatron_dppo.model.splits import padded_vocab_size
from tests.messages import mentioning, mentions
from tests.unit.config_files import DENSE, MOE, minimal, refusals, write_config


@pytest.fixture
def check(tmp_path):
    def run(*overrides, model=MOE):
        config = load_config(write_config(tmp_path, minimal(tmp_path, model)), overrides)
        return describe(config, check_config(config))

    return run


@pytest.fixture
def problems(check):
    def run(*overrides, model=MOE):
        with pytest.raises(ConfigError) as caught:
            check(*overrides, model=model)
        return list(caught.value.faults)

    return run


def test_the_layout_of_a_valid_configuration_in_a_line(tmp_path):
    path = write_config(tmp_path, minimal(tmp_path))
    config = load_config(path, ["parallel.world_size=4", "parallel.tensor=2", "parallel.expert=2"])
    assert describe(config, check_config(config)) == (
        "4 ranks: TP 2 x CP 1 x PP 1 x VPP 1 x DP 2, experts EP 2 x ETP 1 x expert DP 2, sequence "
        "parallel; "
        "vocabulary 511 (padded to 512); a rollout batch is 32 responses and 2 optimiser steps"
    )


@pytest.mark.parametrize(
    ("vocab", "tensor", "padded"),
    [(511, 1, 511), (511, 2, 512), (512, 4, 512), (513, 4, 516), (7, 8, 8)],
)
def test_padded_vocabulary(vocab, tensor, padded):
    assert padded_vocab_size(vocab, tensor) == padded


def test_a_sandbox_does_not_show_the_runs_own_folder(tmp_path, check, problems):
    words = [
        "environment.name=agent",
        "environment.options.agent=ls",
        "environment.max_tokens=2000",
        f"run.directory={tmp_path}/run",
    ]
    check(*words, f"environment.options.sandbox_paths=[{tmp_path}/tools]")
    for path in (tmp_path, tmp_path / "run", tmp_path / "run" / "rollouts"):
        (fault,) = problems(*words, f"environment.options.sandbox_paths=[{path}]")
        assert mentions(fault, "environment.options.sandbox_paths", str(path), "run.directory")


def test_a_folder_or_a_glob_of_data_files_passes(tmp_path, check):
    folder = tmp_path / "math"
    folder.mkdir()
    for name in ("a.jsonl", "b.csv.gz", ".hidden", "README.md"):
        (folder / name).touch()
    check(f"data.train={folder}/")
    check(f"data.train={folder}/[ab].*", f"data.evaluation.held_out={folder}")
    check(f"data.train=[{{path: {folder}/a.*}}, {{path: {folder}/b*}}]")


@pytest.mark.parametrize(("pattern", "is_found"), [("", True), ("*.jsonl", True), ("*.csv", False)])
def test_the_pairs_of_a_supervised_run_may_be_a_folder_or_a_glob(tmp_path, pattern, is_found):
    tree = minimal(tmp_path)
    tree["data"] = {"train": f"{tmp_path}/{pattern}"}
    tree["training"] = {"sequences_per_step": 1, "micro_batch_tokens": 512}
    del tree["rollout"]
    config = SupervisedConfig.model_validate(tree)
    if is_found:
        check_supervised_config(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_supervised_config(config)
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["data.train"]


def test_a_supervised_run_is_refused_what_every_run_is_refused(tmp_path):
    """A file in place of the run's folder, a set whose name can't name a metric, an unknown tracker, and weights that
    are no safetensors file."""
    tree = minimal(tmp_path)
    data = tree["data"]["train"]
    tree["data"] = {"train": data, "evaluation": {"a/b": data}}
    tree["training"] = {"sequences_per_step": 1, "micro_batch_tokens": 512}
    tree["tracking"] = {"trackers": ["nowhere"]}
    tree["run"]["directory"] = data
    del tree["rollout"]
    config = SupervisedConfig.model_validate(tree)
    with pytest.raises(ConfigError) as caught:
        check_everything_supervised(config, "supervised.yaml")
    keys = [fault.partition(":")[0] for fault in caught.value.faults]
    assert keys == ["run.directory", "data.evaluation", "tracking.trackers", "model.hf_checkpoint"]


@pytest.mark.parametrize(
    ("content", "pattern"), [([], ""), ([".hidden.jsonl", "README.md"], ""), (["a.csv"], "*.jsonl")]
)
def test_a_path_without_data_files_is_refused_with_its_key(tmp_path, problems, content, pattern):
    folder = tmp_path / "math"
    folder.mkdir()
    for name in content:
        (folder / name).touch()
    path = f"{folder}/{pattern}"
    faults = problems(f"data.train={path}", f"data.evaluation.sums={path}")
    assert [fault.partition(":")[0] for fault in faults] == ["data.train", "data.evaluation.sums"]
    assert all(repr(path) in fault for fault in faults)
    assert ("README.md" in faults[0]) == ("README.md" in content)
    assert "hidden" not in faults[0]


def test_a_link_that_leads_nowhere_in_a_folder_is_named(tmp_path, problems):
    folder = tmp_path / "math"
    folder.mkdir()
    (folder / "a.jsonl").touch()
    (folder / "b.jsonl").symlink_to("gone.jsonl")
    (fault,) = problems(f"data.train={folder}")
    assert fault.startswith("data.train:")
    assert f"{folder}/b.jsonl" in fault


def test_a_file_that_two_paths_name_is_refused(tmp_path, problems):
    folder = tmp_path / "math"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).touch()
    (fault,) = problems(f"data.train=[{{path: {folder}/}}, {{path: {folder}/b.jsonl}}]")
    assert fault.startswith("data.train:")
    assert f"{folder}/b.jsonl" in fault


def test_a_further_reward_has_a_name_of_its_own(check, problems):
    same = "reward.further={brief: {name: exact_integer}}"
    check("reward.name=my_rewards:length", same)
    (problem,) = problems("reward.name=my_rewards:brief", same)
    assert mentions(problem, "reward.further.brief", "reward.name", "my_rewards:brief")


WORLD = "parallel.world_size="
LAYOUTS_THAT_FIT = [
    (WORLD + "2", "parallel.tensor=2"),
    (WORLD + "2", "parallel.expert=2"),
    (WORLD + "4", "parallel.tensor=4"),  # over 2 key-value heads
    (WORLD + "2", "parallel.tensor=2", "parallel.expert_tensor=2"),
    (WORLD + "4", "parallel.expert=2", "parallel.tensor=2", "parallel.expert_tensor=2"),
    (WORLD + "8", "parallel.tensor=2", "parallel.pipeline=2", "parallel.expert=2"),
    (WORLD + "2", "parallel.pipeline=2", "parallel.virtual_pipeline=2"),
    (WORLD + "1", "optimizer.distributed=true"),
]


@pytest.mark.parametrize("overrides", LAYOUTS_THAT_FIT, ids=" ".join)
def test_layouts_that_fit(check, overrides):
    check(*overrides)


REFUSED = refusals(
    """
optimizer.schedule=cosine
    optimizer.decay_steps: got null with schedule 'cosine', expected more than optimizer.warmup_steps, 0
optimizer.schedule=linear optimizer.warmup_steps=5 optimizer.decay_steps=5
    optimizer.decay_steps: got 5 (int) with schedule 'linear', expected more than
optimizer.decay_steps=5
    optimizer.schedule: got 'constant' with decay_steps 5 (int) and min_lr 0.0, expected
algorithm.overlong_tokens=1000000
    algorithm.overlong_tokens: got 1000000, expected at most rollout.max_response_tokens
optimizer.schedule=linear optimizer.decay_steps=9 optimizer.min_lr=1
    optimizer.min_lr: got 1.0, expected at most optimizer.lr
parallel.world_size=3 parallel.tensor=2
    parallel.world_size: got 3, expected a multiple of tensor x pipeline = 2 x 1 = 2
parallel.world_size=2 parallel.expert=4
    parallel.world_size: got 2, expected a multiple of expert_tensor x expert x pipeline = 1 x 4 x 1 = 4
parallel.world_size=2 parallel.tensor=2 parallel.expert_tensor=1
    parallel.expert_tensor: got 1 with expert 1 and tensor 2, expected 2: Megatron-Core 0.16.1 does not
parallel.world_size=2 parallel.expert_tensor=2
    parallel.expert_tensor: got 2 with expert 1 and tensor 1, expected 1
parallel.world_size=2 parallel.tensor=2 parallel.sequence=false
    parallel.sequence: got false with tensor 2, expected true or null
parallel.sequence=true
    parallel.sequence: got true with tensor 1, expected null
parallel.world_size=3 parallel.expert=3 rollout.prompts_per_step=12
    parallel.expert: got 3, expected a divisor of the model's 8 experts
parallel.world_size=3 parallel.tensor=3
    parallel.tensor: got 3, expected a divisor or a multiple of the model's 2 key-value heads
parallel.world_size=3 parallel.tensor=3
    parallel.tensor: got 3, expected a divisor of the model's 4 attention heads
parallel.world_size=3 parallel.pipeline=3
    parallel.pipeline: got 3, expected a divisor of the model's 4 layers
parallel.world_size=2 parallel.pipeline=2 parallel.virtual_pipeline=3
    parallel.pipeline: got 2 x virtual_pipeline = 2 x 3, expected a divisor of the model's 4 layers
parallel.virtual_pipeline=2
    parallel.virtual_pipeline: got 2 with pipeline 1, expected null
parallel.world_size=6 parallel.expert=2 parallel.expert_tensor=3 rollout.prompts_per_step=12
    parallel.expert_tensor: got 3, expected a divisor of the experts' MLP size 32
megatron.moe_token_dispatcher_type=allgather
    megatron.moe_token_dispatcher_type: got 'allgather', expected 'alltoall'
rollout.router_replay=true megatron.moe_router_fusion=true
    megatron.moe_router_fusion: got true (bool) with rollout.router_replay, expected nothing: the fused router
megatron.cuda_graph_impl=local
    megatron.cuda_graph_impl: got 'local' (str), expected it off
megatron.fp8=e4m3 training.recompute=selective
    megatron.fp8_recipe: got 'delayed' (Megatron-Core's default) with training.recompute selective
megatron.moe_aux_loss_coeff=0.01
    megatron.moe_aux_loss_coeff: got 0.01
sglang.dp_size=2
    sglang.dp_size: got 2
sglang.moe_runner_backend=auto
    sglang.moe_runner_backend: got 'auto' (str), expected 'triton'
training.prompts_per_mini_batch=3
    training.prompts_per_mini_batch: got 3, expected a divisor of rollout.prompts_per_step = 8
parallel.world_size=3
    rollout.prompts_per_step: got 8, expected a multiple of the 3 data-parallel ranks
parallel.world_size=16
    rollout.prompts_per_step: got 8, expected a multiple of the 16 data-parallel ranks
parallel.world_size=8 training.prompts_per_mini_batch=1
    training.prompts_per_mini_batch: got 1 x rollout.group_size 4 = 4 responses in an optimiser step, expected at
        least one for each of the 8
rollout.top_p=0.95
    rollout.top_p: got 0.95, expected 1: the engine's log-probabilities ignore the truncation
rollout.top_k=50
    rollout.top_k: got 50, expected -1 (off)
algorithm.reference_estimator=k2
    algorithm.reference_estimator: got 'k2' (str) with algorithm.reference_kl 0 (off), expected
        algorithm.reference_kl above 0, or no algorithm.reference_estimator
algorithm.reference_importance_weights=true
    algorithm.reference_importance_weights: got true (bool) with algorithm.reference_kl 0 (off)
algorithm.aggregation=token-mean algorithm.aggregation_constant=64
    algorithm.aggregation_constant: got 64.0 with aggregation 'token-mean', expected null
data.train=none.jsonl
    data.train: got 'none.jsonl', expected a JSONL or Parquet file, relative to
data.evaluation.aime24=none.jsonl
    data.evaluation.aime24: got 'none.jsonl', expected a JSONL or Parquet file
data.train=[]
    data.train: got an empty list, expected at least one file
'data.train=[{path: a.jsonl}, {path: none.parquet}]'
    data.train[1].path: got 'none.parquet', expected a JSONL or Parquet file
'data.train=[{path: a.jsonl}, {path: b.jsonl}, {path: a.jsonl}]'
    data.train: 'a.jsonl' is there twice, expected each file once
'data.train=[{path: a.jsonl, weight: 2}, {path: b.jsonl}]'
    data.train[1].weight: missing, expected one for each file, or for none
'data.evaluation={aime24: {path: none.parquet, answer_key: label}}'
    data.evaluation.aime24: got 'none.parquet', expected a JSONL or Parquet file
'data.prompt_template=Solve this.'
    data.prompt_template: got 'Solve this.', expected {prompt} in it once
"data.prompt_template='{prompt} and {prompt}'"
    data.prompt_template: got '{prompt} and {prompt}', expected {prompt} in it once
data.system_prompt=Think. data.apply_chat_template=false
    data.system_prompt: got one with data.apply_chat_template false, expected null
'data.chat_template_arguments={tools: [], enable_thinking: false}'
    data.chat_template_arguments.tools: got []
"rollout.stop=['']"
    rollout.stop: got an empty text
rollout.replay_from=nowhere
    rollout.replay_from: got 'nowhere', expected a folder of rollout batches
engine.urls=[localhost:3000]
    engine.urls: got 'localhost:3000', expected http://host:port
data.max_prompt_tokens=2000
    rollout.max_response_tokens: got 64, with data.max_prompt_tokens 2000 that is 2064, expected at most 46: the
        model's 2048 positions, of which SGLang fills all but 2
data.max_prompt_tokens=1979 rollout.interrupt=abort
    rollout.max_response_tokens: got 64, with data.max_prompt_tokens 1979 that is 2043, expected at most 63: the
        model's 2048 positions, of which SGLang fills all but 6
data.max_prompt_tokens=2042 rollout.max_response_tokens=4
    data.max_prompt_tokens: got 2042, expected at most 2041: the model's 2048 positions, of which SGLang fills all
        but 7 with a prompt
evaluation.max_response_tokens=1023
    evaluation.max_response_tokens: got 1023, with data.max_prompt_tokens 1024
rollout.topk_log_probs=512
    rollout.topk_log_probs: got 512, expected at most the vocabulary's 511
'rollout.stop_token_ids=[3, 511]'
    rollout.stop_token_ids: got [511], expected ids below the vocabulary's 511
rollout.replay_from=.
    rollout.replay_from: got '.', expected a folder of rollout batches (step_*.safetensors)
checkpoint.upload=sums
    checkpoint.upload: got 'sums', expected OWNER/NAME
checkpoint.upload=me/sums checkpoint.export_hf=false
    checkpoint.upload: got 'me/sums', but checkpoint.export_hf is false: nothing is there to
'profile.ranks=[0, 99]'
    profile.ranks: got [99], expected ranks from 0 to 0
profile.ranks=[-1]
    profile.ranks: got [-1], expected ranks from 0 to 0
'profile.steps=[0, 1, 999999]'
    profile.steps: got [0, 999999], expected steps from 1 to run.steps
rollout.prompts_per_step=1048576 rollout.group_size=65536
    rollout.group_size: got 65536, with rollout.prompts_per_step 1048576 that is 68719476736 responses in a batch,
        expected at most 16777216
"engine.urls=['http://rob:hunter2@a:3000']"
    engine.urls: got one for a with a user or a password in it, expected http://host:port
rollout.replay_from=. rollout.max_staleness=1
    rollout.max_staleness: got 1 with rollout.replay_from, expected 0
weight_sync.changes_only=true weight_sync.strategy=disk
    weight_sync.changes_only: got true with weight_sync.strategy disk
weight_sync.changes_only=true engine.placement=colocated
    weight_sync.changes_only: got true with engine.placement colocated
engine.atomic_updates=true weight_sync.strategy=disk
    engine.atomic_updates: got true with weight_sync.strategy disk
engine.atomic_updates=true engine.placement=colocated
    engine.atomic_updates: got true with engine.placement colocated
engine.placement=colocated "engine.urls=['http://a:3000']"
    engine.placement: got colocated with engine.urls, expected separate: servers that run elsewhere
engine.placement=colocated rollout.max_staleness=1
    rollout.interrupt: got drain with engine.placement colocated and rollout.max_staleness 1, expected retract
engine.placement=colocated engine.device=cuda
    weight_sync.strategy: got distributed with engine.placement colocated, expected tensor or disk
rollout.oversampling=1.5
    rollout.oversampling: got 1.5, expected 1 without rollout.drop_zero_variance_groups
engine.deterministic=true rollout.responses_per_call=2
    rollout.responses_per_call: got 2, expected 1 with engine.deterministic
environment.name=calculator environment.credit=turn algorithm.name=gspo
    environment.credit: got turn with algorithm.name gspo, expected trajectory: the rule of gspo
environment.name=calculator environment.credit=turn algorithm.name=unknown
    algorithm: unknown algorithm 'unknown'
reward.name=environment
    reward.name: got environment and no environment.name, expected an environment
"""
)
TOO_MANY_TEXTS = f"rollout.stop={[str(i) for i in range(33)]}"
REFUSED.append(([TOO_MANY_TEXTS], "rollout.stop: got 33 texts, expected at most 32"))


@pytest.mark.parametrize(
    ("overrides", "problem"), REFUSED, ids=[p.split(",")[0] for _, p in REFUSED]
)
def test_what_is_refused(problems, overrides, problem):
    faults = problems(*overrides)
    assert any(line.startswith(problem) for line in faults), faults


def test_a_password_in_a_url_is_in_no_message(problems):
    urls = "['http://rob:hunter2@a:3000', 'http://rob:hunter2@a:3000', 'http://:hunter2@b']"
    faults = problems(f"engine.urls={urls}")
    assert len(faults) == 3
    assert "hunter2" not in "".join(faults)


def test_texts_for_the_model_may_have_lines(problems):
    (fault,) = problems(
        "rollout.top_k=50",
        r'data.system_prompt="Think.\nThen answer."',
        r'data.prompt_template="Q:\t{prompt}\n"',
        r'rollout.stop=["\n\n", "Q:"]',
    )
    assert fault.startswith("rollout.top_k")
    (fault,) = problems(r'data.system_prompt="\0"')
    assert fault.startswith("data.system_prompt: got '\\x00' (str)")
    (fault,) = problems(r'run.directory="a\nb"')
    assert fault.startswith("run.directory: got 'a\\nb' (str)")


REFUSED_FOR_DENSE = refusals(
    """
parallel.world_size=2 parallel.expert=2
    parallel.expert: got 2, expected 1: qwen3 is a dense model
parallel.world_size=2 parallel.expert_tensor=2
    parallel.expert_tensor: got 2, expected null: qwen3
rollout.router_replay=true
    rollout.router_replay: got true, expected false: qwen3
megatron.moe_token_dispatcher_type=alltoall
    megatron.moe_token_dispatcher_type: got 'alltoall', expected nothing: qwen3
"""
)


@pytest.mark.parametrize(("overrides", "problem"), REFUSED_FOR_DENSE)
def test_what_is_refused_for_a_dense_model(problems, overrides, problem):
    assert any(line.startswith(problem) for line in problems(*overrides, model=DENSE))


def test_a_dense_mlp_must_split(problems):
    (fault,) = problems(WORLD + "2", "parallel.tensor=2", model=DENSE | {"intermediate_size": 129})
    assert mentions(fault, "parallel.tensor", 2, 129)


def test_a_dense_model_needs_no_sequence_parallelism(check):
    assert "sequence" not in check(WORLD + "2", "parallel.tensor=2", model=DENSE)


def test_all_problems_are_one_error(problems):
    faults = problems(
        "rollout.top_p=0.9", WORLD + "3", "model.hf_checkpoint=nowhere", "megatron.bf16=true"
    )
    keys = [line.split(":")[0] for line in faults]
    assert keys == [
        "rollout.prompts_per_step",
        "rollout.top_p",
        "megatron.bf16",
        "model.hf_checkpoint",
    ]


def test_missing_files_of_a_checkpoint(tmp_path, problems):
    model = tmp_path / "bare"
    model.mkdir()
    key = f"model.hf_checkpoint={model}"
    assert problems(key)[0].startswith(f"model.hf_checkpoint: {model}/config.json: ")
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    text = "\n".join(problems(key))
    assert mentions(text, model, "model.safetensors", "model.safetensors.index.json")
    assert mentions(text, model, "tokenizer.json", "tokenizer.model")
    assert mentions(text, f"{model}/config.json", "model_type", None, "'llama'")
    (model / "config.json").write_text(json.dumps({**MOE, "hidden_size": 0, "vocab_size": "x"}))
    faults = problems(key)
    for value in ("hidden_size is 0", "vocab_size is 'x'"):
        assert any(f"{model}/config.json: {value}" in problem for problem in faults)
    (model / "config.json").write_text("{")
    assert mentions(problems(key)[0], "model.hf_checkpoint", f"{model}/config.json", "JSON")


def test_a_plan_needs_no_weights(tmp_path, check):
    plan = check()
    config = load_config(write_config(tmp_path, minimal(tmp_path)))
    (tmp_path / "model" / "model.safetensors").unlink()
    assert describe(config, check_config(config, weights=False)) == plan
    with pytest.raises(ConfigError, match=mentioning("weights", tmp_path / "model")):
        check_config(config)


def test_a_missing_shard_is_named(tmp_path, problems):
    minimal(tmp_path)
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"}}
    model = tmp_path / "model"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "m-1.safetensors").touch()
    (fault,) = problems()
    assert mentions(fault, 1, 2, "m-2.safetensors")
    assert "m-1" not in fault


def test_experts_under_their_other_name(check):
    renamed = {k: v for k, v in MOE.items() if k != "num_experts"} | {"num_local_experts": 8}
    plan = check(WORLD + "2", "parallel.expert=2", model=renamed)
    assert "EP 2 x ETP 1" in plan


@pytest.mark.parametrize(
    ("given", "started", "router"),
    [
        ({}, 1, False),
        ({"servers": 2}, 2, True),
        ({"servers": 2, "router": False}, 2, False),
        ({"router": True}, 1, True),
        ({"urls": ["http://a:1"]}, 0, False),
        ({"urls": ["http://a:1", "http://b:1"]}, 0, True),
        ({"urls": ["http://a:1"], "servers": 1}, 1, True),
        ({"servers": 0}, 0, False),
    ],
)
def test_how_many_servers_start_and_whether_a_router_does(given, started, router):
    engine = EngineConfig(**given)
    assert (engine.servers_to_start, engine.uses_router) == (started, router)


@pytest.mark.parametrize("key", ["context_length", "max_total_tokens"])
def test_the_engine_s_own_context_and_cache_bound_the_lengths(problems, check, key):
    check(f"sglang.{key}=1090")
    (problem,) = problems(f"sglang.{key}=1089")
    expected = ("rollout.max_response_tokens", 64, "data.max_prompt_tokens", 1024, 1088, 63)
    assert mentions(problem, *expected, f"sglang.{key}", 1089)


def test_the_longest_that_a_model_serves_or_a_replay_trains(problems, check, tmp_path):
    (tmp_path / "step_000001.safetensors").touch()
    check("data.max_prompt_tokens=1982")  # 2046 of 2048 with the response
    assert len(problems("data.max_prompt_tokens=1983")) == 1
    check("data.max_prompt_tokens=1984", f"rollout.replay_from={tmp_path}")


def test_the_engine_s_split_divides_the_heads(problems, check):
    check("sglang.tp_size=4")  # 4 heads; each of 2 key-value heads is on two ranks
    problem, *others = problems("sglang.tp_size=3")
    assert mentions(problem, "sglang.tp_size", 3, 4)
    # 3 does not divide the width of the experts either.
    assert others
    assert all(other.startswith("sglang.tp_size: got 3") for other in others)


def test_many_problems_are_a_screen():
    error = ConfigError([f"key{i}: wrong" for i in range(1000)], "config.yaml")
    assert len(str(error).splitlines()) == 16
    *_, last, rest = str(error).splitlines()
    assert last.strip() == "key13: wrong"
    assert mentions(rest, 986)
    assert len(error.faults) == 1000


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_the_file_of_authorities_holds_certificates(problems, tmp_path, content):
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    [problem] = problems(f"engine.ca_file={path}")
    assert mentions(problem, "engine.ca_file", f"'{path}'", "PEM")
