"""A package comes from somebody else: what is wrong with one is told, and nothing is written."""

from __future__ import annotations

import stat
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dsec.cli.pack import app
from dsec.pack import registering
from dsec.pack.container import (
    ENTRIES_MAX,
    UNPACKED_MAX_BYTES,
    Entry,
    deflated,
    entry_of,
    write_container,
)
from dsec.pack.manifest import CODE, CONTRACT, MANIFEST, SIGNATURE
from dsec.pack.package import read_package
from dsec.pack.signing import SigningKey, write_new_key
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.agent import PACKAGE_MAX_BYTES
from packages import manifest_of, package_files, package_of, zipped

GOOD = package_of()


def _named(path: str) -> bytes:
    return package_of({**package_files(), path: b"x"})


def _last_with(offset: int, value: bytes) -> bytes:
    """Return the package with something else in the index's header of its last file."""
    return _patched(GOOD, GOOD.rindex(b"PK\x01\x02") + offset, value)


def _mode(mode: int) -> bytes:
    return _last_with(38, (mode << 16).to_bytes(4, "little"))


def _lying_size(size: int) -> bytes:
    """Return a package one file of which says that it has another size than it unpacks to."""
    content = b"0" * 100_000
    files = {**package_files(), f"{CODE}zeros": content}
    manifest = manifest_of(files)
    said = tuple(
        msgspec.structs.replace(it, size_bytes=size) if it.path.endswith("zeros") else it
        for it in manifest.files
    )
    entries = [entry_of(MANIFEST, msgspec.structs.replace(manifest, files=said).encode())]
    for path, data in files.items():
        entry = entry_of(path, data)
        if path.endswith("zeros"):
            entry = Entry(path, entry.body, size, entry.checksum, deflated=True)
        entries.append(entry)
    return write_container(entries)


def _huge(count: int, size: int) -> bytes:
    """Return a package of files that say that they have ``size`` bytes each."""
    body = deflated(b"0" * 1000)
    entries = [Entry(f"{CODE}{n}", body, size, 0, deflated=True) for n in range(count)]
    return write_container([entry_of(MANIFEST, manifest_of(package_files()).encode()), *entries])


def _patched(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def _nested() -> bytes:
    """Return an archive with two names for the bytes of one entry, as the best bombs are made."""
    count, size, at = struct.unpack("<HII", GOOD[-12:-2])
    index = GOOD[at : at + size]
    last = index[index.rindex(b"PK\x01\x02") :]
    whole = GOOD[:at] + index + last.replace(b"words.txt", b"wordz.txt")
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count + 1, count + 1, size + len(last), at, 0)
    return whole + end


def _signed_otherwise() -> bytes:
    key = SigningKey(_SEED)
    manifest = manifest_of(package_files())
    changed = msgspec.structs.replace(manifest, version="9.9").encode()
    entries = [entry_of(MANIFEST, changed), entry_of(SIGNATURE, key.sign(manifest.encode()))]
    return write_container([*entries, *(entry_of(*it) for it in package_files().items())])


def _signed_by_nobody(signature: bytes) -> bytes:
    manifest = manifest_of(package_files()).encode()
    entries = [entry_of(MANIFEST, manifest), entry_of(SIGNATURE, signature)]
    return write_container([*entries, *(entry_of(*it) for it in package_files().items())])


_SEED = "SUAAAAICAMCAKBQHBAEQUCYMBUHA6EARCIJRIFIWC4MBSGQ3DQOR4H776Y"
_WRONG_HASH = manifest_of(package_files() | {f"{CODE}words.txt": b"wordy " * 200}).encode()

HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "not_a_package"),
    "text": (lambda: b"hello " * 20, "not_a_package"),
    "a script before it": (lambda: b"#!/bin/sh\n" + GOOD, "not_a_package"),
    "bytes after it": (lambda: GOOD + b"x", "trailing_bytes"),
    "another archive after it": (lambda: GOOD + GOOD, "damaged"),
    "a comment": (lambda: zipped(b"hi"), "trailing_bytes"),
    "its end cut off": (lambda: GOOD[:-5], "trailing_bytes"),
    "a link": (lambda: _mode(stat.S_IFLNK | 0o777), "unusual"),
    "a device": (lambda: _mode(stat.S_IFCHR | 0o666), "unusual"),
    "a pipe": (lambda: _mode(stat.S_IFIFO | 0o666), "unusual"),
    "a directory": (lambda: _mode(stat.S_IFDIR | 0o755), "unusual"),
    "a directory's name": (lambda: _named("app/d/"), "bad_path"),
    "setuid": (lambda: _mode(stat.S_IFREG | 0o4755), "unusual"),
    "a time": (lambda: _last_with(12, b"\x01"), "unusual"),
    "encryption": (lambda: _last_with(8, b"\x01"), "unusual"),
    "another way to pack": (lambda: _last_with(10, b"\x0e"), "unusual"),
    "an extra field": (lambda: _last_with(30, b"\x04"), "unusual"),
    "another place": (lambda: _last_with(42, b"\x01"), "unusual"),
    "two names": (lambda: GOOD.replace(b"words.txt", b"wordz.txt", 1), "unusual"),
    "an archive of another program": (lambda: zipped(b""), "unusual"),
    "an absolute path": (lambda: _named("/etc/cron.d/x"), "bad_path"),
    "a path that leads out": (lambda: _named("app/../../x"), "bad_path"),
    "a path with a dot": (lambda: _named("app/./x"), "bad_path"),
    "an empty name": (lambda: _named("app//x"), "bad_path"),
    "a backslash": (lambda: _named("app\\..\\x"), "bad_path"),
    "a line feed": (lambda: _named("app/x\ny"), "bad_path"),
    "a null": (lambda: _named("app/x\0y"), "bad_path"),
    "a long name": (lambda: _named("app/" + "x" * 256), "bad_path"),
    "a deep path": (lambda: _named("app/" + "x/" * 64 + "x"), "bad_path"),
    "a whiteout": (lambda: _named("app/.wh.agent.py"), "bad_path"),
    "a file elsewhere": (lambda: _named("etc/x"), "bad_path"),
    "a name twice": (
        lambda: write_container(
            [
                entry_of(MANIFEST, manifest_of(package_files()).encode()),
                *(entry_of(*it) for it in (*package_files().items(), *package_files().items())),
            ]
        ),
        "duplicate",
    ),
    "a file that is a directory": (lambda: _named(f"{CODE}words.txt/x"), "duplicate"),
    "one entry within another": (_nested, "damaged"),
    "a file that is larger than it says": (lambda: _lying_size(1000), "bomb"),
    "a file that is smaller than it says": (lambda: _lying_size(200_000), "damaged"),
    "a bomb": (lambda: _huge(1, UNPACKED_MAX_BYTES), "bomb"),
    "a bomb of many": (lambda: _huge(64, UNPACKED_MAX_BYTES // 64), "bomb"),
    "too many files": (lambda: _huge(ENTRIES_MAX + 1, 1), "bomb"),
    "too large": (lambda: GOOD + b"\0" * PACKAGE_MAX_BYTES, "too_large"),
    "a large manifest": (lambda: package_of(manifest=b" " * 9_000_000), "bomb"),
    "no manifest": (
        lambda: write_container([entry_of(*it) for it in package_files().items()]),
        "not_a_package",
    ),
    "no JSON": (lambda: package_of(manifest=b"{"), "bad_manifest"),
    "deep JSON": (lambda: package_of(manifest=b"[" * 100_000), "bad_manifest"),
    "an unknown field": (lambda: package_of(manifest=b'{"format":1,"x":2}'), "bad_manifest"),
    "a later format": (
        lambda: package_of(manifest=manifest_of(package_files(), format=2).encode()),
        "bad_manifest",
    ),
    "an entry that is not there": (
        lambda: package_of(manifest=manifest_of(package_files(), entry="other.py").encode()),
        "bad_manifest",
    ),
    "an entry that leads out": (
        lambda: package_of(manifest=manifest_of(package_files(), entry="../x.py").encode()),
        "bad_path",
    ),
    "a file that is not named": (
        lambda: package_of(
            {**package_files(), "app/x": b"x"}, manifest_of(package_files()).encode()
        ),
        "bad_manifest",
    ),
    "a file that is missing": (
        lambda: package_of(manifest=manifest_of({**package_files(), "app/x": b"x"}).encode()),
        "bad_manifest",
    ),
    "a wrong hash": (lambda: package_of(manifest=_WRONG_HASH), "wrong_hash"),
    "a signature of another manifest": (_signed_otherwise, "bad_signature"),
    "a signature that is none": (lambda: _signed_by_nobody(b"{}"), "bad_signature"),
    "a signature of no key": (
        lambda: _signed_by_nobody(b'{"public_key":"U","signature":""}'),
        "bad_key",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_package_is_refused_with_a_reason_and_nothing_is_written(
    what: str, tmp_path: Path
) -> None:
    make, reason = HOSTILE[what]
    data = make()
    with pytest.raises(DsecError) as refused:
        read_package(data)
    assert refused.value.code in {ErrorCode.INVALID, ErrorCode.DENIED}
    assert refused.value.details["reason"] == reason, refused.value
    (tmp_path / "x.dsec").write_bytes(data)
    done = CliRunner().invoke(app, ["unpack", str(tmp_path / "x.dsec"), str(tmp_path / "a" / "b")])
    assert done.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.dsec"]


def test_the_same_made_well_is_taken() -> None:
    package = read_package(GOOD)
    assert {file.path: content for file, content in package.contents()} == {
        MANIFEST: manifest_of(package_files()).encode(),
        **package_files(),
    }


def test_sizes_are_added_up_before_anything_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was unpacked")

    monkeypatch.setattr(zlib, "decompressobj", never)
    with pytest.raises(DsecError, match="when unpacked"):
        read_package(_huge(1, UNPACKED_MAX_BYTES))


def test_a_signature_that_is_demanded_has_to_be_there_and_of_that_key(tmp_path: Path) -> None:
    key, other = write_new_key(tmp_path / "key"), write_new_key(tmp_path / "other")
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    signed = package_of(key=SigningKey.read(tmp_path / "key"))
    assert read_package(signed, key.public_key).signed_by == key.public_key
    assert read_package(signed).signed_by == key.public_key
    for data, public_key, reason in (
        (signed, other.public_key, "other_signer"),
        (package_of(), key.public_key, "unsigned"),
    ):
        with pytest.raises(DsecError) as denied:
            read_package(data, public_key)
        assert denied.value.code is ErrorCode.DENIED
        assert denied.value.details["reason"] == reason
    with pytest.raises(DsecError, match="File exists"):
        write_new_key(tmp_path / "key")


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, len(GOOD) - 1), bit=st.integers(0, 7))
def test_a_package_with_one_bit_changed_is_refused_or_means_the_same(at: int, bit: int) -> None:
    changed = _patched(GOOD, at, bytes([GOOD[at] ^ (1 << bit)]))
    _refused_or(changed, GOOD)


@settings(max_examples=80, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(GOOD)), st.integers(0, 40), st.binary(max_size=40)),
        min_size=1,
        max_size=4,
    )
)
def test_a_package_that_was_cut_and_glued_is_refused_or_means_the_same(
    edits: list[tuple[int, int, bytes]],
) -> None:
    changed = GOOD
    for at, cut, put in edits:
        changed = changed[:at] + put + changed[at + cut :]
    _refused_or(changed, GOOD)


