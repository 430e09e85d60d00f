"""Reading a package: all of it is checked before anything of it is used.

A package comes from somebody else. :func:`read_package` looks at everything that it could be wrong
in, in memory, and returns plain files or raises; :meth:`Package.unpack` writes them to a directory
that is not there before and not there when it fails.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.pack.container import Entry, read_container
from dsec.pack.errors import refused, untrusted
from dsec.pack.manifest import (
    CODE,
    CONTRACT,
    LIBRARIES,
    MANIFEST,
    SIGNATURE,
    Manifest,
    PackedFile,
    decode_manifest,
)
from dsec.pack.signing import check_signature
from dsec_common.errors import invalid, not_found
from dsec_common.wire.agent import PACKAGE_MAX_BYTES

_MANIFEST_MAX_BYTES: Final = 8 * 1024 * 1024
_SIGNATURE_MAX_BYTES: Final = 1024
_BEGIN: Final = b"PK\x03\x04"
_NAME_AT: Final = 30


@dataclass(frozen=True, slots=True)
class Package:
    """A package that was checked: every file has the content that the manifest says.

    Attributes:
        signed_by: the public key of who signed it; empty when nobody did.
        size_bytes: packed.
        sha256: of the packed bytes.
    """

    manifest: Manifest
    signed_by: str
    size_bytes: int
    sha256: str
    _entries: tuple[Entry, ...]

    def contents(self) -> Iterator[tuple[PackedFile, bytes]]:
        """Yield each file and its content, the manifest first, the signature not at all."""
        said = {file.path: file for file in self.manifest.files}
        for entry in self._entries:
            if entry.name == SIGNATURE:
                continue
            content = entry.content()
            yield (
                said.get(entry.name)
                or PackedFile(
                    path=entry.name,
                    size_bytes=len(content),
                    sha256=hashlib.sha256(content).hexdigest(),
                ),
                content,
            )

    @property
    def contract(self) -> bytes:
        """The contract, as its author wrote it."""
        (entry,) = (entry for entry in self._entries if entry.name == CONTRACT)
        return entry.content()

    def check_signer(self, public_key: str) -> None:
        """Return when the owner of this key signed the package; an empty one demands nothing.

        Raises:
            DsecError: ``denied``.
        """
        if public_key and not self.signed_by:
            raise untrusted("unsigned", "the package is not signed, and a signature is demanded")
        if public_key and public_key != self.signed_by:
            raise untrusted(
                "other_signer",
                f"the package is signed by {self.signed_by}, not by {public_key}",
            )

    def unpack(self, directory: Path, programs: Mapping[str, bytes] | None = None) -> None:
        """Write all files below a new directory, which appears whole or not at all.

        Args:
            directory: its parents are made.
            programs: what else belongs there, by name, to be run.

        Raises:
            DsecError: ``invalid`` when the directory is there, or cannot be written.
        """
        if directory.exists():
            raise invalid(f"{directory} is there already; name a new directory")
        try:
            parent = directory.parent
            parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=parent))
            try:
                for file, content in self.contents():
                    _put(scratch / file.path, content, executable=file.executable)
                for name, content in (programs or {}).items():
                    _put(scratch / name, content, executable=True)
                scratch.chmod(0o755)
                scratch.rename(directory)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
        except OSError as error:
            raise invalid(f"{directory} cannot be written: {error.strerror}") from None


def _put(path: Path, content: bytes, *, executable: bool) -> None:
    _make_directory(path.parent)
    path.write_bytes(content)
    path.chmod(0o755 if executable else 0o644)


def _make_directory(path: Path) -> None:
    """Make it and those above it, open to all: whoever unpacks need not be who runs it."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir()
        path.chmod(0o755)


def is_package(path: Path) -> bool:
    """Return whether a file is meant as a package: it has the name or the beginning of one."""
    if path.suffix == ".dsec":
        return not path.is_dir()
    try:
        with path.open("rb") as file:
            begin = file.read(_NAME_AT + len(MANIFEST))
    except OSError:
        return False
    return begin.startswith(_BEGIN) and begin.endswith(MANIFEST.encode())


def read_package_file(path: Path, public_key: str = "") -> Package:
    """Return the package in a file; see :func:`read_package`.

    Raises:
        DsecError: as there; ``not_found``, and ``invalid`` when the file cannot be read.
    """
    return read_package(package_bytes(path), public_key)


def package_bytes(path: Path) -> bytes:
    """Return the bytes of a package's file, as far as one may be long, and one more.

    Raises:
        DsecError: ``not_found``; ``invalid`` when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(PACKAGE_MAX_BYTES + 1)
    except FileNotFoundError:
        raise not_found(f"there is no package at {path}") from None
    except OSError as error:
        raise invalid(f"the package {path} cannot be read: {error.strerror}") from None


def read_package(data: bytes, public_key: str = "") -> Package:
    """Return a package, every byte of it checked.

    Args:
        data: all of it.
        public_key: whose signature is demanded; empty: none, but one that is there has to be right.

    Raises:
        DsecError: ``invalid`` with a ``reason`` in its details (``not_a_package``, ``too_large``,
            ``bomb``, ``bad_path``, ``duplicate``, ``unusual``, ``trailing_bytes``, ``damaged``,
            ``wrong_hash``, ``bad_manifest``, ``bad_signature``); ``denied`` (``unsigned``,
            ``other_signer``, ``bad_signature``).
    """
    entries = read_container(data, max_bytes=PACKAGE_MAX_BYTES)
    if not entries or entries[0].name != MANIFEST:
        raise refused("not_a_package", f"it is no package: its first entry is not {MANIFEST}")
    written = _bounded(entries[0], _MANIFEST_MAX_BYTES)
    manifest = decode_manifest(written)
    signed_by = ""
    files = entries[1:]
    if files and files[0].name == SIGNATURE:
        signed_by = check_signature(written, _bounded(files[0], _SIGNATURE_MAX_BYTES))
        files = files[1:]
    _check_files(manifest, files)
    package = Package(
        manifest=manifest,
        signed_by=signed_by,
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        _entries=entries,
    )
    package.check_signer(public_key)
    return package


def _bounded(entry: Entry, max_bytes: int) -> bytes:
    if entry.size_bytes > max_bytes:
        raise refused("bomb", f"{entry.name} has {entry.size_bytes} bytes: at most {max_bytes}")
    return entry.content()


def _check_files(manifest: Manifest, entries: tuple[Entry, ...]) -> None:
    """Refuse files that are there and not named, named and not there, or not as they are named."""
    if [entry.name for entry in entries] != [file.path for file in manifest.files]:
        raise refused("bad_manifest", "the files that are there are not those that it names")
    if manifest.files[0].path != CONTRACT:
        raise refused("bad_manifest", f"it has no {CONTRACT}")
    for file, entry in zip(manifest.files, entries, strict=True):
        if file.path != CONTRACT and not file.path.startswith((CODE, LIBRARIES)):
            raise refused("bad_path", f"{file.path!r} is neither below {CODE} nor {LIBRARIES}")
        if file.size_bytes != entry.size_bytes or file.executable != entry.executable:
            raise refused("bad_manifest", f"{file.path} is not as the manifest says")
        if hashlib.sha256(entry.content()).hexdigest() != file.sha256:
            raise refused("wrong_hash", f"{file.path} is not what the manifest says: another hash")
