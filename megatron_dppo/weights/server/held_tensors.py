"""Checksums of the tensors that a server holds. ``megatron-dppo doctor`` compares them with the weights of a version.

``/weights_checker`` of servers that ``engine.launch_server`` starts has one more action. Its answer has the checksum of
every tensor. For block-FP8 weights it also has the checksum of each block, and the scales themselves. If the
probabilities of trainer and servers differ in a batch, the run writes the answers to a file beside the batch
(``write``). Doctor reads this file after the run, when the servers have ended.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from megatron_dppo.engine.server import hooks
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.quantization import SCALE_SUFFIX
from megatron_dppo.system.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

ACTION = "megatron_dppo.blocks"
_CHECKED = "sglang.srt.utils.weight_checker.WeightChecker.handle"
_BLOCKS = "#blocks"
"""Ending of the name under which an answer has the blocks of a tensor, in base64."""


@dataclass(frozen=True)
class HeldTensors:
    """The tensors of one server.

    Attributes:
        url: address of the server.
        version: the ``weight_version`` that it reported.
        layout: layout of its ranks.
        device: "cpu" or "cuda".
        quantized: whether linear layers and experts are block FP8.
        ranks: the answer of each rank: checksums by name, and blocks.
    """

    url: str
    version: str
    layout: EngineLayout
    device: str
    quantized: bool
    ranks: tuple[Mapping[str, str], ...]

    def checksums(self, rank: int) -> dict[str, str]:
        """Return the checksum of each tensor of a rank."""
        answer = self.ranks[rank].items()
        return {name: value for name, value in answer if not name.endswith(_BLOCKS)}

    def blocks(self, rank: int, name: str) -> Tensor | None:
        """Return a vector that a rank's answer has in addition to a tensor's checksum; None if there is no vector.

        For an FP8 tensor the vector has the checksums of its blocks (int64), for a tensor of scales the scales (fp32).
        Raises ValueError if the answer is not in base64.
        """
        import torch

        text = self.ranks[rank].get(name + _BLOCKS)
        if text is None:
            return None
        dtype = torch.float32 if name.endswith(SCALE_SUFFIX) else torch.int64
        return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=dtype)


_SERVERS = TypeAdapter(tuple[HeldTensors, ...])


def file_of(folder: Path, step: int) -> Path:
    """Return the path, beside the batch in ``folder``, of the file with the tensors that servers held at ``step``."""
    return folder / f"engine_tensors_{step:06d}.json"


def write(path: Path, servers: Sequence[HeldTensors]) -> None:
    """Write the checksums of ``servers`` to a file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps([asdict(server) for server in servers]) + "\n")


def read(path: Path) -> tuple[HeldTensors, ...]:
    """Read the file that ``write`` wrote. Raises OSError, and ValueError for a file of another form."""
    try:
        return _SERVERS.validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path}: {error.errors()[0]['msg']}") from error


def register() -> None:
    """Register the hook, in each process of a server, before SGLang applies its plugins' hooks."""
    hooks.register(_CHECKED, answer_with_blocks, "around")


def answer_with_blocks(
    original: Callable[..., Any], checker: Any, action: str, **options: Any
) -> Any:
    """Answer ``ACTION`` with the checksums of all tensors and the blocks of quantised tensors."""
    if action != ACTION:
        return original(checker, action=action, **options)
    answer = original(checker, action="checksum", **options)
    checksums = answer["checksums"]
    hashed_tensors: list[tuple[str, Tensor]] = []
    for name, tensor in checker._model_state():
        if name in checksums:
            hashed_tensors.append((name, tensor))
    checksums |= blocks_of(hashed_tensors)
    return answer


def blocks_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the entries of an answer for the blocks of quantised ``tensors`` (name, tensor) and for their scales."""
    from megatron_dppo.block_fp8 import DTYPE, block_checksums

    entries: dict[str, str] = {}
    for name, tensor in tensors:
        if tensor.dtype == DTYPE:
            blocks = block_checksums(tensor.detach().reshape(-1, tensor.shape[-1]))
        elif name.endswith(SCALE_SUFFIX):
            blocks = tensor.detach().float()
        else:
            continue
        content = blocks.cpu().contiguous().numpy().tobytes()
        entries[name + _BLOCKS] = base64.b64encode(content).decode()
    return entries
