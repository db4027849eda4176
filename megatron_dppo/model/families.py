"""The supported model families, found by their entry points, and the reader of a config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megatron_dppo.model.config_facts import MOST_LAYERS, ConfigFacts, Entries
from megatron_dppo.model.errors import ModelConfigError, UnsupportedModelError
from megatron_dppo.model.json_file import read_json
from megatron_dppo.model.rows import (
    EMBEDDING,
    FINAL_NORM,
    MEGATRON_LAYER,
    OUTPUT,
    CarriedTensors,
    EngineRow,
    PackedExperts,
    Rule,
    Source,
    in_layers,
    no_tensor,
    routed_layers,
)
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.tiny_sizes import TinySizes
from megatron_dppo.system import plugins

ReadShape = Callable[[ConfigFacts], ModelShape]


EngineKeys = Callable[[ModelShape], Entries]
"""Function of a model. It returns the keys of config.json that SGLang's model reads without a default, with values."""
TinyValues = Callable[[ModelShape, Entries, TinySizes], Entries]
"""Function of a model, the entries of its config.json with tiny sizes, and these sizes. It returns further entries of
the tiny model's config.json."""


def no_entries(*_: Any) -> Entries:
    """No entries."""
    return {}


@dataclass(frozen=True)
class Family:
    """A model family: how to read its config.json, and its table in model order.

    Attributes:
        model_type: the family's name in config.json.
        architecture: the model's class in transformers and SGLang.
        read: reads a ModelShape from the file's entries; reports entries that the table does not describe as faults.
        layer: the rows of a layer, before its experts.
        expert: the rows of each expert in a layer with experts.
        engine: SGLang's tensors in a layer that combine the sources of several rows of ``layer``, or hold only a part
            of a row's sources. If all sources of a row are in these tensors, the tensors of the row's ``in_engine``
            are left out.
        carries: the tensors of published checkpoints that are only copied: not trained, and not sent to engines.
        engine_keeps_output: whether SGLang's model has an output matrix beside the embedding even if both are tied.
        most_engine_ranks: the most tensor-parallel ranks on which SGLang's model computes the right values; None: no
            limit.
        attention_replicas: whether SGLang's model supports attention replicas. If not, the model divides attention
            among all ranks.
        output_per_replica: whether SGLang's model can divide the output matrix among the ranks of an attention replica
            (``enable_dp_lm_head``).
        engine_keys: keys of config.json that SGLang's model reads without a default. transformers 5 does not save all
            of these keys.
        packed: the tensors that have all experts of a layer in files. Checkpoints are written with packed tensors.
            Files with a separate tensor for each matrix are read, too.
        text_table: in a model with further parts, the table of config.json that has the language model's entries.
        outer_engine_keys: keys outside of ``text_table`` that SGLang's model needs and that files lack.
        engine_options: options that SGLang's servers need for this family.
        needs_direct_placement: whether SGLang's own loader reads experts only from packed tensors. Updates send single
            matrices, so the server must place them without this loader.
        engine_has_config_dtype: whether SGLang's model makes linears in the type of config.json even if the server has
            another type. Then both types must be equal.
        has_fp8_engine: whether a quantised SGLang server holds exactly the tensors of ``quantization.is_quantized`` in
            FP8.
        has_head_dim: whether every config.json has the width of a head. If not, the tiny model's hidden size is heads x
            width of a head.
        tiny_values: entries of a tiny model's config.json, beside the sizes that all families have.
        trainer_layers: the function (``package.module:name``) that gets the specifications of a chunk's layers, and
            Megatron's configuration, and puts the family's modules in the place of Megatron's. Empty: the family has
            none.
        cpu_engine: the function (``package.module:name``) that puts PyTorch's functions in place of kernels of SGLang's
            model; called on a CPU, before the model is loaded. Empty: SGLang's model needs none.
    """

    model_type: str
    architecture: str
    read: ReadShape
    layer: tuple[Rule, ...]
    expert: tuple[Rule, ...] = ()
    engine: tuple[EngineRow, ...] = ()
    carries: CarriedTensors = no_tensor
    engine_keeps_output: bool = False
    most_engine_ranks: int | None = None
    attention_replicas: bool = False
    output_per_replica: bool = True
    engine_keys: EngineKeys = no_entries
    packed: tuple[PackedExperts, ...] = ()
    text_table: str | None = None
    outer_engine_keys: Entries = field(default_factory=dict)
    engine_options: Entries = field(default_factory=dict)
    needs_direct_placement: bool = False
    engine_has_config_dtype: bool = False
    has_fp8_engine: bool = False
    has_head_dim: bool = False
    tiny_values: TinyValues = no_entries
    trainer_layers: str = ""
    cpu_engine: str = ""
    embedding: Rule = EMBEDDING
    final_norm: Rule = FINAL_NORM
    output: Rule = OUTPUT

    def rules_of(self, shape: ModelShape, layer: int) -> list[Rule]:
        """Return the rows of ``layer`` before its experts."""
        return [rule for rule in self.layer if rule.layers(shape, layer)]

    def engine_rows_of(self, shape: ModelShape, layer: int) -> list[EngineRow]:
        """Return SGLang's tensors in ``layer``, without its experts."""
        rows = [row for row in self.engine if row.layers(shape, layer)]
        sources_in_rows: set[Source] = set()
        for row in rows:
            sources_in_rows.update(row.sources)
        implied_rows: list[EngineRow] = []
        for rule in self.rules_of(shape, layer):
            if not sources_in_rows.issuperset(rule.sources):
                implied_rows += rule.in_engine
        return implied_rows + rows

    def engine_expert_rows_of(self, shape: ModelShape, layer: int) -> list[EngineRow]:
        """Return SGLang's tensors of each expert of ``layer``; none if the layer is dense."""
        rows: list[EngineRow] = []
        for rule in self.expert_rules_of(shape, layer):
            rows += rule.in_engine
        return rows

    def expert_rules_of(self, shape: ModelShape, layer: int) -> tuple[Rule, ...]:
        """Return the rows of each expert of ``layer``; none if the layer is dense."""
        if routed_layers(shape, layer):
            return self.expert
        return ()

    @property
    def vocabulary_tensors(self) -> tuple[str, str]:
        """Hugging Face names of the embedding and of the output layer."""
        return self.embedding.sources[0].name, self.output.sources[0].name


