"""What a package says of itself: ``manifest.json``, its first entry."""

from __future__ import annotations

import platform
import sys
import sysconfig
from typing import Final

import msgspec

from dsec.pack.errors import refused
from dsec.pack.paths import check_path
from dsec_common.wire.agent import validate_name, validate_version

FORMAT: Final = 1
"""The only format that there is."""

MANIFEST: Final = "manifest.json"
SIGNATURE: Final = "signature.json"
CONTRACT: Final = "agent.yaml"
CODE: Final = "app/"
"""Below it is what the author wrote."""

LIBRARIES: Final = "lib/"
"""Below it are the distributions that the code imports, as in a directory of ``sys.path``."""


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What native code was built for.

    Attributes:
        python: implementation and version, ``cp311``.
        platform: system and processor, ``linux-x86_64``.
    """

    python: str
    platform: str

    @classmethod
    def here(cls) -> Target:
        """Return this interpreter's."""
        system = sysconfig.get_platform().split("-")[0]
        short = {"cpython": "cp", "pypy": "pp"}.get(sys.implementation.name, "py")
        return cls(
            python=f"{short}{sys.version_info.major}{sys.version_info.minor}",
            platform=f"{system}-{platform.machine()}",
        )

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target that a text such as ``cp311-linux-x86_64`` means.

        Raises:
            DsecError: ``invalid``.
        """
        python, _, system = text.partition("-")
        if not (python.isalnum() and "-" in system):
            raise refused("bad_target", f"{text[:64]!r} is no target: write cp311-linux-x86_64")
        return cls(python=python, platform=system)

    def __str__(self) -> str:
        return f"{self.python}-{self.platform}"


class PackedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file: where it is, and what it has to hold."""

    path: str
    size_bytes: int
    sha256: str
    executable: bool = False


class Distribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was taken from the environment that the package was built in.

    Attributes:
        tags: of the wheel that it came as; empty when nobody knows.
        native: it holds machine code.
    """

    name: str
    version: str
    tags: tuple[str, ...] = ()
    native: bool = False


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is in a package. It has no time, no host and no user: the same input is the same bytes.

    Attributes:
        name: of the agent.
        version: of the agent.
        entry: the file that is run, below :data:`CODE`.
        python: the version that it was built with, ``3.11``.
        target: what the native code in it was built for; None when there is none.
        distributions: by name.
        files: all but the manifest itself and the signature, by path.
    """

    format: int
    name: str
    version: str
    entry: str
    python: str
    target: Target | None = None
    distributions: tuple[Distribution, ...] = ()
    files: tuple[PackedFile, ...] = ()

    def encode(self) -> bytes:
        """Return the bytes that are stored, and signed."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def check_target(self, target: Target) -> None:
        """Return when the package's native code runs there, or there is none.

        Raises:
            DsecError: ``invalid``, naming what is native.
        """
        if self.target is None or self.target == target:
            return
        native = ", ".join(one.name for one in self.distributions if one.native) or "its own code"
        raise refused(
            "other_target",
            f"{self.name} {self.version} was built for {self.target} and does not run on {target}: "
            f"{native} is native code; build the package there",
            built_for=str(self.target),
            target=str(target),
        )


def decode_manifest(data: bytes) -> Manifest:
    """Return what a package says of itself, checked as far as it can be without its files.

    Raises:
        DsecError: ``invalid``.
    """
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused("bad_manifest", f"its manifest cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise refused(
            "bad_manifest", f"it is of format {manifest.format}; this program reads {FORMAT}"
        )
    validate_name(manifest.name)
    validate_version(manifest.version)
    check_path(manifest.entry)
    if not any(file.path == CODE + manifest.entry for file in manifest.files):
        raise refused("bad_manifest", f"the file that is run, {manifest.entry!r}, is not there")
    return manifest
