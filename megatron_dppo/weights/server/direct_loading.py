"""Direct placement: a server copies the tensors of a weight update straight to their places in its own tensors.

SGLang's own loader looks every tensor up in tables of names and calls a Python function for each expert. Servers load
their checkpoint in this way when they start. In servers that ``engine.launch_server`` starts, this module loads the
updates. It uses the table ``EngineTensors.parts``. The expected checksums are computed from the same table. So if this
module copies a block to a place other than the table's, verification finds it.

If the table does not describe the server's tensors, SGLang's loader loads the updates too. Possible reasons are another
model, an adapter's layers, and a tensor that is not contiguous. The choice is made once for a server, and logged.

All strategies call the ``load_weights`` of SGLang's model. Tensors that the model derives from loaded tensors (``w_kc``
and ``w_vc`` of latent attention) are derived once, at the end of an update. The functions at the end are plugin hooks
of SGLang.

Changes to present weights (``weights/changes.py``) are kept in host memory until the end of the update. If the update
is interrupted, these changes are dropped, and the weights are still the weights of the previous update. With
``engine.atomic_updates``, whole messages are kept in the same way.
"""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.options import ATOMIC_VARIABLE
from megatron_dppo.engine.server import hooks
from megatron_dppo.model.families import load_model_shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_dppo.model.mapping import Segment
    from megatron_dppo.weights.checksums import EnginePart, EngineTensors
    from megatron_dppo.weights.server.shards import Incoming

log = logging.getLogger(__name__)

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
LOADED = f"{_RUNNER}.maybe_precompile_model_kernels_after_loading"
"""The method that SGLang calls next after it has loaded a model."""
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
REQUESTED = f"{_MANAGER}.begin_weight_update"
"""The scheduler's method that accepts a request for an update, or refuses it while another update is open."""
BEGUN = f"{_UPDATER}.begin_weight_update"
ENDED = f"{_UPDATER}.end_weight_update"
FOLDER = f"{_UPDATER}.update_weights_from_disk"
RECEIVED = f"{_UPDATER}._receive_bucketed_weights_from_distributed"
OPENED = "sglang.srt.managers.tp_worker.BaseTpWorker.deserialize_own_rank"
SHARED = f"{_UPDATER}._update_weights_from_flattened_bucket"
ANSWERED = f"{_MANAGER}.update_weights_from_tensor"
SHARDS = "megatron_dppo.shards"
"""Name of the first tensor in a request for an update in shards. The second name is the update's Instruction."""
_TENSORS_AT_ONCE = 1024
"""Number of tensors of a folder that are read before they are copied."""


class UnplaceableError(EngineError, ValueError):
    """The server's tensors differ from the table's, or a received tensor does not fit the model."""


class _Place(NamedTuple):
    """The place of one block of a received tensor.

    Attributes:
        target: the view of the engine's tensor that holds the block; a vector if the block is one run of elements.
        run: start and length of the block in the flat received tensor; None if the block is the whole tensor, or is no
            run of elements.
        cut: dimension, start and length of a block that is no run of elements; None for a run.
        padding: the view of the engine's tensor that zeros fill; None without padding.
        part: the table's entry if the engine's values differ from the received values; None if they are equal.
    """

    target: Tensor
    run: tuple[int, int] | None = None
    cut: tuple[int, int, int] | None = None
    padding: Tensor | None = None
    part: EnginePart | None = None


class MappedFile:
    """The bytes of a file's tensors, and the names, dtypes and shapes of the tensors."""

    def __init__(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Sequence[int]],
        data: Tensor,
    ) -> None:
        self.names = names
        self.dtypes = dtypes
        self.shapes = [tuple(dims) for dims in shapes]
        self.data = data

    def flat_tensors(self) -> Sequence[Tensor]:
        """Return the tensors as vectors."""
        sizes = [math.prod(dims) for dims in self.shapes]
        first_dtype = self.dtypes[0]
        if all(dtype == first_dtype for dtype in self.dtypes):
            return self.data.view(first_dtype).split(sizes)
        byte_sizes = [n * dtype.itemsize for n, dtype in zip(sizes, self.dtypes, strict=True)]
        chunks = self.data.split(byte_sizes)
        return [chunk.view(dtype) for chunk, dtype in zip(chunks, self.dtypes, strict=True)]


