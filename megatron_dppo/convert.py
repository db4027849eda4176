"""``megatron-dppo convert``: checkpoints between Hugging Face and Megatron, in bounded memory."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.shape import ITEM_BYTES
from megatron_dppo.system.errors import RunError

PLAIN_INTERVAL_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 on an error that is the user's to mend (its text on stderr)."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was published", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="megatron-dppo convert", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _hf_to_megatron_arguments(
        _command(
            commands,
            "hf-to-megatron",
            _hf_to_megatron,
            "Hugging Face -> Megatron-Core's torch_dist",
        )
    )
    _megatron_to_hf_arguments(
        _command(
            commands, "megatron-to-hf", _megatron_to_hf, "a converted folder -> Hugging Face shards"
        )
    )
    verify = _command(
        commands, "verify", _verify, "prove Hugging Face -> Megatron -> Hugging Face byte-identical"
    )
    verify.add_argument("--hf", type=Path, required=True, help="the original folder")
    verify.add_argument(
        "--megatron", type=Path, required=True, help="folder made by hf-to-megatron"
    )
    _plan_arguments(
        _command(
            commands,
            "plan",
            _plan,
            "prove a layout's resharding and count its bytes; needs no weights",
        )
    )
    merge = _command(
        commands,
        "merge-adapters",
        _merge_adapters,
        "a PEFT folder and its base -> Hugging Face shards",
    )
    merge.add_argument("--hf", type=Path, required=True, help="the base")
    merge.add_argument("--adapters", type=Path, required=True, help="folder in PEFT's format")
    merge.add_argument("--out", type=Path, required=True, help="new or empty folder")
    extract = _command(
        commands, "adapters-to-peft", _adapters_to_peft, "a run's checkpoint -> a PEFT folder"
    )
    extract.add_argument("--checkpoint", type=Path, required=True, help="a step's folder of a run")
    extract.add_argument("--hf", type=Path, required=True, help="the base, compared by its SHA-256")
    extract.add_argument("--out", type=Path, required=True, help="new or empty folder")
    return top


def _hf_to_megatron_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--hf", type=Path, required=True, help="Hugging Face folder")
    command.add_argument("--out", type=Path, required=True, help="new or empty folder")
    command.add_argument("--dtype", choices=sorted(ITEM_BYTES), help="cast to; default: as stored")


def _megatron_to_hf_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--megatron",
        type=Path,
        required=True,
        help="folder made by hf-to-megatron, or a checkpoint of a training run",
    )
    command.add_argument(
        "--hf-config", type=Path, help="folder of config and tokenizer; default: --megatron's own"
    )
    command.add_argument("--out", type=Path, required=True, help="new or empty folder")
    command.add_argument("--dtype", choices=sorted(ITEM_BYTES), help="cast to; default: as stored")
    command.add_argument(
        "--max-shard-gb", type=float, default=5.0, help="largest shard, in 10^9 bytes (5)"
    )


def _plan_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--hf-config", type=Path, required=True, help="config.json, or its folder")
    _layout_arguments(command)
    command.add_argument(
        "--dp", type=int, help="data-parallel replicas; default: the fewest that the experts need"
    )
    command.add_argument("--engine-tp", type=int, default=1, help="SGLang's --tp-size (1)")
    command.add_argument("--engine-ep", type=int, default=1, help="SGLang's --ep-size (1)")
    command.add_argument(
        "--dtype",
        choices=sorted(ITEM_BYTES),
        help="of the weights that travel; default: config.json's",
    )


def _command(
    commands: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    return command


def _layout_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tp", type=int, default=1, help="tensor parallel size (1)")
    command.add_argument("--pp", type=int, default=1, help="pipeline parallel size (1)")
    command.add_argument("--vpp", type=int, help="model chunks a pipeline stage")
    command.add_argument("--ep", type=int, default=1, help="expert parallel size (1)")
    command.add_argument(
        "--etp", type=int, help="expert tensor parallel size; default: --tp where --ep is 1, else 1"
    )


def _layout(arguments: argparse.Namespace) -> Layout:
    sizes = (arguments.tp, arguments.pp, arguments.vpp, arguments.ep, arguments.etp)
    smallest = Layout.smallest(*sizes)
    data = getattr(arguments, "dp", None)
    return smallest if data is None else replace(smallest, data=data)


def _hf_to_megatron(arguments: argparse.Namespace) -> int:
    from megatron_dppo.checkpoint_conversion.streaming import hf_to_megatron

    with _bytes_progress("converting", _stored_bytes(arguments.hf)) as progress:
        result = hf_to_megatron(
            arguments.hf, arguments.out, dtype=arguments.dtype, progress=progress
        )
    print(
        f"{arguments.out}: {len(result.tensors)} tensors, {result.shape.family}, torch_dist, for any "
        f"layout, {result.dtype}"
    )
    return 0


def _megatron_to_hf(arguments: argparse.Namespace) -> int:
    from megatron_dppo.checkpoint_conversion.streaming import megatron_to_hf

    total = _stored_bytes(arguments.megatron, arguments.hf_config)
    with _bytes_progress("converting", total) as progress:
        result = megatron_to_hf(
            arguments.megatron,
            arguments.out,
            hf_config=arguments.hf_config,
            dtype=arguments.dtype,
            max_shard_bytes=int(arguments.max_shard_gb * 1e9),
            progress=progress,
        )
    print(f"{arguments.out}: {len(result.tensors)} tensors, {result.dtype}, hashes as recorded")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from megatron_dppo.checkpoint_conversion.streaming import verify

    with _bytes_progress("verifying", _stored_bytes(arguments.megatron, arguments.hf)) as progress:
        result = verify(arguments.hf, arguments.megatron, progress=progress)
    print(f"identical: {result.tensors} tensors, {result.bytes:,} bytes, hashes as recorded")
    return 0


def _merge_adapters(arguments: argparse.Namespace) -> int:
    from megatron_dppo.checkpoint_conversion.adapters import merge_adapters

    with _bytes_progress("merging", _stored_bytes(arguments.hf)) as progress:
        result = merge_adapters(arguments.hf, arguments.adapters, arguments.out, progress)
    print(f"{arguments.out}: {len(result.tensors)} tensors, {result.dtype}, adapters merged")
    return 0


def _adapters_to_peft(arguments: argparse.Namespace) -> int:
    from megatron_dppo.checkpoint_conversion.adapters import checkpoint_to_peft

    found = checkpoint_to_peft(arguments.checkpoint, arguments.hf, arguments.out)
    print(f"{arguments.out}: rank {found.rank}, {', '.join(found.modules)}; base as recorded")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from megatron_dppo.model.layout import EngineLayout
    from megatron_dppo.model.resharding import print_plan

    engine = EngineLayout(arguments.engine_tp, arguments.engine_ep)
    shape = load_model_shape(arguments.hf_config)
    print_plan(
        Console(), shape, _layout(arguments), engine, ITEM_BYTES[arguments.dtype or shape.dtype]
    )
    return 0


def _stored_bytes(folder: Path, config: Path | None = None) -> int:
    """Bytes of a checkpoint's weights; of a torch_dist folder, which may hold more, by its model's config.json."""
    files = list(folder.glob("*.safetensors"))
    if files:
        return sum(path.stat().st_size for path in files)
    shape = load_model_shape(config or folder)
    return ITEM_BYTES[shape.dtype] * sum(math.prod(dims) for dims in hf_tensors(shape).values())


@contextmanager
def _bytes_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with bytes, rate and time left; without a terminal, a line now and then."""
    console = Console(stderr=True)
    if console.is_interactive:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.update(task, advance=count)
        return
    yield _PlainProgress(what, total)


class _PlainProgress:
    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._start = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last < PLAIN_INTERVAL_S:
            return
        self._last = now
        rate = self._done / (now - self._start)
        left = max(0, self._total - self._done) / rate
        share = 100 * self._done / max(1, self._total)
        text = f"{self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB ({share:.0f}%), {rate / 1e6:.0f} MB/s"
        print(f"{self._what}: {text}, {left:.0f} s left", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
