"""Convert checkpoints between Hugging Face and Megatron, in bounded memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_dppo.data.records import DataError
from megatron_dppo.data.tokenizer import has_tokenizer, load_named_tokenizer
from megatron_dppo.metrics.progress import progress
from megatron_dppo.metrics.records import CONFIG_FILE
from megatron_dppo.metrics.summary import saved_config
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import load_stored_shape, unknown_key_warnings
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import parameter_count
from megatron_dppo.model.resharding import print_plan
from megatron_dppo.model.shape import ITEM_BYTES
from megatron_dppo.system.arguments import positive_count, positive_number
from megatron_dppo.system.errors import RunError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 on success, 2 on an error that the user can correct, 130 after Ctrl-C.

    The text of the error goes to standard error.
    """
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
    top = argparse.ArgumentParser(prog="megatron-dppo convert", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str, **folders: str
    ) -> argparse.ArgumentParser:
        """Add the command ``name``, which calls ``run``. ``folders``: required options for folders, with their help."""
        added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        for option, help_text in folders.items():
            added.add_argument(f"--{option}", type=Path, required=True, help=help_text)
        return added

    new_folder_help = "new or empty folder"
    text = "Hugging Face -> Megatron-Core's torch_dist"
    to_megatron = command(
        "hf-to-megatron", _hf_to_megatron, text, hf="Hugging Face folder", out=new_folder_help
    )
    text = "a converted folder -> Hugging Face shards"
    source = "folder made by hf-to-megatron, or a checkpoint of a training run"
    to_hf = command("megatron-to-hf", _megatron_to_hf, text, megatron=source, out=new_folder_help)
    config = "folder of config and tokenizer; default: --megatron's own, or the start model of the run that saved it"
    to_hf.add_argument("--hf-config", type=Path, help=config)
    largest_shard_help = "largest shard, in 10^9 bytes (5)"
    to_hf.add_argument("--max-shard-gb", type=positive_number, default=5.0, help=largest_shard_help)
    for conversion in (to_megatron, to_hf):
        dtypes = sorted(ITEM_BYTES)
        conversion.add_argument(
            "--dtype",
            choices=dtypes,
            help="type of all tensors; default: the stored type, if all tensors have one",
        )
    text = "Hugging Face -> Hugging Face with block-FP8 weights, as servers with engine.quantization=fp8 hold them"
    command("hf-to-fp8", _hf_to_fp8, text, hf="the unquantised folder", out=new_folder_help)
    text = (
        "prove that every tensor is byte-identical after Hugging Face -> Megatron -> Hugging Face"
    )
    converted = "folder made by hf-to-megatron"
    command("verify", _verify, text, hf="the original folder", megatron=converted)
    text = "prove that engines get every weight from a trainer's layout, and count the bytes; needs no weights"
    _plan_arguments(command("plan", _plan, text))
    text = "a PEFT folder and its base -> Hugging Face shards"
    peft = "folder in PEFT's format"
    command(
        "merge-adapters", _merge_adapters, text, hf="the base", adapters=peft, out=new_folder_help
    )
    text = "a run's checkpoint -> a PEFT folder"
    step, base = "a step's folder of a run", "the base, compared by its SHA-256"
    command(
        "adapters-to-peft", _adapters_to_peft, text, checkpoint=step, hf=base, out=new_folder_help
    )
    text = "an export -> a repository of huggingface.co, private unless --public"
    export = "Hugging Face folder, such as a run's hf/; only its own files are sent"
    upload = command("upload", _upload, text, hf=export)
    upload.add_argument(
        "--repo", required=True, metavar="OWNER/NAME", help="created if it is missing"
    )
    upload.add_argument("--public", action="store_true", help="create the repository as public")
    upload.add_argument("--revision", help="an existing branch (main)")
    return top


def _plan_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--hf-config", type=Path, required=True, help="config.json, or its folder")
    sizes = {
        "tp": (1, "tensor parallel size (1)"),
        "pp": (1, "pipeline parallel size (1)"),
        "vpp": (None, "model chunks a pipeline stage"),
        "ep": (1, "expert parallel size (1)"),
        "etp": (None, "expert tensor parallel size; default: --tp where --ep is 1, else 1"),
        "dp": (None, "data-parallel replicas; default: the fewest that the experts need"),
        "engine-tp": (1, "SGLang's --tp-size (1)"),
        "engine-ep": (1, "SGLang's --ep-size (1)"),
        "engine-attn-dp": (1, "SGLang's --attn-dp-size (1)"),
    }
    for option, (default, help_text) in sizes.items():
        command.add_argument(f"--{option}", type=positive_count, default=default, help=help_text)
    help_text = "type of the weights; default: that of config.json"
    command.add_argument("--dtype", choices=sorted(ITEM_BYTES), help=help_text)


def _hf_to_megatron(arguments: argparse.Namespace) -> int:
    from megatron_dppo.convert.streaming import hf_to_megatron

    for warning in unknown_key_warnings(arguments.hf):
        print(f"warning: {warning}", file=sys.stderr)
    with _bytes_progress("converting", _stored_bytes(arguments.hf)) as advance:
        result = hf_to_megatron(
            arguments.hf, arguments.out, dtype=arguments.dtype, progress=advance
        )
    print(
        f"{arguments.out}: {len(result.tensors)} tensors, {result.shape.family}, torch_dist, for any "
        f"layout, {result.dtype}"
    )
    _warn_of_tokenizer(arguments.hf)
    return 0


