"""Why an environment is refused."""

from __future__ import annotations

from collections.abc import Sequence

from dsec.factory.leaks import Finding
from dsec.results import ExecResult
from dsec_common.errors import DsecError, ErrorCode

_TOLD: int = 5
_SAID_CHARACTERS: int = 500


class EnvironmentRefused(DsecError):  # noqa: N818  the environment is at fault, no part failed
    """Something in an environment betrays its task, or should not be there.

    Args:
        name: of what was looked through.
        findings: files and reasons.
    """

    def __init__(self, name: str, findings: Sequence[Finding]) -> None:
        first = findings[0]
        shown = "; ".join(str(finding) for finding in findings[:_TOLD])
        more = f"; and {len(findings) - _TOLD} more" if len(findings) > _TOLD else ""
        super().__init__(
            ErrorCode.INVALID,
            f"{name} is no environment: {shown}{more}",
            details={
                "reason": "refused",
                "findings": len(findings),
                "path": first.path,
                "kind": first.kind,
            },
        )
        self.findings = tuple(findings)


class NotProven(DsecError):  # noqa: N818  as above
    """An environment is solved already, or its solution does not solve it.

    Args:
        name: of the environment.
        what: went otherwise than it must.
        result: of the command that showed it.
    """

    def __init__(self, name: str, what: str, result: ExecResult) -> None:
        said = (result.stdout_text + result.stderr_text).strip()[-_SAID_CHARACTERS:]
        super().__init__(
            ErrorCode.INVALID,
            f"{name} is no environment: {what}" + (f"; it said: {said}" if said else ""),
            details={
                "reason": "not_proven",
                "exit_code": result.exit_code,
                "timed_out": result.timed_out,
            },
        )
        self.result = result
