"""The ``lora:`` section: the adapters that it makes, and the settings that are rejected, each by its key."""

from functools import partial
from pathlib import Path

import pytest

from megatron_dppo.config.lora import adapter_update_faults, adapters_of, lora_faults
from megatron_dppo.config.schema import LoraConfig, SupervisedConfig
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.layout import LayoutSizes
from tests.unit.config_files import DENSE, MOE, faults_of, write_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "model_configs"


@pytest.fixture
def problems(tmp_path):
    return partial(faults_of, tmp_path)


def test_one_override_turns_it_on(tmp_path, problems):
    assert problems("lora.rank=8") == []
    shape = load_model_shape(write_checkpoint(tmp_path / "model"))
    adapters = adapters_of(LoraConfig(rank=8), shape)
    assert (adapters.rank, adapters.alpha, adapters.scale) == (8, 16.0, 2.0)
    assert adapters.modules == (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    assert not adapters.share_experts
    assert adapters_of(LoraConfig(), shape) is None


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["attention"], ("q_proj", "k_proj", "v_proj", "o_proj")),
        (["experts"], ("gate_proj", "up_proj", "down_proj")),
        (["v_proj", "q_proj"], ("q_proj", "v_proj")),
        (["o_proj", "attention"], ("q_proj", "k_proj", "v_proj", "o_proj")),
    ],
)
def test_names_and_groups(tmp_path, names, found):
    shape = load_model_shape(write_checkpoint(tmp_path / "model"))
    assert adapters_of(LoraConfig(rank=8, target_modules=names), shape).modules == found


@pytest.mark.parametrize(
    ("overrides", "model", "words"),
    [
        (["lora.target_modules=[qproj]"], MOE, "lora.target_modules: got ['qproj'], which name nothing in a"),
        (["lora.target_modules=[mlp]"], MOE, "lora.target_modules: got ['mlp'], which name nothing"),
        (["lora.target_modules=[experts]"], DENSE, "lora.target_modules: got ['experts'], which name"),
        (["lora.target_modules=[]"], MOE, "lora.target_modules: got [], which name nothing"),
        (["lora.rank=33"], MOE, "lora: rank 33 is over the 32 of k_proj 32 x 64"),
        (["lora.experts=shared", "lora.target_modules=[attention]"], MOE, "lora.experts: got 'shared', expected"),
        (["lora.train_router=true"], DENSE, "lora.train_router: got true, expected false"),
        (["lora.start_from=/nowhere"], MOE, "lora.start_from: got '/nowhere', which lacks adapter"),
        (["lora.rank=0", "lora.alpha=3.0"], MOE, "lora.rank: got 0 (off) with lora.alpha, expected a rank"),
        (["parallel.world_size=4", "parallel.tensor=4"], DENSE, "lora: q_proj is not cut evenly over 4"),
    ],
)  # fmt: skip
def test_refused(problems, overrides, model, words):
    found = problems("lora.rank=8", *overrides, model=model)
    assert any(problem.startswith(words) for problem in found), found


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("deepseek-v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        ("moonlight-16b-a3b-instruct", ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        (
            "qwen3-next-80b-a3b-instruct",
            ("out_proj", "in_proj_qkvz", "in_proj_ba", "q_proj", "k_proj", "v_proj", "o_proj"),
        ),
        (
            "qwen3.5-35b-a3b",
            (
                "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a",
                "q_proj", "k_proj", "v_proj", "o_proj",
            ),
        ),
    ],
)  # fmt: skip
def test_latents_and_delta_nets_have_adapters_that_are_sent_merged(model, expected):
    shape = load_model_shape(EXAMPLES / model)
    merged = LoraConfig(rank=8, target_modules=["attention"])
    assert adapters_of(merged, shape).modules == expected
    assert list(lora_faults(merged, LayoutSizes(world_size=1), shape, has_engines=True)) == []
    assert list(adapter_update_faults(merged, shape)) == []
    unmerged = merged.model_copy(update={"update": "adapters"})
    (fault,) = adapter_update_faults(unmerged, shape)
    assert fault.startswith("lora.update: got 'adapters', expected 'merged'")


