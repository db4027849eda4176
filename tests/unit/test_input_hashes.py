"""Input files are compared with a list of hashes in the format of sha256sum."""

from __future__ import annotations

import pytest

from megatron_dppo.loop.input_hashes import InputError, check_input_hashes
from tests.patience import run_patiently

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""SHA-256 of the bytes "abc": FIPS 180-2, appendix B.1."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a file").write_bytes(b"abc")
    (tmp_path / "other").write_bytes(b"abd")
    return tmp_path


def write_list(folder, text: str) -> str:
    path = folder / "SHA256SUMS"
    path.write_text(text, newline="")
    return str(path)


def test_what_sha256sum_writes_is_accepted(folder):
    written = run_patiently(["sha256sum", "a file", "other"], cwd=folder, check=True)
    check_input_hashes(write_list(folder, written.stdout))


def test_every_wrong_file_is_named(folder):
    path = write_list(folder, f"{ABC}  a file\n{ABC.upper()} *other\n{ABC}  missing\n")
    with pytest.raises(InputError) as error:
        check_input_hashes(path)
    other, missing = str(error.value).splitlines()
    assert other.startswith(f"{folder}/other: its SHA-256 is a52d159f262b")
    assert other.endswith("expected ba7816bf8f01...")
    assert missing == f"{folder}/missing: No such file or directory"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected lines of sha256sum"),
        (f"{ABC}  a file\n{ABC[:-1]}  other\n", "line 2: expected a line of sha256sum"),
        (f"{ABC}\n", "line 1: expected a line of sha256sum"),
        (f"{ABC}  a\0file\n", "a\0file: embedded null byte"),
        (f"{'0' * 64}  a file\n{ABC}  a file\n", "a file: its SHA-256"),
    ],
)
def test_another_file_is_no_list(folder, text, message):
    with pytest.raises(InputError, match=message):
        check_input_hashes(write_list(folder, text))


def test_names_may_have_other_ends_of_lines(folder):
    (folder / "a\u2028file\x0c").write_bytes(b"abc")
    check_input_hashes(write_list(folder, f"{ABC}  a\u2028file\x0c\r\n"))


def test_a_list_that_is_not_there(folder):
    with pytest.raises(InputError, match="No such file"):
        check_input_hashes(folder / "nothing")
