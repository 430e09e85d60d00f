"""Write a tree of files with holes as an EROFS image; a program of its own, with no other module.

    python -I -S sparse_image.py TREE IMAGE BUILD_TIME UUID

mkfs.erofs reads through every hole and writes it out as zeros, so it takes as long as the files
say they are. This takes as long as what is in them: a hole is an entry in a file's table of chunks
that leads nowhere, so the kernel tells holes as such, and a copy-up by overlayfs leaves them out.

A file with holes is cut into chunks of 2^n blocks, and each chunk is in the image whole or not at
all. Small chunks make a long table, large ones hold blocks of zeros; the size is chosen for each
file. Blocks of zeros are holes in the image's file.

Everything is written once and in the order of the walk, metadata between data: whatever the tree
is, memory is taken for one directory's names, one file's extents and files with several names.

The layout is the kernel's: fs/erofs/erofs_fs.h. Attributes stand beside their inode; nothing is
compressed or shared.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import struct
import sys
import uuid
from array import array
from collections.abc import Iterator

BLOCK = 4096
_BLOCK_BITS = 12
_MAGIC = 0xE0F5E1E2
_HAS_CHUNKED_FILES = 0x4
_HAS_MTIMES = 0x2
#: magic, checksum, compatible features, block bits, slots, root, inodes, time, ns, blocks, where
#: inodes begin, where shared attributes do, UUID, name, incompatible features, and nothing.
_SUPERBLOCK = struct.Struct("<IIIBBHQQIIII16s16sI44x")
_SUPERBLOCK_AT = 1024
#: format, attributes, mode, -, size, where, number, user, group, time, ns, links, and nothing.
_INODE = struct.Struct("<HHHHQIIIIQII16x")
_INODE_SLOT = 32
_PLAIN = 1 | 0 << 1
_CHUNKED = 1 | 4 << 1
_ENTRY = struct.Struct("<QHBx")
_ATTRIBUTES_HEADER = struct.Struct("<IB7x")
_ATTRIBUTE = struct.Struct("<BBH")
_PREFIXES = (
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"user.", 1),
    (b"trusted.", 4),
    (b"security.", 6),
)
_TYPES = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
_NOWHERE = 0xFFFFFFFF
#: Inodes are put into runs of so many bytes, between the data.
_RUN = 64 * 1024
#: Fewer bytes of holes are not worth a table.
_HOLES_MIN = 64 * 1024
_TABLE_ENTRY = 4
_TABLE_MAX = 64 * 1024 * 1024
_CHUNK_BITS_MAX = _BLOCK_BITS + 31
#: A byte of a table is on the disk, a byte of a chunk that is a hole is not.
_TABLE_WEIGHT = 16

Extent = tuple[int, int]
"""Where data begins and ends."""


class Image:
    """An image that is being written, from its beginning to its end."""

    def __init__(self, descriptor: int, limit_bytes: int) -> None:
        self._descriptor = descriptor
        self._blocks_max = min(limit_bytes // BLOCK, _NOWHERE - 1)
        self._blocks = 1
        self._free = self._free_end = 0
        self.inodes = 0

    def take_blocks(self, size: int) -> int:
        """Return the first of blocks for ``size`` bytes."""
        first = self._blocks
        self._blocks += _blocks_of(size)
        if self._blocks > self._blocks_max:
            raise OSError(errno.EFBIG, "the image is too large")
        return first

    def take_inode(self, size: int) -> int:
        """Return the number of an inode that takes ``size`` bytes with what follows it."""
        # None lies across the end of a block.
        size = -(-size // 64) * 64
        if self._free + size > self._free_end:
            room = max(size, _RUN)
            self._free = self.take_blocks(room) * BLOCK
            self._free_end = self._free + -(-room // BLOCK) * BLOCK
        number = self._free // _INODE_SLOT
        self._free += size
        self.inodes += 1
        return number

    def write(self, data: bytes, at: int) -> None:
        """Write bytes at an offset."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self._descriptor, view, at)
            view, at = view[done:], at + done

    def copy(self, source: int, begin: int, end: int, at: int) -> None:
        """Write a part of a file at an offset."""
        os.lseek(self._descriptor, at, os.SEEK_SET)
        while begin < end:
            done = os.sendfile(self._descriptor, source, begin, min(end - begin, 1 << 30))
            if done == 0:
                return  # shorter than it was said to be
            begin += done

    def finish(self, root: int, build_time: int, identity: bytes) -> None:
        """Write the superblock; the image is whole."""
        os.ftruncate(self._descriptor, self._blocks * BLOCK)
        self.write(
            _SUPERBLOCK.pack(
                _MAGIC,
                0,
                _HAS_MTIMES,
                _BLOCK_BITS,
                0,
                root,
                self.inodes,
                build_time,
                0,
                self._blocks,
                0,
                0,
                identity,
                b"",
                _HAS_CHUNKED_FILES,
            ),
            _SUPERBLOCK_AT,
        )


