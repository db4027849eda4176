"""Checkpoints of the real trainer: they resume bit for bit, and in other layouts, and survive faults.

Each test starts its ranks only once, because a start takes seconds. The worker goes through the cases.
"""

from __future__ import annotations

import importlib
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.test_trainer_parity import (
    own_micro_batches,
    policy_token_loss,
    run_config,
    samples,
)
from tests.ranks import RankFailedError, run_ranks
from tests.whole_tensors import gather_buckets, whole_weights

HERE = "tests.distributed.test_checkpoint"
STATE = {"step": 2, "sampler": {"epoch": 1, "order": [3, 1, 2]}, "share": 0.1}
TOLERANCE = 1e-5

# Name -> (parallel section, distributed optimizer, data type).
CASES: dict[str, tuple[dict[str, Any], bool, str]] = {
    "EP2": ({"expert": 2}, False, "float32"),
    "TP2": ({"tensor": 2}, False, "float32"),
    "DP2 distributed": ({}, True, "float32"),
    "EP2 distributed": ({"expert": 2}, True, "float32"),
    "PP2 VPP2": ({"pipeline": 2, "virtual_pipeline": 2}, False, "float32"),
    "CP2 EP2 distributed": ({"context": 2, "expert": 2}, True, "float32"),
    "EP2 bf16": ({"expert": 2}, False, "bfloat16"),
    "DP2 bf16 distributed": ({}, True, "bfloat16"),
}
# Saved case -> parallel sections and kinds of optimizer that resume it: all pairs of kinds, EP 1 -> EP 2 and back.
OTHER_LAYOUTS: dict[str, list[tuple[dict[str, Any], bool]]] = {
    "EP2": [({"tensor": 2}, False), ({}, True)],
    "TP2": [({"pipeline": 2}, False), ({"expert": 2}, True)],
    "DP2 distributed": [({"expert": 2}, False), ({"context": 2}, True)],
    "CP2 EP2 distributed": [({}, False), ({"tensor": 2}, False)],
    "EP2 distributed": [({"pipeline": 2, "virtual_pipeline": 2}, False)],
    "PP2 VPP2": [({"tensor": 2, "expert": 2}, True)],
    "EP2 bf16": [({}, True), ({"tensor": 2}, False)],
    "DP2 bf16 distributed": [({"pipeline": 2}, False)],
}


def make_trainer(
    hf_dir: str, parallel: dict[str, Any], distributed: bool, dtype: str, world_size: int
) -> Any:
    from megatron_dppo.trainer.trainer import Trainer

    config = run_config(
        hf_dir, {**parallel, "world_size": world_size}, {"distributed": distributed}
    )
    model = config.model.model_copy(update={"dtype": dtype})
    return Trainer.read(config.model_copy(update={"model": model}))


def train(trainer: Any, steps: int) -> None:
    """Train on the same batch at every step. The learning rate warms up over two steps, so the schedule matters."""
    batches = own_micro_batches(trainer, samples())
    for _ in range(steps):
        trainer.train_mini_batch(batches, policy_token_loss, denominator=200.0)


def raw_state(trainer: Any) -> dict[str, torch.Tensor]:
    """Return this rank's weights and all tensors of its inner optimizers, as they are in memory."""
    out = {
        f"weight {i} {name}": p.detach().clone()
        for i, chunk in enumerate(trainer.chunks)
        for name, p in chunk.named_parameters()
    }
    for i, part in enumerate(trainer.optimizer.chained_optimizers):
        inner = part.optimizer
        for j, p in enumerate(p for group in inner.param_groups for p in group["params"]):
            tensors = {"main": p.detach(), **inner.state[p]}
            out |= {f"optimizer {i} {j} {k}": v.clone() for k, v in tensors.items()}
    return out


def plain_state(trainer: Any) -> dict[str, torch.Tensor]:
    """Return moments and masters of a plain optimizer as full tensors, on global rank 0."""
    from megatron_dppo.model.gather_plan import hf_buckets_plan
    from megatron_dppo.trainer.model import named_parameters

    out = {}
    of_model = {
        getattr(p, "main_param", p): p for chunk in trainer.chunks for p in chunk.parameters()
    }
    kinds: dict[str, dict[torch.Tensor, torch.Tensor]] = {
        "exp_avg": {},
        "exp_avg_sq": {},
        "main": {},
    }
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                tensors = {**part.optimizer.state[main], "main": main.detach()}
                for kind, values in kinds.items():
                    values[of_model[main]] = tensors[kind]
    plan = hf_buckets_plan(trainer.shape, trainer.layout, 50_000, 4)
    for kind, values in kinds.items():
        by_key = {key: values[p] for key, p in named_parameters(trainer.chunks).items()}
        for bucket in gather_buckets(plan, trainer.topology.rank, by_key):
            out |= {f"{kind} {name}": tensor.clone() for name, tensor in bucket}
    return out


