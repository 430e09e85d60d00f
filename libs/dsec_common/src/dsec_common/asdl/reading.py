"""A contract out of YAML, or out of plain values: whole, or with all that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from yaml.nodes import Node

from dsec_common.asdl.documents import node_of_text, node_of_value
from dsec_common.asdl.kinds import BAD, Free, Reading, missing
from dsec_common.asdl.model import CONTRACT, Contract
from dsec_common.asdl.problems import Findings, Problem
from dsec_common.errors import DsecError, ErrorCode

SCHEMA_ID: Final = "https://json-schema.org/draft/2020-12/schema"

_TOLD_MAX: Final = 20
"""Problems that one error tells of; `dsec agent lint` tells of all."""


class Read(NamedTuple):
    """What came of reading a contract.

    Attributes:
        contract: what it says, as far as it could be read; None when nothing could.
        written: all of it as plain values, texts that look like numbers as texts.
        problems: what is wrong, in the order of the file.
    """

    contract: Contract | None
    written: dict[str, Any]
    problems: tuple[Problem, ...]


def read_text(text: str, *, whole: bool = True) -> Read:
    """Return what a contract in YAML says, and what is wrong with it.

    Args:
        text: the document.
        whole: name and version must be there; else others may say them.
    """
    findings = Findings()
    return _read(node_of_text(text, findings), findings, whole=whole)


def read_value(value: Mapping[str, Any], *, whole: bool = True) -> Read:
    """Return what a contract of plain values says, as :func:`read_text`; no place has a line."""
    findings = Findings()
    return _read(node_of_value(dict(value), findings), findings, whole=whole)


def checked(read: Read, name: str) -> Contract:
    """Return the contract of one that has nothing wrong with it.

    Args:
        read: what came of reading it.
        name: of the file, or what else it is called, for errors.

    Raises:
        DsecError: ``invalid``, with every problem on a line of its own.
    """
    if not read.problems and read.contract is not None:
        return read.contract
    lines = [problem.told(name) for problem in read.problems[:_TOLD_MAX]]
    if more := len(read.problems) - len(lines):
        lines.append(f"and {more} more")
    first = read.problems[0]
    raise DsecError(
        ErrorCode.INVALID,
        "\n".join(lines),
        details={"field": first.path, "line": first.line, "problems": len(read.problems)},
    )


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of contracts, which editors complete them by."""
    schema = CONTRACT.schema()
    return {
        "$schema": SCHEMA_ID,
        "title": "DSec agent contract (ASDL)",
        "description": "What an agent can do, what it needs, and what it may do.",
        **schema,
        "required": ["name", "version"],
    }


def _read(root: Node | None, findings: Findings, *, whole: bool) -> Read:
    if root is None:
        return Read(None, {}, findings.all())
    reading = Reading(findings, {(): root}, {})
    contract = CONTRACT.read(root, (), reading)
    if contract is BAD:
        return Read(None, {}, findings.all())
    for name in ("name", "version") if whole else ():
        if not getattr(contract, name) and (name,) not in reading.nodes:
            findings.add(root.start_mark, (name,), missing(name, CONTRACT.kinds[name]))
    problems = findings.all()
    if problems:
        return Read(contract, {}, problems)
    return Read(contract, Free("").read(root, (), reading), ())