class Directory:
    """A directory that is being looked through."""

    def __init__(self, path: bytes, status: os.stat_result, inode: Inode, parent: int) -> None:
        self.path = path
        self.status = status
        self.inode = inode
        self.links = 2
        self.entries = [(b".", inode.number, 2), (b"..", parent or inode.number, 2)]
        with os.scandir(path) as found:
            self.names = sorted((entry.name for entry in found), reverse=True)

    def data(self) -> bytes:
        """Return its blocks: entries in the order of their names, which stand behind them."""
        blocks: list[bytes] = []
        heads: list[tuple[int, int]] = []
        names: list[bytes] = []
        size = 0
        for name, number, kind in sorted(self.entries):
            if size + _ENTRY.size + len(name) > BLOCK:
                blocks.append(_directory_block(heads, names).ljust(BLOCK, b"\0"))
                heads, names, size = [], [], 0
            heads.append((number, kind))
            names.append(name)
            size += _ENTRY.size + len(name)
        return b"".join([*blocks, _directory_block(heads, names)])


class Inode:
    """One inode with its attributes and, for a file with holes, the place for its table."""

    def __init__(self, image: Image, path: bytes, status: os.stat_result, table: int = 0) -> None:
        self._image = image
        self._status = status
        self._attributes = _attributes(path)
        size = _INODE.size + len(self._attributes)
        self.number = image.take_inode(size + table)

    def write(
        self, *, size: int, where: int, links: int = 0, layout: int = _PLAIN, table: bytes = b""
    ) -> None:
        """Write it, once all of it is known."""
        status, attributes = self._status, self._attributes
        count = (len(attributes) - _ATTRIBUTES_HEADER.size) // 4 + 1 if attributes else 0
        seconds, nanoseconds = divmod(status.st_mtime_ns, 1_000_000_000)
        head = _INODE.pack(
            layout,
            count,
            status.st_mode,
            0,
            size,
            where,
            self.number & 0xFFFFFFFF,
            status.st_uid,
            status.st_gid,
            seconds & 0xFFFFFFFFFFFFFFFF,
            nanoseconds,
            links or status.st_nlink,
        )
        self._image.write(head + attributes + table, self.number * _INODE_SLOT)


class Packer:
    """Puts one tree, the working directory, into an image."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._linked: dict[int, list[int]] = {}
        """By the file's number: that of its inode, and how many names are to come."""

    def pack(self) -> int:
        """Write everything but the superblock; return the root's inode."""
        open_ = [self._enter(b".", 0)]
        root = open_[0].inode.number
        while open_:
            directory = open_[-1]
            if not directory.names:
                self._leave(open_.pop())
                continue
            name = directory.names.pop()
            path = name if directory.path == b"." else directory.path + b"/" + name
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                inside = self._enter(path, directory.inode.number)
                open_.append(inside)
                directory.links += 1
                number = inside.inode.number
            else:
                number = self._put(path, status)
            directory.entries.append((name, number, _TYPES[stat.S_IFMT(status.st_mode)]))
        return root

    def _enter(self, path: bytes, parent: int) -> Directory:
        status = os.lstat(path)
        return Directory(path, status, Inode(self._image, path, status), parent)

    def _leave(self, directory: Directory) -> None:
        data = directory.data()
        first = self._image.take_blocks(len(data))
        self._image.write(data, first * BLOCK)
        directory.inode.write(size=len(data), where=first, links=directory.links)

    def _put(self, path: bytes, status: os.stat_result) -> int:
        known = self._linked.get(status.st_ino)
        if known is None:
            number = self._put_new(path, status)
            if status.st_nlink > 1 and not _is_whiteout(status):
                self._linked[status.st_ino] = [number, status.st_nlink - 1]
            return number
        known[1] -= 1
        if not known[1]:
            del self._linked[status.st_ino]
        return known[0]

    def _put_new(self, path: bytes, status: os.stat_result) -> int:
        if stat.S_ISREG(status.st_mode):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return self._put_file(path, status, descriptor)
            finally:
                os.close(descriptor)
        links = 1 if _is_whiteout(status) else status.st_nlink  # overlayfs shares one of them
        inode = Inode(self._image, path, status)
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(path)  # noqa: PTH115  names are bytes here
            first = self._image.take_blocks(len(target))
            self._image.write(target, first * BLOCK)
            inode.write(size=len(target), where=first)
        else:
            inode.write(size=0, where=_device(status), links=links)
        return inode.number

    def _put_file(self, path: bytes, status: os.stat_result, source: int) -> int:
        size = status.st_size
        extents = list(_extents(source, size))
        if size - sum(end - begin for begin, end in extents) >= _HOLES_MIN:
            return self._put_chunks(path, status, source, extents)
        inode = Inode(self._image, path, status)
        first = self._image.take_blocks(size)
        for begin, end in extents:
            self._image.copy(source, begin, end, first * BLOCK + begin)
        inode.write(size=size, where=first)
        return inode.number

    def _put_chunks(
        self, path: bytes, status: os.stat_result, source: int, extents: list[Extent]
    ) -> int:
        image, size = self._image, status.st_size
        bits = chunk_bits(size, extents)
        table = array("I", [_NOWHERE]) * (((size - 1) >> bits) + 1)
        inode = Inode(image, path, status, len(table) * _TABLE_ENTRY)
        for extent_begin, end in extents:
            begin = extent_begin
            while begin < end:
                chunk = begin >> bits
                if table[chunk] == _NOWHERE:
                    table[chunk] = image.take_blocks(min(1 << bits, size - (chunk << bits)))
                part_end = min(end, (chunk + 1) << bits)
                image.copy(source, begin, part_end, table[chunk] * BLOCK + begin - (chunk << bits))
                begin = part_end
        if sys.byteorder == "big":
            table.byteswap()
        inode.write(size=size, where=bits - _BLOCK_BITS, layout=_CHUNKED, table=table.tobytes())
        return inode.number


