"""A small root file system made of this host's own programs, to start without any image.

``build_host_rootfs`` copies a shell, the core utilities and a Python with its standard library,
each with the shared libraries that it needs, into a directory that can be imported as a base layer.
It copies content only: nothing of the host's configuration, accounts or keys.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_common.errors import DsecError, ErrorCode, invalid, not_found

#: What every base has, as far as the host has it. (One name a line would fill a page.)
# fmt: off
DEFAULT_PROGRAMS: Final = (
    "sh", "bash", "env", "cat", "chmod", "chown", "cp", "cut", "date", "dd", "df", "dirname",
    "basename", "du", "echo", "expr", "false", "head", "id", "install", "ln", "ls", "md5sum",
    "mkdir", "mkfifo", "mktemp", "mv", "nproc", "od", "paste", "printf", "pwd", "readlink",
    "realpath", "rm", "rmdir", "seq", "sha256sum", "sleep", "sort", "split", "stat", "stty",
    "tac", "tail", "tee", "test", "timeout", "touch", "tr", "true", "truncate", "tty", "uname",
    "uniq", "wc", "whoami", "yes", "awk", "cmp", "diff", "find", "grep", "gzip", "sed", "tar",
    "xargs",
)
# fmt: on

#: Libraries that programs load by name at run time, which ``ldd`` cannot see: glibc ends threads
#: with the first and looks up names with the others.
_LOADED_LATER: Final = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")

#: What modules in machine code may be linked to, wherever they were built (PEP 513), and no program
#: here need be.
_LINKED_BY_WHEELS: Final = (
    *("libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1"),
    "libstdc++.so.6",
)

_LINKS: Final = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
# fmt: off
_PLAIN_DIRECTORIES: Final = (
    "dev", "etc", "home", "home/agent", "media", "mnt", "opt", "proc", "run", "srv", "sys", "usr",
    "usr/bin", "usr/lib", "usr/lib64", "usr/local", "usr/local/bin", "usr/local/lib", "usr/sbin",
    "usr/share", "var", "var/cache", "var/lib", "var/log",
)
# fmt: on
_DIRECTORIES: Final = {
    **dict.fromkeys(_PLAIN_DIRECTORIES, 0o755),
    "root": 0o700,
    "tmp": 0o1777,
    "var/tmp": 0o1777,
}
#: The user of a sandbox that does not run as root.
_AGENT_ID: Final = 1000
_FILES: Final = {
    "etc/passwd": (
        "root:x:0:0:root:/root:/bin/sh\n"
        "agent:x:1000:1000:agent:/home/agent:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "etc/group": "root:x:0:\ntty:x:5:\nagent:x:1000:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/profile": "export PATH=/usr/local/bin:/usr/bin:/bin\n",
}

#: Parts of the standard library that a sandbox has no use for: tests, windows, installers.
# fmt: off
_STDLIB_LEFT_OUT: Final = frozenset((
    "test", "tests", "idlelib", "ensurepip", "tkinter", "turtledemo", "turtle.py",
    "site-packages", "dist-packages",
))
# fmt: on
_STDLIB_LEFT_OUT_PATTERN: Final = re.compile(
    r"config-\d.*|.*\.a|.*\.exe|.*\.opt-[12]\.pyc|_(tkinter|test|ctypes_test|xx)\w*\..*"
    r"|xx\w*\..*\.so"
)
_LDD_LINE: Final = re.compile(r"\s+(?:(?P<name>\S+) => )?(?P<path>/\S+) \(0x[0-9a-f]+\)")
_LDD_MISSING: Final = re.compile(r"\s+(?P<name>\S+) => not found")
_SHEBANG: Final = re.compile(rb"#!\s*(\S+)(?:\s+(\S+))?")
_ELF: Final = b"\x7fELF"

_ABOUT_PYTHON: Final = """
import json, os, sys, sysconfig
print(json.dumps({
    "executable": os.path.realpath(sys.executable),
    "stdlib": sysconfig.get_path("stdlib"),
    "version": "%d.%d" % sys.version_info[:2],
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootfsReport:
    """What was built.

    Attributes:
        path: the root directory.
        size_bytes: the total of all files.
        files: how many files, links and directories there are.
        programs: names in ``/usr/bin``, sorted.
        missing: default programs and libraries that this host has not.
        python_version: as ``3.11``; empty without Python.
    """

    path: Path
    size_bytes: int
    files: int
    programs: tuple[str, ...]
    missing: tuple[str, ...]
    python_version: str


def build_host_rootfs(
    dest: Path,
    *,
    python: bool = True,
    programs: Sequence[str] = (),
    interpreter: str = sys.executable,
) -> RootfsReport:
    """Assemble a root file system in ``dest`` from the programs of this host.

    The same host gives the same tree: what is copied keeps its times, all else has time 0. The
    layout has ``/bin`` and ``/lib`` as links into ``/usr``; Python lives in ``/usr/local``, found
    under ``/usr/bin/python3`` too. Blocking; takes a second or two.

    Args:
        dest: an empty directory, or one that does not exist yet.
        python: whether to bring ``interpreter`` with its standard library.
        programs: names on ``PATH`` to bring beside :data:`DEFAULT_PROGRAMS`.
        interpreter: which Python; a virtual environment's stands for the one it was made of.

    Raises:
        DsecError: ``invalid`` when ``dest`` is not empty, ``not_found`` when one of ``programs`` or
            the interpreter is missing, ``unsupported`` when this host's programs cannot be read.
    """
    if dest.exists() and any(dest.iterdir()):
        raise invalid(f"{dest} is not empty; name a new directory for the root file system")
    root = _Rootfs(dest)
    root.make_skeleton()
    for name in dict.fromkeys((*DEFAULT_PROGRAMS, *programs)):
        root.add_program(name, required=name in programs)
    version = root.add_python(interpreter) if python else ""
    root.add_libraries()
    root.add_library_cache()
    root.settle_times()
    entries = list(_walk(dest))
    return RootfsReport(
        path=dest,
        size_bytes=sum(entry.st_size for entry in entries if stat.S_ISREG(entry.st_mode)),
        files=len(entries),
        programs=tuple(sorted(path.name for path in (dest / "usr" / "bin").iterdir())),
        missing=tuple(root.missing),
        python_version=version,
    )


class _Rootfs:
    def __init__(self, dest: Path) -> None:
        self._dest = dest
        self._copied: set[Path] = set()
        #: Files of the host whose shared libraries are needed.
        self._linked: list[Path] = []
        self._later: tuple[str, ...] = _LOADED_LATER
        self.missing: list[str] = []

    def make_skeleton(self) -> None:
        self._dest.mkdir(parents=True, exist_ok=True)
        self._dest.chmod(0o755)
        for name, mode in _DIRECTORIES.items():
            (self._dest / name).mkdir()
            (self._dest / name).chmod(mode)
        if os.geteuid() == 0:
            os.chown(self._dest / "home" / "agent", _AGENT_ID, _AGENT_ID)
        for name, target in _LINKS.items():
            (self._dest / name).symlink_to(target)
        for name, text in _FILES.items():
            (self._dest / name).write_text(text)
            (self._dest / name).chmod(0o644)

    def add_program(self, name: str, *, required: bool) -> None:
        found = shutil.which(name)
        if found is None:
            if required:
                raise not_found(
                    f"this host has no program {name!r} on its PATH; install it, or leave it out",
                    program=name,
                )
            self.missing.append(name)
            return
        source = Path(os.path.realpath(found))
        target = self._dest / "usr" / "bin" / source.name
        if source not in self._copied:
            self._copy(source, target)
            self._add_interpreter_of(source)
        if source.name != name:
            self._link(self._dest / "usr" / "bin" / Path(name).name, source.name)

    def add_python(self, interpreter: str) -> str:
        try:
            answer = subprocess.run(
                [interpreter, "-I", "-c", _ABOUT_PYTHON], capture_output=True, check=True
            ).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise not_found(
                f"the Python interpreter {interpreter!r} does not run: {error}"
            ) from None
        about: dict[str, str] = json.loads(answer)
        version = about["version"]
        executable = self._dest / "usr" / "local" / "bin" / f"python{version}"
        self._copy(Path(about["executable"]), executable)
        for name in ("python3", "python"):
            self._link(executable.with_name(name), executable.name)
            self._link(self._dest / "usr" / "bin" / name, f"/usr/local/bin/{name}")
        library = self._dest / "usr" / "local" / "lib" / f"python{version}"
        self._copy_stdlib(Path(about["stdlib"]), library)
        self._later = (*self._later, *_LINKED_BY_WHEELS)
        return version

    def add_libraries(self) -> None:
        """Copy what ``ldd`` names for all that was copied, into the loader's own search path."""
        resolved, loaders = self._needed_libraries()
        if "libc.so.6" not in resolved:
            raise DsecError(
                ErrorCode.UNSUPPORTED,
                "this host's programs do not use glibc; build the base layer from an image instead",
            )
        # The loader always searches the directory of libc, wherever a library was on the host.
        libc = resolved["libc.so.6"]
        home = self._dest / _merged(libc.parent)
        later = {name: libc.with_name(name) for name in self._later}
        present = {name: path for name, path in later.items() if path.exists()}
        for name, path in (present | resolved).items():
            self._copy(Path(os.path.realpath(path)), home / name)
        for path in loaders:
            self._copy(Path(os.path.realpath(path)), self._dest / _merged(path))

    def add_library_cache(self) -> None:
        """Say where libraries are, as any distribution does: without, each start looks about.

        Where nobody may (not root) or can (another C library), programs start all the same.
        """
        ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if ldconfig is None or os.geteuid() != 0:
            return
        subprocess.run([ldconfig, "-X", "-r", self._dest], check=False, capture_output=True)
        # What it notes for its own next run tells of times and inodes.
        shutil.rmtree(self._dest / "var/cache/ldconfig", ignore_errors=True)

    def settle_times(self) -> None:
        """Give time 0 to all that has no time of its own, so that equal hosts give equal trees."""
        for directory, _, files in os.walk(self._dest, topdown=False):
            for name in files:
                path = Path(directory) / name
                if path not in self._copied:
                    os.utime(path, (0, 0), follow_symlinks=False)
            for path in Path(directory).iterdir():
                if path.is_symlink():
                    os.utime(path, (0, 0), follow_symlinks=False)
            os.utime(directory, (0, 0))

    def _add_interpreter_of(self, source: Path) -> None:
        """Bring what a script starts with; a script alone would be a broken program."""
        with source.open("rb") as file:
            match = _SHEBANG.match(file.read(256))
        if match is None:
            return
        program = Path(os.fsdecode(match[1])).name
        if program == "env" and match[2]:
            program = os.fsdecode(match[2])
        if not program.startswith("python"):
            self.add_program(program, required=False)

    def _copy_stdlib(self, source: Path, target: Path) -> None:
        for directory, subdirectories, files in os.walk(source):
            subdirectories[:] = sorted(filter(_belongs_in_stdlib, subdirectories))
            here = target / Path(directory).relative_to(source)
            here.mkdir(mode=0o755)
            here.chmod(0o755)
            for name in sorted(filter(_belongs_in_stdlib, files)):
                # Debian keeps some modules as links to /etc, which may lead nowhere.
                if (Path(directory) / name).is_file():
                    self._copy(Path(directory) / name, here / name)

    def _needed_libraries(self) -> tuple[dict[str, Path], set[Path]]:
        """Return the files of the host by the name they are loaded as, and the loaders."""
        resolved: dict[str, Path] = {}
        loaders: set[Path] = set()
        try:
            output = subprocess.run(
                ["ldd", *map(str, self._linked)],
                capture_output=True,
                check=False,  # one static program among them makes the status 1
                env={**os.environ, "LC_ALL": "C"},
                text=True,
            ).stdout
        except FileNotFoundError:
            raise DsecError(
                ErrorCode.UNSUPPORTED,
                "this host has no ldd, which tells the libraries of a program; install libc-bin",
            ) from None
        for line in output.splitlines():
            if (lost := _LDD_MISSING.fullmatch(line)) and lost["name"] not in self.missing:
                self.missing.append(lost["name"])
            if match := _LDD_LINE.fullmatch(line):
                path = Path(match["path"])
                if match["name"]:
                    resolved[Path(match["name"]).name] = path
                else:
                    loaders.add(path)
        return resolved, loaders

    def _copy(self, source: Path, target: Path) -> None:
        """Copy content, permission bits and time; never an owner, a set-id bit or an attribute."""
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        status = source.stat()
        target.chmod(stat.S_IMODE(status.st_mode) & 0o777)
        os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))
        self._copied |= {source, target}
        with source.open("rb") as file:
            if file.read(len(_ELF)) == _ELF:
                self._linked.append(source)

    def _link(self, link: Path, target: str) -> None:
        if not link.is_symlink() and not link.exists():
            link.symlink_to(target)


def _belongs_in_stdlib(name: str) -> bool:
    return name not in _STDLIB_LEFT_OUT and not _STDLIB_LEFT_OUT_PATTERN.fullmatch(name)


def _merged(path: Path) -> Path:
    """Return where a directory or file of the host is below a root whose /lib is in /usr."""
    relative = path.relative_to("/")
    return Path("usr") / relative if relative.parts[0] in _LINKS else relative


def _walk(root: Path) -> Iterator[os.stat_result]:
    for directory, subdirectories, files in os.walk(root):
        for name in (*subdirectories, *files):
            yield (Path(directory) / name).lstat()
