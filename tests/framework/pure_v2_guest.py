"""Runs the cgroup contract suite where cgroup v2 is all there is: in a small emulated machine.

A host whose controllers are bound to v1 hierarchies cannot lend them to its v2 tree. So this packs
Python, pytest and the suite into an initial RAM disk, boots a stock kernel on it (QEMU's software
emulation: no KVM needed) and answers with pytest's own exit code::

    python tests/framework/pure_v2_guest.py /boot/vmlinuz-<version>

It needs ``qemu-system-x86_64`` and a kernel 5.19 or later with cgroup v2 and a serial console built
in, as Debian's ``linux-image-cloud-amd64`` has. The guest has no disk and no network.
"""

from __future__ import annotations

import argparse
import re
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[2]
SUITE: Final = ("tests/kernel/test_cgroups_contract.py", "tests/kernel/test_cgroups_layout.py")
_SOURCES: Final = (
    "pyproject.toml",
    "tests/conftest.py",
    "tests/framework/cgroup_processes.py",
    "tests/framework/sharing_out.py",
    "libs/dsec_common/src/dsec_common/__init__.py",
    "libs/dsec_common/src/dsec_common/errors.py",
    "services/sandboxd/src/dsec_sandboxd/__init__.py",
    "services/sandboxd/src/dsec_sandboxd/kernel/__init__.py",
    "services/sandboxd/src/dsec_sandboxd/kernel/protocol.py",
    *SUITE,
)
_BACKENDS: Final = "services/sandboxd/src/dsec_sandboxd/kernel/cgroups*.py"
_PACKAGES: Final = (
    "_pytest", "pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments",
    "pytest_asyncio", "pytest_timeout.py", "typing_extensions.py",
)  # fmt: skip
_METADATA: Final = ("pytest_asyncio", "pytest_timeout")  # how pytest finds its plugins
_UNUSED: Final = frozenset(
    {"site-packages", "test", "idlelib", "lib2to3", "tkinter", "ensurepip", "__pycache__"}
)
_PYTEST_OPTIONS: Final = ("-q", "--color=no", "-p", "no:cacheprovider", "-o", "timeout=300")
_GUEST_TREE: Final = "/suite"
_VERDICT: Final = re.compile(r"^suite ended with (\d+)$", re.MULTILINE)

# The guest's first process. It is run as written, so it may use nothing of this module.
_INIT: Final = """#!{python} -S
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None)
os.environ.update(PATH="/bin", HOME="/tmp", PYTHONPATH="{path}", PYTHONDONTWRITEBYTECODE="1")
for name, kind in (("proc", "proc"), ("sys", "sysfs"), ("dev", "devtmpfs"), ("tmp", "tmpfs"),
                   ("sys/fs/cgroup", "cgroup2")):
    os.makedirs("/" + name, exist_ok=True)
    assert libc.mount(kind.encode(), b"/" + name.encode(), kind.encode(), 0, None) == 0, name
command = [sys.executable, "-m", "pytest", *{options}, *{suite}]
try:
    print("suite ended with", subprocess.run(command, cwd="{tree}").returncode, flush=True)
finally:
    libc.sync()
    libc.reboot(0x4321FEDC)
"""


def main() -> int:
    """Boot, show what the guest prints, and return pytest's exit code (70 without a verdict)."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("kernel", type=Path, help="a kernel image to boot")
    parser.add_argument("--timeout-s", type=float, default=900.0)
    parser.add_argument("pytest_options", nargs="*", help="after --: options for pytest")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dsec-guest-") as directory:
        disk = Path(directory) / "initrd"
        with disk.open("wb") as file:
            write_disk(file, asked.pytest_options)
        return boot(asked.kernel, disk, asked.timeout_s)


def boot(kernel: Path, disk: Path, timeout_s: float) -> int:
    """Run the guest to its end."""
    command = [
        "qemu-system-x86_64", "-M", "q35", "-accel", "tcg", "-cpu", "max", "-m", "1536",
        "-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot",
        "-kernel", str(kernel), "-initrd", str(disk),
        "-append", "console=ttyS0 loglevel=1 panic=-1 cgroup_no_v1=all rdinit=/init",
    ]  # fmt: skip
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as guest:
        assert guest.stdout is not None
        watchdog = threading.Timer(timeout_s, guest.kill)
        watchdog.start()
        for line in guest.stdout:
            said.append(line.decode(errors="replace").replace("\r", ""))
            print(said[-1], end="", flush=True)  # noqa: T201  a program for people
        watchdog.cancel()
    verdict = _VERDICT.search("".join(said))
    return int(verdict[1]) if verdict else 70


def write_disk(file: BinaryIO, pytest_options: list[str]) -> None:
    """Write the guest's root as a cpio archive (the ``newc`` form that kernels unpack)."""
    python = Path(sys.executable).resolve()
    path = [f"{_GUEST_TREE}/site", f"{_GUEST_TREE}/libs/dsec_common/src"]
    path.append(f"{_GUEST_TREE}/services/sandboxd/src")
    init = _INIT.format(
        python=python, path=":".join(path), tree=_GUEST_TREE, suite=list(SUITE),
        options=[*_PYTEST_OPTIONS, *pytest_options],
    )  # fmt: skip
    entries: dict[str, tuple[int, bytes]] = {"/init": (stat.S_IFREG | 0o755, init.encode())}
    for target, source in contents(python):
        entries[target] = (stat.S_IFREG | (source.stat().st_mode & 0o777), source.read_bytes())
    for target in list(entries):
        for parent in Path(target).parents:
            entries.setdefault(str(parent), (stat.S_IFDIR | 0o755, b""))
    entries["/tmp"] = (stat.S_IFDIR | 0o1777, b"")
    for number, name in enumerate(sorted(entries), start=1):
        mode, content = entries[name]
        _write_entry(file, number, name.lstrip("/") or ".", mode, content)
    _write_entry(file, 0, "TRAILER!!!", 0, b"")


def contents(python: Path) -> Iterator[tuple[str, Path]]:
    """Yield where each file of the guest goes, and where it is on this host."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    binaries = [python, *stdlib.glob("lib-dynload/*.so")]
    for name in sorted({library for binary in binaries for library in _libraries(binary)}):
        yield name, Path(name)
    yield str(python), python
    yield from ((str(path), path) for path in _files(stdlib))
    packages = Path(sysconfig.get_path("purelib"))
    chosen = [packages / name for name in _PACKAGES]
    chosen += [path for name in _METADATA for path in packages.glob(f"{name}-*.dist-info")]
    for top in chosen:
        for path in [top] if top.is_file() else _files(top):
            yield f"{_GUEST_TREE}/site/{path.relative_to(packages)}", path
    for path in [*(ROOT / name for name in _SOURCES), *ROOT.glob(_BACKENDS)]:
        yield f"{_GUEST_TREE}/{path.relative_to(ROOT)}", path


def _files(top: Path) -> Iterator[Path]:
    for path in top.iterdir():
        if path.name in _UNUSED or path.suffix in {".a", ".pyc"}:
            continue
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _libraries(binary: Path) -> list[str]:
    listed = subprocess.run(["ldd", str(binary)], check=False, capture_output=True, text=True)
    return re.findall(r"(?:=> |^\s+)(/\S+) \(0x", listed.stdout, re.MULTILINE)


def _write_entry(file: BinaryIO, number: int, name: str, mode: int, content: bytes) -> None:
    encoded = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    file.writelines(part + b"\0" * (-len(part) % 4) for part in (header, content))


if __name__ == "__main__":
    sys.exit(main())
