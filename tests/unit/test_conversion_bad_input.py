"""Faults of a checkpoint or an output folder give a clear error, and nothing is damaged or left half-written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from enum import Enum
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.checkpoint_conversion.hf_folder import SafetensorsReader, write_hf_checkpoint
from megatron_dppo.checkpoint_conversion.streaming import hf_to_megatron, megatron_to_hf, verify
from megatron_dppo.model.errors import CheckpointError, ModelError
from megatron_dppo.model.families import load_model_shape
from tests.tiny_models import save_tiny_model, tensors_of


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", layers=4)


@pytest.fixture
def moe_copy(moe, tmp_path) -> Path:
    return Path(shutil.copytree(moe, tmp_path / "hf"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_header(folder: Path, header: object) -> None:
    """Write a file with this header and no tensors."""
    content = json.dumps(header).encode()
    file = len(content).to_bytes(8, "little") + content
    (folder / "model.safetensors").write_bytes(file)


def write_entry(folder: Path, **facts: object) -> None:
    """Write a file with one tensor of no bytes; ``facts`` are the facts that differ."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], **facts}
    write_header(folder, {"model.norm.weight": entry})


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


BAD_INPUTS = {
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has neither"),
    "a link to no file": (
        lambda d: lose_linked_file(d / "model.safetensors"),
        "links to ../blobs/absent, which does not exist",
    ),
    "truncated": (lambda d: truncate(d / "model.safetensors"), "truncated or overwritten"),
    "empty file": (lambda d: (d / "model.safetensors").write_bytes(b""), "cannot hold a header"),
    "not safetensors": (
        lambda d: (d / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"notjson!"),
        "not JSON",
    ),
    "a header that is a list": (lambda d: write_header(d, []), "its header is a list"),
    "a header that is nested too deeply": (
        lambda d: (d / "model.safetensors").write_bytes(
            (10**5).to_bytes(8, "little") + b"[" * 10**5
        ),
        "not JSON",
    ),
    "an entry that is a number": (
        lambda d: write_header(d, {"model.norm.weight": 5}),
        "model.norm.weight is malformed",
    ),
    "a list as dtype": (lambda d: write_entry(d, dtype=[]), "model.norm.weight is malformed"),
    "texts as offsets": (
        lambda d: write_entry(d, data_offsets=["0", "0"]),
        "model.norm.weight is malformed",
    ),
    "three offsets": (
        lambda d: write_entry(d, data_offsets=[0, 0, 0]),
        "model.norm.weight is malformed",
    ),
    "a name that occurs twice": (
        lambda d: duplicate_entry(d / "model.safetensors"),
        "'lm_head.weight' occurs twice",
    ),
    "other bytes than its shape has": (
        lambda d: write_entry(d, shape=[2]),
        "has 0 bytes, expected 8",
    ),
    "a folder": (
        lambda d: ((d / "model.safetensors").unlink(), (d / "model.safetensors").mkdir()),
        "model.safetensors: cannot be read",
    ),
    "a negative shape": (
        lambda d: write_entry(d, shape=[-1, -1]),
        "model.norm.weight is malformed",
    ),
    "a fraction in a shape": (
        lambda d: write_entry(d, shape=[0.0]),
        "model.norm.weight is malformed",
    ),
    "missing tensor": (
        lambda d: change_tensors(d, lambda t: t.pop("model.norm.weight")),
        "1 missing, first model.norm.weight",
    ),
    "unknown tensor": (
        lambda d: change_tensors(d, lambda t: t.update({"extra.weight": torch.zeros(2)})),
        "1 unknown, first extra.weight",
    ),
    "wrong shape": (
        lambda d: change_tensors(d, lambda t: t.update({"model.norm.weight": torch.zeros(65)})),
        r"model.norm.weight has shape \(65,\), config.json says \(64,\)",
    ),
    "mixed dtypes": (
        lambda d: change_tensors(
            d, lambda t: t.update({"model.norm.weight": torch.zeros(64).bfloat16()})
        ),
        "tensors of several dtypes",
    ),
    "unsupported dtype": (
        lambda d: change_tensors(
            d, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
        ),
        "has dtype I8, expected one of",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "no such file"),
}


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


def edit_index(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


BAD_INDICES = {
    "missing shard": (
        lambda d: (d / "model-00002-of-00004.safetensors").unlink(),
        "names model-00002-of-00004.safetensors, which is not in the folder",
    ),
    "truncated shard": (
        lambda d: truncate(d / "model-00003-of-00004.safetensors"),
        "truncated or overwritten",
    ),
    "wrong place": (
        lambda d: edit_index(
            d, lambda m: m.update({"model.norm.weight": "model-00001-of-00004.safetensors"})
        ),
        "places model.norm.weight in model-00001-of-00004.safetensors, but it is in model-00003",
    ),
    "not listed": (
        lambda d: edit_index(d, lambda m: m.pop("model.norm.weight")),
        "does not list model.norm.weight",
    ),
    "unknown tensor": (
        lambda d: edit_index(d, lambda m: m.update({"x": "model-00001-of-00004.safetensors"})),
        "places x in .* but no shard has it",
    ),
    "an empty name": (lambda d: edit_index(d, lambda m: m.update({"x": ""})), "'x' is in ''"),
    "a file of another folder": (
        lambda d: edit_index(d, lambda m: m.update({"x": "/etc/passwd"})),
        "'x' is in '/etc/passwd', expected the name of a file in the same folder",
    ),
    "a name longer than a file's": (
        lambda d: edit_index(d, lambda m: m.update({"x": "x" * 5000})),
        "expected the name of a file",
    ),
    "a name that is no text": (
        lambda d: edit_index(d, lambda m: m.update({"x": None})),
        "expected the name of a file",
    ),
    "no weight map": (
        lambda d: (d / "model.safetensors.index.json").write_text("[]"),
        "is damaged, expected",
    ),
}


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

    def reducer_override(self, value: object) -> object:
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
