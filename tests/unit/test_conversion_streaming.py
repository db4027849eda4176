"""Conversion of whole checkpoints to Megatron and back: byte-identical and certified, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_dppo.checkpoint_conversion.certificate import load_certificate
from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
from megatron_dppo.convert.__main__ import main
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf, verify
from megatron_dppo.model.errors import CheckpointError, MismatchError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, local_parameters
from tests.patience import run_patiently
from tests.tiny_models import save_hollow_model, save_tiny_model, tensors_of
from tests.unit.test_batch_file import flipped

pytestmark = pytest.mark.second

SIDE_FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def same_bytes(a: Path, b: Path) -> bool:
    tensors, others = tensors_of(a), tensors_of(b)
    if tensors.keys() != others.keys():
        return False
    return all(
        tensor.dtype == others[name].dtype and torch.equal(tensor, others[name])
        for name, tensor in tensors.items()
    )


def test_a_moe_there_and_back(moe, tmp_path):
    certificate = hf_to_megatron(moe, tmp_path / "megatron")
    assert len(verify(moe, tmp_path / "megatron")) == len(hf_tensors(certificate.shape)) == 135
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=300_000)
    assert same_bytes(moe, tmp_path / "back")
    for name in SIDE_FILES:
        assert (tmp_path / "back" / name).read_bytes() == (moe / name).read_bytes()
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert load_certificate(tmp_path / "back").tensors == certificate.tensors


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_dense_families_there_and_back(tmp_path, family, tied):
    hf = save_tiny_model(tmp_path / "hf", family, tied=tied, dtype=torch.bfloat16)
    hf_to_megatron(hf, tmp_path / "megatron")
    verify(hf, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", hf_config=hf)
    assert same_bytes(hf, tmp_path / "back")


def test_any_layout_loads_through_the_checked_reader(moe, tmp_path):
    hf_to_megatron(moe, tmp_path / "m")
    original = tensors_of(moe)
    with open_checkpoint(tmp_path / "m") as converted, open_checkpoint(moe) as plain:
        for p in local_parameters(
            load_model_shape(tmp_path / "m"), Layout(tensor=4, expert_tensor=4), 3
        ):
            for s in p.segments:
                expected = s.of_hf(original[s.hf_name])
                assert torch.equal(converted.read(s.hf_name, s.dim, s.hf_start, s.length), expected)
                assert torch.equal(plain.read(s.hf_name, s.dim, s.hf_start, s.length), expected)


def test_casting_is_recorded_and_verified_against_the_cast(moe, tmp_path):
    certificate = hf_to_megatron(moe, tmp_path / "m", dtype="bfloat16")
    assert (certificate.source_dtype, certificate.dtype) == ("float32", "bfloat16")
    verify(moe, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    megatron_to_hf(tmp_path / "m", tmp_path / "back", dtype="float32")
    assert load_certificate(tmp_path / "back").dtype == "float32"
    name = "model.layers.0.mlp.gate.weight"
    assert torch.equal(
        tensors_of(tmp_path / "back")[name], tensors_of(moe)[name].bfloat16().float()
    )


def flip_byte(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 1]))


def test_one_flipped_bit_is_named_by_tensor_file_and_offset(moe, tmp_path):
    hf_to_megatron(moe, tmp_path / "m")
    path = tmp_path / "m" / "release" / "__0_0.distcp"
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    row = tensors_of(moe)[name][5].numpy().tobytes()
    assert path.read_bytes().count(row) == 1
    offset = path.read_bytes().index(row) + 3 * 4
    flip_byte(path, offset)
    with pytest.raises(MismatchError) as error:
        verify(moe, tmp_path / "m")
    text = str(error.value)
    assert text.startswith(f"{name}[5, 3]: ")
    assert f"{path} at byte {offset}," in text
    with pytest.raises(MismatchError, match=r"experts.5.down_proj.weight has SHA-256"):
        megatron_to_hf(tmp_path / "m", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with open_checkpoint(tmp_path / "m") as reader:
        reader.read("model.norm.weight")
        with pytest.raises(MismatchError, match="changed on purpose"):
            reader.read(name, 0, 0, 1)


def test_an_altered_certificate_or_original_is_noticed(moe_copy, tmp_path):
    hf_to_megatron(moe_copy, tmp_path / "m")
    flip_byte(moe_copy / "model.safetensors", (moe_copy / "model.safetensors").stat().st_size - 1)
    with pytest.raises(MismatchError, match=r"model.norm.weight\[63\]"):
        verify(moe_copy, tmp_path / "m")
    path = tmp_path / "m" / "conversion.json"
    path.write_text(path.read_text().replace('"num_layers": 4', '"num_layers": 5'))
    with pytest.raises(CheckpointError, match="altered"):
        open_checkpoint(tmp_path / "m")


PRINT_ADDED_MEMORY = """
import sys
from pathlib import Path
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf, verify
import torch; torch.zeros(1000).sum()
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak()
hf, out, back = sys.argv[1:]
hf_to_megatron(hf, out)
verify(hf, out)
megatron_to_hf(out, back)
print(peak() - before)
"""


def test_memory_is_bounded_by_blocks_and_not_by_the_model(tmp_path):
    """Converting a model of 604 MB, verifying it and converting it back adds less than 128 MiB to the peak memory."""
    hf = save_hollow_model(
        tmp_path / "hf", hidden_size=1024, vocab_size=140_000, moe_intermediate_size=256
    )
    arguments = [str(hf), str(tmp_path / "m"), str(tmp_path / "back")]
    result = run_patiently([sys.executable, "-c", PRINT_ADDED_MEMORY, *arguments], 500, check=True)
    assert (tmp_path / "back" / "model.safetensors").stat().st_size > 550e6
    assert int(result.stdout) < 128 << 10, f"{result.stdout} kB"


def test_the_command_line(moe, tmp_path, capsys):
    hf, m, back = str(moe), str(tmp_path / "m"), str(tmp_path / "back")
    layout = ["--tp", "2", "--pp", "2", "--vpp", "2", "--ep", "2"]
    assert main(["plan", "--hf-config", hf, *layout, "--engine-tp", "2"]) == 0
    assert "135 tensors, 314,048 parameters" in capsys.readouterr().out
    assert main(["hf-to-megatron", "--hf", hf, "--out", m]) == 0
    assert main(["verify", "--hf", hf, "--megatron", m]) == 0
    assert "identical: 135 tensors, 1,256,192 bytes" in capsys.readouterr().out
    assert main(["megatron-to-hf", "--megatron", m, "--hf-config", hf, "--out", back]) == 0
    assert same_bytes(moe, tmp_path / "back")
    assert main(["verify", "--hf", str(tmp_path / "none"), "--megatron", m]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"layers": 3}),
        ("olmoe", {}),
        ("qwen2_moe", {}),
        ("qwen3", {"tied": True}),
        ("qwen2", {"vocab_size": 515}),
        ("llama", {"dtype": torch.bfloat16}),
    ],
)
def test_a_torch_dist_checkpoint_there_and_back(tmp_path, family, options):
    hf = save_tiny_model(tmp_path / "hf", family, **options)
    written = hf_to_megatron(hf, tmp_path / "m")
    assert written.form == "torch_dist"
    assert (tmp_path / "m" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert len(verify(hf, tmp_path / "m")) == len(written.tensors)
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    assert same_bytes(hf, tmp_path / "back")
    original = tensors_of(hf)
    with open_checkpoint(tmp_path / "m") as reader:
        for p in local_parameters(written.shape, Layout(tensor=2, expert_tensor=2, pipeline=1), 1):
            for s in p.segments:
                expected = s.of_hf(original[s.hf_name])
                assert torch.equal(reader.read(s.hf_name, s.dim, s.hf_start, s.length), expected)


def convert_there_and_back(hf: Path, out: Path) -> None:
    folder = out.with_name("between")
    hf_to_megatron(hf, folder)
    megatron_to_hf(folder, out)


FORMS: dict[str, Callable[..., object]] = {
    "torch_dist": hf_to_megatron,
    "huggingface": convert_there_and_back,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_bit_beside_the_weights_of_a_conversion_is_named(moe, tmp_path, form):
    FORMS[form](moe, tmp_path / "out")
    read_certificate = load_certificate(tmp_path / "out")
    assert set(read_certificate.files) >= {*SIDE_FILES, "chat_template.jinja"}
    for i, name in enumerate(sorted(read_certificate.files)):
        path = tmp_path / "out" / name
        content = path.read_bytes()
        for seed in range(3):
            path.write_bytes(
                flipped(content, random.Random(10 * i + seed).randrange(8 * len(content)))
            )
            with pytest.raises(MismatchError, match=rf"out/{name}: .*conversion.json"):
                open_checkpoint(tmp_path / "out")
        path.unlink()
        with pytest.raises(MismatchError, match=f"out/{name}: "):
            open_checkpoint(tmp_path / "out")
        path.write_bytes(content)
    open_checkpoint(tmp_path / "out").close()


def test_a_certificate_without_files_is_of_an_earlier_version_and_refused(moe, tmp_path):
    hf_to_megatron(moe, tmp_path / "out")
    path = tmp_path / "out" / "conversion.json"
    body = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("files", "sha256")}
    digest = hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps({**body, "sha256": digest}))
    with pytest.raises(CheckpointError, match=r"\(KeyError\('files'"):
        load_certificate(tmp_path / "out")


def test_a_runs_checkpoint_is_converted_with_the_start_model_that_its_run_names(tmp_path, capsys):
    """A checkpoint has no config.json. The run's config.yaml, two folders up, names the start model."""
    hf = save_tiny_model(tmp_path / "hf", "qwen3")
    hf_to_megatron(hf, tmp_path / "converted")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    checkpoint.parent.mkdir(parents=True)
    (tmp_path / "converted" / "release").rename(checkpoint)
    back = tmp_path / "back"
    words = ["megatron-to-hf", "--megatron", str(checkpoint), "--out", str(back)]
    assert main(words) == 2
    assert "--hf-config" in capsys.readouterr().err
    config = tmp_path / "run" / "config.yaml"
    config.write_text(f"model: {{hf_checkpoint: {tmp_path / 'gone'}}}\n")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "gone") in error
    assert "--hf-config" in error
    config.write_text(f"model: {{hf_checkpoint: {hf}}}\n")
    assert main(words) == 0
    assert str(hf) in capsys.readouterr().out
    assert same_bytes(hf, back)
    assert (back / "tokenizer.json").is_file()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_certified_folder_is_converted_by_its_certificate(moe, tmp_path, dtype):
    """A flipped bit of a weight, or of a file beside the weights, does not get a new certificate."""
    hf_to_megatron(moe, tmp_path / "m")
    megatron_to_hf(tmp_path / "m", tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "again", dtype=dtype)
    weights = tmp_path / "hf" / "model.safetensors"
    size = weights.stat().st_size
    flip_byte(weights, size - 1)
    with pytest.raises(MismatchError, match=r"conversion\.json recorded"):
        hf_to_megatron(tmp_path / "hf", tmp_path / "damaged", dtype=dtype)
    flip_byte(weights, size - 1)
    tokenizer = tmp_path / "hf" / "tokenizer.json"
    flip_byte(tokenizer, tokenizer.stat().st_size // 2)
    with pytest.raises(MismatchError, match=r"tokenizer\.json"):
        hf_to_megatron(tmp_path / "hf", tmp_path / "damaged", dtype=dtype)
    assert not (tmp_path / "damaged").exists()
    # Without its certificate, the damaged folder is converted like any other folder.
    (tmp_path / "hf" / "conversion.json").unlink()
    hf_to_megatron(tmp_path / "hf", tmp_path / "damaged", dtype=dtype)


def test_a_damaged_index_of_blocks_is_one_clear_error(moe, tmp_path):
    """Any bit may flip, also in a length of the pickle, which can then ask for any amount of memory."""
    hf_to_megatron(moe, tmp_path / "m")
    path = tmp_path / "m" / "release" / ".metadata"
    intact, rng = path.read_bytes(), random.Random(1)
    refused = 0
    for _ in range(60):
        content = bytearray(intact)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            megatron_to_hf(tmp_path / "m", tmp_path / "out", hf_config=moe)
        except CheckpointError:
            refused += 1
        else:
            assert same_bytes(moe, tmp_path / "out")
            shutil.rmtree(tmp_path / "out")
    assert refused > 20
