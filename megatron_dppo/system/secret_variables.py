"""Environment variables that hold keys (secrets): their names, and how a process receives them without showing them.

The initial environment of a process stays in ``/proc/<pid>/environ``. Every process of this user can read that file,
and child processes inherit the environment. Therefore

- a process that a user started with keys overwrites them in the memory behind that file (``hide_secrets``);
- a process that the run starts has no keys in its environment. It reads them, as a JSON object, from standard input
  (``split_environment``, ``hide_secrets``), or from the connection that it serves (``receive_passed``);
- a process has its keys only in Python's ``os.environ``. The C library's environment lacks them, and by default a child
  process inherits only the C library's environment;
- a process with keys is not dumpable: the kernel then refuses its environment and its memory to other processes of this
  user. Processes with CAP_SYS_PTRACE, for example root's processes, can still read them.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECRETS_VARIABLE = "MEGATRON_DPPO_SECRETS"
"""Environment variable. ``stdin``: this process receives its keys on its standard input."""
DUMPABLE_VARIABLE = "MEGATRON_DPPO_DUMPABLE"
"""Environment variable. ``1``: debuggers and profilers of this user can read the run's processes."""
_STDIN = "stdin"
_RUN_PREFIX = "MEGATRON_DPPO_"
_PR_SET_DUMPABLE = 4
_LIBC = ctypes.CDLL(None, use_errno=True)
# Fields of /proc/<pid>/stat, counted from 0 after the process's name: begin and end of the initial environment.
_ENV_START, _ENV_END = 47, 48

# LEASE is for MEGATRON_DPPO_LEASE: its nonce is the right to write in the run's folder.
_SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CONNECTION_STRING|AUTH_SOCK"
    r"|(API|ACCESS|AUTH|BEARER|BOT|REFRESH|SESSION)_?TOKENS?|WEBHOOK"
    # One of these words at the end. A number, or a word about the kind of deployment, may follow.
    r"|((^|_)(KEYS?|TOKEN|JWT|COOKIE|AUTH|PAT|PASS|PASSCODE|PW|CREDS?|DSN|BEARER|LEASE)|_PWD)\d*"
    r"(_(\d+|[A-Z]|B64|BACKUP|BASE64|CONFIG|DEFAULT|DEV|JSON|LIVE|MAIN|NEW|OLD|PROD|PRODUCTION|RO|RW|READ|STAGING"
    r"|TEST|VALUE|WRITE))*$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    # An address with a password, or with a user alone where services take a token as the user.
    r"://[^/\s:@]*:[^/\s@]+@|\b(https?|wss?|grpcs?)://[^/\s@]+@"
    r"|[?&](access_token|api_?key|key|password|secret|sig|signature|token|X-Amz-Signature)=[^&\s]"
    r"|\bauthorization[=:]|\bBearer [\w+/.=-]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----",
    re.IGNORECASE,
)
_KEY_BY_PREFIX = re.compile(
    # The published prefixes of keys: Hugging Face, OpenAI and others, GitHub, GitLab, Slack, AWS, Google, NVIDIA, Groq,
    # xAI, Replicate, npm, PyPI, Docker, Stripe, and JSON Web Tokens.
    r"(?<![\w-])(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9]{16,}|sk-(admin|ant|lf|or|proj|svcacct)-[\w-]{16,}"
    r"|gh[opsur]_\w{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|xox[a-z]-[\w-]{16,}|(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|nvapi-[\w-]{16,}"
    r"|gsk_\w{16,}|xai-\w{16,}|r8_\w{16,}|npm_\w{16,}|pypi-[\w-]{16,}|dckr_pat_[\w-]{16,}"
    r"|[rs]k_(live|test)_\w{16,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
)
_PROGRAM_NAMES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|LANG|LANGUAGE|LC_\w+|TMPDIR|TEMP|TMP|LD_LIBRARY_PATH|PYTHON\w*|VIRTUAL_ENV"
    r"|CONDA_PREFIX|NODE_PATH|NODE_OPTIONS|NODE_EXTRA_CA_CERTS|JAVA_HOME|GOPATH|SSL_CERT_FILE|SSL_CERT_DIR"
    r"|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES"
    r"|(?i:https?_proxy|all_proxy|no_proxy)"
)


def is_secret(name: str, value: str) -> bool:
    """Whether a variable holds a key: by its name, or by a value in the form of a key or of an address with one."""
    if name == SECRETS_VARIABLE:
        return False
    patterns = (_SECRET_VALUE, _KEY_BY_PREFIX)
    return bool(_SECRET_NAME.search(name)) or any(pattern.search(value) for pattern in patterns)


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold keys."""
    return {name: value for name, value in environment.items() if is_secret(name, value)}


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold no key."""
    return {name: value for name, value in environment.items() if not is_secret(name, value)}


