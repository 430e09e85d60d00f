"""Function calls: one task in a sandbox of its own, and whose doing its end is."""

from __future__ import annotations

from typing import Final

from dsec_common.bus import ReplyAddress, Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import ErrorReply
from dsec_common.wire.pool import CALL_FILES_MAX_BYTES, CallFunction, CallStatus, FunctionResult
from dsec_common.wire.sandbox import CreateSandbox, SandboxCreated
from dsec_common.wire.task import TaskFiles
from dsec_scheduler import admission
from dsec_scheduler.agents.resolving import Resolver
from dsec_scheduler.creation import Creation
from dsec_scheduler.errors import bad_field
from dsec_scheduler.idempotency import bucket_key

#: Of a call that never ran: the request's own fault, told as any other request's.
_CALLERS: Final = frozenset(
    {
        ErrorCode.INVALID,
        ErrorCode.NOT_FOUND,
        ErrorCode.CONFLICT,
        ErrorCode.DENIED,
        ErrorCode.UNSUPPORTED,
    }
)
#: Of a call whose sandbox was there: the task's own fault.
_TASKS: Final = _CALLERS | {ErrorCode.OOM, ErrorCode.COMMAND_TIMEOUT}


def request_of(call: CallFunction) -> CreateSandbox:
    """Return the creation that a call is."""
    return CreateSandbox(
        message_id=call.message_id,
        base=call.base,
        workspace=call.workspace,
        toolkits=call.toolkits,
        limits=call.limits,
        env=call.env,
        labels=call.labels,
        agent=call.agent,
        agent_version=call.agent_version,
        command=call.command,
        delete_after=True,
        idempotency_key=call.idempotency_key,
        timeout_s=call.timeout_s,
        warm=call.warm,
        task=TaskFiles(write=call.files, read=call.collect),
    )


def result_of(created: SandboxCreated) -> FunctionResult:
    """Return what came of a call whose sandbox there was."""
    result, error = created.result, created.error
    if error is not None and not _is_tasks(error):
        status = CallStatus.SANDBOX_ERROR
    elif error is None and result is not None and result.exit_code == 0 and not result.timed_out:
        status = CallStatus.SUCCESS
    else:
        status = CallStatus.FAILED
    return FunctionResult(
        status=status,
        result=result,
        files=created.files,
        error=error,
        sandbox_id=created.sandbox_id,
        warm=created.warm,
    )


def _is_tasks(error: ErrorReply) -> bool:
    # A disk that is full is the task's; so is a path that cannot be written or read.
    return error.code in _TASKS or error.details.get("what") == "path"


class CallDoor:
    """Takes calls."""

    def __init__(self, creation: Creation, agents: Resolver, request_timeout_max_s: float) -> None:
        self._creation = creation
        self._agents = agents
        self._timeout_max_s = request_timeout_max_s

    async def call(self, asked: Request[CallFunction]) -> FunctionResult:
        """Run a task and answer with its end, which is never an error of the request.

        Raises:
            DsecError: ``invalid``, ``not_found`` and so on for a request that cannot be meant;
                ``conflict`` for a key that was used with other arguments.
        """
        call, project = asked.message, asked.project
        size = sum(len(data) for data in call.files.values())
        if size > CALL_FILES_MAX_BYTES:
            raise bad_field("files", size, f"at most {CALL_FILES_MAX_BYTES} bytes in all")
        request = request_of(call)
        meant = await self._agents.learn(project, request) if request.agent else request
        admission.check(meant, self._timeout_max_s)
        key = call.idempotency_key
        try:
            succeeded = await self._creation.create(
                project,
                request,
                call.timeout_s,
                ReplyAddress(),
                bucket_key(project, "call", key) if key else "",
            )
        except DsecError as error:
            if error.code in _CALLERS:
                raise
            return FunctionResult(
                cause_id=call.message_id,
                status=CallStatus.SANDBOX_ERROR,
                error=ErrorReply.of(error, call.message_id),
            )
        return result_of(succeeded.created)
