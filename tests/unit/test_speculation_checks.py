"""Speculative decoding: the algorithms, and the runs with them, that the checks of a configuration admit."""

import pytest

from megatron_dppo.config.forwarded import SGLANG
from tests.unit.config_files import DENSE, MOE, faults_of

NGRAM = "sglang.speculative_algorithm=NGRAM"
EAGLE = {
    "speculative_algorithm": "EAGLE",
    "speculative_draft_model_path": "draft",
    "speculative_eagle_topk": 1,
    "speculative_num_steps": 3,
}
ADAPTERS = [
    *("lora.rank=8", "lora.update=adapters", "weight_sync.strategy=disk"),
    "weight_sync.directory=weights",
]
DELTA_NETS = {
    **MOE, "model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2, "shared_expert_intermediate_size": 32, "head_dim": 16,
}  # fmt: skip


@pytest.fixture
def keys(tmp_path):
    """Return a function from overrides to the keys of the configuration that the checks reject."""

    def keys_of(*overrides, model=MOE):
        return {fault.partition(":")[0] for fault in faults_of(tmp_path, *overrides, model=model)}

    return keys_of


def eagle(**changes):
    table = EAGLE | changes
    return [f"sglang.{key}={value}" for key, value in table.items() if value is not None]


def test_ngrams_and_a_fixed_draft_of_one_chain_are_admitted(keys):
    assert not keys(NGRAM, "sglang.speculative_num_draft_tokens=8", "rollout.router_replay=true")
    assert not keys(*eagle(), "rollout.router_replay=true")
    assert not keys(*eagle(speculative_algorithm="EAGLE3"))


def test_ngrams_are_known_and_a_draft_is_passed_on_with_warnings():
    assert not list(SGLANG.untried({"speculative_algorithm": "NGRAM"}))
    assert {w.partition(":")[0] for w in SGLANG.untried(EAGLE)} >= {
        "sglang.speculative_draft_model_path"
    }


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"speculative_draft_model_path": None}, "sglang.speculative_draft_model_path"),
        ({"speculative_eagle_topk": None}, "sglang.speculative_eagle_topk"),
        ({"speculative_eagle_topk": 4}, "sglang.speculative_eagle_topk"),
        ({"speculative_num_steps": None}, "sglang.speculative_num_steps"),
        ({"speculative_num_steps": 0}, "sglang.speculative_num_steps"),
        ({"speculative_algorithm": "STANDALONE"}, "sglang.speculative_algorithm"),
        ({"speculative_algorithm": "eagle"}, "sglang.speculative_algorithm"),
    ],
)
def test_a_draft_must_be_a_chain_of_a_model_of_its_own(keys, changes, key):
    assert keys(*eagle(**changes)) == {key}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["engine.placement=colocated"], "engine.placement"),
        (["weight_sync.strategy=disk", "weight_sync.directory=weights"], "weight_sync.strategy"),
        (["engine.device=cpu"], "sglang.speculative_algorithm"),
        (["engine.deterministic=true"], "engine.deterministic"),
    ],
)
def test_runs_that_would_lose_or_change_a_draft_are_refused(keys, overrides, key):
    assert key in keys(*eagle(), *overrides)


def test_the_served_model_is_no_draft_of_its_own(keys, tmp_path):
    overrides = eagle(speculative_draft_model_path=tmp_path / "model")
    assert keys(*overrides) == {"sglang.speculative_draft_model_path"}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (
            ["sglang.speculative_ngram_max_bfs_breadth=1"],
            "sglang.speculative_ngram_max_bfs_breadth",
        ),
        (["sglang.page_size=64"], "sglang.page_size"),
        (["engine.deterministic=true"], "engine.deterministic"),
        (["rollout.interrupt=abort"], "rollout.interrupt"),
        (["rollout.interrupt=retract"], "rollout.interrupt"),
        (["sglang.tp_size=2", "sglang.attn_dp_size=2"], "sglang.speculative_algorithm"),
    ],
)
def test_runs_that_ngrams_exclude_are_refused(keys, overrides, key):
    assert key in keys(NGRAM, *overrides)
    assert key not in keys(*overrides)


def test_updates_of_adapters_exclude_speculation(keys):
    assert keys(NGRAM, *ADAPTERS, model=DENSE) == {"lora.update"}
    assert not keys(*ADAPTERS, model=DENSE)


def test_delta_nets_exclude_speculation(keys):
    assert "sglang.speculative_algorithm" in keys(NGRAM, model=DELTA_NETS)
    assert "sglang.speculative_algorithm" not in keys(NGRAM, model=DENSE)
