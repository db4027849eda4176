"""What an answer holds in place of a recording: where its bytes are, what they are, and their hash."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import xxhash

MAGIC = b"megatron_dppo recording 1 "
"""No recording in int32 begins so: its first expert would have a number above 10^9."""
DTYPES = ("uint8", "uint16")
_ID = re.compile(r"[0-9a-f]{32}")
_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Notice:
    """Of one recording [rows, layers, experts a token].

    ``folder``: of the file, on the server's host; its name is ``id``. ``hash``: of the file's bytes
    (``content_hash``).
    """

    id: str
    folder: str
    dtype: str
    shape: tuple[int, int, int]
    hash: str

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def encode(self) -> bytes:
        """What stands in the answer."""
        return MAGIC + json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """None for anything that is no notice; raises ValueError for a broken one."""
        if not content.startswith(MAGIC):
            return None
        try:
            told: dict[str, Any] = json.loads(content[len(MAGIC) :])
            notice = cls(**{**told, "shape": tuple(told["shape"])})
            right = (
                _ID.fullmatch(notice.id)
                and _HASH.fullmatch(notice.hash)
                and isinstance(notice.folder, str)
                and notice.dtype in DTYPES
                and len(notice.shape) == 3
                and all(type(size) is int and size >= 0 for size in notice.shape)
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"a broken notice of a recording: {error}") from error
        if not right:
            raise ValueError(f"a broken notice of a recording: {told}")
        return notice

    def array(self, content: bytes | bytearray | np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The recording in a file's ``content``, of the ``shape`` that was asked for.

        Raises ValueError for another shape, another size, or bytes with another hash.
        """
        if self.shape != tuple(shape):
            raise ValueError(f"a recording of shape {self.shape}, expected {tuple(shape)}")
        flat = np.frombuffer(content, np.uint8)
        if len(flat) != self.size:
            raise ValueError(f"{len(flat)} bytes of a recording, expected {self.size}")
        found = content_hash(flat)
        if found != self.hash:
            raise ValueError(f"a recording with the hash {found}, expected {self.hash}")
        return flat.view(self.dtype).reshape(self.shape)


def content_hash(flat: np.ndarray) -> str:
    """XXH3 (128 bits) of an array's bytes."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(flat).data)