def test_an_engine_with_adapters_of_its_own_is_refused(problems):
    refusal = [
        "sglang.enable_lora: got true (bool), expected nothing: with lora.update merged, engines "
        "have no adapters; with lora.update adapters, the run sets this option"
    ]
    assert problems("sglang.enable_lora=true") == refusal
    assert problems(*ADAPTERS_ONLY, "sglang.enable_lora=true") == refusal
    assert problems(*ADAPTERS_ONLY, "sglang.lora_backend=triton") == []
    assert len(problems("lora.rank=8", "sglang.lora_backend=triton")) == 1


ADAPTERS_ONLY = [
    "lora.rank=8", "lora.update=adapters", "lora.target_modules=[attention]",
    "weight_sync.strategy=disk",
]  # fmt: skip


def test_adapters_alone_where_the_engine_can(problems):
    assert problems(*ADAPTERS_ONLY) == []
    assert problems(*ADAPTERS_ONLY, "lora.target_modules=[all-linear]", model=DENSE) == []
    assert problems(*ADAPTERS_ONLY, "lora.target_modules=[o_proj, down_proj]", model=DENSE) == []


@pytest.mark.parametrize(
    ("overrides", "model", "words"),
    [
        (["lora.rank=0"], MOE, "lora.rank: got 0 (off) with lora.target_modules, lora.update, expected"),
        (["weight_sync.strategy=distributed"], MOE, "weight_sync.strategy: got 'distributed' with lora.update"),
        (["weight_sync.strategy=tensor"], MOE, "weight_sync.strategy: got 'tensor' with lora.update"),
        (["lora.train_router=true"], MOE, "lora.train_router: got true with lora.update 'adapters', expected"),
        (["engine.deterministic=true"], MOE, "engine.deterministic: got true with lora.update 'adapters'"),
        (["rollout.interrupt=retract"], MOE,
         "rollout.interrupt: got retract, expected drain or abort where updates send only adapters"),
        (["engine.router=true"], MOE, "engine.router: got true (bool) with lora.update 'adapters', expected"),
        (["engine.servers=2"], MOE, "engine.router: got null with lora.update 'adapters', expected false"),
        (["lora.target_modules=[all-linear]"], MOE,
         "lora.update: got 'adapters' with ['down_proj', 'gate_proj', 'up_proj'] of experts, expected"),
        (["lora.target_modules=[q_proj, v_proj]"], MOE,
         "lora.target_modules: got ['q_proj', 'v_proj'] with lora.update 'adapters', expected all of"),
        (["lora.target_modules=[up_proj]"], DENSE,
         "lora.target_modules: got ['up_proj'] with lora.update 'adapters', expected all of"),
    ],
)  # fmt: skip
def test_adapters_alone_where_the_engine_cannot(problems, overrides, model, words):
    found = problems(*ADAPTERS_ONLY, *overrides, model=model)
    assert any(problem.startswith(words) for problem in found), found


def test_a_supervised_run_has_no_engines_for_adapters(tmp_path):
    def problems(update):
        config = SupervisedConfig.model_validate(
            {
                "run": {"directory": str(tmp_path / "run"), "steps": 1},
                "model": {"hf_checkpoint": str(write_checkpoint(tmp_path / "model"))},
                "data": {"train": "x.jsonl"},
                "training": {"sequences_per_step": 1, "micro_batch_tokens": 64},
                "optimizer": {"lr": 1.0},
                "lora": {"rank": 4, "update": update},
            }
        )
        shape = load_model_shape(tmp_path / "model")
        return list(lora_faults(config.lora, config.parallel.sizes, shape, has_engines=False))

    assert problems("merged") == []
    assert problems("adapters") == [
        "lora.update: got 'adapters', expected 'merged': a supervised run has no engines to send them to"
    ]


def test_a_rank_may_be_the_smallest_dimension(problems):
    assert problems("lora.rank=32") == []
