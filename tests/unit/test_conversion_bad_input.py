"""Faults of a checkpoint or an output folder give a clear error, and nothing is damaged or left half-written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_dppo.checkpoint_conversion.hf_folder import SafetensorsReader, write_hf_checkpoint
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf, verify
from megatron_dppo.model.errors import CheckpointError, ModelError
from megatron_dppo.model.families import load_model_shape
from tests.tiny_models import save_tiny_model, tensors_of


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


Damage = Callable[[Path], object]
"""Damages the checkpoint in a folder."""


def of_weights(change: Damage) -> Damage:
    """Return the damage that ``change`` does to the file of the weights."""
    return lambda folder: change(folder / "model.safetensors")


def of_content(content: bytes) -> Damage:
    return of_weights(lambda path: path.write_bytes(content))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def of_tensors(**new_tensors: Tensor | None) -> Damage:
    """Return the damage that sets tensors by name. None removes a tensor; ``norm`` is the weight of the last norm."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in new_tensors.items():
            whole_name = "model.norm.weight" if name == "norm" else name
            tensors.pop(whole_name, None)
            if tensor is not None:
                tensors[whole_name] = tensor

    return lambda folder: change_tensors(folder, change)


def of_header(header: object) -> Damage:
    """Return the damage that writes a file with this header and no tensors."""
    content = json.dumps(header).encode()
    return of_content(len(content).to_bytes(8, "little") + content)


def of_entry(**facts: object) -> Damage:
    """Return the damage that writes a file with one tensor of no bytes; ``facts`` are the facts that differ."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], **facts}
    return of_header({"model.norm.weight": entry})


def duplicate_entry(path: Path) -> None:
    """Write the first entry of the header twice."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    entry = json.dumps({name: header[name]})
    text = json.dumps(header)[:-1] + ", " + entry[1:]
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + content[8 + length :])


def lose_linked_file(path: Path) -> None:
    """Leave a link whose file is gone, as a copy of the hub's cache without its blobs has."""
    path.unlink()
    path.symlink_to("../blobs/absent")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


