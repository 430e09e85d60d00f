"""Names of layers: what is allowed, and what a reference means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dsec_common.errors import DsecError, invalid

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_SHOWN_MAX: Final = 80

DIGEST_PREFIX: Final = "sha256:"


@dataclass(frozen=True, slots=True)
class NamedReference:
    """A reference by ``name@version``; an empty version means that none was given."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}@{self.version}" if self.version else self.name


@dataclass(frozen=True, slots=True)
class DigestReference:
    """A reference by content: ``sha256:`` and 64 hexadecimal digits."""

    digest: str

    def __str__(self) -> str:
        return self.digest


@dataclass(frozen=True, slots=True)
class TagReference:
    """A reference by ``name:tag``, whose meaning moves."""

    name: str
    tag: str

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"


Reference = NamedReference | TagReference | DigestReference


def shown(text: object) -> str:
    """Return ``text`` quoted for an error message, cut when it is long."""
    quoted = ascii(text)
    return quoted if len(quoted) <= _SHOWN_MAX else f"{quoted[: _SHOWN_MAX - 1]}…"


def validate_name(name: str) -> str:
    """Return ``name`` unchanged, or raise ``invalid``."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise invalid(
        f"{shown(name)} is not a layer name: use 1-64 lower-case letters, digits, '.', '_' and "
        "'-', the first of them a letter or digit"
    )


def validate_version(version: str) -> str:
    """Return ``version`` unchanged, or raise ``invalid``."""
    if isinstance(version, str) and _VERSION.fullmatch(version):
        return version
    raise invalid(
        f"{shown(version)} is not a layer version: use 1-64 letters, digits, '.', '_', '+' and "
        "'-', the first of them a letter or digit"
    )


def validate_tag(tag: str) -> str:
    """Return ``tag`` unchanged, or raise ``invalid``."""
    if isinstance(tag, str) and _VERSION.fullmatch(tag):
        return tag
    raise invalid(
        f"{shown(tag)} is not a layer's tag: use 1-64 letters, digits, '.', '_', '+' and '-', the "
        "first of them a letter or digit"
    )


def is_digest(text: str) -> bool:
    """Tell whether ``text`` is ``sha256:`` and 64 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def parse_reference(text: str) -> Reference:
    """Return what ``text`` refers to.

    Raises:
        DsecError: ``invalid`` when it is neither ``name@version``, ``name:tag``, ``name`` nor
            ``sha256:…``.
    """
    if not isinstance(text, str):
        raise invalid(f"{shown(text)} is not a layer reference: give name@version as text")
    if text.startswith(DIGEST_PREFIX):
        if is_digest(text):
            return DigestReference(text)
        raise invalid(
            f"{shown(text)} is not a layer digest: it is sha256: and 64 lower-case hexadecimal "
            "digits"
        )
    name, at, version = text.partition("@")
    try:
        if not at and ":" in name:
            name, _, tag = name.partition(":")
            return TagReference(validate_name(name), validate_tag(tag))
        return NamedReference(validate_name(name), validate_version(version) if at else "")
    except DsecError as error:
        raise invalid(
            f"{shown(text)} is not a layer reference (name@version, name:tag or sha256:…): "
            f"{error.message}"
        ) from None
