"""Several ranks write the files of an export. The files equal those of a single writer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

HERE = "tests.distributed.test_export"
SHARD_BYTES = 200_000
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"expert": 2},
    "PP2": {"pipeline": 2},
    "DP2": {},
    "CP2": {"context": 2},
}


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def export_worker(folder: str) -> dict[str, Any]:
    """Export in each layout, and then to a full disk. Return the files that this rank opened, and the error."""
    import torch.distributed as dist

    from megatron_dppo.checkpoint_conversion import tensor_store
    from megatron_dppo.trainer.hf_export import export_hf
    from megatron_dppo.trainer.model import named_parameters
    from tests.distributed.test_checkpoint import make_trainer, names_in, refusal, small_files_only

    opened: list[str] = []
    writer = tensor_store.SafetensorsFileWriter

    class RecordingWriter(writer):  # type: ignore[misc, valid-type]
        def __init__(self, path: Path, specs: Any) -> None:
            opened.append(path.name)
            super().__init__(path, specs)

    tensor_store.SafetensorsFileWriter = RecordingWriter  # type: ignore[misc,assignment]
    out: dict[str, Any] = {}
    for name, parallel in LAYOUTS.items():
        trainer = make_trainer(f"{folder}/hf", parallel, False, "float32", 2)

        def export(to: str, trainer: Any = trainer) -> None:
            export_hf(
                {key: p.data for key, p in named_parameters(trainer.chunks).items()},
                trainer.topology.rank,
                (trainer.shape, trainer.layout, trainer.dtype),
                to,
                side_files_from=f"{folder}/hf",
                max_shard_bytes=SHARD_BYTES,
            )

        export(f"{folder}/{name}")
        out[name] = list(opened)
        opened.clear()
        trainer.close()
    with small_files_only(100_000, on_rank=1):
        out["full disk"] = refusal(lambda: export(f"{folder}/full"))
        dist.barrier()
    out["left"] = names_in(Path(folder))
    return out


@pytest.mark.distributed
def test_several_ranks_write_what_one_would(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from megatron_dppo.checkpoint_conversion.hf_folder import write_hf_checkpoint
    from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
    from megatron_dppo.model.families import load_model_shape
    from tests.tiny_models import save_tiny_model

    hf = save_tiny_model(tmp_path / "hf", "qwen3_moe", layers=4, vocab_size=515)
    tensors = load_file(hf / "model.safetensors")
    write_hf_checkpoint(
        tmp_path / "one", load_model_shape(hf), torch.float32, tensors.items(),
        side_files_from=hf, max_shard_bytes=SHARD_BYTES,
    )  # fmt: skip
    expected = digests(tmp_path / "one")
    reports = run_ranks(f"{HERE}:export_worker", 2, str(tmp_path))
    files = sorted(name for name in expected if name.startswith("model-"))
    assert len(files) > 3
    certificates = []
    for name in LAYOUTS:
        found = digests(tmp_path / name)
        certificates.append(found.pop("conversion.json"))
        assert found == expected
        with open_checkpoint(tmp_path / name) as reader:  # The reader checks the certificate, too.
            assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())
        shares = [set(report[name]) for report in reports]
        assert all(shares), name
        assert not shares[0] & shares[1]
        assert sorted(shares[0] | shares[1]) == files
    assert len(set(certificates)) == 1
    for report in reports:
        assert report["full disk"].startswith("CheckpointError: ")
        assert "rank 1: [Errno 27]" in report["full disk"]
        assert report["left"] == ["CP2", "DP2", "EP2", "PP2", "hf", "one"]