class _Families(Mapping[str, Family]):
    """The families by the ``model_type`` in config.json. A family is imported when it is first read.

    ``loaded`` has the imported families.
    """

    def __init__(self) -> None:
        self.loaded: dict[str, Family] = {}

    def __getitem__(self, model_type: str) -> Family:
        if model_type not in self.loaded:
            self.loaded[model_type] = _load_family(model_type)
        return self.loaded[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(plugins.find_plugins(plugins.FAMILIES))

    def __len__(self) -> int:
        return len(plugins.find_plugins(plugins.FAMILIES))


FAMILIES = _Families()


def _load_family(model_type: str) -> Family:
    """Import a family.

    Raises KeyError for an unknown ``model_type``. Raises ModelConfigError if an entry point of a family is malformed or
    names no family, and if two distributions register the same ``model_type``.
    """
    try:
        entry = plugins.find_plugins(plugins.FAMILIES)[model_type]
        family = plugins.load_plugin(entry)
    except plugins.PluginError as error:
        raise ModelConfigError(str(error)) from error
    if not isinstance(family, Family) or family.model_type != model_type:
        raise ModelConfigError(
            f"entry point {entry.name!r} of group {entry.group!r}: {entry.value!r} is {family!r}, expected a Family "
            f"with the model_type {model_type!r}"
        )
    return family


def family_of(shape: ModelShape) -> Family:
    """Return the family of ``shape``."""
    return FAMILIES[shape.family]


def has_layer_parameter(shape: ModelShape, name: str) -> bool:
    """Return whether a layer of the model has Megatron's parameter ``name``.

    An example of a name: ``self_attention.linear_qkv.bias``.
    """
    rules = [rule for rule in family_of(shape).layer if rule.megatron == MEGATRON_LAYER + name]
    return any(_count_layers(rule, shape) for rule in rules)


def _count_layers(rule: Rule, shape: ModelShape) -> int:
    """Count the layers that have the row ``rule``."""
    return sum(rule.layers(shape, layer) for layer in range(shape.num_layers))


@cache
def layers_are_alike(shape: ModelShape) -> bool:
    """Return whether all layers of the model have the same parameters, so that a checkpoint can stack them."""
    family = family_of(shape)
    rules = (*family.layer, *in_layers(routed_layers, *family.expert))
    return all(_count_layers(rule, shape) in (0, shape.num_layers) for rule in rules)


def engine_layer_counts(shape: ModelShape) -> list[tuple[EngineRow, int]]:
    """Return each of SGLang's tensors in layers, without experts, with the number of layers that have it."""
    counts = Counter[EngineRow]()
    for layer in range(shape.num_layers):
        counts.update(family_of(shape).engine_rows_of(shape, layer))
    return list(counts.items())


def layer_counts(shape: ModelShape, layers: Iterable[int]) -> list[tuple[Rule, int]]:
    """Return each row of ``layers`` before their experts, with the number of these layers that have it."""
    counts = Counter[Rule]()
    for layer in layers:
        counts.update(family_of(shape).rules_of(shape, layer))
    return list(counts.items())


def load_model_shape(hf_dir: str | Path) -> ModelShape:
    """Read ``hf_dir/config.json`` (or a config file itself) of a model to train or to serve.

    Raises:
        ModelConfigError: The file is missing or is not JSON.
        UnsupportedModelError: The family is not supported, no table describes some entries, or weights have 8 or 4
            bits. The error has all faults.
    """
    return _valid_shape(hf_dir, reads_quantized=False)


def load_stored_shape(hf_dir: str | Path) -> ModelShape:
    """Read as ``load_model_shape``, for a conversion: weights may have 8 or 4 bits."""
    return _valid_shape(hf_dir, reads_quantized=True)


def _valid_shape(hf_dir: str | Path, *, reads_quantized: bool) -> ModelShape:
    facts, shape = _read(hf_dir)
    _refuse_quantization(facts, reads_quantized=reads_quantized)
    if not facts.faults:
        # Compare values with each other only if each value is valid: a placeholder would cause a second, wrong fault.
        _check_relations(shape, facts)
    if facts.faults:
        raise UnsupportedModelError(facts.faults)
    return shape


def unknown_key_warnings(hf_dir: str | Path) -> list[str]:
    """Return a warning for each key of ``hf_dir/config.json`` that may change the model but is not known here.

    Raises the errors of ``load_model_shape`` if the file does not exist, or the family is not supported.
    """
    facts, _ = _read(hf_dir)
    return [
        f"{facts.where} has the key {key} with the value {value!r}, which is neither read nor known to be harmless: if "
        "it changes the model's arithmetic, another model is trained"
        for key, value in facts.unknown().items()
    ]


def missing_engine_keys(hf_dir: str | Path) -> dict[str, Any]:
    """Return the keys that SGLang's model reads and that ``hf_dir/config.json`` lacks, with the model's values.

    transformers 5 does not save a key if transformers' own model supports only one value of the key. Raises the errors
    of ``load_model_shape``.
    """
    facts, shape = _read(hf_dir)
    family = family_of(shape)
    outer_keys = family.outer_engine_keys
    missing = {key: value for key, value in outer_keys.items() if facts.values.get(key) is None}
    keys = family.engine_keys(shape)
    missing_in_table = {key: value for key, value in keys.items() if facts.values.get(key) is None}
    if missing_in_table and family.text_table is not None:
        return {**missing, family.text_table: missing_in_table}
    return {**missing, **missing_in_table}


def packed_experts(hf_dir: Path) -> tuple[PackedExperts, ...]:
    """Return the packed tensors of a folder's family; none without a config.json of a known family."""
    try:
        values = read_json(hf_dir / "config.json", _CONFIG, ModelConfigError)
    except ModelConfigError:
        return ()
    if not isinstance(values, dict):
        return ()
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        return ()
    return family.packed


def _read(hf_dir: str | Path) -> tuple[ConfigFacts, ModelShape]:
    path = Path(hf_dir)
    if path.is_dir():
        path = path / "config.json"
    values = read_json(path, _CONFIG, ModelConfigError)
    model_type = None
    if isinstance(values, dict):
        model_type = values.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise UnsupportedModelError(
            [f"{path}: model_type {model_type!r}; supported families: {sorted(FAMILIES)}"]
        )
    facts = ConfigFacts(language_model_values(values), str(path))
    if family.text_table is not None:
        _check_text_table(facts, family, values.get(family.text_table))
    facts.require("architectures", [family.architecture], [family.architecture])
    facts.ignore("quantization_config")
    shape = family.read(facts)
    facts.require_neutral()
    return facts, shape


def _check_text_table(facts: ConfigFacts, family: Family, table: Any) -> None:
    if not isinstance(table, Mapping):
        facts.fault(f"{family.text_table} is {table!r}, expected a table")
        return
    expected = f"{family.model_type}_text"
    if table.get("model_type", expected) != expected:
        facts.fault(
            f"{family.text_table}.model_type is {table['model_type']!r}, expected {expected!r}"
        )


_OUTER_KEYS = ("architectures", "model_type", "tie_word_embeddings")
"""Keys that are read outside of the language model's table, also in a config.json with this table."""


def language_model_values(values: Entries) -> Entries:
    """Return the entries of a config.json. If the language model's entries are in a table, they replace the table."""
    name = _text_table(values)
    if name is None:
        return values
    outer_values = {key: value for key, value in values.items() if key != name}
    values_of_outer_keys = {key: values[key] for key in _OUTER_KEYS if key in values}
    return {**outer_values, **values[name], **values_of_outer_keys}


def with_language_model_values(values: Entries, changes: Entries) -> dict[str, Any]:
    """Return a config.json with ``changes`` to the entries of its language model, inside or outside of the table."""
    name = _text_table(values)
    if name is None:
        return {**values, **changes}
    outer_values = dict(values)
    table_values = dict(values[name])
    for key, value in changes.items():
        # Change an entry where the file has it, so that no second value contradicts the new value.
        is_only_outside = key in outer_values and key not in table_values
        if key in _OUTER_KEYS or is_only_outside:
            outer_values[key] = value
        else:
            table_values[key] = value
    return {**outer_values, name: table_values}


def _text_table(values: Entries) -> str | None:
    """Return the key of the table that has the language model's entries; None if a config.json has no such table."""
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None or not isinstance(values.get(family.text_table or ""), Mapping):
        return None
    return family.text_table


_READ_METHODS = ("fp8", "mxfp4")
"""The ``quant_method`` in config.json of weights that the converter reads."""


def _refuse_quantization(facts: ConfigFacts, *, reads_quantized: bool) -> None:
    scheme = facts.values.get("quantization_config")
    if scheme is None:
        return
    if not isinstance(scheme, Mapping):
        facts.fault(f"quantization_config is {scheme!r}, expected a table")
        return
    method = scheme.get("quant_method")
    if method not in _READ_METHODS:
        way_out = "use the model's unquantised release"
    elif reads_quantized:
        return
    else:
        way_out = (
            "`megatron-dppo convert hf-to-megatron --dtype bfloat16` reads such weights with their scales, and "
            "`convert megatron-to-hf` makes an unquantised folder of the result"
        )
    facts.fault(
        f"quantization_config says {method!r}, expected none: weights are trained and served unquantised; {way_out}"
    )


_CONFIG = "a Hugging Face config.json"
_MOST_EXPERTS = 4096
"""A limit of a plausible model, as MOST_LAYERS is."""


def _check_relations(shape: ModelShape, facts: ConfigFacts) -> None:
    if shape.num_layers > MOST_LAYERS:
        facts.fault(f"num_hidden_layers is {shape.num_layers}, expected at most {MOST_LAYERS}")
    if shape.num_experts > _MOST_EXPERTS:
        facts.fault(f"num_experts is {shape.num_experts}, expected at most {_MOST_EXPERTS}")
    if shape.is_moe and not shape.moe_layers:
        facts.fault(
            f"all {shape.num_layers} layers are dense, expected at least one layer with experts"
        )
    heads = shape.num_attention_heads
    groups = shape.num_query_groups
    if heads % groups:
        facts.fault(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
        )
    if shape.experts_per_token > shape.num_experts:
        facts.fault(
            f"num_experts_per_tok is {shape.experts_per_token}, expected at most the {shape.num_experts} experts"
        )
    if shape.experts_per_token == 1 and shape.norm_topk_prob:
        facts.fault(
            "num_experts_per_tok is 1, expected at least 2: the model divides the weights of a token's experts by "
            "their sum, and Megatron-Core does not divide the weight of a single expert"
        )
