"""Contracts of agents as their authors write them: YAML of which the registry needs a little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dsec.recipes import read_yaml_file
from dsec_common.errors import invalid
from dsec_common.yaml_text import text_of


class Capability(msgspec.Struct, frozen=True):
    """Something that an agent can do, and what it needs for that."""

    permissions: tuple[str, ...] | None = None


class Contract(msgspec.Struct, frozen=True):
    """What of a contract is for the registry, as far as it says so."""

    name: str = ""
    version: str = ""
    description: str | None = None
    capabilities: tuple[Capability, ...] | None = None

    @property
    def permissions(self) -> tuple[str, ...]:
        """What all capabilities need."""
        every = (one for it in self.capabilities or () for one in it.permissions or ())
        return tuple(dict.fromkeys(every))


def read_contract(path: Path) -> tuple[dict[str, Any], Contract]:
    """Return all that a file says, which is kept as it is, and what the registry needs of it.

    Raises:
        DsecError: ``invalid``, naming the field.
    """
    written = read_yaml_file(path, "a contract")
    needed = dict(written)
    if isinstance(written.get("version"), int | float):
        # As it was written: 1.10 is another version than 1.1.
        needed["version"] = text_of(path.read_text(encoding="utf-8"), "version")
    try:
        return written, msgspec.convert(needed, Contract)
    except msgspec.ValidationError as error:
        raise invalid(f"{path} is no contract: {error}") from None
