"""The tokenizer of a Hugging Face folder, compared with its tokenizer.json.

For many folders transformers ignores the rules of tokenizer.json, and builds the tokenizer of a class: the class that
tokenizer_config.json names, or the class of the model's type. If the class does not fit, the text and its ids part
ways. For example, a LlamaTokenizer made of a byte-level tokenizer.json loses every space and every line end.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.data.records import DataError
from megatron_dppo.system.text import single_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
_CONFIG = "tokenizer_config.json"
_MAX_ID = 1 << 24
_COMPARED_TEXTS = (
    "What is 3+5?\n\nIt  is 8.",
    " A space before,\ta tab, a line end\r\n  and [1, 23, 456, 7890] \n",
    "don't, THEY'LL: naïve, cafe\u0301, \ufb01, \u2167, 日本語, Москва, \N{SLIGHTLY SMILING FACE}",
    "def f(x):\n\n    return x**2  # 1,234.5\n\n\n",
)
"""Texts with spaces, line ends, digits and letters of several scripts. Tokenizers differ in how they split these."""


def has_tokenizer(folder: str | Path) -> bool:
    """Whether ``folder`` has a tokenizer."""
    return (Path(folder) / _CONFIG).is_file()


def load_named_tokenizer(
    name: str | Path, *, local_files_only: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, or of a name on the hub, with the rules of its tokenizer.json.

    Raises DataError if the tokenizer can't be loaded, or as ``with_file_rules``.
    """
    if _is_path(str(name)) and not Path(name).is_dir():
        raise DataError(f"{name}: no such folder")
    # Import lazily: the import takes seconds.
    from transformers import AutoTokenizer

    # Load tokenizer.json first: it refuses a huge token id, with which transformers would be busy for minutes.
    rules = _rules_of(name, local_files_only)
    tokenizer = _loaded(AutoTokenizer, name, local_files_only)
    return _with_rules(tokenizer, rules, name, local_files_only)


def _is_path(name: str) -> bool:
    """Whether ``name`` can only be a path: the hub's names are ``name`` or ``owner/name``."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def with_file_rules(
    tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> PreTrainedTokenizerBase:
    """Return ``tokenizer``, loaded from ``folder``, if it follows tokenizer.json. Otherwise load one that does.

    Logs a warning if ``tokenizer`` has other rules. Raises DataError if a PreTrainedTokenizerFast of the folder does
    not follow tokenizer.json either.
    """
    return _with_rules(tokenizer, _rules_of(folder, True), folder, True)


def _with_rules(
    tokenizer: PreTrainedTokenizerBase,
    rules: Tokenizer | None,
    name: str | Path,
    local_files_only: bool,
) -> PreTrainedTokenizerBase:
    """Do the work of ``with_file_rules`` with ``rules``, the result of ``_rules_of``."""
    tokenizer = _of_file(tokenizer, rules, name, local_files_only)
    _restore_first_token(tokenizer, name)
    return tokenizer


def _restore_first_token(tokenizer: PreTrainedTokenizerBase, name: str | Path) -> None:
    """Have ``tokenizer`` begin texts with its first token, if tokenizer_config.json says so (``add_bos_token``).

    transformers 5 ignores this key: it adds the token only where tokenizer.json does. Raises DataError.
    """
    first_token = tokenizer.bos_token_id
    if first_token is None or not tokenizer.is_fast or _declared(name, "add_bos_token") is not True:
        return
    if _begins_with(tokenizer, first_token, name):
        return
    tokenizer.add_bos_token = True
    if not _begins_with(tokenizer, first_token, name):
        raise DataError(
            f"{name}: add_bos_token in {_CONFIG} is true, but the tokenizer can't be made to begin a text with "
            f"{tokenizer.bos_token!r}; expected a tokenizer.json whose post_processor adds it"
        )
    log.warning(
        "%s: add_bos_token in %s is true, but transformers begins no text with %r. This program begins prompts "
        "without a chat template with it",
        name,
        _CONFIG,
        tokenizer.bos_token,
    )


def _begins_with(tokenizer: PreTrainedTokenizerBase, token: int, name: str | Path) -> bool:
    try:
        ids: list[int] = tokenizer(_COMPARED_TEXTS[0])["input_ids"]
    # As in ``_loaded``.
    except Exception as error:
        raise DataError(f"{name}: its tokenizer can't encode text: {_reason(error)}") from error
    return ids[:1] == [token]


def _of_file(
    tokenizer: PreTrainedTokenizerBase,
    rules: Tokenizer | None,
    name: str | Path,
    local_files_only: bool,
) -> PreTrainedTokenizerBase:
    """Return ``tokenizer``, or one with ``rules``; see ``with_file_rules``."""
    from transformers import PreTrainedTokenizerFast

    if rules is None:
        return tokenizer
    difference = _difference(rules, tokenizer, name)
    if difference is None:
        return tokenizer
    # This class keeps tokenizer.json as it is.
    plain_tokenizer = _loaded(PreTrainedTokenizerFast, name, local_files_only)
    remaining_difference = _difference(rules, plain_tokenizer, name)
    if remaining_difference is not None:
        raise DataError(
            f"{name}: with the keys of {_CONFIG}, the tokenizer {remaining_difference}; expected the rules of "
            "tokenizer.json. Remove the key that changes them, for example a further token"
        )
    log.warning(
        "%s: transformers builds a %s (tokenizer_class in %s: %s), which %s. This program uses the rules of "
        "tokenizer.json. Others that load the folder by transformers get the other ids; for most the way out is the "
        "tokenizer_class 'PreTrainedTokenizerFast', which keeps the rules of tokenizer.json",
        name,
        type(tokenizer).__name__,
        _CONFIG,
        json.dumps(_declared(name, "tokenizer_class")),
        difference,
    )
    return plain_tokenizer


def _loaded(loader: Any, name: str | Path, local_files_only: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer by ``loader.from_pretrained``. Raises DataError."""
    # The decoded text keeps all its spaces, as SGLang's answers do.
    options = {"local_files_only": local_files_only, "clean_up_tokenization_spaces": False}
    try:
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(str(name), **options)
    # A damaged file can cause any exception; the tokenizers library raises bare Exceptions.
    except Exception as error:
        raise DataError(f"{name}: its tokenizer can't be loaded: {_reason(error)}") from error
    return tokenizer


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {single_line(error)}"


