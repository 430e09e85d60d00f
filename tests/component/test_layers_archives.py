"""Hostile and odd archives, read as the store reads them."""

from __future__ import annotations

import gzip
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.layers.archives import write_tar
from dsec_sandboxd.layers.limits import ImportLimits, ImportWatch
from dsec_sandboxd.layers.tree import TreeWriter
from layer_builders import (
    Member,
    directory_member,
    file_member,
    link_member,
    look,
    member,
    tar_bytes,
)

LIMITS = ImportLimits(bytes_max=1 << 20, entries_max=100)


class Unpacking:
    """Unpacks archives beside a file and a directory that no archive may touch."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "tree"
        self.root.mkdir()
        self.outside = directory / "outside"
        self.outside.mkdir()
        (self.outside / "secret").write_text("secret")
        self._archive = directory / "archive.tar"
        self._untouched = look(self.outside)
        self.warnings: tuple[str, ...] = ()

    def unpack(self, source: Sequence[Member] | bytes, limits: ImportLimits = LIMITS) -> None:
        data = source if isinstance(source, bytes) else tar_bytes(source)
        self._archive.write_bytes(data)
        with TreeWriter(self.root, limits) as tree:
            write_tar(self._archive, tree, ImportWatch(), limits)
            tree.finish()
            self.warnings = tree.warnings

    def refuse(
        self, source: Sequence[Member] | bytes, code: ErrorCode = ErrorCode.LAYER_ERROR
    ) -> str:
        with pytest.raises(DsecError) as refused:
            self.unpack(source)
        assert refused.value.code is code
        assert not refused.value.retryable
        return refused.value.message

    def check_outside(self) -> None:
        assert look(self.outside) == self._untouched
        assert {path.name for path in self.root.parent.iterdir()} <= {
            "tree",
            "outside",
            "archive.tar",
        }


@pytest.fixture
def unpacking(tmp_path: Path) -> Iterator[Unpacking]:
    result = Unpacking(tmp_path)
    yield result
    result.check_outside()


@pytest.mark.parametrize("name", ["../outside/new", "a/../../outside/new", "..", "a/.."])
def test_a_name_that_climbs_is_refused(unpacking: Unpacking, name: str) -> None:
    assert "'..'" in unpacking.refuse([file_member(name)])


def test_an_absolute_name_is_refused(unpacking: Unpacking) -> None:
    assert "absolute" in unpacking.refuse([file_member(str(unpacking.outside / "new"))])


@pytest.mark.parametrize("target", ["../outside", "/", "{outside}"])
def test_a_file_through_a_symbolic_link_is_refused(unpacking: Unpacking, target: str) -> None:
    link = link_member("a", target.format(outside=unpacking.outside))
    message = unpacking.refuse([link, file_member("a/secret", b"changed")])
    assert "not a directory here" in message
    assert list(unpacking.root.rglob("secret")) == []


def test_a_directory_through_a_symbolic_link_is_refused(unpacking: Unpacking) -> None:
    unpacking.refuse([link_member("a", "../outside"), directory_member("a/new")])


def test_a_link_through_a_symbolic_link_is_refused(unpacking: Unpacking) -> None:
    unpacking.refuse([link_member("a", "../outside"), link_member("a/new", "/etc")])


def test_a_file_in_place_of_a_symbolic_link_leaves_its_target_alone(unpacking: Unpacking) -> None:
    unpacking.unpack([link_member("a", "../outside/secret"), file_member("a", b"mine")])
    assert look(unpacking.root)["a"].content == b"mine"


def test_a_directory_in_place_of_a_symbolic_link_leaves_its_target_alone(
    unpacking: Unpacking,
) -> None:
    unpacking.unpack(
        [link_member("a", "../outside"), directory_member("a", mode=0o700), file_member("a/secret")]
    )
    assert (unpacking.root / "a" / "secret").read_bytes() == b"content"


def test_absolute_and_dangling_symbolic_links_are_content(unpacking: Unpacking) -> None:
    unpacking.unpack(
        [link_member("sh", "/usr/bin/dash"), link_member("up", "../../.."), link_member("x", "y")]
    )
    seen = look(unpacking.root)
    assert [seen[name].content for name in ("sh", "up", "x")] == ["/usr/bin/dash", "../../..", "y"]


@pytest.mark.parametrize("target", ["../outside/secret", "/etc/passwd", "later", "directory", "."])
def test_a_hard_link_to_anything_but_an_earlier_file_is_refused(
    unpacking: Unpacking, target: str
) -> None:
    unpacking.refuse([directory_member("directory"), link_member("a", target, hard=True)])


def test_a_hard_link_through_a_symbolic_link_is_refused(unpacking: Unpacking) -> None:
    unpacking.refuse([link_member("a", "../outside"), link_member("b", "a/secret", hard=True)])


def test_a_hard_link_to_a_symbolic_link_does_not_follow_it(unpacking: Unpacking) -> None:
    unpacking.unpack([link_member("a", "../outside/secret"), link_member("b", "a", hard=True)])
    assert look(unpacking.root)["b"].names == ("a", "b")


def test_a_hard_link_that_replaces_the_directory_of_its_target_is_refused(
    unpacking: Unpacking,
) -> None:
    unpacking.refuse([file_member("a/b"), link_member("a", "a/b", hard=True)])


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE])
def test_a_device_node_is_refused(unpacking: Unpacking, kind: bytes) -> None:
    message = unpacking.refuse([member("dev/null", kind, devmajor=1, devminor=3)])
    assert "device node" in message


def test_an_overlay_whiteout_is_a_device_node_too(unpacking: Unpacking) -> None:
    unpacking.refuse([member("gone", tarfile.CHRTYPE, devmajor=0, devminor=0)])


def test_an_unknown_type_of_member_is_refused(unpacking: Unpacking) -> None:
    data = bytearray(tar_bytes([file_member("a", b"")]))
    data[156:157] = b"Z"
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    assert "unknown type" in unpacking.refuse(bytes(data))


def test_set_id_bits_are_removed_and_the_sticky_bit_stays(unpacking: Unpacking) -> None:
    unpacking.unpack(
        [
            file_member("su", mode=0o4755),
            directory_member("shared", mode=0o2775),
            directory_member("tmp", mode=0o1777),
        ]
    )
    seen = look(unpacking.root)
    assert [seen[name].mode for name in ("su", "shared", "tmp")] == [
        "-rwxr-xr-x",
        "drwxrwxr-x",
        "drwxrwxrwt",
    ]
    assert unpacking.warnings == ("removed set-user-id or set-group-id from 2 files",)


def test_owners_are_kept_as_far_as_a_sandbox_has_ids(unpacking: Unpacking) -> None:
    unpacking.unpack(
        [
            file_member("kept", uid=65535, gid=1000),
            file_member("high", uid=65536, gid=7),
            file_member("negative", uid=-1, gid=-5),
        ]
    )
    seen = look(unpacking.root)
    assert [(seen[name].uid, seen[name].gid) for name in ("kept", "high", "negative")] == [
        (65535, 1000),
        (0, 7),
        (0, 0),
    ]
    assert "2 entries" in unpacking.warnings[0]


def test_extended_attributes_are_not_kept(unpacking: Unpacking) -> None:
    headers = {
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.security.capability": "x",
        "SCHILY.xattr.user.note": "z",
    }
    unpacking.unpack([file_member("a", pax_headers=headers)])
    assert os.listxattr(unpacking.root / "a") == []


def test_the_last_of_members_with_the_same_name_wins(unpacking: Unpacking) -> None:
    unpacking.unpack(
        [
            file_member("a", b"one"),
            file_member("a", b"two"),
            directory_member("b"),
            file_member("b/c"),
            file_member("b", b"a file"),
            file_member("d"),
            directory_member("d"),
        ]
    )
    seen = look(unpacking.root)
    assert seen["a"].content == b"two"
    assert seen["b"].content == b"a file"
    assert seen["d"].mode == "drwxr-xr-x"
    assert set(seen) == {".", "a", "b", "d"}


def test_a_rewritten_file_does_not_reach_its_other_names(unpacking: Unpacking) -> None:
    unpacking.unpack(
        [file_member("a", b"one"), link_member("b", "a", hard=True), file_member("a", b"two")]
    )
    assert look(unpacking.root)["b"].content == b"one"


def test_parents_that_no_member_describes_are_plain_directories(unpacking: Unpacking) -> None:
    unpacking.unpack([file_member("a/b/c")])
    seen = look(unpacking.root)
    assert (seen["a/b"].mode, seen["a/b"].uid, seen["a/b"].mtime_ns) == ("drwxr-xr-x", 0, 0)


def test_directories_keep_their_times_although_content_comes_later(unpacking: Unpacking) -> None:
    unpacking.unpack(
        [
            directory_member("a", mtime=1_000, mode=0o500),
            file_member("a/b", mtime=2_000),
            directory_member(".", mtime=3_000),
        ]
    )
    seen = look(unpacking.root)
    assert [seen[name].mtime_ns // 1_000_000_000 for name in (".", "a", "a/b")] == [
        3_000,
        1_000,
        2_000,
    ]
    assert seen["a"].mode == "dr-x------"


def test_a_named_pipe_is_content_and_is_never_opened(unpacking: Unpacking) -> None:
    unpacking.unpack([member("pipe", tarfile.FIFOTYPE, mode=0o620)])
    assert look(unpacking.root)["pipe"].mode == "prw--w----"


@pytest.mark.parametrize(
    "name", ["n" * 256, "/".join(["d"] * 200), "/".join(["d" * 200] * 20), "a\0b"]
)
def test_a_name_that_linux_or_the_sandbox_cannot_take_is_refused(
    unpacking: Unpacking, name: str
) -> None:
    # In a pax header, the only place where a tar archive can hold a NUL.
    unpacking.refuse([file_member("short", pax_headers={"path": name})])


def test_a_link_target_with_a_nul_is_refused(unpacking: Unpacking) -> None:
    info = member("a", tarfile.SYMTYPE, linkname="b", pax_headers={"linkpath": "b\0c"})
    unpacking.refuse([info])


def test_more_bytes_than_the_limit_are_refused_before_they_are_written(
    unpacking: Unpacking,
) -> None:
    bomb = gzip.compress(tar_bytes([file_member("zeros", bytes(8 << 20))]))
    assert len(bomb) < 20_000
    message = unpacking.refuse(bomb, ErrorCode.EXHAUSTED)
    assert "1048576 bytes" in message
    assert sum(path.lstat().st_size for path in unpacking.root.iterdir()) <= LIMITS.bytes_max


def test_rewriting_one_file_counts_every_time(unpacking: Unpacking) -> None:
    unpacking.refuse([file_member("a", bytes(300_000))] * 4, ErrorCode.EXHAUSTED)


def test_more_entries_than_the_limit_are_refused(unpacking: Unpacking) -> None:
    members = [file_member(f"f{number}", b"") for number in range(101)]
    assert "100 entries" in unpacking.refuse(members, ErrorCode.EXHAUSTED)


def test_directories_that_no_member_describes_count_as_entries(unpacking: Unpacking) -> None:
    members = [file_member(f"d{number}/f", b"") for number in range(51)]
    unpacking.refuse(members, ErrorCode.EXHAUSTED)


def test_a_huge_extended_header_is_refused_before_it_is_read(unpacking: Unpacking) -> None:
    header = member("pax", tarfile.XHDTYPE)
    header.size = 4 << 30
    data = header.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 16)
    assert "headers" in unpacking.refuse(data)


def test_a_sparse_file_is_bounded_by_what_it_unpacks_to(unpacking: Unpacking) -> None:
    headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "holes",
        "GNU.sparse.realsize": str(1 << 40),
    }
    data = b"1\n0\n1\n".ljust(512, b"\0") + b"x"
    unpacking.refuse([file_member("holes", data, pax_headers=headers)], ErrorCode.EXHAUSTED)


@pytest.mark.parametrize("compression", ["", "gz"])
def test_a_cut_off_archive_is_refused(unpacking: Unpacking, compression: str) -> None:
    members = [file_member(f"f{number}", os.urandom(2000)) for number in range(10)]
    data = tar_bytes(members, compression)
    end = len(data) if compression else data.rstrip(b"\0").__len__()
    for length in range(600, end, 1777):
        message = unpacking.refuse(data[:length])
        assert "cut off" in message or "sound" in message or "damaged" in message


def test_a_damaged_header_in_the_middle_is_not_taken_for_the_end(unpacking: Unpacking) -> None:
    data = bytearray(tar_bytes([file_member("a"), file_member("b"), file_member("c")]))
    data[1024 + 10] ^= 0xFF
    unpacking.refuse(bytes(data))


def test_a_damaged_gzip_checksum_is_refused(unpacking: Unpacking) -> None:
    data = bytearray(gzip.compress(tar_bytes([file_member("a")])))
    data[-8] ^= 0xFF
    assert "damaged" in unpacking.refuse(bytes(data))


@pytest.mark.parametrize("data", [b"", b"not a tar archive", bytes(range(256)) * 8])
def test_another_kind_of_file_is_refused(unpacking: Unpacking, data: bytes) -> None:
    unpacking.refuse(data)


def test_an_unknown_compression_names_the_known_ones(unpacking: Unpacking) -> None:
    data = tar_bytes([file_member("a")], "xz")
    assert "gzip or zstd" in unpacking.refuse(data, ErrorCode.UNSUPPORTED)


def test_zstd_archives_are_read(unpacking: Unpacking) -> None:
    data = tar_bytes([file_member("a", bytes(500_000))])
    packed = subprocess.run(["zstd", "-cq"], input=data, capture_output=True, check=True).stdout
    unpacking.unpack(packed)
    assert (unpacking.root / "a").stat().st_size == 500_000
    unpacking.refuse(packed[:-20])


def test_a_zstd_bomb_ends_the_program_that_unpacks_it(unpacking: Unpacking) -> None:
    data = tar_bytes([file_member("a", bytes(64 << 20))])
    packed = subprocess.run(["zstd", "-cq"], input=data, capture_output=True, check=True).stdout
    unpacking.refuse(packed, ErrorCode.EXHAUSTED)


def test_an_empty_archive_is_an_empty_tree(unpacking: Unpacking) -> None:
    unpacking.unpack([])
    assert set(look(unpacking.root)) == {"."}


def test_names_that_are_not_utf_8_are_kept_byte_for_byte(unpacking: Unpacking) -> None:
    raw = b"caf\xe9\n\x01"
    info = tarfile.TarInfo(raw.decode("utf-8", "surrogateescape"))
    data = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + bytes(1024)
    unpacking.unpack(data)
    assert os.listdir(os.fsencode(unpacking.root)) == [raw]  # noqa: PTH208  bytes


def test_an_odd_modification_time_becomes_one_that_file_systems_hold(unpacking: Unpacking) -> None:
    times = {"old": "-5", "new": "1e300", "nan": "nan", "exact": "1700000000.25"}
    unpacking.unpack(
        [file_member(name, pax_headers={"mtime": value}) for name, value in times.items()]
    )
    seen = look(unpacking.root)
    assert seen["old"].mtime_ns == seen["nan"].mtime_ns == 0
    assert seen["new"].mtime_ns == (1 << 33) * 1_000_000_000
    assert seen["exact"].mtime_ns == 1_700_000_000_250_000_000


def test_every_file_is_closed_to_others_while_it_is_written(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()

    def watching() -> Iterator[bytes]:
        assert stat.S_IMODE((root / "a").stat().st_mode) == 0o600
        yield b"x"

    with TreeWriter(root, LIMITS) as tree:
        from dsec_sandboxd.layers.tree import Attributes  # noqa: PLC0415  beside its only use

        tree.add_file(("a",), Attributes(mode=0o644, uid=0, gid=0, mtime_ns=0), watching())