def draw_numbers() -> list[float]:
    """Draw one number from every random generator."""
    from megatron.core import tensor_parallel

    with tensor_parallel.get_cuda_rng_tracker().fork():
        stream = float(torch.rand(()))
    return [random.random(), float(np.random.rand()), float(torch.rand(())), stream]


def case_folder(store_dir: Path, name: str) -> str:
    return str(store_dir / name.replace(" ", "_"))


def write_worker(folder: str) -> dict[str, Any]:
    """Train every case for four steps. The checkpoint of step 2 is written in the background meanwhile."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    rank = int(os.environ["RANK"])
    for name, (parallel, distributed, dtype) in CASES.items():
        at = case_folder(Path(folder), name)
        trainer = make_trainer(f"{folder}/hf", parallel, distributed, dtype, 2)
        train(trainer, 2)
        draw_numbers()
        store = CheckpointStore(at, 2, background=True)
        store.save(trainer, 2, STATE)
        expected = {"hf at 2": whole_weights(trainer), "draws": draw_numbers()}
        if not distributed:
            expected["plain state"] = plain_state(trainer)
        train(trainer, 2)
        store.finish()
        expected |= {"raw": raw_state(trainer), "hf": whole_weights(trainer)}
        trainer.close()
        torch.save(expected, f"{at}.rank{rank}.pt")
    trainer = make_trainer(f"{folder}/hf", {"expert": 2}, False, "float32", 2)
    train(trainer, 4)
    torch.save(raw_state(trainer), f"{folder}/EP2_never_saved.rank{rank}.pt")
    trainer.close()
    return {}


def resume_worker(folder: str) -> dict[str, Any]:
    """Load every case in its own layout and in others, and train the last two steps."""
    rank, report = int(os.environ["RANK"]), {}
    for name, (_, _, dtype) in CASES.items():
        at = case_folder(Path(folder), name)
        expected = torch.load(f"{at}.rank{rank}.pt", weights_only=True)
        report[name] = resume_here(folder, name, expected)
        for parallel, distributed in OTHER_LAYOUTS[name]:
            found = resume_elsewhere(folder, at, (parallel, distributed, dtype), expected)
            report[f"{name} as {parallel} {distributed}"] = found
    return report


def resume_here(folder: str, name: str, expected: dict[str, Any]) -> dict[str, bool]:
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    trainer = make_trainer(f"{folder}/hf", *CASES[name], 2)
    store = CheckpointStore(case_folder(Path(folder), name), 2)
    state = store.load(trainer, store.survey().complete[-1])
    same_draws = draw_numbers() == expected["draws"]
    train(trainer, 2)
    got = raw_state(trainer)
    trainer.close()
    return {
        "state": state == STATE,
        "draws": same_draws,
        "step count": trainer.step_count == 4,
        "names": got.keys() == expected["raw"].keys(),
        "bitwise": all(torch.equal(got[k], v) for k, v in expected["raw"].items()),
    }


def resume_elsewhere(
    folder: str, at: str, case: tuple[dict[str, Any], bool, str], expected: dict[str, Any]
) -> dict[str, Any]:
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    trainer = make_trainer(f"{folder}/hf", *case, 2)
    store = CheckpointStore(at, 2)
    store.load(trainer, store.survey().complete[-1])
    loaded = whole_weights(trainer)
    comparable = "plain state" in expected and not case[1]
    state = plain_state(trainer) if comparable else {}
    train(trainer, 2)
    trained = whole_weights(trainer)
    trainer.close()
    if trainer.topology.rank != 0:
        return {}
    return {
        "weights": same(loaded, expected["hf at 2"]),
        "optimizer": same(state, expected["plain state"]) if comparable else True,
        "distance": distance(trained, expected["hf"]),
    }


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert got.keys() == expected.keys()
    assert got
    return all(torch.equal(got[k], v) for k, v in expected.items())


def distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[k].double() - v).norm() / v.double().norm()) for k, v in expected.items())


# On four ranks, the replicas of dense parameters are other ranks than the replicas of expert parameters.
FOUR: dict[str, tuple[dict[str, Any], bool]] = {
    "TP2 EP2": ({"tensor": 2, "expert": 2}, False),
    "TP2 EP2 distributed": ({"tensor": 2, "expert": 2}, True),
}
FOUR_RESUMED: tuple[dict[str, Any], bool] = ({"tensor": 2, "expert_tensor": 2, "pipeline": 2}, True)


def four_ranks_worker(folder: str) -> dict[str, Any]:
    """Save in each layout of FOUR. Load it in the same layout, in FOUR_RESUMED, and by Megatron's own loader."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    out: dict[str, Any] = {}
    for name, (parallel, distributed) in FOUR.items():
        at = case_folder(Path(folder), f"four {name}")
        trainer = make_trainer(f"{folder}/hf", parallel, distributed, "bfloat16", 4)
        train(trainer, 1)
        store = CheckpointStore(at, 1)
        store.save(trainer, 1, {})
        raw, weights = raw_state(trainer), whole_weights(trainer)
        train(trainer, 1)
        store.load(trainer, store.survey().complete[-1])
        found = {"same": same(raw_state(trainer), raw)}
        if not distributed:
            found["megatron"] = megatron_reads(trainer, store.survey().complete[-1].path)
        trainer.close()
        other = make_trainer(f"{folder}/hf", *FOUR_RESUMED, "bfloat16", 4)
        store.load(other, store.survey().complete[-1])
        loaded = whole_weights(other)
        found["elsewhere"] = loaded.keys() == weights.keys() and all(
            torch.equal(loaded[key], value) for key, value in weights.items()
        )
        other.close()
        out[name] = found
    return out


