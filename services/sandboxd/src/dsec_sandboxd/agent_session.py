"""What one sandbox's agent may ask, and what becomes of it.

Who asks is known from the socket alone: nothing in a request names a sandbox or a rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NamedTuple, assert_never

import msgspec

from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_common.wire.rollout import FeedbackState
from dsec_sandboxd.agent_gateway import AgentGateway
from dsec_sandboxd.agent_protocol import (
    FRAME_MAX_BYTES,
    PAYLOAD_MAX_BYTES,
    PROTOCOL_VERSION,
    WAIT_MAX_S,
    AgentRequest,
    Await,
    Hello,
    Log,
    Report,
    Step,
    Tool,
    packed_payload,
)
from dsec_sandboxd.ports import Uses
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.step_log import PLATFORM_ACTIONS
from dsec_sandboxd.tools.desk import ToolDesk
from dsec_sandboxd.tools.http import Part

#: How long a report is tried again while the platform is away, before the agent is told so.
REPORT_TIMEOUT_S: Final = 30.0

#: Of a step's payload: a larger one is reported first and then waited for, since the node would
#: hold it for as long as the wait.
STEP_MAX_BYTES: Final = 16 * 1024

Json = dict[str, Any]


class _Due(NamedTuple):
    action: str
    stage: str
    latency_ms: float
    attributes: dict[str, str]


class AgentSession:
    """The agent's side of one sandbox; shared by all its connections."""

    def __init__(
        self,
        record: SandboxRecord,
        node: str,
        gateway: AgentGateway,
        clock: Clock,
        uses: Uses | None = None,
        *,
        tools: ToolDesk | None = None,
    ) -> None:
        """Take whose session it is, the way out, who counts its uses, and who runs its tools."""
        self._record = record
        self._node = node
        self._gateway = gateway
        self._clock = clock
        self._uses = uses
        self._tools = tools
        self._numbering = asyncio.Lock()
        self._logged_seq = 0
        self._answered_seq = 0
        # Steps whose answer is about to be sent; see `write_steps`.
        self._due: list[_Due] = []

    @property
    def local(self) -> str:
        """The sandbox."""
        return self._record.local

    async def answer(self, request: AgentRequest, sent: Callable[[], None], part: Part) -> Json:
        """Do what is asked and return the result; once that is sent, :meth:`write_steps` is due.

        Args:
            request: any but a :class:`Log`, which :meth:`log` takes without waiting.
            sent: called when the request's payload is no longer needed.
            part: takes what is to be told before the result.

        Raises:
            DsecError: the refusal, for the agent.
        """
        if self._uses is None:
            return await self._do(request, sent, part)
        self._uses.began(self.local)
        try:
            return await self._do(request, sent, part)
        finally:
            self._uses.ended(self.local)

    async def _do(  # noqa: PLR0911  one for each kind of request
        self, request: AgentRequest, sent: Callable[[], None], part: Part
    ) -> Json:
        match request:
            case Hello():
                return await self._hello()
            case Report():
                return await self._report(request)
            case Await():
                return await self._await(request.seq, request.wait_s)
            case Step() if request.seq and len(memoryview(request.payload)) <= STEP_MAX_BYTES:
                return await self._step_at_once(request)
            case Step():
                wait_s = request.wait_s
                accepted = await self._report(request)
                del request  # its payload too: the wait may be long
                sent()
                return await self._await(accepted["seq"], wait_s)
            case Log():
                return self.log(request)
            case Tool():
                return await self._call(request, part)
            case _:
                assert_never(request)

    def log(self, request: Log) -> Json:
        """Write one step of the behaviour log.

        Raises:
            DsecError: ``denied`` for an action that only the platform writes.
        """
        if request.action in PLATFORM_ACTIONS:
            raise DsecError(
                ErrorCode.DENIED,
                f"the action {request.action!r} is the platform's own; choose another name",
            )
        if self._uses is not None:
            self._uses.began(self.local)
            self._uses.ended(self.local)
        self._gateway.log(
            self._record,
            request.action,
            status=request.status,
            latency_ms=request.latency_ms,
            attributes=request.attributes,
            tokens_in=request.tokens_in,
            tokens_out=request.tokens_out,
        )
        return {}

    async def _call(self, request: Tool, part: Part) -> Json:
        if self._tools is None:
            raise DsecError(ErrorCode.UNSUPPORTED, "this node runs no tools")
        return await self._tools.call(
            self._record, request.tool, request.call, request.arguments, part
        )

    async def _hello(self) -> Json:
        last_seq = 0
        begins: Json = {}
        if self._record.rollout_id:
            info = await self._gateway.inspect(self._record, self._deadline(REPORT_TIMEOUT_S))
            last_seq = info.last_seq
            if info.restoration is not None:
                begins["restoration"] = msgspec.structs.asdict(info.restoration)
        return {
            "protocol": PROTOCOL_VERSION,
            "sandbox_id": str(self._record.scoped_id(self._node)),
            "rollout_id": self._record.rollout_id,
            "last_seq": last_seq,
            "tools": [] if self._tools is None else self._tools.offered(self._record),
            "payload_max_bytes": PAYLOAD_MAX_BYTES,
            "frame_max_bytes": FRAME_MAX_BYTES,
            **begins,
        }

    async def _report(self, request: Report | Step) -> Json:
        self._need_rollout()
        payload = packed_payload(request.payload)
        if request.seq:
            return await self._report_as(request.seq, request.stage, payload)
        async with self._numbering:
            deadline = self._deadline(REPORT_TIMEOUT_S)
            seq = (await self._gateway.inspect(self._record, deadline)).last_seq + 1
            return await self._report_as(seq, request.stage, payload)

    async def _report_as(self, seq: int, stage: str, payload: bytes) -> Json:
        began = self._clock.monotonic()
        duplicate = await self._gateway.report(
            self._record, seq, stage, payload, self._deadline(REPORT_TIMEOUT_S)
        )
        # A repetition whose first answer got lost is a duplicate there, and not yet logged here.
        if seq > self._logged_seq:
            self._logged_seq = seq
            attributes = {"stage": stage, "seq": str(seq)}
            self._log_step(_Due("stage", stage, self._ms_since(began), attributes))
        return {"seq": seq, "duplicate": duplicate}

    async def _step_at_once(self, request: Step) -> Json:
        """Report and wait in one request; how long the report alone took is not known then."""
        self._need_rollout()
        payload = packed_payload(request.payload)
        seq, stage, began = request.seq, request.stage, self._clock.monotonic()
        wait_s = min(max(request.wait_s, 0.0), WAIT_MAX_S)
        feedback = await self._gateway.step(
            self._record,
            seq,
            stage,
            payload,
            deadline=self._deadline(wait_s),
            away_until=self._deadline(max(wait_s, REPORT_TIMEOUT_S)),
        )
        if seq > self._logged_seq:
            self._logged_seq = seq
            self._due.append(_Due("stage", stage, 0.0, {"stage": stage, "seq": str(seq)}))
        return self._answered(feedback, began)

    async def _await(self, seq: int, wait_s: float) -> Json:
        self._need_rollout()
        began = self._clock.monotonic()
        wait_s = min(max(wait_s, 0.0), WAIT_MAX_S)
        feedback = await self._gateway.await_feedback(self._record, seq, self._deadline(wait_s))
        return self._answered(feedback, began)

    def _answered(self, feedback: FeedbackState, began: float) -> Json:
        seq = feedback.seq
        result: Json = {"ready": False, "seq": seq}
        if feedback.ready:
            result = {
                "ready": True,
                "seq": seq,
                "payload": feedback.payload,
                "reward": feedback.reward,
                "done": feedback.done,
            }
            if seq > self._answered_seq:
                self._answered_seq = seq
                self._due.append(_Due("feedback", "", self._ms_since(began), _told(feedback)))
        if self._due:
            self._gateway.reserve(self._record, len(self._due))
        return result

    def write_steps(self) -> None:
        """Write the steps whose answer was sent just now: nobody waits for that any more.

        Their numbers are kept already. Nothing may be awaited between the answer's return and this.
        """
        due, self._due = self._due, []
        for step in due:
            self._log_step(step)

    def _log_step(self, step: _Due) -> None:
        self._gateway.log(
            self._record,
            step.action,
            status="ok",
            latency_ms=step.latency_ms,
            attributes=step.attributes,
            stage=step.stage,
        )

    def _ms_since(self, began: float) -> float:
        return 1000 * (self._clock.monotonic() - began)

    def _deadline(self, wait_s: float) -> float:
        return self._clock.monotonic() + wait_s

    def _need_rollout(self) -> None:
        if not self._record.rollout_id:
            raise _no_rollout(str(self._record.scoped_id(self._node)))


def _told(feedback: FeedbackState) -> dict[str, str]:
    told = {"seq": str(feedback.seq), "done": str(feedback.done).lower()}
    if feedback.reward is not None:
        told["reward"] = f"{feedback.reward:g}"
    return told


def _no_rollout(sandbox_id: str) -> DsecError:
    return not_found(
        f"sandbox {sandbox_id} serves no rollout, so nobody reads its reports; create it with a "
        "rollout_id",
        sandbox_id=sandbox_id,
    )
