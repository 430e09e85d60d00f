"""How a command's result is shown, and what exit code it means."""

from __future__ import annotations

import base64
import sys
from typing import TYPE_CHECKING, Any, Final

from dsec_common.errors import DsecError, ErrorCode

if TYPE_CHECKING:
    from dsec.cli.output import Output
    from dsec.results import ExecResult

EXIT_TIMED_OUT: Final = 124
EXIT_PLATFORM: Final = 125
EXIT_NOT_EXECUTABLE: Final = 126
EXIT_NO_SUCH_COMMAND: Final = 127
SIGNAL_BASE: Final = 128


def show_result(output: Output, result: ExecResult) -> int:
    """Write what a command printed, to where it printed it, and return the exit code it means."""
    if output.json:
        output.document(result_document(result))
        return exit_code_of(result)
    sys.stdout.buffer.write(result.stdout)
    sys.stdout.buffer.flush()
    sys.stderr.buffer.write(result.stderr)
    sys.stderr.buffer.flush()
    for name, cut in (("stdout", result.stdout_truncated), ("stderr", result.stderr_truncated)):
        if cut:
            output.say(f"dsec: {name} was longer and is cut here")
    if result.oom:
        output.say("dsec: ended: the sandbox's memory ran out; see --memory of create")
    if result.timed_out:
        output.say(f"dsec: ended after {result.duration_s:.1f} s: its time ran out")
    return exit_code_of(result)


def exit_code_of_failure(error: DsecError | None) -> int:
    """Return what a shell would: 127 and 126 for a program that is not there or cannot be run."""
    if error is None or error.details.get("what") != "command":
        return EXIT_PLATFORM
    absent = error.code is ErrorCode.NOT_FOUND
    return EXIT_NO_SUCH_COMMAND if absent else EXIT_NOT_EXECUTABLE


def exit_code_of(result: ExecResult) -> int:
    """Return the command's own code; 128 + n when signal n ended it, 124 when its time ran out."""
    if result.timed_out:
        return EXIT_TIMED_OUT
    if result.signal is not None:
        return SIGNAL_BASE + result.signal
    return result.exit_code or 0


def result_document(result: ExecResult) -> dict[str, Any]:
    """Return a result with its output as text; as base64, too, where text would lose bytes."""
    document: dict[str, Any] = {
        "sandbox_id": result.sandbox_id,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "stdout": result.stdout_text,
        "stderr": result.stderr_text,
        "stdout_truncated": result.stdout_truncated,
        "stderr_truncated": result.stderr_truncated,
        "timed_out": result.timed_out,
        "oom": result.oom,
        "duration_s": result.duration_s,
    }
    for name in ("stdout", "stderr"):
        data = getattr(result, name)
        if document[name].encode() != data:
            document[f"{name}_base64"] = base64.b64encode(data).decode()
    return document