def megatron_reads(trainer: Any, folder: Path) -> bool:
    """Whether Megatron's own loader finds in ``folder`` the moments and masters that a plain optimizer holds."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    from megatron_dppo.trainer.checkpoint.state import state_slices

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    model = {
        str(i): c.sharded_state_dict(metadata={"dp_cp_group": group})
        for i, c in enumerate(trainer.chunks)
    }
    tensors, _ = extract_sharded_tensors_and_factories(model)
    of_model = {id(sharded.data): sharded for sharded in nested_values(tensors)}
    slices = state_slices(trainer.optimizer)
    requested_tensors = {
        str(i): {
            name: make_sharded_optimizer_tensor(
                of_model[id(one.parameter)],
                torch.empty(one.parameter.shape, dtype=torch.float32),
                f"optimizer.state.{name}",
            )
            for name in one.tensors
        }
        for i, one in enumerate(slices)
    }
    loaded = dist_checkpointing.load({"optimizer": requested_tensors}, str(folder))["optimizer"]
    return all(
        torch.equal(loaded[str(i)][name].view(-1), values)
        for i, one in enumerate(slices)
        for name, values in one.tensors.items()
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(action: Callable[[], Any]) -> str:
    """Return the error of ``action`` on this rank."""
    try:
        action()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


@contextmanager
def small_files_only(limit: int, on_rank: int) -> Iterator[None]:
    """On one rank the kernel fails writes beyond ``limit`` bytes of a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if int(os.environ["RANK"]) == on_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def limited_call(owner: Any, name: str) -> Iterator[None]:
    """Within calls of one method, allow rank 0 only files of at most 50 bytes."""
    method = getattr(owner, name)

    def limited(*args: Any, **kwargs: Any) -> Any:
        with small_files_only(50, on_rank=0):
            return method(*args, **kwargs)

    setattr(owner, name, limited)
    try:
        yield
    finally:
        setattr(owner, name, method)


@contextmanager
def broken_call(owner: Any, name: str, on_rank: int) -> Iterator[None]:
    """On one rank a method raises an unforeseen error, as a bug in its code does."""
    method = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if int(os.environ["RANK"]) == on_rank:
            raise KeyError("planted")
        return method(*args, **kwargs)

    setattr(owner, name, broken)
    try:
        yield
    finally:
        setattr(owner, name, method)


