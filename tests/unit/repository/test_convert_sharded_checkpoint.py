"""tools/convert_sharded_checkpoint.py: folders that versions before 0.2 converted to, which the package refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.checkpoint_conversion.certificate import CERTIFICATE, Certificate
from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
from megatron_dppo.convert.streaming import megatron_to_hf, verify
from megatron_dppo.model.errors import CheckpointError, MismatchError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, primary_parameters
from tests.messages import mentioning
from tests.tiny_models import save_tiny_model
from tools.convert_sharded_checkpoint import convert

TOOL = Path(__file__).parents[3] / "tools" / "convert_sharded_checkpoint.py"
LAYOUTS = {
    "single": Layout(),
    "TP4": Layout(tensor=4, expert_tensor=4),
    "PP2 VPP2": Layout.smallest(pipeline=2, virtual_pipeline=2),
    "TP2 PP2 EP2": Layout.smallest(2, 2, None, 2),
    "EP4 ETP2": Layout.smallest(expert=4, expert_tensor=2),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", layers=4, vocab_size=515)


def write_sharded(hf: Path, folder: Path, layout: Layout) -> Path:
    """Write the model ``hf`` in the form of versions before 0.2."""
    shape, tensors = load_model_shape(hf), load_file(hf / "model.safetensors")
    shutil.copytree(hf, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for rank in range(layout.world_size):
        stored = {}
        for p in primary_parameters(shape, layout, rank):
            values = torch.zeros(p.shape)
            for segment in p.segments:
                segment.of_local(values).copy_(segment.of_hf(tensors[segment.hf_name]))
            stored[p.name if layout.chunks == 1 else f"model{p.chunk}.{p.name}"] = values
        if stored:
            save_file(stored, folder / f"rank-{rank:05d}.safetensors")
    digests = {
        n: hashlib.sha256(tensors[n].numpy().tobytes()).hexdigest() for n in hf_tensors(shape)
    }
    Certificate("torch_dist", shape, "float32", "float32", digests).save(folder)
    body = json.loads((folder / CERTIFICATE).read_text())
    del body["sha256"]
    body = {**body, "form": "sharded", "layout": dataclasses.asdict(layout)}
    digest = hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
    (folder / CERTIFICATE).write_text(json.dumps({**body, "sha256": digest}))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_an_old_folder_becomes_the_model_that_it_was(hf, tmp_path, layout):
    old = write_sharded(hf, tmp_path / "old", layout)
    convert(old, tmp_path / "new")
    assert len(verify(hf, tmp_path / "new")) == 135


def test_it_is_refused_with_the_command_that_converts_it(hf, tmp_path):
    old = write_sharded(hf, tmp_path / "old", LAYOUTS["TP2 PP2 EP2"])
    refused = f"tools/convert_sharded_checkpoint.py {old} NEW_FOLDER"
    with pytest.raises(CheckpointError, match=refused):
        open_checkpoint(old)
    with pytest.raises(CheckpointError, match=refused):
        megatron_to_hf(old, tmp_path / "back")
    subprocess.run([sys.executable, str(TOOL), str(old), str(tmp_path / "new")], check=True)
    megatron_to_hf(tmp_path / "new", tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (hf / "config.json").read_bytes()


def test_an_altered_or_missing_rank_is_noticed_and_nothing_written(hf, tmp_path):
    old = write_sharded(hf, tmp_path / "old", LAYOUTS["TP2 PP2 EP2"])
    path = old / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little") + 5] ^= 1  # behind the header
    path.write_bytes(content)
    with pytest.raises(MismatchError, match="has SHA-256"):
        convert(old, tmp_path / "new")
    shutil.copy(old / "rank-00000.safetensors", path)
    with pytest.raises(CheckpointError, match=mentioning(path)):
        convert(old, tmp_path / "new")
    path.unlink()
    with pytest.raises(CheckpointError, match=mentioning(path)):
        convert(old, tmp_path / "new")
    assert not (tmp_path / "new").exists()
