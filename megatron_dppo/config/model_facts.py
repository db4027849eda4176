"""What the checks need to know of a model: read from a Hugging Face folder's config.json, without
any library."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.config.errors import ConfigError

_WHERE = "model.hf_checkpoint"
_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a causal language model.

    ``ffn_size``: inner size of a dense MLP. ``experts``: 0 for a dense model, and then
    ``expert_ffn_size`` and
    ``experts_per_token`` are 0 too. ``dense_layers``: whether some layer of a mixture has a dense
    MLP.
    """

    model_type: str
    layers: int
    attention_heads: int
    kv_heads: int
    ffn_size: int
    vocab_size: int
    max_position_embeddings: int | None
    experts: int
    experts_per_token: int
    expert_ffn_size: int
    dense_layers: bool

    @property
    def mixture_of_experts(self) -> bool:
        """Whether tokens are routed."""
        return self.experts > 0


def read_model_facts(folder: str | Path) -> ModelFacts:
    """Facts of the checkpoint in ``folder``, after checking that its weights and tokenizer are
    there.

    Raises ConfigError that names every file that is missing or key that has no value.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError([f"{_WHERE}: got {str(folder)!r}, which is not a folder"])
    problems = _missing_files(folder)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ConfigError([f"{_WHERE}: {config_file} is missing", *problems])
    try:
        values = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError([f"{_WHERE}: {config_file} is not JSON: {error}", *problems]) from error
    reader = _Reader(values, config_file)
    facts = reader.facts()
    if problems + reader.problems:
        raise ConfigError(problems + reader.problems)
    return facts


def _missing_files(folder: Path) -> list[str]:
    problems = []
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        lost = [name for name in shards if not (folder / name).is_file()]
        if lost:
            some = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
            problems.append(
                f"{_WHERE}: {len(lost)} of the {len(shards)} files that {index} names are "
                f"missing: {some}"
            )
    elif not (folder / "model.safetensors").is_file():
        problems.append(
            f"{_WHERE}: no weights in {folder}: expected model.safetensors or {index.name}"
        )
    if not any(all((folder / f).is_file() for f in files) for files in _TOKENIZER_FILES):
        wanted = " or ".join(" + ".join(files) for files in _TOKENIZER_FILES)
        problems.append(f"{_WHERE}: no tokenizer in {folder}: expected {wanted}")
    return problems


class _Reader:
    """Looks keys up under the names that transformers' families give them; collects what is
    missing."""

    def __init__(self, values: dict[str, Any], file: Path) -> None:
        self.values = values
        self.file = file
        self.problems: list[str] = []

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of ``names`` that has a value; ``default`` where none has, else a problem and
        1."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
            self.problems.append(f"{_WHERE}: {self.file}: {name} is {value!r}, expected a size")
            return 1
        if default is None:
            wanted = " or ".join(names)
            self.problems.append(f"{_WHERE}: {self.file}: no {wanted}")
            return 1
        return default

    def facts(self) -> ModelFacts:
        """All of them; only good when ``problems`` stayed empty."""
        experts = self.number("num_experts", "num_local_experts", "n_routed_experts", default=0)
        heads, layers = self.number("num_attention_heads"), self.number("num_hidden_layers")
        ffn = self.number("intermediate_size")
        expert_ffn = self.number("moe_intermediate_size", default=ffn) if experts else 0
        return ModelFacts(
            model_type=str(self.values.get("model_type", "unknown")),
            layers=layers,
            attention_heads=heads,
            kv_heads=self.number("num_key_value_heads", default=heads),
            ffn_size=ffn,
            vocab_size=self.number("vocab_size"),
            max_position_embeddings=self.number("max_position_embeddings", default=0) or None,
            experts=experts,
            experts_per_token=self.number("num_experts_per_tok") if experts else 0,
            expert_ffn_size=expert_ffn,
            dense_layers=bool(
                not experts
                or self.values.get("mlp_only_layers")
                or self.number("decoder_sparse_step", default=1) > 1
                or self.number("first_k_dense_replace", default=0)
            ),
        )
