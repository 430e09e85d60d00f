"""What a program really imports: its imports are written down while it runs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from dsec_common.errors import DsecError, ErrorCode, invalid

_TIMEOUT_S: Final = 600.0
_LOG_MAX_BYTES: Final = 16 * 1024 * 1024

#: Each Python that the command starts runs this first. Names go out one by one, so that those of a
#: program that is killed are there too, and before all other finders, which might not tell.
_HOOK: Final = '''\
"""Writes down what is imported."""
import os, sys

_log = os.open(os.environ["DSEC_PACK_TRACE"], os.O_WRONLY | os.O_APPEND)


class _Recorder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        os.write(_log, (name + "\\n").encode("utf-8", "replace"))


_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _here]
sys.modules.pop("sitecustomize", None)
sys.meta_path.insert(0, _Recorder)
try:
    import sitecustomize
except ImportError:
    pass
'''


def traced_imports(command: str, directory: Path) -> frozenset[str]:
    """Run a command and return the names of all modules that a Python in it looked for.

    What it prints goes to standard error.

    Args:
        command: as on a command line; no shell is involved.
        directory: where it runs.

    Raises:
        DsecError: ``invalid`` when it cannot be run, fails, or runs no Python that can be followed;
            ``timeout`` when it does not end.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise invalid(f"--trace: {command!r} is no command: {error}") from None
    if not words:
        raise invalid("--trace: there is no command")
    with tempfile.TemporaryDirectory(prefix="dsec-pack-trace-") as name:
        scratch = Path(name)
        (scratch / "sitecustomize.py").write_text(_HOOK, encoding="utf-8")
        log = scratch / "imports"
        log.touch()
        _run(words, directory, scratch, log)
        with log.open("rb") as file:
            lines = file.read(_LOG_MAX_BYTES).decode("utf-8", "replace").splitlines()
    if not lines:
        raise invalid(
            f"--trace: {words[0]!r} ran no Python whose imports could be followed; it may be run "
            "with -I, -E or -S"
        )
    return frozenset(lines)


def _run(words: list[str], directory: Path, scratch: Path, log: Path) -> None:
    before = os.environ.get("PYTHONPATH", "")
    environment = os.environ | {
        "PYTHONPATH": f"{scratch}{os.pathsep}{before}" if before else str(scratch),
        "PYTHONDONTWRITEBYTECODE": "1",
        "DSEC_PACK_TRACE": str(log),
    }
    try:
        done = subprocess.run(
            words,
            check=False,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            timeout=_TIMEOUT_S,
        )
    except OSError as error:
        raise invalid(f"--trace: {words[0]!r} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise DsecError(
            ErrorCode.TIMEOUT,
            f"--trace: the command did not end within {_TIMEOUT_S:.0f} s; give one that does",
            retryable=False,
        ) from None
    if done.returncode:
        raise invalid(
            f"--trace: the command ended with {done.returncode}, so what it would have imported "
            "after that is not known"
        )
