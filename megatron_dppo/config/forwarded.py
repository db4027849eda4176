"""The tables that are forwarded to Megatron and SGLang: keys that another section sets, and keys that must not be set.

``options.toml`` has a row for each option of which something is known. All other keys are passed on.
:mod:`megatron_dppo.launch.library_checks` compares them with the fields that the library declares.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_dppo.config import speculation
from megatron_dppo.config.errors import closest, expectation, given


class LibraryMissingError(ImportError):
    """The library can't be imported in this environment, so its options are unknown."""


@dataclass(frozen=True)
class LibraryFields:
    """The options of a library's class, as plain data.

    :mod:`megatron_dppo.trainer.megatron_config` and :mod:`megatron_dppo.engine.server_arguments` import the libraries
    and make these objects; this module imports neither.

    Attributes:
        title: class, library and version, for messages.
        types: field -> its type annotation.
        computed: fields that the library sets itself and that must not be set.
    """

    title: str
    types: Mapping[str, Any]
    computed: frozenset[str] = frozenset()


def field_fault(
    fields: LibraryFields, key: str, value: Any, hidden: Collection[str] = ()
) -> str | None:
    """Return the fault of ``key: value`` as the end of a message; None if the library accepts the value.

    ``hidden``: fields that are never suggested for an unknown key.
    """
    if key in fields.computed:
        return f"expected nothing: {fields.title} computes it"
    if key not in fields.types:
        similar_fields = closest(key, fields.types.keys() - fields.computed - {*hidden}, count=3)
        hint = ""
        if similar_fields:
            hint = f"; did you mean {' or '.join(similar_fields)}?"
        return f"not a field of {fields.title}{hint}"
    try:
        read_value(fields.types[key], value)
    except ValueError as error:
        return f"{error}, as {fields.title} declares"
    return None


def read_value(annotation: Any, value: Any) -> Any:
    """Convert ``value``, as YAML gave it, to the type of ``annotation``.

    For a tuple, YAML gives a list. For an enumeration, YAML gives the name of a member. Raises ValueError with the
    expected type as its text.
    """
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        if isinstance(value, str) and value in annotation.__members__:
            return annotation[value]
        raise ValueError(f"expected {expectation(annotation)}")
    adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    # Validate as JSON: pydantic's strict mode accepts a list for a tuple in JSON only.
    try:
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ValueError(f"expected {expectation(annotation)}") from error


class OptionFact(Flag):
    """A flag says one thing that the project knows of a library's option, or which of its programs reads the option."""

    KNOWN = auto()
    """The option's effect on a run was tested, read in the library's source, or seen in the options that SGLang chose
    for an H100 (``tests/gpu_evidence``). An option of SGLang with this flag changes neither the layout of weights nor
    the recorded data."""
    COUNTED = auto()
    """A formula of the planner reads the option."""
    NUMBER = auto()
    """The planner, or the placement of servers on devices, calculates with the option."""
    SIZE = auto()
    """The option depends on the number of a server's GPUs, or on their memory. A rehearsal chooses its own."""
    ON_CPU = auto()
    """The option has the same meaning on CPU and GPU. A rehearsal on CPUs leaves out all other options of SGLang."""
    GPU_ONLY = auto()
    """The option chooses GPU kernels or GPU memory. A rehearsal on CPUs leaves it out."""
    SHARES = auto()
    """The option divides the weights among the ranks of a server in a way that weight updates do not support."""
    SPECULATION = auto()
    """The option is a form of speculative decoding that was not compared with plain decoding."""


_OPTIONS: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("options.toml").read_text(encoding="utf-8")
)
_USUALLY_OFF: tuple[Any, ...] = (None, 0, "", "null", "none", "{}", [], {})
"""Values, besides false, that turn most options off."""


def _is_off(value: Any, neutral_values: Collection[Any] = _USUALLY_OFF) -> bool:
    """Whether ``value`` leaves an option off: one of ``neutral_values``, or false."""
    # Test for bool first: True equals 1 in Python, so a neutral value 1 would match true.
    if isinstance(value, bool):
        return not value
    return value in neutral_values


EXPERT_KERNEL = "triton"
"""SGLang's ``moe_runner_backend`` that keeps the loaded layout of unquantised experts."""


