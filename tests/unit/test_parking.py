"""The parker without a model, with tensors that share storages as Megatron-Core's parameters do."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megatron_dppo.model.shape import TRAINER_PARTS
from megatron_dppo.trainer import parking, platform
from megatron_dppo.trainer.parking import ParkedError, Parker, drop_quantised_weights
from tests.messages import mentioning


class TrainerTensors:
    """Two parameters that are views of one buffer, a frozen parameter, a reference copy, gradients and a moment."""

    def __init__(self) -> None:
        self.buffer = torch.arange(100, dtype=torch.float32)
        self.first = Parameter(self.buffer[:60].view(6, 10))
        self.second = Parameter(self.buffer[64:].view(4, 9))
        self.frozen = Parameter(torch.ones(7, dtype=torch.bfloat16), requires_grad=False)
        self.reference = torch.full((5,), 3.0)
        self.gradients = torch.ones(100)
        self.moments = [torch.full((60,), 0.5)]

    def __call__(self):
        return {
            "weights": [self.first, self.second, self.frozen],
            "reference": [self.reference],
            "gradients": [self.gradients],
            "optimizer": list(self.moments),
        }

    def sizes(self) -> list[int]:
        tensors = [t for part in self().values() for t in part]
        return [t.untyped_storage().nbytes() for t in tensors]


@pytest.fixture
def tensors() -> TrainerTensors:
    return TrainerTensors()


@pytest.fixture
def parker(tensors: TrainerTensors) -> Parker:
    return Parker(tensors)


def test_all_storages_hold_nothing_and_come_back(tensors: TrainerTensors, parker: Parker) -> None:
    before = [t.clone() for part in tensors().values() for t in part]
    view, sizes = tensors.first[2], tensors.sizes()
    result = parker.park()
    assert set(tensors.sizes()) == {0}
    assert result.bytes == {"weights": 414, "reference": 20, "gradients": 400, "optimizer": 240}
    assert result.copied == 414 + 20 + 240
    assert parker.parked == set(TRAINER_PARTS)
    assert parker.unpark().bytes == result.bytes
    assert tensors.sizes() == sizes
    assert parker.parked == set()
    after = [t for part in tensors().values() for t in part]
    parts = ["weights", "weights", "weights", "reference", "gradients", "optimizer"]
    for part, old, new in zip(parts, before, after, strict=True):
        expected = torch.zeros_like(old) if part == "gradients" else old
        assert torch.equal(new, expected), part
    # Views that were made before parking still see the parameter's bytes.
    tensors.buffer[20] = -1.0
    assert view[0] == tensors.first[2, 0] == -1.0


def test_gradients_are_zero_whatever_the_bytes_they_get_hold(
    tensors: TrainerTensors, parker: Parker, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = parking._allocate

    def allocate_used_bytes(storages: list[parking._Storage]) -> None:
        allocate(storages)
        for storage in storages:
            storage.flat().fill_(7)

    monkeypatch.setattr(parking, "_allocate", allocate_used_bytes)
    parker.park()
    parker.unpark()
    assert not tensors.gradients.any()
    assert tensors.reference.tolist() == [3.0] * 5


def test_a_wrong_order_is_one_error_and_changes_nothing(
    tensors: TrainerTensors, parker: Parker
) -> None:
    with pytest.raises(ParkedError, match=mentioning("trainer")):
        parker.unpark()
    parker.park(["gradients", "optimizer"])
    with pytest.raises(ParkedError, match=mentioning("optimizer")):
        parker.park(["weights", "optimizer"])
    with pytest.raises(ParkedError, match=mentioning("weights")):
        parker.unpark(["weights", "optimizer"])
    assert parker.parked == {"gradients", "optimizer"}
    parker.check("read weights", "weights")
    with pytest.raises(ParkedError, match=mentioning("train", "gradients", "optimizer")):
        parker.check("train")
    parker.park(["weights"])
    parker.unpark(["weights"])
    assert parker.parked == {"gradients", "optimizer"}
    assert tensors.second[0, 0] == 64


def test_what_never_changes_is_copied_once(tensors: TrainerTensors, parker: Parker) -> None:
    parker.park()
    parker.unpark()
    tensors.buffer += 1
    assert parker.park().copied == 400 + 240
    parker.unpark()
    assert tensors.frozen.tolist() == [1.0] * 7
    assert tensors.reference.tolist() == [3.0] * 5
    assert tensors.first[0, 0] == 1.0


def test_quantised_copies_of_weights_are_dropped() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    copies = {"weight": torch.zeros(16, dtype=torch.uint8)}
    model[1]._fp8_workspaces = copies  # type: ignore[assignment]
    drop_quantised_weights([model])
    assert copies == {}


def test_moments_that_appear_later_are_parked_too(tensors: TrainerTensors, parker: Parker) -> None:
    parker.park(["optimizer"])
    parker.unpark()
    tensors.moments.append(torch.full((60,), 0.25))
    assert parker.park(["optimizer"]).bytes == {"optimizer": 480}
    parker.unpark()
    assert [float(m[0]) for m in tensors.moments] == [0.5, 0.25]


def test_without_room_on_the_host_nothing_is_parked(
    tensors: TrainerTensors, parker: Parker, monkeypatch
) -> None:
    def raise_full(size: int):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(platform, "HostMemory", raise_full)
    sizes = tensors.sizes()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        parker.park()
    assert tensors.sizes() == sizes
    assert not parker.parked


def test_without_room_on_the_device_all_stays_parked(tensors: TrainerTensors) -> None:
    class StorageWithoutRoom:
        """A storage on a device whose memory the engine still uses."""

        def resize_(self, size: int) -> None:
            if size:
                raise torch.OutOfMemoryError("out of memory")

    first = tensors.buffer.untyped_storage()
    size = first.nbytes()
    first.resize_(0)
    both: tuple[Any, ...] = (first, StorageWithoutRoom())
    storages = [parking._Storage(s, size, is_constant=False) for s in both]
    with pytest.raises(torch.OutOfMemoryError):
        parking._allocate(storages)
    assert first.nbytes() == 0
