"""What a package is made of: what the code imports, and nothing that depends on who builds it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dsec.pack import building
from dsec.pack.building import Built, Wanted, build_package, write_package
from dsec.pack.environment import Environment, parse_requirement
from dsec.pack.imports import Import, imports_of
from dsec.pack.manifest import Target
from dsec.pack.package import read_package
from dsec_common.errors import DsecError, ErrorCode
from packages import cache_in, write_project, write_wheel

WHERE = "agent.py"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of ``sys.path`` with distributions of this test's own."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    return directory


def _install(site: Path, name: str, files: Mapping[str, str], *requires: str) -> None:
    wheel = write_wheel(site.parent / "wheels", name, "1.0", files, requires)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def _build(tmp_path: Path, project: Path, wanted: Wanted | None = None) -> Built:
    return build_package(project, wanted, cache_in(tmp_path))


def _paths(built: Built) -> set[str]:
    return {file.path for file in built.package.manifest.files}


def _names(built: Built) -> list[str]:
    return [one.name for one in built.package.manifest.distributions]


# --- Finding --------------------------------------------------------------------------------------

SOURCE = b"""
from __future__ import annotations
import typing, os.path
from typing import TYPE_CHECKING
from .near import thing
from .. import above
if TYPE_CHECKING:
    import only_types
else:
    import at_run_time
if not TYPE_CHECKING:
    import negated
try:
    import fast
except ImportError:
    import slow
try:
    import kept
except ValueError:
    pass
with contextlib.suppress(ImportError):
    import suppressed
if sys.platform == "win32":
    import winreg_like
def late():
    import deferred
    importlib.import_module("by.name")
    __import__(name)
