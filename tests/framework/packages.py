"""Packages in a test: small projects, whole packages of a few files, and broken ones."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsec.pack.cache import Cache
from dsec.pack.container import entry_of, write_container
from dsec.pack.manifest import CODE, CONTRACT, FORMAT, MANIFEST, SIGNATURE, Manifest, PackedFile
from dsec.pack.signing import SigningKey

CONTRACT_TEXT = 'name: tester\nversion: "1.0"\n'
CODE_TEXT = "print('works')\n"


def write_project(directory: Path, files: Mapping[str, str] | None = None) -> Path:
    """Make a project of a contract, ``agent.py`` and other files; return its directory."""
    everything = {"agent.yaml": CONTRACT_TEXT, "agent.py": CODE_TEXT, **(files or {})}
    for name, text in everything.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory


def cache_in(tmp_path: Path) -> Cache:
    """Return a cache of this test's own."""
    return Cache(tmp_path / "cache")


def package_files() -> dict[str, bytes]:
    """Return the files of a small package, the contract first."""
    return {
        CONTRACT: CONTRACT_TEXT.encode(),
        f"{CODE}agent.py": CODE_TEXT.encode(),
        f"{CODE}words.txt": b"words " * 200,
    }


def manifest_of(files: Mapping[str, bytes], **changes: Any) -> Manifest:
    """Return a manifest that says of each file what is true."""
    described = tuple(
        PackedFile(path=path, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for path, content in files.items()
    )
    said: dict[str, Any] = {
        "format": FORMAT,
        "name": "tester",
        "version": "1.0",
        "entry": "agent.py",
        "python": "3.11",
        "files": described,
    }
    return Manifest(**said | changes)


def package_of(
    files: Mapping[str, bytes] | None = None,
    manifest: bytes | None = None,
    key: SigningKey | None = None,
) -> bytes:
    """Return a package; whatever is given may be wrong, and is taken as it is."""
    contents = package_files() if files is None else files
    written = manifest_of(contents).encode() if manifest is None else manifest
    entries = [entry_of(MANIFEST, written)]
    if key is not None:
        entries.append(entry_of(SIGNATURE, key.sign(written)))
    entries += [entry_of(path, content) for path, content in contents.items()]
    return write_container(entries)


def zipped(comment: bytes) -> bytes:
    """Return a package's files as an archive of Python's own making, with times."""
    contents = package_files()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = comment
        for path, content in ((MANIFEST, manifest_of(contents).encode()), *contents.items()):
            archive.writestr(path, content)
    return file.getvalue()


def write_wheel(
    directory: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    requires: Sequence[str] = (),
) -> Path:
    """Write a wheel that pip takes; return its path."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    everything = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{info}/licenses/LICENSE": "free\n",
    }
    rows = []
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in everything.items():
            archive.writestr(member, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            rows.append(f"{member},sha256={digest.rstrip(b'=').decode()},{len(text.encode())}")
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return path
