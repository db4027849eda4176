"""Upload an exported checkpoint to the Hugging Face Hub."""

from __future__ import annotations

import glob
import logging
from fnmatch import fnmatch
from pathlib import Path

from megatron_dppo.checkpoint_conversion.certificate import CERTIFICATE, certificate_of, read_body
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.system.text import first_of, single_line

log = logging.getLogger(__name__)


_EXPORTED = (
    "*.safetensors",
    "*.safetensors.index.json",
    CERTIFICATE,
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.json*",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "README.md",
    "LICENSE*",
    "NOTICE*",
)
"""Patterns of the usual file names in a Hugging Face folder of a model."""


_NAMED_FILES = 5
"""Largest number of files that a warning names."""


def export_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the model's files in ``folder``, and the names of all other files and folders there.

    A file is the model's if it has a usual name, or if the model's certificate lists it.
    """
    certified: set[str] = set()
    if (folder / CERTIFICATE).is_file():
        certified = set(certificate_of(read_body(folder / CERTIFICATE)).files)
    sent_names: list[str] = []
    other_names: list[str] = []
    for path in sorted(folder.iterdir()):
        is_usual = any(fnmatch(path.name, pattern) for pattern in _EXPORTED)
        is_model = path.is_file() and (is_usual or path.name in certified)
        if is_model:
            sent_names.append(path.name)
        else:
            other_names.append(path.name)
    return sent_names, other_names


def upload(
    folder: Path, repository: str, *, private: bool = True, revision: str | None = None
) -> str:
    """Send an export's own files to ``repository`` (``OWNER/NAME``) of huggingface.co; return the commit's address.

    ``private`` applies to a repository that this function creates; an existing repository stays private or public.
    huggingface_hub reads the access token from HF_TOKEN or from the store of ``hf auth login``, and the Hub's address
    from HF_ENDPOINT. Raises CheckpointError if ``folder`` is no export or the upload fails.
    """
    try:
        from httpx import HTTPError
        from huggingface_hub import HfApi
    except ImportError as error:
        raise CheckpointError(
            f"{error}; an upload needs: pip install 'megatron-dppo[hub]'"
        ) from error

    files = [folder / "config.json", *folder.glob("*.safetensors")]
    if len(files) < 2 or not files[0].is_file():
        raise CheckpointError(f"{folder}: expected an export: config.json and *.safetensors")
    sent_names, other_names = export_files(folder)
    if other_names:
        log.warning(
            "%s: these are no files of the model and are not sent: %s",
            folder,
            first_of(other_names, _NAMED_FILES, ", "),
        )
    hub = HfApi(library_name="megatron_dppo")
    try:
        created = hub.create_repo(repository, private=private, exist_ok=True)
        if private and hub.repo_info(created.repo_id).private is False:
            log.warning("%s was public before, and so is what is sent there", repository)
        commit = hub.upload_folder(
            repo_id=created.repo_id,
            folder_path=folder,
            revision=revision,
            allow_patterns=[glob.escape(name) for name in sent_names],
            # An export is the folder ``hf`` in the folder of its run.
            commit_message=f"Export of {folder.resolve().parent.name}",
        )
    # hf_xet sends large files, and raises RuntimeError.
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} is not sent to {repository}: {single_line(error, 1000)}"
        ) from error
    return str(commit.commit_url)