NAMES = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["agent.yaml", MANIFEST, SIGNATURE, "app/agent.py", "app/../x", "/x"]),
)


@settings(max_examples=80, deadline=None)
@given(
    members=st.lists(
        st.tuples(NAMES, st.binary(max_size=60), st.integers(0, 200), st.booleans(), st.booleans()),
        max_size=6,
    )
)
def test_a_container_of_anything_gives_nothing_but_typed_errors(
    members: list[tuple[str, bytes, int, bool, bool]],
) -> None:
    entries = []
    for name, body, size, is_deflated, executable in members:
        try:
            name.encode()
        except UnicodeEncodeError:
            continue
        entries.append(Entry(name, body, size, zlib.crc32(body), is_deflated, executable))
    _refused_or(write_container(entries), None)


def _refused_or(data: bytes, same: bytes | None) -> None:
    try:
        package = read_package(data)
    except DsecError:
        return
    assert same is not None
    assert list(package.contents()) == list(read_package(same).contents())


@pytest.mark.parametrize(
    ("contract", "said"),
    [
        (b"name: other\nversion: '1.0'\n", "its contract of other 1.0"),
        (b"name: tester\nversion: '1.1'\n", "its contract of tester 1.1"),
        (b"name: tester\nverzion: '1.0'\n", "verzion"),
        (b"\xff", "is no text"),
    ],
)
def test_a_package_whose_contract_is_anothers_is_not_registered(
    contract: bytes, said: str, tmp_path: Path
) -> None:
    package = read_package(package_of(package_files() | {CONTRACT: contract}))
    with pytest.raises(DsecError, match=said) as refused:
        registering._contract_in(package, tmp_path / "x.dsec")
    assert refused.value.code is ErrorCode.INVALID
