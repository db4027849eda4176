"""Files of scored responses that grow response by response: a sequence of frames. Nothing is pickled.

    frame      magic, 4 bytes; length of the content, 8 bytes, little endian; XXH3 of the content, 16 bytes; the content
    content    safetensors: ``token_ids``, ``loss_mask`` and one array per column; JSON in the metadata has the rest

A process may die while it appends a frame, so the last frame of a file may be incomplete. ``read_frames`` does not
return an incomplete frame, and ``open_frames`` removes it. ``read_frames`` skips a frame whose content does not have
the hash in the frame. Frames behind a damaged header cannot be found: ``read_frames`` ends at the header, and
``open_frames`` removes them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megatron_dppo.data.trajectory import Stamp, Trajectory

log = logging.getLogger(__name__)

_MAGIC = b"RSP1"
_LENGTH, _HASH = 8, 16
_HEADER = len(_MAGIC) + _LENGTH + _HASH
_FACTS = "facts"
_COLUMN = "column."
_FIELDS = (
    *("problem_id", "sample_index", "finish_reason", "text", "prompt_tokens", "cached_tokens"),
    *("verify_steps", "ended_by", "turn_rewards", "turn_times", "wants_score"),
)
"""Fields of a trajectory that are stored as JSON. Reward, advantage and components are not stored here: they follow
from the score."""


@dataclass(frozen=True)
class ScoredResponse:
    """A response and its score.

    Attributes:
        key: (position of the response's group in the batch, index of the response in the group).
        trajectory: the response, with a stamp and without a reward.
        score: the fields of the score, plain JSON.
    """

    key: tuple[int, int]
    trajectory: Trajectory
    score: Mapping[str, Any]


def open_frames(path: Path) -> BinaryIO:
    """Open a file to append frames. Removes all that follows the first incomplete or damaged header. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab+")  # noqa: SIM115  the caller closes the file
    size = path.stat().st_size
    start = 0
    while start < size:
        file.seek(start)
        header = file.read(_HEADER)
        end = start + _HEADER + _content_length(header)
        if len(header) < _HEADER or not header.startswith(_MAGIC) or end > size:
            file.truncate(start)
            break
        start = end
    return file


def _content_length(header: bytes) -> int:
    return int.from_bytes(header[len(_MAGIC) : len(_MAGIC) + _LENGTH], "little")


def append_frame(file: BinaryIO, response: ScoredResponse) -> None:
    """Append one frame and flush it. Raises OSError."""
    content = _encode(response)
    digest = xxhash.xxh3_128_digest(content)
    file.write(_MAGIC + len(content).to_bytes(_LENGTH, "little") + digest + content)
    file.flush()


def read_frames(path: Path) -> Iterator[ScoredResponse]:
    """Yield the responses of the intact frames of a file, in order. Logs a warning for each damaged frame."""
    with open(path, "rb") as file:
        while len(header := file.read(_HEADER)) == _HEADER:
            length = _content_length(header)
            # A damaged length may be larger than the file. Reading this number of bytes might exhaust the memory.
            if not header.startswith(_MAGIC) or length > path.stat().st_size:
                log.warning("%s: damaged before byte %d; the rest is not used", path, file.tell())
                return
            content = file.read(length)
            if len(content) < length:
                # The last frame is incomplete.
                return
            if xxhash.xxh3_128_digest(content) != header[-_HASH:]:
                log.warning("%s: a response before byte %d is damaged", path, file.tell())
                continue
            try:
                yield _decode(content)
            except (SafetensorError, KeyError, TypeError, ValueError) as error:
                log.warning("%s: a response before byte %d: %s", path, file.tell(), error)


def _encode(response: ScoredResponse) -> bytes:
    t = response.trajectory
    facts = {
        "key": response.key,
        "score": dict(response.score),
        "stamp": None if t.stamp is None else asdict(t.stamp),
        **{name: getattr(t, name) for name in _FIELDS},
    }
    arrays = {"token_ids": t.token_ids, "loss_mask": t.loss_mask}
    arrays |= {_COLUMN + name: array for name, array in t.columns.items()}
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(contiguous, {_FACTS: json.dumps(facts)})


def _decode(content: bytes) -> ScoredResponse:
    # ``load`` returns no metadata, so read the JSON header, which has the metadata. The first 8 bytes are its length.
    header_length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_length])
    facts = json.loads(header["__metadata__"][_FACTS])
    arrays = load(content)
    fields = {name: facts[name] for name in _FIELDS}
    fields["turn_rewards"] = tuple(fields["turn_rewards"])
    fields["turn_times"] = tuple(fields["turn_times"])
    trajectory = Trajectory(
        token_ids=arrays.pop("token_ids"),
        loss_mask=arrays.pop("loss_mask"),
        columns={name.removeprefix(_COLUMN): array for name, array in arrays.items()},
        stamp=None if facts["stamp"] is None else Stamp(**facts["stamp"]),
        **fields,
    )
    trajectory.check()
    position, sample = facts["key"]
    return ScoredResponse((position, sample), trajectory, facts["score"])
