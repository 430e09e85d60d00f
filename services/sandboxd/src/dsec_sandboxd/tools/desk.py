"""Runs the tools of agents: each call held to the contract, and written down, by the node itself.

Who calls is known from the socket, what it may from its sandbox's record. The sandbox cannot pass
any of this by: what a tool reaches it reaches by the node alone, or by a network of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from dsec_common.clock import Clock
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode, invalid
from dsec_common.wire.agent import NETWORK_ACCESS
from dsec_common.wire.network import NetworkMode, NetworkPolicy
from dsec_common.wire.tools import NodeTools, ToolTerms
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.tools.http import (
    HttpAnswer,
    HttpArguments,
    HttpRequests,
    Part,
    check_request,
    shown,
)
from dsec_sandboxd.tools.models import ModelArguments, ModelServer, request_of
from dsec_sandboxd.tools.rates import CallRates
from dsec_sandboxd.tools.targets import Way

CALLS_AT_ONCE: Final = 4
"""Tool calls of one sandbox under way; further ones are ``exhausted``."""

_CALLS_OF_ALL: Final = 128
_HTTP: Final = "http_client"
#: The calls of each tool; what they are called is for the log, what they do is one thing.
_HTTP_CALLS: Final = frozenset({"get", "post", "request"})
_MODEL_CALLS: Final = frozenset({"invoke", "complete", "stream"})
_NO_TOOLS: Final = NodeTools()

ArgumentsT = TypeVar("ArgumentsT", HttpArguments, ModelArguments)


@dataclass
class _Told:
    """What is written down of a call, as far as it has come."""

    status: str = "ok"
    tokens_in: int = 0
    tokens_out: int = 0
    attributes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Reaching:
    """A call under way, by the policy that it began under; its limit is over when that is."""

    policy: NetworkPolicy
    limit: asyncio.Timeout


Log = Callable[..., None]
"""Writes a step, as :meth:`dsec_sandboxd.agent_gateway.AgentGateway.log` does."""


class ToolDesk:
    """The tools of one node's sandboxes."""

    def __init__(
        self,
        way: Way,
        models: ModelServer | None,
        rates: CallRates,
        clock: Clock,
        *,
        network_of: Callable[[SandboxRecord], NetworkPolicy | None],
        log: Log,
    ) -> None:
        """Take the parts.

        Args:
            way: the way out.
            models: the model server; None when this node was told of none.
            rates: counts calls.
            clock: for how long calls take.
            network_of: what tools of a sandbox may reach now; None is nothing.
            log: writes steps.
        """
        self._way = way
        self._http = HttpRequests(way)
        self._models = models
        self._rates = rates
        self._clock = clock
        self._network_of = network_of
        self._log = log
        self._under_way: Counter[str] = Counter()
        self._reaching: defaultdict[str, set[_Reaching]] = defaultdict(set)

    def offered(self, record: SandboxRecord) -> list[str]:
        """Return the tools that this node runs for a sandbox, by name."""
        terms = (record.tools or _NO_TOOLS).terms
        return sorted(name for name in terms if name == _HTTP or self._models is not None)

    def count_model_call(self, record: SandboxRecord) -> None:
        """Count a call of the trainer's model as one of the tool that the contract has for models.

        Raises:
            DsecError: ``exhausted`` when there were too many; ``unavailable`` when it cannot be
                counted.
        """
        terms = (record.tools or _NO_TOOLS).terms
        for tool in sorted(terms.keys() - {_HTTP}):
            if (rate := terms[tool].rate_limit) is not None:
                self._rates.take(record.local, tool, rate)

    async def call(
        self, record: SandboxRecord, tool: str, call: str, arguments: msgspec.Raw, part: Part
    ) -> dict[str, Any]:
        """Make a call and return what came of it; its body is passed on in parts.

        Every call is a step of the behaviour log when it is over, refused or not.

        Raises:
            DsecError: ``denied`` for a tool that the contract does not name, a permission that it
                lacks, and what is beyond its terms; ``exhausted`` when it was called too often;
                ``unsupported`` for what this node does not run; and those of the tool.
        """
        began = self._clock.monotonic()
        told = _Told(attributes={"tool": tool, "call": call})
        told.attributes["arguments_sha256"] = hashlib.sha256(memoryview(arguments)).hexdigest()
        try:
            return await self._call(record, tool, call, arguments, part, told)
        except DsecError as error:
            told.status = error.code.value
            told.attributes["error"] = error.message
            raise
        except asyncio.CancelledError:
            told.status = "cancelled"
            raise
        except BaseException:
            told.status = ErrorCode.INTERNAL.value
            raise
        finally:
            self._log(
                record,
                "tool_call",
                status=told.status,
                latency_ms=1000 * (self._clock.monotonic() - began),
                attributes=told.attributes,
                tokens_in=told.tokens_in,
                tokens_out=told.tokens_out,
            )

    async def _call(  # noqa: PLR0917  one call's parts
        self,
        record: SandboxRecord,
        tool: str,
        call: str,
        arguments: msgspec.Raw,
        part: Part,
        told: _Told,
    ) -> dict[str, Any]:
        terms = _terms(record, tool)
        if tool == _HTTP:
            asked = _decoded(arguments, HttpArguments, tool, call, _HTTP_CALLS)
            told.attributes |= {"url": shown(asked.url), "method": asked.method}
            policy = self._reach(record, terms)
            check_request(asked)
            with self._place(record.local, tool, terms):
                answer = await self._within(record, policy, asked, part)
            told.status = str(answer.status)
            told.attributes |= {"bytes": str(answer.bytes), "answered_by": shown(answer.url)}
            return msgspec.structs.asdict(answer)
        question = _decoded(arguments, ModelArguments, tool, call, _MODEL_CALLS)
        told.attributes["model"] = question.model or terms.model
        if self._models is None:
            raise DsecError(
                ErrorCode.UNSUPPORTED, f"this node has no model server to run {tool} with"
            )
        request_of(question, terms, tool)
        with self._place(record.local, tool, terms):
            written = await self._models.ask(question, terms, tool, part)
        told.tokens_in, told.tokens_out = written.tokens_in, written.tokens_out
        return msgspec.structs.asdict(written)

    async def _within(
        self, record: SandboxRecord, policy: NetworkPolicy, asked: HttpArguments, part: Part
    ) -> HttpAnswer:
        """Make a request that ends when the sandbox's tools may not reach the same any more."""
        reaching = _Reaching(policy, asyncio.timeout(None))
        of_sandbox = self._reaching[record.local]
        of_sandbox.add(reaching)
        try:
            async with reaching.limit:
                return await self._http.ask(asked, await self._way.ready_for(policy), part)
        except TimeoutError as error:
            if not reaching.limit.expired():
                raise
            raise DsecError(
                ErrorCode.DENIED,
                f"what {_HTTP} may reach was changed while it asked {shown(asked.url)}; the "
                "request may have arrived",
                details={"permission": NETWORK_ACCESS, MAY_HAVE_HAPPENED: True},
            ) from error
        finally:
            of_sandbox.discard(reaching)
            if not of_sandbox:
                self._reaching.pop(record.local, None)

    def network_changed(self, record: SandboxRecord) -> None:
        """End the calls under way that began when a sandbox's tools might reach something else."""
        policy = self._network_of(record)
        for reaching in self._reaching.get(record.local, ()):
            if reaching.policy != policy and not reaching.limit.expired():
                reaching.limit.reschedule(0.0)

    def _reach(self, record: SandboxRecord, terms: ToolTerms) -> NetworkPolicy:
        """Return what the tool may reach.

        Raises:
            DsecError: ``denied`` when that is nothing.
        """
        if NETWORK_ACCESS not in terms.permissions:
            raise DsecError(
                ErrorCode.DENIED,
                f"{_HTTP} lacks the permission {NETWORK_ACCESS}; the agent's contract grants it "
                "where it names the tool",
                details={"permission": NETWORK_ACCESS},
            )
        policy = self._network_of(record)
        if policy is None or policy.mode is NetworkMode.NONE:
            raise DsecError(
                ErrorCode.DENIED,
                f"{_HTTP} may reach nothing: the agent's contract or its policy leaves it no "
                "network",
                details={"permission": NETWORK_ACCESS},
            )
        return policy

    def _place(self, local: str, tool: str, terms: ToolTerms) -> _Place:
        """Count a call, and take a place for it.

        Raises:
            DsecError: ``exhausted`` when there is none, or the contract allows no more calls.
        """
        of_all = self._under_way.total()
        if self._under_way[local] >= CALLS_AT_ONCE or of_all >= _CALLS_OF_ALL:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"{CALLS_AT_ONCE} tool calls of this sandbox are under way, or too many of this "
                "node's; wait for one of them",
                retry_after_s=0.5,
            )
        if terms.rate_limit is not None:
            self._rates.take(local, tool, terms.rate_limit)
        return _Place(self._under_way, local)


class _Place:
    """A place that is given back at the end."""

    def __init__(self, taken: Counter[str], local: str) -> None:
        self._taken = taken
        self._local = local

    def __enter__(self) -> None:
        self._taken[self._local] += 1

    def __exit__(self, *_: object) -> None:
        self._taken[self._local] -= 1
        if not self._taken[self._local]:
            del self._taken[self._local]


def _terms(record: SandboxRecord, tool: str) -> ToolTerms:
    terms: Mapping[str, ToolTerms] = (record.tools or _NO_TOOLS).terms
    if tool not in terms:
        raise DsecError(
            ErrorCode.DENIED,
            f"the agent's contract names no tool {tool[:80]!r} that its node runs; "
            f"it names {', '.join(sorted(terms)) or 'none'}",
            details={"tool": tool},
        )
    return terms[tool]


def _decoded(
    arguments: msgspec.Raw,
    kind: type[ArgumentsT],
    tool: str,
    call: str,
    calls: frozenset[str],
) -> ArgumentsT:
    if call not in calls:
        raise invalid(f"{tool} has no call {call[:80]!r}; it has {', '.join(sorted(calls))}")
    try:
        return msgspec.json.decode(arguments, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise invalid(f"{tool}.{call}: {error}") from error
