"""Contracts of agents (ASDL) as files, and as whatever else a caller has of one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dsec_common.asdl.documents import TEXT_CHARACTERS_MAX
from dsec_common.asdl.model import Capability, Contract
from dsec_common.asdl.reading import Read, checked, json_schema, read_text, read_value
from dsec_common.asdl.terms import USUAL_TIMEOUT_S, Terms, terms_of, under
from dsec_common.errors import invalid
from dsec_common.wire.sandbox import CreateSandbox
from dsec_common.wire.tools import ToolTerms

__all__ = [
    "Capability",
    "Contract",
    "Given",
    "Terms",
    "ToolTerms",
    "contract_of",
    "json_schema",
    "lint_contract",
    "read_contract",
    "terms_of",
    "under_contract",
]

Given = Contract | Mapping[str, Any] | str | os.PathLike[str]
"""A contract, what one says as plain values, or the path of a file that has one."""


def read_contract(path: Path, *, whole: bool = True) -> tuple[dict[str, Any], Contract]:
    """Return all that a file says, as plain values, and the contract.

    Args:
        path: of a file in YAML.
        whole: name and version must be there; else others may say them.

    Raises:
        DsecError: ``invalid``, with every problem on a line of its own, as
            ``<path>:<line>:<column>: <part>: <what is wrong, and what to do>``.
    """
    read = lint_contract(path, whole=whole)
    contract = checked(read, str(path))
    return read.written, contract


def lint_contract(path: Path, *, whole: bool = True) -> Read:
    """Return what a file says, and all that is wrong with it.

    Raises:
        DsecError: ``invalid`` for a file that cannot be read as text.
    """
    # As many bytes as the longest contract can have, and one that says that there are more.
    most = 4 * TEXT_CHARACTERS_MAX
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > most:
        raise invalid(f"{path} is too large to be a contract: at most {most} bytes are read")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"{path} is no text: {error}") from None
    return read_text(text, whole=whole)


def contract_of(given: Given) -> Contract:
    """Return a contract in whatever form it was given.

    Raises:
        DsecError: ``invalid``, with every problem on a line of its own.
    """
    if isinstance(given, Contract):
        return given
    if isinstance(given, Mapping):
        return checked(read_value(given, whole=False), "the contract")
    if isinstance(given, str | os.PathLike):
        return read_contract(Path(given), whole=False)[1]
    raise invalid(f"contract is a {type(given).__name__}: give a path, a mapping or a Contract")


def under_contract(request: CreateSandbox, given: Given) -> CreateSandbox:
    """Return a request for a sandbox with what it leaves open as a contract has it.

    A command whose time is the usual one has the contract's, be that shorter or longer.

    Raises:
        DsecError: ``invalid`` for the contract; ``denied`` for more than it allows.
    """
    contract = contract_of(given)
    agent, terms = contract.name or "the agent", terms_of(contract)
    command = request.command
    if command is not None and command.timeout_s == USUAL_TIMEOUT_S and terms.timeout_s is not None:
        command = msgspec.structs.replace(command, timeout_s=terms.timeout_s)
    meant = under(terms, msgspec.structs.replace(request, command=command), agent)
    return msgspec.structs.replace(meant, agent=request.agent or contract.name)