def _megatron_to_hf(arguments: argparse.Namespace) -> int:
    from megatron_dppo.convert.streaming import megatron_to_hf

    hf_config = arguments.hf_config
    if hf_config is None and not (arguments.megatron / "config.json").is_file():
        hf_config = _start_model(arguments.megatron)
    total = _stored_bytes(arguments.megatron, hf_config)
    with _bytes_progress("converting", total) as advance:
        result = megatron_to_hf(
            arguments.megatron,
            arguments.out,
            hf_config=hf_config,
            dtype=arguments.dtype,
            max_shard_bytes=int(arguments.max_shard_gb * 1e9),
            progress=advance,
        )
    print(f"{arguments.out}: {len(result.tensors)} tensors, {result.dtype}, hashes as recorded")
    if hf_config is not None and arguments.hf_config is None:
        print(f"config and tokenizer: {hf_config}, the start model of the run")
    _warn_of_tokenizer(arguments.out)
    return 0


def _warn_of_tokenizer(folder: Path) -> None:
    """Print a warning if the folder has a tokenizer that is damaged, or that transformers loads with other rules."""
    if not has_tokenizer(folder):
        return
    try:
        # The loader logs a warning of other rules.
        load_named_tokenizer(folder, local_files_only=True)
    except DataError as error:
        print(f"warning: {error}", file=sys.stderr)


def _start_model(checkpoint: Path) -> Path:
    """Return the folder of the start model of the run that saved ``checkpoint``. The run's config.yaml names it.

    Raises CheckpointError if the checkpoint is in no run's folder, or if the start model is missing.
    """
    # The checkpoint's path is RUN/checkpoints/STEP.
    run = checkpoint.absolute().parent.parent
    config = run / CONFIG_FILE
    way_out = "name a folder with the model's config.json and tokenizer by --hf-config"
    try:
        values = saved_config(run)
        if values is None:
            raise FileNotFoundError(f"{config}: no such file")
        start = Path(values["model"]["hf_checkpoint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint} has no config.json, and {config}, which names the start model of a run, can't be read "
            f"({error}); {way_out}"
        ) from error
    if not (start / "config.json").is_file():
        raise CheckpointError(
            f"{checkpoint} has no config.json, and the run's start model, {start} (model.hf_checkpoint in {config}), "
            f"has none here either; {way_out}"
        )
    return start


def _hf_to_fp8(arguments: argparse.Namespace) -> int:
    from megatron_dppo.convert.quantized import quantize_folder

    with _bytes_progress("quantising", _stored_bytes(arguments.hf)) as advance:
        specs = quantize_folder(arguments.hf, arguments.out, advance)
    size = sum(spec.bytes for spec in specs.values())
    print(f"{arguments.out}: {len(specs)} tensors, {size:,} bytes, block FP8")
    _warn_of_tokenizer(arguments.hf)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from megatron_dppo.convert.streaming import verify

    with _bytes_progress("verifying", _stored_bytes(arguments.megatron, arguments.hf)) as advance:
        specs = verify(arguments.hf, arguments.megatron, progress=advance)
    size = sum(spec.bytes for spec in specs.values())
    print(f"identical: {len(specs)} tensors, {size:,} bytes, hashes as recorded")
    return 0


def _merge_adapters(arguments: argparse.Namespace) -> int:
    from megatron_dppo.convert.merging import merge_adapters

    with _bytes_progress("merging", _stored_bytes(arguments.hf)) as advance:
        result = merge_adapters(arguments.hf, arguments.adapters, arguments.out, advance)
    print(f"{arguments.out}: {len(result.tensors)} tensors, {result.dtype}, adapters merged")
    _warn_of_tokenizer(arguments.hf)
    return 0


def _adapters_to_peft(arguments: argparse.Namespace) -> int:
    from megatron_dppo.convert.merging import checkpoint_to_peft

    adapters = checkpoint_to_peft(arguments.checkpoint, arguments.hf, arguments.out)
    print(f"{arguments.out}: rank {adapters.rank}, {', '.join(adapters.modules)}; base as recorded")
    return 0


def _upload(arguments: argparse.Namespace) -> int:
    from megatron_dppo.checkpoint_conversion.uploading import upload

    address = upload(
        arguments.hf, arguments.repo, private=not arguments.public, revision=arguments.revision
    )
    print(f"{arguments.hf}: {address}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    sizes = (arguments.tp, arguments.pp, arguments.vpp, arguments.ep, arguments.etp)
    layout = Layout.smallest(*sizes)
    if arguments.dp is not None:
        layout = replace(layout, data=arguments.dp)
    engine = EngineLayout(arguments.engine_tp, arguments.engine_ep, arguments.engine_attn_dp)
    shape = load_stored_shape(arguments.hf_config)
    print_plan(Console(), shape, layout, engine, ITEM_BYTES[arguments.dtype or shape.dtype])
    return 0


def _stored_bytes(folder: Path, config: Path | None = None) -> int:
    """Return the number of bytes of a checkpoint's weights. The reader names a file of the index that is missing."""
    from megatron_dppo.checkpoint_conversion.hf_folder import weight_files

    files = weight_files(folder)
    if files:
        return sum(path.stat().st_size for path in files if path.exists())
    # A torch_dist folder: compute the number from the model's config.json.
    shape = load_stored_shape(config or folder)
    return ITEM_BYTES[shape.dtype] * parameter_count(shape)


@contextmanager
def _bytes_progress(action: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of ``total`` bytes; yield a function that adds to the number of finished bytes."""
    done_bytes = 0
    with progress(f"{action}, MB", total // 10**6, console=Console(stderr=True)) as tracker:

        def advance(count: int) -> None:
            nonlocal done_bytes
            done_bytes += count
            rate = max(1.0, done_bytes / tracker.elapsed)
            note = f"{rate / 1e6:.0f} MB/s, {max(0, total - done_bytes) / rate:.0f} s left"
            tracker.update(completed=done_bytes // 10**6, note=note)

        yield advance


if __name__ == "__main__":
    sys.exit(main())
