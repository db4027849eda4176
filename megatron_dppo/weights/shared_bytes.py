"""Bytes in shared memory: an engine on the same host receives a handle of the memory instead of the bytes.

SGLang unpickles the handle. This process only pickles it, and imports nothing of SGLang. On a GPU the handle is a
handle of CUDA IPC. It was tested on an H100 with another process of ours, but not yet with SGLang.
"""

from __future__ import annotations

import base64
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

_SHARING = threading.Lock()
"""Guards torch's sharing strategy in this process."""


_DEVICE_ARGUMENT = 6
"""Position of the device index among the arguments of ``rebuild_cuda_tensor``."""


def shared_empty(size: int, device: torch.device | str) -> Tensor:
    """Allocate ``size`` bytes that another process can open; on a CPU they are in a file under ``/dev/shm``."""
    if torch.device(device).type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    with _file_system_sharing():
        return torch.empty(size, dtype=torch.uint8).share_memory_()


MESSAGES = "messages"
"""Key of a payload's messages: pairs of a text and the bytes. Or its value is the reason why they cannot be opened."""


class SharedBytes(NamedTuple):
    """Bytes in shared memory for one engine rank, and the text that says what they are."""

    text: str
    data: Tensor


def shared_payloads(by_rank: Sequence[Sequence[SharedBytes]]) -> list[str]:
    """Return a payload with the handles of each engine rank's bytes, in base64."""
    # Each rank needs handles of its own: a handle counts as one reference to the memory until its rank has opened and
    # dropped it.
    with _file_system_sharing():
        return [
            base64.b64encode(_Pickler.dumps({MESSAGES: [tuple(m) for m in messages]})).decode()
            for messages in by_rank
        ]


def open_payload(payload: str, index_of: Mapping[str, int]) -> dict[str, Any]:
    """Open a payload of ``shared_payloads`` in a process that does nothing else: the function changes torch for good.

    ``index_of``: the UUID of a device -> its index in this process. SGLang's own receiver does the same look-up.
    """
    rebuild = reductions.rebuild_cuda_tensor

    def rebuild_by_uuid(*arguments: Any) -> Any:
        new_arguments = list(arguments)
        new_arguments[_DEVICE_ARGUMENT] = index_of[new_arguments[_DEVICE_ARGUMENT]]
        return rebuild(*new_arguments)

    reductions.rebuild_cuda_tensor = rebuild_by_uuid
    return dict(pickle.loads(base64.b64decode(payload)))


def named_by_uuid(
    rebuild: Callable[..., Any], arguments: tuple[Any, ...], uuid_of: Callable[[int], str]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return torch's recipe for rebuilding a tensor in another process, with a CUDA device named by its UUID."""
    if rebuild is not reductions.rebuild_cuda_tensor:
        return rebuild, arguments
    # A device index names another device in a process with another CUDA_VISIBLE_DEVICES. SGLang accepts a UUID instead
    # (sglang.srt.utils.patch_torch).
    new_arguments = list(arguments)
    new_arguments[_DEVICE_ARGUMENT] = uuid_of(new_arguments[_DEVICE_ARGUMENT])
    return rebuild, tuple(new_arguments)


class _Pickler(ForkingPickler):
    """Pickles handles of tensors in shared memory; a CUDA device is named by its UUID."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(value)
            return named_by_uuid(rebuild, arguments, _uuid)
        return NotImplemented


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def _file_system_sharing() -> Iterator[None]:
    # torch's other strategy sends file descriptors. Only a process that ``multiprocessing`` started can receive file
    # descriptors. A server is no such process, and would end.
    # The strategy is global to the process. The lock is needed because one thread allocates memory while another thread
    # sends the previous batch.
    with _SHARING:
        previous_strategy = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            torch.multiprocessing.set_sharing_strategy(previous_strategy)