def _difference(
    rules: Tokenizer, tokenizer: PreTrainedTokenizerBase, name: str | Path
) -> str | None:
    """Describe the first text that ``tokenizer`` encodes, or decodes again, in another way than ``rules``.

    Returns None without a difference. Raises DataError if the tokenizer ``name`` can't encode or decode a text.
    """
    try:
        return _first_difference(rules, tokenizer)
    # As in ``_loaded``: files that were loaded may have values that no text can be encoded with.
    except Exception as error:
        raise DataError(f"{name}: its tokenizer can't encode text: {_reason(error)}") from error


def _first_difference(rules: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> str | None:
    for text in _COMPARED_TEXTS:
        expected_ids = rules.encode(text, add_special_tokens=False).ids
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected_text = rules.decode(expected_ids, skip_special_tokens=False)
        other_text = rules.decode(ids, skip_special_tokens=False)
        if other_text != expected_text:
            return f"encodes {text!r} as the ids of {other_text!r}"
        if ids != expected_ids:
            return f"encodes {text!r} as {ids}, tokenizer.json as {expected_ids}"
        decoded_text = tokenizer.decode(expected_ids)
        if decoded_text != expected_text:
            return f"decodes the ids of {expected_text!r} as {decoded_text!r}"
    return None


def _file_of(name: str | Path, file: str, local_files_only: bool) -> str | None:
    """Return the path of a folder's file, or of a downloaded file; None if there is no such file."""
    from transformers.utils import cached_file

    path: str | None = cached_file(
        str(name),
        file,
        local_files_only=local_files_only,
        _raise_exceptions_for_missing_entries=False,
    )
    return path


def _declared(name: str | Path, key: str) -> Any:
    """Return a key of the configuration of a tokenizer that has been loaded; None without the key."""
    path = _file_of(name, _CONFIG, True)
    if path is None:
        return None
    return json.loads(Path(path).read_text(encoding="utf-8")).get(key)


def _rules_of(name: str | Path, local_files_only: bool) -> Tokenizer | None:
    """Load tokenizer.json without its limits of length; None if there is none.

    Raises DataError if it can't be loaded, or if an id is ``_MAX_ID`` or more.
    """
    from tokenizers import Tokenizer

    try:
        path = _file_of(name, "tokenizer.json", local_files_only)
        if path is None:
            return None
        rules = Tokenizer.from_file(path)
    # As in ``_loaded``.
    except Exception as error:
        raise DataError(f"{name}: its tokenizer can't be loaded: {_reason(error)}") from error
    rules.no_truncation()
    rules.no_padding()
    for token, token_id in rules.get_vocab().items():
        if token_id >= _MAX_ID:
            raise DataError(
                f"{path}: the token {token!r} has the id {token_id}, expected an id below {_MAX_ID}: a model has a "
                "row for each id"
            )
    return rules