"""


def test_imports_are_found_wherever_they_stand() -> None:
    found = {one.module: one for one in imports_of(SOURCE, WHERE, "pack.inner")}
    assert found["pack.inner.near"] == Import("pack.inner.near", ("thing",), 5, optional=False)
    assert found["pack"].names == ("above",)
    assert "only_types" not in found
    optional = {name for name, one in found.items() if one.optional}
    assert optional == {"fast", "slow", "suppressed", "winreg_like"}
    assert {"at_run_time", "negated", "kept", "deferred", "by.name", "os.path"} < set(found)


def test_what_is_no_python_is_told_with_its_line() -> None:
    with pytest.raises(DsecError, match=r"agent\.py:2: this is no Python"):
        imports_of(b"x = 1\ny = (\n", WHERE)
    with pytest.raises(DsecError, match=r"no Python|nested"):
        imports_of(b"x = " + b"-" * 100_000 + b"1", WHERE)


def test_only_what_is_imported_is_taken_with_what_it_requires(tmp_path: Path, site: Path) -> None:
    _install(site, "used", {"used/__init__.py": "try:\n import huge\nexcept ImportError: pass\n"},
             "needed>=1", "never; sys_platform == 'plan9'", "huge; extra == 'all'")  # fmt: skip
    _install(site, "needed", {"needed.py": "x = 1\n"})
    _install(site, "huge", {"huge.py": "x = 1\n"})
    project = write_project(
        tmp_path / "project",
        {"agent.py": "import used\nimport parts.one\n", "parts/one.py": "from . import two\n",
         "parts/two.py": "", "parts/unused.py": "import huge\n", "words.txt": "hi",
         "tests/test_it.py": "import pytest\n", ".secret": "x"},
    )  # fmt: skip
    built = _build(tmp_path, project)
    assert _names(built) == ["needed", "used"]
    assert {path for path in _paths(built) if path.startswith("app/")} == {
        "app/agent.py", "app/parts/one.py", "app/parts/two.py", "app/words.txt",
    }  # fmt: skip
    assert {"lib/used/__init__.py", "lib/needed.py", "lib/needed-1.0.dist-info/METADATA",
            "lib/needed-1.0.dist-info/licenses/LICENSE"} < _paths(built)  # fmt: skip
    assert not any("RECORD" in path for path in _paths(built))
    assert built.package.manifest.target is None
    whole = _build(tmp_path, project, Wanted(require=("used[all]",)))
    assert _names(whole) == ["huge", "needed", "used"]
    left_to_the_base = _build(tmp_path, project, Wanted(exclude=("needed", "*.txt")))
    assert _names(left_to_the_base) == ["used"]
    assert "app/words.txt" not in _paths(left_to_the_base)


def test_two_distributions_that_share_a_name_are_told_apart(tmp_path: Path, site: Path) -> None:
    _install(site, "shared_a", {"shared/a/__init__.py": ""})
    _install(site, "shared_b", {"shared/b.py": ""})
    code = {"agent.py": "from shared import b\n"}
    assert _names(_build(tmp_path, write_project(tmp_path / "project", code))) == ["shared-b"]
    assert [one.name for one in Environment.here().owners("shared.a")] == ["shared-a"]


def test_an_import_that_nobody_has_is_told_with_its_place(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", {"agent.py": "\nimport not_there.at_all\n"})
    with pytest.raises(DsecError, match=r"agent\.py:2 imports not_there\.at_all") as missing:
        _build(tmp_path, project)
    assert missing.value.code is ErrorCode.NOT_FOUND
    write_project(project, {"agent.py": "try:\n  import not_there\nexcept ImportError:\n  pass\n"})
    assert _build(tmp_path, project).left_out == {"not_there": "agent.py:2"}
    write_project(project, {"agent.py": "import local.gone\n", "local/__init__.py": ""})
    with pytest.raises(DsecError, match=r"agent\.py:1 imports local\.gone"):
        _build(tmp_path, project)


def test_a_run_shows_what_no_import_names(tmp_path: Path, site: Path) -> None:
    _install(site, "plugin", {"plugin.py": "import json\n"})
    project = write_project(
        tmp_path / "project",
        {"agent.py": "import importlib, sys\nimportlib.import_module(sys.argv[1])\n",
         "near/__init__.py": "", "near/deep.py": ""},
    )  # fmt: skip
    assert _names(_build(tmp_path, project)) == []
    for traced, name, path in (("plugin", ["plugin"], "lib/plugin.py"),
                               ("near.deep", [], "app/near/deep.py")):  # fmt: skip
        command = f"env PYTHONPATH_WAS=1 {sys.executable} agent.py {traced}"
        os.environ["PYTHONPATH"] = str(site)
        try:
            built = _build(tmp_path, project, Wanted(trace=command))
        finally:
            del os.environ["PYTHONPATH"]
        assert _names(built) == name
        assert path in _paths(built)
    assert not list(project.rglob("*.pyc"))
    with pytest.raises(DsecError, match="ended with 1"):
        _build(tmp_path, project, Wanted(trace=f"{sys.executable} agent.py not_there"))
    with pytest.raises(DsecError, match="ran no Python"):
        _build(tmp_path, project, Wanted(trace="true"))
    included = _build(tmp_path, project, Wanted(include=("near", "plugin")))
    assert {"app/near/deep.py", "lib/plugin.py"} < _paths(included)


def test_what_is_developed_elsewhere_is_taken_from_there(tmp_path: Path, site: Path) -> None:
    _install(site, "developed", {"developed.pth": ""})
    home = tmp_path / "elsewhere"
    (home / "developed").mkdir(parents=True)
    (home / "developed" / "__init__.py").write_text("x = 1\n")
    url = {"url": home.as_uri(), "dir_info": {"editable": True}}
    (site / "developed-1.0.dist-info" / "direct_url.json").write_text(json.dumps(url))
    sys.path.append(str(home))
    try:
        project = write_project(tmp_path / "project", {"agent.py": "import developed\n"})
        built = _build(tmp_path, project)
    finally:
        sys.path.remove(str(home))
    assert _names(built) == ["developed"]
    assert "lib/developed/__init__.py" in _paths(built)
    assert not any("direct_url" in path for path in _paths(built))


def test_of_the_sdk_only_what_an_agent_reaches_is_taken(tmp_path: Path) -> None:
    code = {"agent.py": "from dsec import DsecError\nfrom dsec.agent_channel import AgentChannel\n"}
    built = _build(tmp_path, write_project(tmp_path / "project", code))
    assert {"lib/dsec/agent_channel.py", "lib/dsec_common/errors.py"} < _paths(built)
    assert "lib/dsec/client.py" not in _paths(built)
    assert _names(built) == []
    assert built.package.size_bytes < 1 << 20
    # An agent with tools: those that its contract names, and what its contract is read with.
    weather = _build(tmp_path, Path(__file__).resolve().parents[2] / "examples" / "weather")
    assert {"lib/dsec/tools/http.py", "lib/dsec/agent/agent.py"} < _paths(weather)
    assert _names(weather) == ["msgspec", "pyyaml"]
    assert weather.package.size_bytes < 12 << 20


# --- The file -------------------------------------------------------------------------------------


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_the_same_input_is_the_same_bytes(tmp_path: Path) -> None:
    files = {"agent.py": "import b, a\n", "a.py": "", "b.py": "", "z/words.txt": "z", "m.txt": "m"}
    packages = []
    for number, mask in enumerate((0o022, 0o077, 0o002)):
        os.umask(mask)
        names = sorted(files, reverse=bool(number % 2))
        project = write_project(tmp_path / f"p{number}", {name: files[name] for name in names})
        for path in project.rglob("*"):
            os.utime(path, (1e9 + number, 1e9 + number))
            if number == 2 and os.geteuid() == 0:
                os.chown(path, 1234, 1234)
        built = build_package(project, None, cache_in(tmp_path / str(number % 2)))
        write_package(built, tmp_path / "x.dsec")
        packages.append((tmp_path / "x.dsec").read_bytes())
    assert packages[0] == packages[1] == packages[2]
    assert read_package(packages[0]).manifest.name == "tester"


def test_a_damaged_cache_changes_nothing(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", {"words.txt": "words " * 1000})
    first = _build(tmp_path, project).data
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert _build(tmp_path, project).data == first


def test_what_is_too_large_is_refused_with_its_biggest_parts(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "PACKAGE_MAX_BYTES", 1 << 20)
    _install(site, "weighty", {"weighty.py": ""})
    (site / "weighty.bin").write_bytes(os.urandom(1 << 20))
    with (site / "weighty-1.0.dist-info" / "RECORD").open("a") as record:
        record.write("weighty.bin,,\n")
    project = write_project(tmp_path / "project", {"agent.py": "import weighty\n"})
    (project / "noise").write_bytes(os.urandom(1 << 19))
    with pytest.raises(DsecError, match=r"1 MiB.*weighty 1\.0 \(1\.0 MiB\), app/noise") as large:
        _build(tmp_path, project)
    assert large.value.details["reason"] == "too_large"
    with (project / "zeros").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(DsecError, match=r"256 MiB.*app/zeros \(300\.0 MiB\), weighty"):
        _build(tmp_path, project)


def test_too_many_files_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "ENTRIES_MAX", 5)
    project = write_project(tmp_path / "project", {"a.txt": "", "b.txt": ""})
    with pytest.raises(DsecError, match="3 files: at most 2 are taken") as large:
        _build(tmp_path, project)
    assert large.value.details["reason"] == "too_large"


def test_a_directory_that_cannot_be_read_is_told_and_not_left_out(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", {})
    here = os.open(project, os.O_RDONLY)
    for _ in range(20):  # longer than a path may be
        os.mkdir("d" * 250, dir_fd=here)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(DsecError, match="cannot be read whole: File name too long"):
        _build(tmp_path, project)


@pytest.mark.parametrize("name", ["requirements.txt", "dsec-pack.lock"])
def test_what_is_required_is_read_from_a_plain_file_of_bounded_size(
    tmp_path: Path, name: str
) -> None:
    required = {"requirements.txt": "far\n"} if name != "requirements.txt" else {}
    project = write_project(tmp_path / "project", required)
    os.mkfifo(project / name)
    with pytest.raises(DsecError, match=f"{name} is no plain file"):
        _build(tmp_path, project)
    (project / name).unlink()
    (project / name).write_bytes(b"#" * (2 << 20))
    with pytest.raises(DsecError, match=f"{name} is too large"):
        _build(tmp_path, project)


@pytest.mark.usefixtures("umask")
def test_what_is_unpacked_is_open_to_all_whatever_the_umask(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", {"a/b/words.txt": "x"})
    package = _build(tmp_path, project).package
    os.umask(0o077)
    package.unpack(tmp_path / "there")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "there").rglob("*")}
    assert modes == {0o755, 0o644}


def test_what_killed_builds_left_in_the_cache_goes(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", {})
    left, young = (tmp_path / "cache" / name for name in ("making-1", "making-2"))
    for path in (left, young):
        (path / "site").mkdir(parents=True)
    os.utime(left, (1e9, 1e9))
    _build(tmp_path, project)
    assert (left.exists(), young.exists()) == (False, True)


def test_links_that_lead_out_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", {"real.txt": "x"})
    (project / "inside").symlink_to("real.txt")
    assert "app/inside" in _paths(_build(tmp_path, project))
    (tmp_path / "secret").write_text("x")
    for make, what in (
        (lambda path: path.symlink_to(tmp_path / "secret"), "outside of"),
        (lambda path: path.symlink_to(tmp_path), "link to a directory"),
        (lambda path: path.symlink_to("nowhere"), "cannot be read"),
        (os.mkfifo, "no plain file"),
    ):
        make(project / "odd")
        with pytest.raises(DsecError, match=what):
            _build(tmp_path, project)
        (project / "odd").unlink()


def test_native_code_has_its_platform_in_the_manifest(tmp_path: Path, site: Path) -> None:
    _install(site, "native", {"native.cpython-311-x86_64-linux-gnu.so": "code"})
    project = write_project(tmp_path / "project", {"agent.py": "import native\n"})
    manifest = _build(tmp_path, project).package.manifest
    assert manifest.target == Target.here()
    assert [one.native for one in manifest.distributions] == [True]
    manifest.check_target(Target.here())
    with pytest.raises(DsecError, match=r"built for .* native is native code") as other:
        manifest.check_target(Target.parse("cp39-linux-riscv64"))
    assert other.value.details["reason"] == "other_target"


# --- What is run, and its contract ----------------------------------------------------------------


def test_one_file_brings_the_modules_that_it_imports_and_no_others(tmp_path: Path) -> None:
    project = write_project(
        tmp_path, {"weather.py": "import near\n", "near.py": "", "far.py": "", "words.txt": ""}
    )
    (project / "agent.yaml").rename(project / "weather.yaml")
    built = _build(tmp_path, project / "weather.py")
    assert _paths(built) == {"agent.yaml", "app/weather.py", "app/near.py"}
    assert built.package.contract == (project / "weather.yaml").read_bytes()


def test_what_is_run_and_its_contract_are_asked_for_when_nobody_can_tell(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", {"a.py": "", "b.py": "", "x.yaml": ""})
    (project / "agent.py").unlink()
    with pytest.raises(DsecError, match=r"--entry: a\.py, b\.py"):
        _build(tmp_path, project)
    assert _build(tmp_path, project, Wanted(entry="b.py")).package.manifest.entry == "b.py"
    (project / "agent.yaml").rename(project / "y.yaml")
    with pytest.raises(DsecError, match=r"--asdl: x\.yaml, y\.yaml"):
        _build(tmp_path, project, Wanted(entry="b.py"))
    (tmp_path / "out.py").write_text("")
    with pytest.raises(DsecError, match="outside of"):
        _build(tmp_path, project, Wanted(entry="../out.py", contract=project / "y.yaml"))
    with pytest.raises(DsecError) as missing:
        _build(tmp_path, tmp_path / "nowhere")
    assert missing.value.code is ErrorCode.NOT_FOUND


def test_an_unpacked_package_runs_where_nothing_of_it_is_installed(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    built = _build(tmp_path, root / "examples" / "forecast")
    assert _names(built) == ["msgspec", "pyyaml"]
    assert built.package.size_bytes < 12 << 20
    write_package(built, tmp_path / "x.dsec")
    program = [sys.executable, "-m", "dsec.cli.pack", "unpack", "x.dsec", "there"]
    subprocess.run(program, check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
    shutil.rmtree(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-I", "-S", tmp_path / "there" / "run"],
        check=True,
        capture_output=True,
        input='{"place":"Oslo","celsius":[1,9]}',
        text=True,
        env={},
    )
    assert json.loads(done.stdout) == {"place": "Oslo", "text": "9 °C and getting warmer"}


def test_requirements_that_are_installed_will_do() -> None:
    here = Environment.here()
    assert here.satisfies(parse_requirement("msgspec>=0.1", "here"))
    assert not here.satisfies(parse_requirement("msgspec<0.1", "here"))
    with pytest.raises(DsecError, match="here: 'no way' is no requirement"):
        parse_requirement("no way", "here")