def faults_worker(folder: str) -> dict[str, Any]:
    """Return the errors of saves and loads that must fail, and the folders that each leaves."""
    from megatron_dppo.trainer.checkpoint.directory import CheckpointDirectory, StoredCheckpoint
    from megatron_dppo.trainer.checkpoint.saving import SaveTask
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    rank, at = int(os.environ["RANK"]), Path(folder) / "faults"
    trainer = make_trainer(f"{folder}/hf", {"expert": 2}, False, "float32", 2)
    train(trainer, 1)
    store = CheckpointStore(at, 2)
    out: dict[str, Any] = {"none yet": not store.survey().complete}
    store.save(trainer, 1, {})

    def after(action: Callable[[], Any]) -> list[Any]:
        message = refusal(action)
        torch.distributed.barrier()
        return [message, names_in(at), store.survey().complete[-1].step]

    for limited in (0, 1):
        with small_files_only(100_000, limited):
            out[f"full disk on rank {limited}"] = after(lambda: store.save(trainer, 2, {}))
    for owner, name in ((SaveTask, "_write_headers"), (CheckpointDirectory, "publish")):
        with limited_call(owner, name):
            out[f"full disk in {name}"] = after(lambda: store.save(trainer, 2, {}))
    with broken_call(CheckpointDirectory, "publish", 0):
        out["fault in publish"] = after(lambda: store.save(trainer, 2, {}))
    # The saving thread of rank 0 hangs in a collective of this store. Therefore use a new store afterwards.
    saving: Any = importlib.import_module("megatron_dppo.trainer.checkpoint.saving")
    saving._END_S = 0.1
    with broken_call(SaveTask, "_write_and_publish", 1):
        out["fault in a thread"] = after(lambda: store.save(trainer, 2, {}))
    store = CheckpointStore(at, 2)
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=1 << 20)
    out["little space"] = after(lambda: store.save(trainer, 2, {}))
    shutil.disk_usage = usage
    out["unequal state"] = after(lambda: store.save(trainer, 2, {"rank": rank}))
    trainer.step_count += 1
    out["another count"] = after(lambda: store.save(trainer, 2, {}))
    trainer.step_count -= 1

    if rank == 0:
        (at / "step_000009.partial-7").mkdir()
    torch.distributed.barrier()
    for step in (2, 3, 4):
        store.save(trainer, step, {"step": step})
    out["kept"] = names_in(at)

    if rank == 0:
        os.truncate(at / "step_000004" / "__1_0.distcp", 1000)
        with open(at / "step_000003" / "__1_0.distcp", "r+b") as file:
            file.seek(100_000)
            byte = file.read(1)[0]
            file.seek(100_000)
            file.write(bytes([byte ^ 1]))
    torch.distributed.barrier()
    cut = StoredCheckpoint(at / "step_000004", 4, 10)
    out["cut"] = after(lambda: store.load(trainer, cut))
    out["altered"] = after(lambda: store.load(trainer, store.survey().complete[-1]))
    trainer.shape = replace(trainer.shape, num_layers=8)
    out["another model"] = after(lambda: store.load(trainer, store.survey().complete[-1]))
    return out