MALFORMED = "model.norm.weight is malformed"
DEEP_HEADER = (10**5).to_bytes(8, "little") + b"[" * 10**5
BAD_INPUTS: dict[str, tuple[Damage, str]] = {
    "no weights": (of_weights(Path.unlink), "has neither"),
    "a link to no file": (
        of_weights(lose_linked_file), "links to ../blobs/absent, which does not exist",
    ),
    "truncated": (of_weights(truncate), "truncated or overwritten"),
    "empty file": (of_content(b""), "cannot hold a header"),
    "not safetensors": (of_content(b"\x08" + bytes(7) + b"notjson!"), "not JSON"),
    "a header that is a list": (of_header([]), "its header is a list"),
    "a header that is nested too deeply": (of_content(DEEP_HEADER), "not JSON"),
    "an entry that is a number": (of_header({"model.norm.weight": 5}), MALFORMED),
    "a list as dtype": (of_entry(dtype=[]), MALFORMED),
    "texts as offsets": (of_entry(data_offsets=["0", "0"]), MALFORMED),
    "three offsets": (of_entry(data_offsets=[0, 0, 0]), MALFORMED),
    "a name that occurs twice": (of_weights(duplicate_entry), "'lm_head.weight' occurs twice"),
    "other bytes than its shape has": (of_entry(shape=[2]), "has 0 bytes, expected 8"),
    "a folder": (of_weights(replace_by_folder), "model.safetensors: cannot be read"),
    "a negative shape": (of_entry(shape=[-1, -1]), MALFORMED),
    "a fraction in a shape": (of_entry(shape=[0.0]), MALFORMED),
    "missing tensor": (of_tensors(norm=None), "1 missing, first model.norm.weight"),
    "unknown tensor": (of_tensors(extra=torch.zeros(2)), "1 unknown, first extra"),
    "wrong shape": (
        of_tensors(norm=torch.zeros(65)), r"model.norm.weight has shape \(65,\), config.json says \(64,\)",
    ),
    "mixed dtypes": (of_tensors(norm=torch.zeros(64).bfloat16()), "tensors of several dtypes"),
    "unsupported dtype": (
        of_tensors(norm=torch.zeros(64, dtype=torch.int8)), "has dtype I8, expected one of",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no such file"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_checkpoints_are_refused_and_nothing_is_written(moe_copy, tmp_path, damage, message):
    damage(moe_copy)
    with pytest.raises(ModelError, match=message):
        hf_to_megatron(moe_copy, tmp_path / "m")
    assert os.listdir(tmp_path) == ["hf"]


def sharded_copy(source: Path, target: Path) -> Path:
    """The same model in several shards with an index."""
    shape = load_model_shape(source)
    write_hf_checkpoint(
        target,
        shape,
        torch.float32,
        tensors_of(source).items(),
        side_files_from=source,
        max_shard_bytes=400_000,
    )
    return target


def of_index(**shards: str | None) -> Damage:
    """Return the damage that places tensors in other files of the index. ``norm`` is the weight of the last norm."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        for name, shard in shards.items():
            index["weight_map"]["model.norm.weight" if name == "norm" else name] = shard
        path.write_text(json.dumps(index))

    return change


def unlisted_norm(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))


FIRST, SECOND, THIRD = (f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3))
BAD_INDICES: dict[str, tuple[Damage, str]] = {
    "missing shard": (
        lambda folder: (folder / SECOND).unlink(), f"names {SECOND}, which is not in the folder",
    ),
    "truncated shard": (lambda folder: truncate(folder / THIRD), "truncated or overwritten"),
    "wrong place": (
        of_index(norm=FIRST), f"places model.norm.weight in {FIRST}, but it is in model-00003",
    ),
    "not listed": (unlisted_norm, "does not list model.norm.weight"),
    "unknown tensor": (of_index(x=FIRST), "places x in .* but no shard has it"),
    "an empty name": (of_index(x=""), "'x' is in ''"),
    "a file of another folder": (
        of_index(x="/etc/passwd"), "'x' is in '/etc/passwd', expected the name of a file in the same folder",
    ),
    "a name longer than a file's": (of_index(x="x" * 5000), "expected the name of a file"),
    "a name that is no text": (of_index(x=None), "expected the name of a file"),
    "no weight map": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "is damaged, expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BAD_INDICES.values(), ids=BAD_INDICES)
def test_bad_indices_are_refused(moe, tmp_path, damage, message):
    folder = sharded_copy(moe, tmp_path / "hf")
    with SafetensorsReader(folder) as reader:
        assert len(reader.specs) == 135
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsReader(folder)


def test_a_tied_model_that_stores_its_output_layer_too(tmp_path):
    hf = save_tiny_model(tmp_path / "hf", "qwen3", tied=True)
    change_tensors(
        hf, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    hf_to_megatron(hf, tmp_path / "m")
    verify(hf, tmp_path / "m")
    change_tensors(hf, lambda t: t["lm_head.weight"][-1].zero_())
    with pytest.raises(CheckpointError, match=r"lm_head.weight .* model.embed_tokens.weight"):
        hf_to_megatron(hf, tmp_path / "m2")


def test_bad_megatron_folders_are_refused(moe, tmp_path):
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        verify(moe, moe)
    hf_to_megatron(moe, tmp_path / "m")
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    with pytest.raises(CheckpointError, match=r"\.metadata nor latest_checkpointed_iteration"):
        verify(moe, tmp_path / "back")
    other = save_tiny_model(tmp_path / "other", "qwen3_moe", layers=2)
    with pytest.raises(CheckpointError, match=r"num_layers 4 \(config.json: 2\)"):
        megatron_to_hf(tmp_path / "m", tmp_path / "back2", hf_config=other)


def test_an_output_that_is_not_empty_is_left_alone(moe, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "precious").write_text("mine")
    with pytest.raises(CheckpointError, match="exists"):
        hf_to_megatron(moe, tmp_path / "m")
    assert (tmp_path / "m" / "precious").read_text() == "mine"
    assert os.listdir(tmp_path) == ["m"]


def test_damaged_torch_dist_checkpoints_are_refused(moe, tmp_path):
    hf_to_megatron(moe, tmp_path / "m")
    data = tmp_path / "m" / "release" / "__0_0.distcp"
    shutil.copytree(tmp_path / "m", tmp_path / "truncated")
    os.truncate(tmp_path / "truncated" / "release" / data.name, data.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="metadata"):
        verify(moe, tmp_path / "truncated")
    data.unlink()
    with pytest.raises(CheckpointError, match="metadata"):
        verify(moe, tmp_path / "m")
    (tmp_path / "m" / "conversion.json").unlink()
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(CheckpointError, match="iter_0000100"):
        verify(moe, tmp_path / "m")
    other = save_tiny_model(tmp_path / "other", "qwen3_moe", layers=4, hidden=128)
    hf_to_megatron(other, tmp_path / "m2")
    with pytest.raises(CheckpointError, match=r"hidden_size 128 \(config.json: 64\)"):
        verify(moe, tmp_path / "m2")
    (tmp_path / "m2" / "conversion.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"word_embeddings.weight .*\(512, 128\), .*\(512, 64\)"
    ):
        verify(moe, tmp_path / "m2")


@pytest.mark.parametrize(
    ("stored", "asked", "message"),
    [
        ({"layers": 4}, {"layers": 3}, "layers or experts"),
        ({"tied": False}, {"tied": True}, "output_layer.weight"),
        ({"family": "qwen3"}, {"family": "llama"}, "q_layernorm.weight"),
    ],
)
def test_what_the_model_of_config_json_lacks_is_not_left_behind(tmp_path, stored, asked, message):
    hf = save_tiny_model(tmp_path / "hf", **stored)
    hf_to_megatron(hf, tmp_path / "m")
    (tmp_path / "m" / "conversion.json").unlink()  # a checkpoint of a training run has none
    other = save_tiny_model(tmp_path / "other", **asked)
    with pytest.raises(CheckpointError, match=message):
        megatron_to_hf(tmp_path / "m", tmp_path / "back", hf_config=other)
    assert not (tmp_path / "back").exists()


class HarmfulObject:
    """An object whose pickle calls ``os.system``."""

    def __reduce__(self):
        return os.system, ("true",)


def test_metadata_that_would_run_code_is_refused(moe, tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(HarmfulObject()))
    with pytest.raises(CheckpointError, match="system"):
        megatron_to_hf(tmp_path, tmp_path / "back", hf_config=moe)


class OlderPickler(pickle.Pickler):
    """A pickler that writes members of enums as Python 3.11.0 to 3.11.3 do: as a call of getattr."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_an_older_python_is_read(moe, tmp_path):
    hf_to_megatron(moe, tmp_path / "m")
    (path,) = (tmp_path / "m").rglob(".metadata")
    metadata = pickle.loads(path.read_bytes())
    with open(path, "wb") as file:
        OlderPickler(file).dump(metadata)
    assert b"getattr" in path.read_bytes()
    assert verify(moe, tmp_path / "m")


class AttributeReader:
    """An object whose pickle reads an attribute that is not a member of an enum."""

    def __reduce__(self):
        return getattr, (torch.Size, "__init__")


def test_metadata_reaches_nothing_but_members_of_enums(moe, tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(AttributeReader()))
    with pytest.raises(CheckpointError, match="'__init__'"):
        megatron_to_hf(tmp_path, tmp_path / "back", hf_config=moe)
