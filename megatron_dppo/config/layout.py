"""Checks of the model's folder and of the parallel layout before any process starts, and the layout in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.schema import CheckpointSection, TrainConfig
from megatron_dppo.model.errors import CheckpointError, ModelConfigError, UnsupportedModelError
from megatron_dppo.model.layout import (
    Layout,
    LayoutSizes,
    largest_all_to_all_context,
    model_faults,
    size_faults,
)
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import padded_vocab_size
from megatron_dppo.model.weight_index import INDEX, read_weight_index
from megatron_dppo.system.text import first_of

_KEY = "model.hf_checkpoint"
_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""Sets of files: a tokenizer has all files of one set."""


def read_checkpoint_folder(section: CheckpointSection, *, weights: bool = True) -> ModelShape:
    """Return the shape of the model in the folder of ``section``.

    The folder must have a tokenizer and, if ``weights`` is true, weights. An index of the weights must be valid also if
    ``weights`` is false. Raises ConfigError with every missing file and every wrong entry of config.json.
    """
    folder = Path(section.hf_checkpoint)
    if not folder.is_dir():
        raise ConfigError([f"{_KEY}: got {str(folder)!r}, which is not a folder"])
    shape: ModelShape | None = None
    faults: list[str] = []
    try:
        shape = section.read_shape()
    except UnsupportedModelError as error:
        faults += error.faults
    except ModelConfigError as error:
        faults.append(str(error))
    if weights:
        faults += missing_weights(folder)
    else:
        faults += _index_faults(folder)
    faults += _missing_tokenizer(folder)
    if faults or shape is None:
        raise ConfigError([f"{_KEY}: {fault}" for fault in faults])
    return shape


def missing_weights(folder: str | Path) -> list[str]:
    """Return one line about missing files of the weights in ``folder``; an empty list if all files exist."""
    folder = Path(folder)
    if index_faults := _index_faults(folder):
        return index_faults
    index = folder / INDEX
    if not index.is_file():
        if (folder / "model.safetensors").is_file():
            return []
        return [f"no weights in {folder}: expected model.safetensors or {index.name}"]
    shards = sorted(set(read_weight_index(index).values()))
    missing_shards = [name for name in shards if not (folder / name).is_file()]
    if not missing_shards:
        return []
    return [
        f"{len(missing_shards)} of the {len(shards)} files that {index} names are missing: "
        f"{first_of(missing_shards, 3, ', ')}"
    ]


def _index_faults(folder: Path) -> list[str]:
    """Return one line about an index that can't be read; an empty list for a valid index, or without an index."""
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        read_weight_index(index)
    except CheckpointError as error:
        return [str(error)]
    return []


def _missing_tokenizer(folder: Path) -> list[str]:
    for files in _TOKENIZER_FILES:
        if all((folder / file).is_file() for file in files):
            return []
    file_sets = [" + ".join(files) for files in _TOKENIZER_FILES]
    return [f"no tokenizer in {folder}: expected {' or '.join(file_sets)}"]


Faults = Iterator[str]
"""Lines about faults, each with the key first."""


def describe(config: TrainConfig, model: ModelShape) -> str:
    """Return the layout, the vocabulary and a batch's optimiser steps of a checked configuration in one line."""
    sizes = config.parallel.sizes
    rollout = config.rollout
    layout = Layout.of(sizes)
    vocab = model.vocab_size
    dense_sizes = {
        "TP": layout.tensor,
        "CP": layout.context,
        "PP": layout.pipeline,
        "VPP": layout.chunks,
        "DP": layout.data,
    }
    expert_sizes = {
        "EP": layout.expert,
        "ETP": layout.expert_tensor,
        "expert DP": layout.expert_data,
    }
    sequence = ""
    if sizes.sequence_parallel(model):
        sequence = ", sequence parallel"
    padded = padded_vocab_size(vocab, sizes.tensor)
    padding = ""
    if padded != vocab:
        padding = f" (padded to {padded})"
    return (
        f"{layout.world_size} ranks: {_product(dense_sizes)}, experts {_product(expert_sizes)}{sequence}; vocabulary "
        f"{vocab}{padding}; a rollout batch is {rollout.prompts_per_step * rollout.group_size} responses and "
        f"{config.mini_batches} optimiser steps"
    )


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def world_faults(sizes: LayoutSizes) -> Faults:
    """Report faults of the layout that do not depend on the model."""
    yield from (fault.text("parallel.") for fault in size_faults(sizes))


def layout_faults(sizes: LayoutSizes, megatron: Mapping[str, Any], model: ModelShape) -> Faults:
    """Report faults of the layout, and of the ``megatron:`` table's dispatcher and exchange, for this model."""
    yield from (fault.text("parallel.") for fault in model_faults(sizes, model))
    dispatcher = megatron.get("moe_token_dispatcher_type")
    if dispatcher is not None and not model.is_moe:
        yield (
            f"megatron.moe_token_dispatcher_type: got {dispatcher!r}, expected nothing: "
            f"{model.family} is a dense model"
        )
    yield from _exchange_faults(sizes, megatron.get("cp_comm_type"), model)


EXCHANGES = ("p2p", "a2a")
"""How Transformer Engine's context-parallel attention brings keys and values of a packed sequence to the ranks.
``p2p``: around a ring. ``a2a``: an all-to-all, after which each rank has all tokens of some heads.
"""


def _exchange_faults(sizes: LayoutSizes, exchange: Any, model: ModelShape) -> Faults:
    if exchange is None:
        return
    key = f"megatron.cp_comm_type: got {exchange!r}"
    if sizes.context == 1:
        yield f"{key}, expected nothing: parallel.context is 1"
    elif exchange not in EXCHANGES:
        yield f"{key}, expected {' or '.join(EXCHANGES)}, which take packed sequences"
    elif exchange == "a2a":
        max_context = largest_all_to_all_context(sizes.tensor, model)
        if max_context % sizes.context:
            yield (
                f"{key} with parallel.context {sizes.context} and parallel.tensor {sizes.tensor}, expected a context "
                f"that divides {max_context}, the greatest common divisor of a rank's query heads and key heads; or p2p"
            )