def map_folder(folder: Path) -> list[MappedFile] | None:
    """Return the tensors of each safetensors file of ``folder``, mapped into memory.

    Files that the folder's index does not name are not read. Returns None if a tensor is not aligned to its dtype: then
    the tensor cannot be a view of the mapped bytes. Also returns None if no file holds a tensor. Raises CheckpointError
    for a damaged file.
    """
    import torch

    from megatron_dppo.checkpoint_conversion.hf_folder import weight_files
    from megatron_dppo.checkpoint_conversion.tensor_store import SafetensorsFile

    files: list[MappedFile] = []
    for path in weight_files(folder):
        # Only the header is needed here: the tensors are mapped below.
        file = SafetensorsFile(path)
        file.close()
        # Order the tensors by their places in the file: the tensors of MappedFile follow each other in its bytes.
        offset_of = {name: entry.offset for name, entry in file.entries.items()}
        names = sorted(offset_of, key=offset_of.__getitem__)
        entries = [file.entries[name] for name in names]
        if any(entry.offset % entry.dtype.itemsize for entry in entries):
            return None
        if not entries:
            continue
        dtypes = [entry.dtype for entry in entries]
        shapes = [entry.shape for entry in entries]
        size = path.stat().st_size
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        files.append(MappedFile(names, dtypes, shapes, data[entries[0].offset :]))
    return files or None


class _Copies(NamedTuple):
    """Copies that place received blocks: ``sources[i]`` goes to ``targets[i]``, and ``paddings`` become zero."""

    targets: list[Tensor]
    sources: list[Tensor]
    paddings: list[Tensor]

    def carry_out(self) -> None:
        import torch

        for padding in self.paddings:
            padding.zero_()
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)