@dataclass(frozen=True)
class ForwardedTable:
    """A section whose keys are a library's options.

    Attributes:
        name: name of the section.
        owned: option -> this package's key that sets it.
        fixed: option -> reason why nothing may set it.
        off: option -> reason why it must be off.
        neutral: option of ``off`` -> values that turn it off, if they differ from ``_USUALLY_OFF``.
        options: option -> what is known of it. If no option has the flag KNOWN, ``untried`` yields no warnings.
    """

    name: str
    owned: Mapping[str, str]
    fixed: Mapping[str, str]
    off: Mapping[str, str]
    neutral: Mapping[str, Sequence[Any]]
    options: Mapping[str, OptionFact]

    @classmethod
    def read(cls, name: str) -> Self:
        """Return the table of ``options.toml`` with this name."""
        columns: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for option, row in _OPTIONS[name].items():
            for column, value in row.items():
                columns[column][option] = value
        owned, fixed, off = (
            {option: _OPTIONS["texts"].get(text, text) for option, text in columns[column].items()}
            for column in ("set_by", "never", "off")
        )
        options = {
            option: reduce(or_, (OptionFact[fact.upper()] for fact in facts))
            for option, facts in columns["facts"].items()
        }
        return cls(name, owned, fixed, off, columns["neutral"], options)

    def faults(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each key that the user must not set here."""
        for key, value in values.items():
            reason = self.fixed.get(key)
            if key in self.owned:
                reason = f"{self.owned[key]} sets it"
            if reason is not None:
                yield f"{self.name}.{key}: got {given(value)}, expected nothing: {reason}"
        for key, reason in self.off.items():
            if not self.leaves_off(key, values.get(key)):
                yield f"{self.name}.{key}: got {given(values[key])}, expected it off: {reason}"

    def untried(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield a warning for each free key whose effect on a run is not known."""
        known_options = self.options_with(OptionFact.KNOWN)
        if not known_options:
            return
        for key, value in self.free(values).items():
            if key not in known_options and key not in self.off and not _is_off(value):
                yield (
                    f"{self.name}.{key}: got {given(value)}, which is passed on, but its effect on a run is not known: "
                    "compare the first steps with a run without it"
                )

    def options_with(self, fact: OptionFact) -> list[str]:
        """Return the options of which ``fact`` is known."""
        return [name for name, facts in self.options.items() if fact in facts]

    def leaves_off(self, key: str, value: Any) -> bool:
        """Whether ``value`` turns the option ``key`` off."""
        return value is None or _is_off(value, self.neutral.get(key, _USUALLY_OFF))

    def free(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the free keys, which are neither owned nor fixed, with their values. The library receives them."""
        return {k: v for k, v in values.items() if k not in self.owned and k not in self.fixed}

    def library_faults(self, values: Mapping[str, Any], fields: LibraryFields) -> Iterator[str]:
        """Yield a line for each free key that the library does not declare, or whose value has another type."""
        hidden_fields = {*self.owned, *self.fixed}
        for key, value in self.free(values).items():
            fault = field_fault(fields, key, value, hidden_fields)
            if fault is not None:
                yield f"{self.name}.{key}: got {given(value)}, {fault}"


class _MegatronTable(ForwardedTable):
    def faults(self, values: Mapping[str, Any]) -> Iterator[str]:
        yield from super().faults(values)
        if values.get("moe_token_dispatcher_type") == "allgather":
            yield (
                "megatron.moe_token_dispatcher_type: got 'allgather', expected 'alltoall': "
                "packed micro-batches differ in length between ranks"
            )


class _SglangTable(ForwardedTable):
    def faults(self, values: Mapping[str, Any]) -> Iterator[str]:
        yield from super().faults(values)
        if values.get("model_impl") not in (None, "auto", "sglang"):
            yield (
                f"sglang.model_impl: got {given(values['model_impl'])}, expected 'auto' or 'sglang': weight updates "
                "know the parameters of SGLang's own models"
            )
        if values.get("load_balance_method") == "follow_bootstrap_room":
            yield (
                "sglang.load_balance_method: got 'follow_bootstrap_room', expected another method: it sends a request "
                "to the attention replica that disaggregated prefill chose, and a run has no disaggregated prefill"
            )
        yield from speculation.table_faults(values)
        replicas = values.get("dp_size")
        # With enable_dp_attention and without attn_dp_size, dp_size is the number of attention replicas.
        has_older_form = values.get("enable_dp_attention") and not values.get("attn_dp_size")
        if replicas not in (None, 1) and not has_older_form:
            yield (
                f"sglang.dp_size: got {given(replicas)}, expected 1, or sglang.enable_dp_attention: true without "
                "sglang.attn_dp_size: a server has one replica of the experts, and engine.servers starts more servers"
            )


MEGATRON = _MegatronTable.read("megatron")
"""Fields of megatron.core's TransformerConfig."""
DDP = ForwardedTable.read("megatron_ddp")
"""Fields of megatron.core's DistributedDataParallelConfig."""
OPTIMIZER = ForwardedTable.read("megatron_optimizer")
"""Fields of megatron.core's OptimizerConfig."""
SGLANG = _SglangTable.read("sglang")
"""Fields of SGLang's ServerArgs, and sampling parameters."""


_FP8_CAPABILITIES: Mapping[str, tuple[int, int]] = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
"""``fp8_recipe`` -> the lowest compute capability that Transformer Engine requires for it."""
_FP4_CAPABILITY = (10, 0)
_DELAYED = "delayed"
"""Megatron-Core's default of ``fp8_recipe``."""


def is_blockwise(table: Mapping[str, Any]) -> bool:
    """Whether the ``megatron:`` table sets FP8 with a scale for each block."""
    return table.get("fp8") is not None and table.get("fp8_recipe") == "blockwise"


def precision_faults(table: Mapping[str, Any], capability: tuple[int, int]) -> Iterator[str]:
    """Report low precision in the ``megatron:`` table that a GPU of this compute ``capability`` does not support."""
    recipe = table.get("fp8_recipe") or _DELAYED
    min_capability = _FP8_CAPABILITIES.get(recipe)
    if table.get("fp8") is not None and min_capability is not None and capability < min_capability:
        yield _capability_fault("fp8_recipe", recipe, min_capability, capability)
    if table.get("fp4") is not None and capability < _FP4_CAPABILITY:
        yield _capability_fault("fp4", table["fp4"], _FP4_CAPABILITY, capability)


def _capability_fault(
    key: str, value: Any, min_capability: tuple[int, int], capability: tuple[int, int]
) -> str:
    return (
        f"megatron.{key}: got {given(value)} on a GPU of compute capability {capability[0]}.{capability[1]}, expected "
        f"{min_capability[0]}.{min_capability[1]} or more"
    )


def recompute_faults(table: Mapping[str, Any], recompute: str) -> Iterator[str]:
    """Report an FP8 recipe that does not work with selective recomputation of a mixture of experts.

    ``recompute``: ``training.recompute``; on a GPU ``selective`` recomputes the experts' activation and the norms.
    """
    recipe = table.get("fp8_recipe") or _DELAYED
    is_delayed = table.get("fp8") is not None and recipe == _DELAYED
    if is_delayed and recompute == "selective" and "recompute_modules" not in table:
        yield (
            "megatron.fp8_recipe: got 'delayed' (Megatron-Core's default) with training.recompute selective, expected "
            "another recipe, such as 'blockwise', or megatron.recompute_modules: a scale of an earlier step can't be "
            "computed again"
        )


def expert_kernel_faults(table: Mapping[str, Any]) -> Iterator[str]:
    """Report kernels of the experts, in the ``sglang:`` table, whose weight layout can't be verified."""
    backend = table.get("moe_runner_backend")
    if backend not in (None, EXPERT_KERNEL):
        yield (
            f"sglang.moe_runner_backend: got {given(backend)}, expected {EXPERT_KERNEL!r}: other kernels keep the "
            "experts' weights in a layout of their own (auto chooses such kernels on some GPUs), and the checksums of "
            "this layout differ from the trainer's"
        )


def replay_faults(table: Mapping[str, Any]) -> Iterator[str]:
    """Report keys of the ``megatron:`` table that ``rollout.router_replay`` excludes."""
    fused = table.get("moe_router_fusion", False)
    if fused not in (False, None, "none"):
        yield (
            f"megatron.moe_router_fusion: got {given(fused)} with rollout.router_replay, expected nothing: the fused "
            "router takes no recorded choice"
        )


PRECISION_AWARE = "use_precision_aware_optimizer"
OFFLOAD = "optimizer_cpu_offload"
OFFLOAD_FRACTION = "optimizer_offload_fraction"
MOMENT_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype")


def training_faults(
    ddp: Mapping[str, Any], optimizer: Mapping[str, Any], distributed: bool, dtype: str
) -> Iterator[str]:
    """Report faults of the ``megatron_ddp:`` and ``megatron_optimizer:`` tables.

    ``distributed``: whether the optimizer's state is sharded, not replicated. ``dtype``: ``model.dtype``.
    """
    yield from DDP.faults(ddp)
    if ddp.get("overlap_param_gather") and not distributed:
        yield (
            "megatron_ddp.overlap_param_gather: got true, expected optimizer.distributed: true with it: without "
            "it every replica has all weights, and nothing is gathered"
        )
    yield from OPTIMIZER.faults(optimizer)
    yield from _optimizer_memory_faults(optimizer, distributed, dtype)


def offloaded_fraction(optimizer: Mapping[str, Any]) -> float:
    """Return the share of Adam's state that the ``megatron_optimizer:`` table moves to the host."""
    if not optimizer.get(OFFLOAD):
        return 0.0
    return float(optimizer.get(OFFLOAD_FRACTION, 1.0))


def moment_dtypes(optimizer: Mapping[str, Any]) -> list[str]:
    """Return the dtypes of Adam's two moments, as the ``megatron_optimizer:`` table sets them."""
    return [str(optimizer.get(key) or "float32") for key in MOMENT_DTYPES]


def _optimizer_memory_faults(
    optimizer: Mapping[str, Any], distributed: bool, dtype: str
) -> Iterator[str]:
    """Report faults of low-precision and of offloaded state in the ``megatron_optimizer:`` table."""
    for key in (PRECISION_AWARE, OFFLOAD):
        if optimizer.get(key) and not distributed:
            yield (
                f"megatron_optimizer.{key}: got true, expected optimizer.distributed: true with it: only "
                "Megatron-Core's distributed optimizer has this option"
            )
        if optimizer.get(key) and dtype == "float32":
            yield (
                f"megatron_optimizer.{key}: got true with model.dtype float32, expected bfloat16: Megatron-Core can't "
                "divide float32 weights in this way"
            )
    is_offloaded = bool(optimizer.get(OFFLOAD))
    fraction = optimizer.get(OFFLOAD_FRACTION)
    if fraction is not None and not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
        yield f"megatron_optimizer.{OFFLOAD_FRACTION}: got {given(fraction)}, expected more than 0 and at most 1"
    if fraction is not None and not is_offloaded:
        yield (
            f"megatron_optimizer.{OFFLOAD_FRACTION}: got {given(fraction)}, expected nothing without "
            f"megatron_optimizer.{OFFLOAD}: true"
        )
    for key, moment_dtype in zip(MOMENT_DTYPES, moment_dtypes(optimizer), strict=True):
        if moment_dtype != "bfloat16":
            continue
        if not optimizer.get(PRECISION_AWARE):
            yield (
                f"megatron_optimizer.{key}: got {given(moment_dtype)}, expected megatron_optimizer.{PRECISION_AWARE}: "
                "true with it: Megatron-Core ignores it otherwise"
            )
        elif is_offloaded:
            yield (
                f"megatron_optimizer.{key}: got {given(moment_dtype)} with megatron_optimizer.{OFFLOAD}, expected "
                "'float32': Megatron-Core's moments on the host are fp32"
            )


def adam_faults(optimizer: Mapping[str, Any], *, has_fused_adam: bool) -> Iterator[str]:
    """Report an option of the ``megatron_optimizer:`` table that needs Transformer Engine, if that is not installed.

    ``has_fused_adam``: whether Transformer Engine is installed.
    """
    if optimizer.get(PRECISION_AWARE) and not optimizer.get(OFFLOAD) and not has_fused_adam:
        yield (
            f"megatron_optimizer.{PRECISION_AWARE}: got true, expected Transformer Engine in this environment, or "
            f"megatron_optimizer.{OFFLOAD}: true with it: only Transformer Engine's Adam has such state"
        )


TABLES: Mapping[str, ForwardedTable] = {
    table.name: table for table in (MEGATRON, DDP, OPTIMIZER, SGLANG)
}
"""Section -> its table."""
