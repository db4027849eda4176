"""Routers of sigmoids with a bias, and models with dense first layers and such routers in all other layers."""

from __future__ import annotations

from typing import Any

from megatron_dppo.families.shared import decoder, reading
from megatron_dppo.model import splits
from megatron_dppo.model.config_facts import MOST_LAYERS, ConfigFacts, Entries
from megatron_dppo.model.rows import Rule, dense_layers, in_layers, layer_rule, routed_layers
from megatron_dppo.model.shape import ModelShape, Router
from megatron_dppo.model.tiny_sizes import TinySizes


def router_bias(name: str = "mlp.gate.e_score_correction_bias") -> Rule:
    """Return the rule of the bias that is added to a router's scores for the choice of experts only.

    ``name`` is the bias's name in the family's checkpoints. The bias is a buffer in Megatron-Core, is float32 in
    trainer and engine, and is not trained.
    """
    return layer_rule(
        "mlp.router.expert_bias",
        splits.replicated,
        (name, ("experts",)),
        dtype="float32",
        engine_dtype="float32",
    )


def dense_then_moe(engine_dtype: str | None = None) -> tuple[Rule, ...]:
    """Return the rules of the MLP in dense layers, and of the router and the shared experts in layers with experts.

    The router uses sigmoids and has a bias. ``engine_dtype`` is the type of SGLang's router if it is not the model's
    type.
    """
    router = decoder.moe_router(engine_dtype=engine_dtype)
    moe = (*router, router_bias(), *decoder.shared_expert("mlp.shared_experts"))
    return (*in_layers(dense_layers, *decoder.DENSE_MLP), *in_layers(routed_layers, *moe))


def read_sigmoid_router(facts: ConfigFacts, default: Router) -> Router:
    """Read a router of DeepSeek-V3's kind. ``default`` has transformers' values of missing keys."""
    facts.require("scoring_func", "sigmoid", "sigmoid")
    facts.require("topk_method", "noaux_tc", "noaux_tc")
    facts.require("norm_topk_prob", True, True)
    groups = facts.positive("n_group", default=default.groups)
    chosen_groups = facts.positive("topk_group", default=default.chosen_groups)
    experts_per_token = facts.positive("num_experts_per_tok")
    if groups == chosen_groups:
        # A choice of all groups has no effect.
        groups = chosen_groups = 1
    if groups > 1 and experts_per_token != 2 * chosen_groups:
        facts.fault(
            f"topk_group is {chosen_groups} with num_experts_per_tok {experts_per_token}, expected half of it: "
            "Megatron-Core's score of a group is the sum of its highest num_experts_per_tok / topk_group scores, but "
            "the model's score of a group is the sum of the group's highest 2 scores"
        )
    experts = facts.positive("n_routed_experts", "num_local_experts")
    if experts % groups:
        facts.fault(f"n_group is {groups}, expected a divisor of the {experts} experts")
    scale = facts.number("routed_scaling_factor", default.scale)
    return Router("sigmoid", True, groups, chosen_groups, scale)


def tiny_values(shape: ModelShape, values: Entries, sizes: TinySizes) -> Entries:
    """Return one dense layer at most, and one group of experts: then the router selects among all experts."""
    tiny: dict[str, Any] = {}
    if "first_k_dense_replace" in values:
        tiny["first_k_dense_replace"] = min(1, values["first_k_dense_replace"])
    if "n_group" in values:
        tiny |= {"n_group": 1, "topk_group": 1}
    return tiny


def read_first_layers(facts: ConfigFacts, default: int) -> tuple[int, ...]:
    """Return the numbers of the first layers, whose MLP is dense.

    ``default`` is transformers' number of first layers if the file does not have the key.
    """
    count = facts.count("first_k_dense_replace", default)
    layers = facts.positive("num_hidden_layers")
    if count >= layers:
        facts.fault(f"first_k_dense_replace is {count}, expected less than the {layers} layers")
        return ()
    return tuple(range(min(count, MOST_LAYERS)))


def _leading_dense_layers(facts: ConfigFacts) -> int:
    """Count the dense layers before the first layer with experts; one if ``mlp_layer_types`` is missing."""
    layers = min(facts.positive("num_hidden_layers"), MOST_LAYERS)
    kinds = facts.values.get("mlp_layer_types")
    # ``require`` below reports a value that is no list.
    if not kinds or not isinstance(kinds, list):
        kinds = ["dense"]
    count = 0
    # At least the last layer must have experts.
    while count < min(layers - 1, len(kinds)) and kinds[count] == "dense":
        count += 1
    expected = ["dense"] * count + ["sparse"] * (layers - count)
    facts.require("mlp_layer_types", expected, expected)
    return count


def read_agreed_dense_layers(facts: ConfigFacts) -> tuple[int, ...]:
    """Return the numbers of the first layers, whose MLP is dense.

    transformers reads ``mlp_layer_types``, SGLang reads ``first_k_dense_replace``: both must agree.
    """
    first_layers = _leading_dense_layers(facts)
    facts.require("first_k_dense_replace", first_layers, first_layers)
    return tuple(range(first_layers))


def read_dense_then_moe(facts: ConfigFacts, router: Router, **extra: Any) -> ModelShape:
    """Read a model with the rows of ``dense_then_moe``; ``router``: as for ``read_sigmoid_router``."""
    facts.require("moe_layer_freq", 1, 1)
    # Further layers predict more tokens. Checkpoints carry their tensors.
    facts.ignore("num_nextn_predict_layers", "num_mtp_layers")
    width = facts.positive("moe_intermediate_size")
    return reading.read_decoder_shape(
        facts,
        num_experts=facts.positive("n_routed_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=width,
        shared_ffn_hidden_size=facts.positive("n_shared_experts", default=1) * width,
        router=read_sigmoid_router(facts, router),
        **extra,
    )