class TensorPlaces:
    """The places of all tensors of a model in the tensors of one engine rank.

    Args:
        table: the tensors of the served model.
        rank: the engine rank.
        held_tensors: the rank's tensors, by SGLang's names.

    Raises:
        UnplaceableError: the rank does not hold the tensors of the table.
    """

    def __init__(self, table: EngineTensors, rank: int, held_tensors: Mapping[str, Tensor]) -> None:
        from megatron_dppo.model.mapping import engine_inputs
        from megatron_dppo.weights.server.shards import MessagePlacements

        self._shapes = {name: tuple(dims) for name, dims in table.shapes.items()}
        self._places: dict[str, list[_Place]] = {}
        self._repeated: set[str] = set()
        self._addresses: dict[str, int] = {}
        self._unfilled: list[Tensor] = []
        blocks: dict[Segment, list[tuple[Tensor, bool]]] = defaultdict(list)
        flat_tensors = self._flat(table.sizes[rank], held_tensors)
        filled_tensors: set[str] = set()
        for name, parts in table.parts.items():
            # SGLang's loader must receive some tensors a second time, under another name.
            self._repeated.update(engine_inputs(table.shape, name)[1:])
            own_parts = [part for part in parts if part.rank == rank]
            filled_tensors.update(part.tensor for part in own_parts)
            places: list[_Place] = []
            for part in own_parts:
                places.append(_place(part, self._shapes[name], flat_tensors[part.tensor]))
                view, padding = part.views(self._shapes[name], flat_tensors[part.tensor])
                blocks[replace(part.block, local_start=0)].append((view, part.adds_one))
                if padding is not None:
                    self._unfilled.append(padding)
            self._places[name] = places
        for name, flat in flat_tensors.items():
            if name not in filled_tensors:
                self._unfilled.append(flat)
        self.placements = MessagePlacements(table, blocks)
        """The places of the messages of updates."""

    def is_current(self, held_tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the rank's tensors still have the addresses that they had when the places were made."""
        for name, address in self._addresses.items():
            tensor = held_tensors.get(name)
            if tensor is None or tensor.data_ptr() != address:
                return False
        return True

    def fill_padding(self) -> None:
        """Write zeros to the tensors, and parts of tensors, that no tensor of a checkpoint fills."""
        for tensor in self._unfilled:
            tensor.zero_()

    def load(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the blocks of the tensors to their places.

        Raises UnplaceableError for a tensor that the model does not have, or of another shape.
        """
        tensors = [(name, tuple(tensor.shape), tensor.reshape(-1)) for name, tensor in bucket]
        self._copies_of_tensors(tensors).carry_out()

    def load_file(self, file: MappedFile) -> None:
        """Copy the blocks of a file's tensors to their places; raises as ``load``."""
        tensors = zip(file.names, file.shapes, file.flat_tensors(), strict=True)
        self._copies_of_tensors(tensors).carry_out()

    def _copies_of_tensors(self, tensors: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> _Copies:
        """Return the copies of the blocks of received tensors (name, shape, the tensor as a vector) to their places."""
        copies = _Copies([], [], [])
        for name, dims, flat in tensors:
            places = self._places.get(name)
            if places is None:
                self._check_ignored(name)
                continue
            if dims != self._shapes[name]:
                raise UnplaceableError(
                    f"weight update: {name} was received with the shape {dims}, expected {self._shapes[name]}"
                )
            for place in places:
                copies.targets.append(place.target)
                if place.part is None:
                    copies.sources.append(_block(flat, dims, place))
                else:
                    copies.sources.append(place.part.cut(flat.view(dims), place.target.dtype))
                if place.padding is not None:
                    copies.paddings.append(place.padding)
        return copies

    def _check_ignored(self, name: str) -> None:
        """Raise unless the update works without the tensor ``name``.

        The update works without ``PROBE`` of ``engine_weights``: no model has this tensor. It also works without the
        second copy of a tensor that is sent under two names: only servers with SGLang's loader need the second name.
        """
        if name in self._repeated or "rotary_emb.inv_freq" in name:
            return
        raise UnplaceableError(
            f"weight update: {name} was received, expected a tensor of the model"
        )

    def _flat(
        self, sizes: Mapping[str, int], held_tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the rank's tensors as vectors. Raises UnplaceableError if they differ from the table's ``sizes``."""
        flat_tensors: dict[str, Tensor] = {}
        for name, size in sizes.items():
            tensor = held_tensors.get(name)
            if tensor is None or tensor.numel() != size or not tensor.is_contiguous():
                held_form = "no tensor"
                if tensor is not None:
                    held_form = f"{tuple(tensor.shape)} with strides {tensor.stride()}"
                raise UnplaceableError(
                    f"{name}: the engine holds {held_form}, expected {size} contiguous elements"
                )
            self._addresses[name] = tensor.data_ptr()
            flat_tensors[name] = tensor.detach().view(-1)
        return flat_tensors


def _place(part: EnginePart, dims: tuple[int, ...], flat: Tensor) -> _Place:
    """Return the place of ``part``, a block of a tensor of the shape ``dims``, in the vector of its engine tensor."""
    block = part.block
    held_dims = list(dims)
    held_dims[block.dim] = part.width
    size = math.prod(held_dims)
    region = flat[part.start : part.start + size]
    if part.adds_one:
        return _Place(region.view(held_dims), part=part)
    is_whole = block.length == dims[block.dim]
    if is_whole and part.width == block.length:
        return _Place(region)
    padding: Tensor | None = None
    if block.dim == 0:
        # Consecutive rows are one run of elements, both in the received tensor and in the engine's tensor.
        row_elements = math.prod(dims[1:])
        block_elements = block.length * row_elements
        run = (block.hf_start * row_elements, block_elements)
        if block_elements < size:
            padding = region[block_elements:]
        return _Place(region[:block_elements], run=run, padding=padding)
    shaped_region = region.view(held_dims)
    if part.width > block.length:
        padding = shaped_region.narrow(block.dim, block.length, part.width - block.length)
    target = shaped_region.narrow(block.dim, 0, block.length)
    return _Place(target, cut=(block.dim, block.hf_start, block.length), padding=padding)


def _block(flat: Tensor, dims: tuple[int, ...], place: _Place) -> Tensor:
    """Return the block of a received tensor, given as a vector, that belongs at ``place``, as a view."""
    if place.run is not None:
        return flat.narrow(0, *place.run)
    if place.cut is not None:
        return flat.view(dims).narrow(*place.cut)
    return flat


class DirectLoader:
    """Replacement of ``load_weights`` of a server's ``model`` once the model is loaded.

    Args:
        model: SGLang's model.
        rank: the engine rank.
        read_table: reads the tensors of the served model.
    """

    def __init__(self, model: Any, rank: int, read_table: Callable[[], EngineTensors]) -> None:
        self._model = model
        self._rank = rank
        self._read_table = read_table
        self._own_loader = model.load_weights
        self._table: EngineTensors | None = None
        self._tensor_places: TensorPlaces | None = None
        self._is_updating = False
        self._uses_own_loader = False
        self._folder: Path | None = None
        self._keeps_whole = ATOMIC_VARIABLE in os.environ
        self._kept: list[Callable[[], None]] = []
        """Functions that load the kept messages at the end of the update, in the messages' order."""
        self._prepare()

    @property
    def places_directly(self) -> bool:
        return not self._uses_own_loader

    def begin(self) -> None:
        """Open an update. The places are made again if SGLang has replaced tensors since the last update."""
        self._is_updating = True
        self._folder = None
        self._prepare()

    def drop_kept(self) -> None:
        """Forget the kept messages of an update that was interrupted."""
        self._kept.clear()

    def end(self) -> bool:
        """Close an update, and load the kept messages.

        Returns whether the caller must derive tensors from the loaded tensors.
        """
        self._is_updating = False
        for load in self._kept:
            load()
        self._kept.clear()
        return not self._uses_own_loader

    def read_next_from(self, folder: Path) -> None:
        """Make the next call read ``folder`` directly, instead of one tensor after the other from SGLang's iterator."""
        self._folder = folder

    def __call__(
        self, weights: Incoming | Iterable[tuple[str, Tensor]], *args: Any, **options: Any
    ) -> Any:
        """Load ``weights``. Outside of an update they are all tensors of the model, for example from a folder."""
        from megatron_dppo.weights.server.shards import Incoming

        if not self._is_updating:
            self._prepare()
        if isinstance(weights, Incoming):
            self._receive(weights)
            return None
        folder = self._folder
        self._folder = None
        if self._tensor_places is None:
            return self._own_loader(weights, *args, **options)
        mapped_files = None
        if folder is not None:
            mapped_files = map_folder(folder)
        if mapped_files is not None:
            for file in mapped_files:
                self._tensor_places.load_file(file)
        else:
            for group in _groups(weights):
                self._tensor_places.load(group)
        # Let the model derive tensors from the loaded tensors. Within an update, SGLang does so once, at its end.
        if not self._is_updating and hasattr(self._model, "post_load_weights"):
            self._model.post_load_weights()
        return None

    def _receive(self, incoming: Incoming) -> None:
        """Receive messages that have only what this rank keeps. Raises UnplaceableError without a table."""
        if self._tensor_places is None:
            raise UnplaceableError(
                "weight update: the server cannot place tensors directly (its log says why), expected "
                "weight_sync.strategy disk"
            )
        placements = self._tensor_places.placements
        self._kept += incoming.receive(placements, keeps_whole=self._keeps_whole)

    def _prepare(self) -> None:
        """Make the places of the model's present tensors, unless the table does not describe them."""
        if self._uses_own_loader:
            return
        held_tensors = dict(self._model.named_parameters())
        held_tensors.update(self._model.named_buffers())
        try:
            if self._tensor_places is None or not self._tensor_places.is_current(held_tensors):
                if self._table is None:
                    self._table = self._read_table()
                self._tensor_places = TensorPlaces(self._table, self._rank, held_tensors)
        except (OSError, ValueError) as error:
            log.info("weight updates are loaded by SGLang's own loader: %s", error)
            self._uses_own_loader = True
            self._tensor_places = None
            return
        self._tensor_places.fill_padding()


def _groups(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in lists of at most _TENSORS_AT_ONCE."""
    remaining = iter(weights)
    while group := list(islice(remaining, _TENSORS_AT_ONCE)):
        yield group


def register() -> None:
    """Register the hooks, in each process of a server, before SGLang applies its plugins' hooks."""
    hooks.register(LOADED, load_updates_directly, "after")
    hooks.register(REQUESTED, drop_kept, "before")
    hooks.register(BEGUN, begin_update, "after")
    hooks.register(ENDED, end_update, "around")
    hooks.register(FOLDER, read_folder_directly, "before")
    hooks.register(RECEIVED, receive_shards, "around")
    hooks.register(OPENED, open_shared_messages, "around")
    hooks.register(SHARED, load_shared_messages, "around")
    hooks.register(ANSWERED, answer_for_all_ranks, "after")


served_shape = cache(load_model_shape)
"""Returns the shape of the model in a folder, which this process serves; raises as ``load_model_shape``."""


def load_updates_directly(result: Any, runner: Any, *_: Any) -> None:
    """Make a DirectLoader the ``load_weights`` of the model that ``runner`` has loaded."""
    if runner.is_draft_worker:
        # Updates are only for the served model.
        return
    from sglang.srt.runtime_context import get_parallel

    arguments = runner.server_args
    folder = str(runner.model_config.model_path)
    rank = get_parallel().tp_rank

    def read_table() -> EngineTensors:
        from megatron_dppo.weights.checksums import EngineTensors

        return EngineTensors.of_server(served_shape(folder), arguments.resolved_dict(), rank)

    runner.model.load_weights = DirectLoader(runner.model, rank, read_table)


def drop_kept(manager: Any, *_: Any) -> None:
    """Make the DirectLoader forget the messages of an interrupted update, before a new one is requested or refused."""
    loader = manager.tp_worker.model_runner.model.load_weights
    if isinstance(loader, DirectLoader):
        loader.drop_kept()


def begin_update(result: Any, updater: Any) -> None:
    """Open the update in the DirectLoader of the ``updater``'s model."""
    loader = updater.get_model().load_weights
    if isinstance(loader, DirectLoader):
        loader.begin()


def end_update(original: Callable[..., None], updater: Any, *, run_post_load: bool) -> None:
    """Make SGLang derive the model's derived tensors after an update that was placed directly."""
    loader = updater.get_model().load_weights
    if isinstance(loader, DirectLoader):
        run_post_load = loader.end() or run_post_load
    original(updater, run_post_load=run_post_load)


def read_folder_directly(updater: Any, model_path: str, *_: Any, **options: Any) -> None:
    """Have the DirectLoader of the ``updater``'s model read an update's folder, if the update is of all tensors."""
    loader = updater.get_model().load_weights
    if isinstance(loader, DirectLoader) and options.get("weight_name_filter") is None:
        loader.read_next_from(Path(model_path))


def receive_shards(
    original: Callable[..., Any],
    updater: Any,
    *,
    names: Sequence[str],
    dtypes: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    group_name: str,
) -> Any:
    """Return an update in shards, which the DirectLoader receives: it knows the places. SGLang receives all else."""
    if names[0] != SHARDS:
        return original(updater, names=names, dtypes=dtypes, shapes=shapes, group_name=group_name)
    from megatron_dppo.weights.server.shards import IncomingShards

    return IncomingShards(names[1], updater._model_update_group[group_name], group_name)


def open_shared_messages(
    original: Callable[..., Any], worker: Any, payloads: Sequence[bytes]
) -> Any:
    """Open this rank's payload.

    If the memory cannot be opened because its sender has ended, return the reason: an exception would end the server.
    """
    from megatron_dppo.weights.shared_bytes import MESSAGES

    try:
        return original(worker, payloads)
    except (OSError, RuntimeError) as error:
        return {MESSAGES: f"weight update: the sender's memory cannot be opened: {error}"}


def load_shared_messages(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    flattened_tensor_bucket_dict: Mapping[str, Any],
) -> tuple[bool, str]:
    """Load this rank's messages from shared memory. SGLang loads a request of another form.

    If a message cannot be placed, return an error: an exception would end the server.
    """
    from megatron_dppo.weights.server.shards import SharedMessage
    from megatron_dppo.weights.shared_bytes import MESSAGES

    messages = flattened_tensor_bucket_dict.get(MESSAGES)
    if messages is None:
        return original(updater, flattened_tensor_bucket_dict)
    if isinstance(messages, str):
        return False, messages
    load_weights = updater.get_model().load_weights
    try:
        for text, data in messages:
            load_weights(SharedMessage(text, data))
    except EngineError as error:
        return False, str(error)
    return True, "Success"


def answer_for_all_ranks(answer: Any, *_: Any) -> Any:
    """Put the first failure of all ranks into the answer: SGLang answers with the result of the first rank alone."""
    from sglang.srt.runtime_context import get_parallel

    own_fault = None if answer.success else answer.message
    for fault in get_parallel().tp_group.all_gather_object(own_fault):
        if fault is not None:
            answer.success = False
            answer.message = fault
            break
    return answer


def places_directly(model: Any) -> bool:
    """Return whether weight updates of ``model`` are loaded by direct placement."""
    loader = model.load_weights
    return isinstance(loader, DirectLoader) and loader.places_directly
