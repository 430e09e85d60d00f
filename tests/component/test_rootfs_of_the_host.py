"""Root file systems made of this host's programs, entered with chroot to see that they work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsec.rootfs import build_host_rootfs
from dsec_common.errors import DsecError, ErrorCode
from layer_builders import look

CHROOT = "/usr/sbin/chroot"
MODULES = (
    "asyncio, bz2, ctypes, curses, dataclasses, decimal, email, hashlib, http.server, json, lzma, "
    "multiprocessing, pydoc, readline, socket, sqlite3, ssl, subprocess, unittest, uuid, venv, "
    "xml.etree.ElementTree, zlib"
)


def run_in(root: Path, *command: str) -> str:
    """Run a command in the root file system and return what it printed."""
    return subprocess.run(
        [CHROOT, root, *command],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rootfs") / "root"
    report = build_host_rootfs(path)
    assert report.path == path
    assert report.size_bytes < 100_000_000
    assert report.files > 1000
    assert {"sh", "env", "ls", "python3"} <= set(report.programs)
    assert report.python_version == f"{sys.version_info[0]}.{sys.version_info[1]}"
    return path


def test_the_shell_and_the_core_utilities_work(root: Path) -> None:
    script = "echo 'b a' | tr ' ' '\\n' | sort | xargs; whoami; ls -ld /tmp | cut -c1-10; pwd"
    assert run_in(root, "/bin/sh", "-c", script) == "a b\nroot\ndrwxrwxrwt\n/\n"


def test_python_works_with_its_standard_library(root: Path) -> None:
    assert run_in(root, "python3", "-c", f"import {MODULES}; print('ok')") == "ok\n"


def test_python_threads_end(root: Path) -> None:
    program = "import threading; t = threading.Thread(target=print, args=(1,)); t.start(); t.join()"
    assert run_in(root, "python3", "-c", program) == "1\n"


def test_modules_in_machine_code_find_what_they_may_be_linked_to(root: Path) -> None:
    names = ["libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6", "libstdc++.so.6"]
    program = f"import ctypes; [ctypes.CDLL(name) for name in {names}]; print('ok')"
    assert run_in(root, "python3", "-c", program) == "ok\n"


def test_scripts_find_python_under_its_usual_names(root: Path) -> None:
    for name in ("/usr/bin/python3", "/usr/local/bin/python", "python"):
        assert run_in(root, name, "-c", "import sys; print(sys.prefix)") == "/usr/local\n"


def test_compiled_modules_are_up_to_date(root: Path) -> None:
    assert (
        "matches"
        in run_in(root, "python3", "-v", "-c", "pass")
        + subprocess.run(
            [CHROOT, root, "/usr/bin/python3", "-v", "-c", "import json"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    )
    assert list(root.rglob("*.opt-1.pyc")) == []


def test_the_same_host_gives_the_same_tree(root: Path, tmp_path: Path) -> None:
    build_host_rootfs(tmp_path / "again")
    first, second = look(root), look(tmp_path / "again")
    assert set(first) == set(second)
    assert [name for name in first if first[name] != second[name]] == []


def test_it_holds_no_set_id_program_and_nothing_else_of_the_host(tmp_path: Path) -> None:
    build_host_rootfs(tmp_path / "root", python=False, programs=["mount"])
    seen = look(tmp_path / "root")
    assert [name for name, entry in seen.items() if "s" in entry.mode[1:].lower()] == []
    assert "agent:x:1000" in str(seen["etc/passwd"].content)
    assert {path.name for path in (tmp_path / "root" / "etc").iterdir()} == {
        "group",
        "hosts",
        "ld.so.cache",
        "nsswitch.conf",
        "passwd",
        "profile",
    }


def test_a_program_finds_its_libraries_without_looking_about(tmp_path: Path) -> None:
    root = tmp_path / "root"
    build_host_rootfs(root, python=False)
    told = subprocess.run(
        ["/usr/sbin/ldconfig", "-p", "-r", root], capture_output=True, text=True, check=True
    ).stdout
    named = [line.rpartition(" => ")[2] for line in told.splitlines() if " => " in line]
    assert any(name.endswith("/libc.so.6") for name in named)
    assert all((root / name.lstrip("/")).exists() for name in named)
    assert not (root / "var/cache/ldconfig").exists()


def test_without_python_it_is_small(tmp_path: Path) -> None:
    report = build_host_rootfs(tmp_path / "root", python=False)
    assert report.python_version == ""
    assert report.size_bytes < 25_000_000
    assert run_in(tmp_path / "root", "sh", "-c", "echo $((6 * 7))") == "42\n"


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="this host has no system Python")
def test_the_system_python_of_a_distribution_works_too(tmp_path: Path) -> None:
    report = build_host_rootfs(tmp_path / "root", interpreter="/usr/bin/python3")
    assert report.size_bytes < 100_000_000
    program = f"import {MODULES}; import sys; print(sys.version_info[:2])"
    major, minor = report.python_version.split(".")
    assert run_in(tmp_path / "root", "python3", "-c", program) == f"({major}, {minor})\n"


def test_programs_that_are_scripts_bring_what_they_start_with(tmp_path: Path) -> None:
    build_host_rootfs(tmp_path / "root", python=False, programs=["ldd"])
    assert "Usage" in run_in(tmp_path / "root", "ldd", "--help")


def test_a_program_that_is_missing_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(DsecError) as error:
        build_host_rootfs(tmp_path / "root", python=False, programs=["no-such-program"])
    assert error.value.code is ErrorCode.NOT_FOUND
    assert "no-such-program" in error.value.message
    with pytest.raises(DsecError) as error:
        build_host_rootfs(tmp_path / "other", interpreter="/no/such/python")
    assert error.value.code is ErrorCode.NOT_FOUND


def test_a_directory_with_content_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(DsecError) as error:
        build_host_rootfs(tmp_path)
    assert error.value.code is ErrorCode.INVALID
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