def killed_worker(folder: str) -> dict[str, Any]:
    """Save once; rank 1 dies when it has written its tensors of the second save, in the background."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    trainer = make_trainer(f"{folder}/hf", {"expert": 2}, False, "float32", 2)
    train(trainer, 1)
    store = CheckpointStore(Path(folder) / "killed", 2, background=True)
    store.save(trainer, 1, {})
    store.finish()
    if trainer.topology.rank == 1:
        saving: Any = importlib.import_module("megatron_dppo.trainer.checkpoint.saving")
        saving.write_hashed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    store.save(trainer, 2, {})
    store.finish()
    return {}


@contextmanager
def slow_writes() -> Iterator[threading.Event]:
    """Saves write nothing until the event is set."""
    from megatron_dppo.trainer.checkpoint.saving import SaveTask

    go, write = threading.Event(), SaveTask._write

    def held(self: SaveTask, folder: Path) -> Any:
        go.wait()
        return write(self, folder)

    SaveTask._write = held  # type: ignore[method-assign]
    try:
        yield go
    finally:
        SaveTask._write = write  # type: ignore[method-assign]


def background_worker(folder: str) -> dict[str, Any]:
    """Save in the background: training continues, the next save waits, and every rank raises a failure."""
    import torch.distributed as dist

    from megatron_dppo.metrics import table as names
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    at, published_steps = Path(folder) / "background", []
    trainer = make_trainer(f"{folder}/hf", {}, True, "float32", 2)
    train(trainer, 1)
    store = CheckpointStore(at, 2, background=True, published=published_steps.append)
    out: dict[str, Any] = {"nothing": store.figures()}
    with slow_writes() as go:
        saved = raw_state(trainer)
        store.save(trainer, 1, {})
        store.poll()
        train(trainer, 1)
        out["meanwhile"] = [names_in(at), len(store.survey().complete)]
        dist.barrier()
        if trainer.topology.rank == 0:
            threading.Timer(0.3, go.set).start()
        else:
            go.set()
        store.save(trainer, 2, {})
        out["next waited"] = (at / "step_000001").is_dir()
        store.finish()
    out["figures"] = store.figures()
    files = [f for f in at.rglob("*") if f.is_file() and f.name != "manifest.json"]
    out["both"] = sum(f.stat().st_size for f in files)
    out["names"] = [names.CHECKPOINT_BYTES, names.CHECKPOINT_WRITTEN]
    out["published"] = list(published_steps)
    trained = raw_state(trainer)
    # The second load restores the trained state, so that the trainer is unchanged afterwards.
    for step, state in enumerate((saved, trained)):
        store.load(trainer, store.survey().complete[step])
        out[f"as it was at {step + 1}"] = same(raw_state(trainer), state)

    with small_files_only(100_000, on_rank=1):
        store.save(trainer, 3, {})
        out["failed"] = refusal(store.finish)
        dist.barrier()
    out["left"] = names_in(at)
    store.save(trainer, 3, {})
    store.close()
    dist.barrier()
    out["closed"] = names_in(at)
    return out


def cut_parameters_worker(folder: str) -> list[dict[str, Any]]:
    """Save a model with parameters that TP2 divides. Continue in TP2, and in layouts with whole parameters."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    trainer = make_trainer(f"{folder}/hf", {"tensor": 2}, False, "float32", 2)
    store = CheckpointStore(Path(folder) / "checkpoints", 1)
    train(trainer, 1)
    store.save(trainer, 1, {})
    saved = whole_weights(trainer)
    train(trainer, 1)
    trained = whole_weights(trainer)
    trainer.close()
    found = []
    for parallel in ({"tensor": 2}, {"expert": 2}, {"pipeline": 2}):
        other = make_trainer(f"{folder}/hf", parallel, False, "float32", 2)
        store.load(other, store.survey().complete[-1])
        loaded = whole_weights(other)
        train(other, 1)
        continued = whole_weights(other)
        other.close()
        if other.topology.rank == 0:
            found.append({"same": same(loaded, saved), "distance": distance(continued, trained)})
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of every case at step 2, written by two ranks, and the states that must follow."""
    from tests.tiny_models import save_tiny_model

    folder = tmp_path_factory.mktemp("checkpoints")
    save_tiny_model(folder / "hf", "qwen3_moe", layers=4, vocab_size=515)
    run_ranks(f"{HERE}:write_worker", 2, str(folder))
    return folder


@pytest.mark.distributed
def test_a_resumed_run_is_the_run_that_was_not_stopped(checkpoints: Path) -> None:
    for rank in range(2):
        never_saved = torch.load(checkpoints / f"EP2_never_saved.rank{rank}.pt", weights_only=True)
        saved = torch.load(checkpoints / f"EP2.rank{rank}.pt", weights_only=True)
        assert same(saved["raw"], never_saved)
    reports = run_ranks(f"{HERE}:resume_worker", 2, str(checkpoints))
    for name in CASES:
        for rank, report in enumerate(reports):
            assert all(report[name].values()), (name, rank, report[name])
    for name, others in OTHER_LAYOUTS.items():
        for parallel, distributed in others:
            found = reports[0][f"{name} as {parallel} {distributed}"]
            assert found["weights"], (name, parallel)
            assert found["optimizer"], (name, parallel)
            # bfloat16 gradients round differently on another layout, and a router's choice may flip.
            if CASES[name][2] == "float32":
                assert found["distance"] <= TOLERANCE, (name, parallel, found)


@pytest.mark.distributed
def test_faults_leave_older_checkpoints_and_reach_every_rank(checkpoints: Path) -> None:
    reports = run_ranks(f"{HERE}:faults_worker", 2, str(checkpoints))
    for got in reports:
        assert got["none yet"]
        for fault, reason in {
            "full disk on rank 0": "rank 0: [Errno 27] File too large",
            "full disk on rank 1": "rank 1: [Errno 27]",
            "full disk in _write_headers": "rank 0: [Errno 27] File too large",
            "full disk in publish": "rank 0: [Errno 27] File too large",
            "fault in publish": "rank 0: KeyError: 'planted'",
            "little space": "No space left on device; it needs about 4.6 MiB, 1.0 MiB were free",
        }.items():
            message, table, latest = got[fault]
            assert message.startswith("CheckpointError: "), (fault, message)
            assert reason in message, (fault, message)
            assert "MiB" in message
            assert (table, latest) == (["step_000001"], 1), (fault, table)
        message, _, latest = got["fault in a thread"]
        assert (message, latest) == ("CheckpointError: KeyError: 'planted'", 1)
        for fault, reason in {
            "unequal state": "ValueError: ranks disagree on the run's state",
            "another count": "CheckpointError: rank 0: the optimizer counts [1] steps, the trainer 2",
        }.items():
            message, table, latest = got[fault]
            assert message.startswith(reason), (fault, message)
            assert (table, latest) == (["step_000001"], 1)
        assert got["kept"] == ["step_000003", "step_000004"]
        for fault, reason in {
            "cut": "step_000004/__1_0.distcp: has 1000 bytes, expected ",
            "altered": "step_000003/__1_0.distcp: altered",
            "another model": "num_layers is 8 here and 4 in the checkpoint",
        }.items():
            message, table, latest = got[fault]
            kind = "CheckpointError: " if fault == "another model" else "DamagedCheckpointError: "
            assert message.startswith(kind), (fault, message)
            assert reason in message, (fault, message)
            assert (table, latest) == (["step_000003", "step_000004"], 3)


@pytest.mark.distributed
def test_a_rank_killed_while_saving_leaves_the_older_checkpoint(checkpoints: Path) -> None:
    from megatron_dppo.trainer.checkpoint.directory import (
        CheckpointDirectory,
        check_content,
        read_manifest,
    )

    with pytest.raises(RankFailedError, match=r"-9"):
        run_ranks(f"{HERE}:killed_worker", 2, str(checkpoints))
    folder = checkpoints / "killed"
    assert names_in(folder) == ["step_000001", "step_000002.partial-2"]
    directory = CheckpointDirectory(folder, 2)
    (left,) = directory.complete()
    check_content(left.path, read_manifest(left.path)["files"])
    assert directory.begin(2).path.name == "step_000002.partial-3"
    assert names_in(folder) == ["step_000001", "step_000002.partial-3"]


@pytest.mark.distributed
def test_training_goes_on_while_a_checkpoint_is_written(checkpoints: Path) -> None:
    reports = run_ranks(f"{HERE}:background_worker", 2, str(checkpoints))
    for rank, got in enumerate(reports):
        assert got["nothing"] == {}
        assert got["meanwhile"] == [["step_000001.partial-1"], 0]
        assert got["next waited"]
        written, seconds = got["names"]
        assert got["figures"].keys() == {written, seconds}
        assert got["figures"][written] == got["both"]
        assert got["figures"][seconds] >= (0.3 if rank == 0 else 0)
        assert got["as it was at 1"]
        assert got["as it was at 2"]
        assert got["published"] == ([1, 2] if rank == 0 else [])
        assert got["failed"].startswith("CheckpointError: ")
        assert "rank 1: [Errno 27]" in got["failed"]
        assert got["left"] == ["step_000001", "step_000002"]
        assert got["closed"] == ["step_000002", "step_000003"]


@pytest.mark.distributed
def test_replicas_share_out_what_they_write(checkpoints: Path) -> None:
    for got in run_ranks(f"{HERE}:four_ranks_worker", 4, str(checkpoints)):
        for name, found in got.items():
            assert all(found.values()), (name, found)
    for name in FOUR:
        (step,) = Path(case_folder(checkpoints, f"four {name}")).iterdir()
        sizes = [path.stat().st_size for path in step.glob("*.distcp")]
        assert len(sizes) == 4
        assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["olmoe", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_parameters_in_parts_are_saved_in_parts_and_loaded_whole(
    tmp_path: Path, family: str
) -> None:
    """The parameters are norms of all heads, and the sections of a delta net's inputs. The converter reads them too."""
    from megatron_dppo.checkpoint_conversion.torch_dist import TorchDistCheckpoint
    from megatron_dppo.model.families import load_model_shape
    from megatron_dppo.model.mapping import hf_tensors
    from tests.tiny_models import save_tiny_model

    save_tiny_model(tmp_path / "hf", family, vocab_size=515)
    (found, _) = run_ranks(f"{HERE}:cut_parameters_worker", 2, str(tmp_path))
    (step,) = (tmp_path / "checkpoints").iterdir()
    shape = load_model_shape(tmp_path / "hf")
    with TorchDistCheckpoint(step, shape) as checkpoint:
        assert checkpoint.specs.keys() == hf_tensors(shape).keys()
    assert [case["same"] for case in found] == [True] * 3
    assert max(case["distance"] for case in found) <= TOLERANCE