def chunk_bits(size: int, extents: list[Extent]) -> int:
    """Return the binary logarithm of the chunk size that makes the least of a file with holes.

    Raises:
        OSError: ``EFBIG`` when its table would be too long whatever the size.
    """
    best, best_cost = 0, 0
    for bits in range(_BLOCK_BITS, _CHUNK_BITS_MAX + 1):
        table = (((size - 1) >> bits) + 1) * _TABLE_ENTRY
        if table > _TABLE_MAX:
            continue
        cost = _TABLE_WEIGHT * table + (_chunks(extents, bits) << bits)
        if not best or cost < best_cost:
            best, best_cost = bits, cost
        if table == _TABLE_ENTRY:
            break
    if not best:
        raise OSError(errno.EFBIG, "a file is too large")
    return best


def _chunks(extents: list[Extent], bits: int) -> int:
    """Return how many chunks have data."""
    count, last = 0, -1
    for begin, end in extents:
        first, final = begin >> bits, (end - 1) >> bits
        count += final - max(first, last + 1) + 1
        last = final
    return count


def _extents(source: int, size: int) -> Iterator[Extent]:
    at = 0
    while at < size:
        try:
            begin = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = min(os.lseek(source, begin, os.SEEK_HOLE), size)
        yield begin, at


def _attributes(path: bytes) -> bytes:
    """Return a file's attributes as they stand behind its inode."""
    told: list[bytes] = []
    for text in sorted(os.listxattr(path, follow_symlinks=False)):
        name = os.fsencode(text)
        for prefix, index in _PREFIXES:
            if name.startswith(prefix):
                rest = name[len(prefix) :]
                value = os.getxattr(path, name, follow_symlinks=False)
                entry = _ATTRIBUTE.pack(len(rest), index, len(value)) + rest + value
                told.append(entry.ljust(-(-len(entry) // 4) * 4, b"\0"))
                break
    return b"".join([_ATTRIBUTES_HEADER.pack(0, 0), *told]) if told else b""


def _directory_block(heads: list[tuple[int, int]], names: list[bytes]) -> bytes:
    at = len(heads) * _ENTRY.size
    packed: list[bytes] = []
    for (number, kind), name in zip(heads, names, strict=True):
        packed.append(_ENTRY.pack(number, at, kind))
        at += len(name)
    return b"".join([*packed, *names])


def _device(status: os.stat_result) -> int:
    """Return a device's number as the kernel writes it; nothing for what is no device."""
    if not (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        return 0
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _blocks_of(size: int) -> int:
    return -(-size // BLOCK)


def main(arguments: list[str]) -> int:
    """Write the image; return 0, or 1 and say why not."""
    tree, path, build_time, identity = arguments
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.chdir(tree)
        limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        image = Image(descriptor, sys.maxsize if limit_bytes < 0 else limit_bytes)
        root = Packer(image).pack()
        image.finish(root, int(build_time), uuid.UUID(identity).bytes)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        os.close(descriptor)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
