"""What a process and its parser say to each other over pipes: frames of JSON and bytes, nothing pickled.

Arrays stand in one buffer, which is a file in shared memory where that has room, so that the reader
maps them; else they follow in the frame.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any

import numpy as np

from megatron_dppo.data.trajectory import FINISH_REASONS, Trajectory
from megatron_dppo.engine.requests import GenerationRequest, RoutedShape, SamplingParams

_LENGTHS = struct.Struct("<QQ")
_ALIGNMENT = 64


def write_frame(pipe: IO[bytes], told: Mapping[str, Any], content: bytes = b"") -> None:
    """Write a JSON object and bytes after it. Raises BrokenPipeError where nobody reads."""
    head = json.dumps(told).encode()
    for part in (_LENGTHS.pack(len(head), len(content)), head, content):
        view = memoryview(part)
        while view:  # an unbuffered pipe may take less
            view = view[pipe.write(view) :]


def read_frame(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """What ``write_frame`` wrote; None at the pipe's end. Raises EOFError for a part of one."""
    beginning = _read(pipe, _LENGTHS.size)
    if not beginning:
        return None
    head, content = _LENGTHS.unpack(beginning)
    return json.loads(_read(pipe, head)), bytes(_read(pipe, content))


def _read(pipe: IO[bytes], size: int) -> bytearray:
    found = bytearray()
    while len(found) < size:
        piece = pipe.read(size - len(found))
        if not piece:
            if found:
                raise EOFError(f"{len(found)} of {size} bytes")
            break
        found += piece
    return found


# --- requests


def request_to_json(request: GenerationRequest) -> dict[str, Any]:
    """All that parsing needs. ``columns`` may hold plain JSON values and RoutedShapes."""
    return {
        "key": str(request.key),
        "prompt_ids": list(request.prompt_ids),
        "sampling": asdict(request.sampling),
        "columns": {name: _option(value) for name, value in request.columns.items()},
        "problem_id": request.problem_id,
        "sample_index": request.sample_index,
    }


def request_from_json(told: Mapping[str, Any]) -> GenerationRequest:
    """What ``request_to_json`` told; its key is the text of the key."""
    columns = {
        name: RoutedShape(**{**value, "moe_layers": tuple(value["moe_layers"])})
        if kind == "routed"
        else value
        for name, (kind, value) in told["columns"].items()
    }
    sampling = SamplingParams(**told["sampling"])
    return GenerationRequest(**{**told, "sampling": sampling, "columns": columns})


def _option(value: Any) -> tuple[str, Any]:
    return ("routed", asdict(value)) if isinstance(value, RoutedShape) else ("plain", value)


# --- trajectories


def trajectories_to_wire(
    trajectories: Sequence[Trajectory],
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """What is said of each in JSON, and all their arrays in order."""
    rows, arrays = [], list[np.ndarray]()
    for t in trajectories:
        own = {"token_ids": t.token_ids, "loss_mask": t.loss_mask, **t.columns}
        rows.append(
            {
                "problem_id": t.problem_id,
                "sample_index": t.sample_index,
                "finish_reason": FINISH_REASONS.index(t.finish_reason),
                "text": t.text,
                "arrays": [[name, a.dtype.name, list(a.shape)] for name, a in own.items()],
            }
        )
        arrays += own.values()
    return rows, arrays


def buffer_size(arrays: Sequence[np.ndarray]) -> int:
    """Bytes that ``fill`` needs."""
    return sum(_place(array.nbytes) for array in arrays)


def fill(buffer: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
    """Put the arrays into ``buffer`` (uint8), each at an aligned place."""
    start = 0
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer[start : start + len(flat)] = flat
        start += _place(len(flat))


def trajectories_from_wire(
    rows: Sequence[Mapping[str, Any]], buffer: np.ndarray
) -> list[Trajectory]:
    """What ``trajectories_to_wire`` and ``fill`` gave; the arrays are views of ``buffer``."""
    trajectories, start = [], 0
    for row in rows:
        own: dict[str, np.ndarray] = {}
        for name, dtype, shape in row["arrays"]:
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            own[name] = buffer[start : start + size].view(dtype).reshape(shape)
            start += _place(size)
        trajectories.append(
            Trajectory(
                problem_id=row["problem_id"],
                sample_index=row["sample_index"],
                token_ids=own.pop("token_ids"),
                loss_mask=own.pop("loss_mask"),
                columns=own,
                finish_reason=FINISH_REASONS[row["finish_reason"]],
                text=row["text"],
            )
        )
    return trajectories


def _place(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