def split_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], bytes]:
    """Return the environment for a new process, and the data for its standard input, which ``hide_secrets`` reads."""
    plain = {**without_secrets(environment), SECRETS_VARIABLE: _STDIN}
    return plain, json.dumps(secrets_of(environment)).encode()


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that runs a user's or a model's code: no keys, no variables of the run."""
    allowed_variables: dict[str, str] = {}
    for name, value in without_secrets(environment).items():
        if name == DUMPABLE_VARIABLE or not name.startswith(_RUN_PREFIX):
            allowed_variables[name] = value
    return allowed_variables


def program_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that acts for a model.

    The environment has the paths of programs and libraries, the language, certificates, proxies, and the keys that this
    process has received by ``receive_passed``.
    """
    allowed_variables: dict[str, str] = {}
    for name, value in worker_environment(environment).items():
        if _PROGRAM_NAMES.fullmatch(name):
            allowed_variables[name] = value
    return {**allowed_variables, **chosen_variables(environment, _passed)}


def chosen_variables(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the variables in ``names`` that are set."""
    return {name: environment[name] for name in names if name in environment}


def named_in_options(options: Mapping[str, Any]) -> list[str]:
    """Return the names of the environment variables that ``options`` refer to.

    For example, the option ``api_key_variable: JUDGE_KEY`` refers to the environment variable JUDGE_KEY.
    """
    names: list[str] = []
    for option, value in options.items():
        if option.endswith("_variable") and isinstance(value, str):
            names.append(value)
    return names


def withheld_hint(text: str, received: Collection[str], list_name: str) -> str:
    """Return a hint for the error message ``text`` of a worker if it names a secret that the worker lacks; else "".

    A worker receives a secret variable only if the configuration names the variable, for example in its list
    ``list_name``. ``received``: the names of the variables that the worker received. The hint says that this process
    has the variable, and the worker does not.
    """
    withheld_names: list[str] = []
    for name in secrets_of(os.environ):
        if name not in received and re.search(rf"\b{re.escape(name)}\b", text):
            withheld_names.append(name)
    if not withheld_names:
        return ""
    names = ", ".join(sorted(withheld_names))
    return f"; {names}: set, but not passed to this process; name it in {list_name}"


def redact(text: str, secrets: Iterable[str | None]) -> str:
    """Return a server's text for a message, with ``<api key>`` in place of each of ``secrets`` and of other keys.

    A server may echo a key that it received. Other keys are recognised by their prefixes, such as ``hf_``.
    """
    for secret in secrets:
        if secret:
            text = text.replace(secret, "<api key>")
    return _KEY_BY_PREFIX.sub("<api key>", text)


_environment_lock = threading.Lock()
_passed: set[str] = set()
"""Names of the variables that ``receive_passed`` has received."""


def hide_secrets() -> None:
    """Read the keys on standard input, if there are any, and hide all keys of this process.

    Call this before other threads and processes are started. A second call has no effect.
    """
    if os.environ.pop(SECRETS_VARIABLE, None) == _STDIN:
        with open(0, "rb", closefd=False) as file:
            hold(json.loads(file.read()))
    secrets = secrets_of(os.environ)
    _overwrite_initial(secrets)
    hold(secrets)
    close_to_others()


def hold(values: Mapping[str, str]) -> None:
    """Put these values into ``os.environ``, but not into the environment that child processes inherit."""
    with _environment_lock:
        for name, value in values.items():
            os.environ[name] = value
            # The line above has set the C library's variable too.
            os.unsetenv(name)


def receive_passed(values: Mapping[str, str]) -> None:
    """Put a worker's variables into ``os.environ``. ``program_environment`` passes them on to the worker's programs."""
    hold(values)
    _passed.update(values)


@contextmanager
def withheld() -> Iterator[None]:
    """Remove the keys from ``os.environ`` until the block ends.

    Use this for a library that starts a process with a copy of ``os.environ``.
    """
    secrets = secrets_of(os.environ)
    for name in secrets:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        hold(secrets)


def close_to_others() -> None:
    """Make the kernel refuse this process's memory, environment and descriptors to other processes of this user.

    The process's files in /proc then belong to root. The process leaves no core file, and py-spy and gdb need root. If
    the process executes another program, that program is readable again.
    """
    if os.environ.get(DUMPABLE_VARIABLE) != "1":
        _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _overwrite_initial(names: Iterable[str]) -> None:
    """Overwrite the values of ``names`` in the memory that ``/proc/<pid>/environ`` shows."""
    for name in names:
        # Otherwise the C library would read the overwritten memory.
        os.unsetenv(name)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start = int(fields[_ENV_START])
    end = int(fields[_ENV_END])
    if start >= end:
        return
    memory = (ctypes.c_char * (end - start)).from_address(start)
    encoded_names = {os.fsencode(name) for name in names}
    entry_address = start
    for entry in memory.raw.split(b"\0"):
        encoded_name, equals_sign, value = entry.partition(b"=")
        if equals_sign and encoded_name in encoded_names:
            value_address = entry_address + len(encoded_name) + 1
            ctypes.memset(value_address, 0, len(value))
        entry_address += len(entry) + 1
