"""Where an agent's work comes from: the trainer, the command line, or standard input."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from dsec_common.errors import DsecError, ErrorCode, invalid

if TYPE_CHECKING:
    from dsec.agent.agent import Agent

_log: Final = logging.getLogger(__name__)

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list": (list,),
    "dict": (dict,),
}


def serve(agent: Agent, arguments: Sequence[str] | None) -> None:
    """Work once or until the trainer says that it is done; see :meth:`dsec.Agent.serve`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words:
        _work_for_a_person(agent, words)
    elif agent.context.rollout_id:
        _Rollout(agent).work()
    else:
        _work_for_a_program(agent)


def work(agent: Agent, given: Any) -> Any:
    """Return what ``execute`` returns for an input.

    An object has the arguments by name; an agent with one parameter takes any other value as that.

    Raises:
        DsecError: what ``execute`` raises; ``internal`` for any other exception; ``invalid`` for
            an input that does not fit and an output that is no JSON.
    """
    bound = _bound(agent, given)
    _check_types(bound)
    try:
        output = agent.execute(*bound.args, **bound.kwargs)
        if inspect.iscoroutine(output):
            output = asyncio.run(output)
    except DsecError:
        raise
    except Exception as error:
        _log.exception("the agent failed")
        raise DsecError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}") from error
    try:
        json.dumps(output, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise invalid(f"what execute returned is no JSON: {error}") from None
    return output


def told(error: DsecError) -> dict[str, Any]:
    """Return an error as the agent protocol has it."""
    return {
        "code": error.code.value,
        "message": error.message,
        "retryable": error.retryable,
        "retry_after_s": error.retry_after_s,
        "details": error.details,
    }


def _bound(agent: Agent, given: Any) -> inspect.BoundArguments:
    signature = inspect.signature(agent.execute)
    if given is None and not any(it.default is it.empty for it in signature.parameters.values()):
        return signature.bind()
    try:
        if isinstance(given, dict):
            return signature.bind(**given)
    except TypeError as error:
        if len(signature.parameters) != 1:
            raise invalid(f"the input does not fit execute{signature}: {error}") from None
    if len(signature.parameters) != 1:
        raise invalid(f"the input does not fit execute{signature}: give its arguments by name")
    return signature.bind(given)


def _check_types(bound: inspect.BoundArguments) -> None:
    """Refuse a value of another type than its parameter says, as far as JSON has that type."""
    for name, value in bound.arguments.items():
        annotation = bound.signature.parameters[name].annotation
        wanted = getattr(annotation, "__name__", annotation)
        kinds = _TYPES.get(wanted) if isinstance(wanted, str) else None
        is_flag = isinstance(value, bool)
        if kinds is not None and (not isinstance(value, kinds) or (is_flag and bool not in kinds)):
            raise invalid(f"{name} is of type {wanted}, and a {type(value).__name__} was given")


# --- A rollout --------------------------------------------------------------------------------


class _Rollout:
    """Does what the trainer's feedback says, one piece of work after the other.

    What was under way when an earlier process died is never begun again by itself: the trainer is
    told, and says what to do.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._context = agent.context
        self._working = True
        self._leaving = False

    def work(self) -> None:
        try:
            with self._finishing():
                self._work()
        except DsecError as error:
            if error.code is not ErrorCode.EXPIRED:
                raise
            _log.info("the rollout was closed: %s", error.message)

    def _work(self) -> None:
        seq = self._begin()
        while not (self._leaving or self._context.done):
            self._working = False
            feedback = self._context.feedback(seq)
            self._working = True
            if not feedback.done:
                seq = self._result_of(feedback.payload)

    def _begin(self) -> int:
        agent, context = self._agent, self._context
        about: dict[str, Any] = {
            "agent": agent.name,
            "version": agent.version,
            "arguments": list(inspect.signature(agent.execute).parameters),
        }
        if not context.last_seq:
            return context.report("ready", about)
        about["last_seq"] = context.last_seq
        about["checkpoints"] = context.state.checkpoints()
        return context.report("restarted", about)

    def _result_of(self, given: Any) -> int:
        try:
            output = work(self._agent, given)
        except DsecError as error:
            return self._context.report("failed", {"error": told(error)})
        try:
            return self._context.report("result", {"output": output})
        except DsecError as error:
            if error.code is not ErrorCode.INVALID:
                raise
            # What was returned is too much for a report.
            return self._context.report("failed", {"error": told(error)})

    @contextlib.contextmanager
    def _finishing(self) -> Iterator[None]:
        """Have SIGTERM end a wait at once, and work when it is reported."""

        def leave(_number: int, _frame: FrameType | None) -> None:
            self._leaving = True
            if not self._working:
                raise SystemExit(0)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


# --- Once -------------------------------------------------------------------------------------


def _work_for_a_person(agent: Agent, words: Sequence[str]) -> None:
    given = _parsed(agent, words)
    try:
        output = work(agent, given)
    except DsecError as error:
        _fail(f"{error.code.value}: {error.message}")
    sys.stdout.write(f"{output if isinstance(output, str) else json.dumps(output)}\n")


def _work_for_a_program(agent: Agent) -> None:
    text = sys.stdin.read()
    try:
        output = work(agent, _input(text))
    except DsecError as error:
        _fail(json.dumps({"error": told(error)}))
    sys.stdout.write(f"{json.dumps(output)}\n")


def _input(text: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise invalid(f"the input is no JSON: {error}") from None


def _parsed(agent: Agent, words: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=inspect.getdoc(type(agent).execute))
    parameters = inspect.signature(agent.execute).parameters.values()
    for parameter in parameters:
        is_text = parameter.annotation in {str, "str", parameter.empty}
        parser.add_argument(
            f"--{parameter.name.replace('_', '-')}",
            dest=parameter.name,
            required=parameter.default is parameter.empty,
            default=argparse.SUPPRESS,
            type=str if is_text else _json_word,
            help=None if is_text else "JSON",
        )
    return vars(parser.parse_args(words))


def _json_word(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no JSON: {error}") from None


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    raise SystemExit(1)
