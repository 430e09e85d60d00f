"""What is not installed is fetched once, by pip, and pinned to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.pack.building import Built, Wanted, build_package
from dsec.pack.cache import Cache
from dsec.pack.fetching import LOCK, read_requirements
from dsec_common.errors import DsecError, ErrorCode
from packages import write_project, write_wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels, which is all that pip looks in."""
    directory = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    write_wheel(directory, "far", "1.5", {"far/__init__.py": "x = 1\n"}, ["farther>=2"])
    write_wheel(directory, "farther", "2.0", {"farther.py": "y = 1\n"})
    return directory


def _build(project: Path, cache: Path, *, may_fetch: bool = True) -> Built:
    return build_package(project, Wanted(may_fetch=may_fetch), Cache(cache))


def _versions(built: Built) -> dict[str, str]:
    return {one.name: one.version for one in built.package.manifest.distributions}


def test_what_is_required_and_not_installed_is_fetched_and_pinned(
    tmp_path: Path, index: Path
) -> None:
    project = write_project(
        tmp_path / "project", {"agent.py": "import far\n", "requirements.txt": "far>=1 # it\n"}
    )
    with pytest.raises(DsecError, match="--no-fetch") as forbidden:
        _build(project, tmp_path / "cache", may_fetch=False)
    assert forbidden.value.code is ErrorCode.UNAVAILABLE
    assert not (project / LOCK).exists()
    first = _build(project, tmp_path / "cache")
    assert _versions(first) == {"far": "1.5", "farther": "2.0"}
    assert f"app/{LOCK}" not in {file.path for file in first.package.manifest.files}
    lock = (project / LOCK).read_text()
    assert "far==1.5 --hash=sha256:" in lock
    assert "farther==2.0 --hash=sha256:" in lock
    # A newer version changes nothing, and what was fetched is not fetched again.
    write_wheel(index, "far", "1.6", {"far/__init__.py": "x = 2\n"}, ["farther>=2"])
    assert _build(project, tmp_path / "cache", may_fetch=False).data == first.data
    assert _build(project, tmp_path / "other").data == first.data
    assert (project / LOCK).read_text() == lock
    # Nor does anyone get other bytes under the same version.
    write_wheel(index, "farther", "2.0", {"farther.py": "stolen = 1\n"})
    with pytest.raises(DsecError, match=r"(?i)hash"):
        _build(project, tmp_path / "third")
    # A requirement that the lock does not meet makes it anew.
    (project / "requirements.txt").write_text("far>=1.6\n")
    assert _versions(_build(project, tmp_path / "third")) == {"far": "1.6", "farther": "2.0"}
    assert "far==1.6" in (project / LOCK).read_text()


def test_nothing_is_fetched_for_the_name_of_an_import_alone(tmp_path: Path, index: Path) -> None:
    project = write_project(tmp_path / "project", {"agent.py": "import far\n"})
    with pytest.raises(DsecError, match=r"imports far.*requirements\.txt"):
        _build(project, tmp_path / "cache")
    assert not (project / LOCK).exists()


def test_what_there_is_not_is_told_in_pips_own_words(tmp_path: Path, index: Path) -> None:
    project = write_project(tmp_path / "project", {"requirements.txt": "farthest\n"})
    with pytest.raises(DsecError, match="farthest"):
        _build(project, tmp_path / "cache")
    assert not (project / LOCK).exists()
    assert not list((tmp_path / "cache").glob("making-*"))


def test_a_requirements_file_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    assert read_requirements(path) == ()
    path.write_text("# all\n\nfar[x]>=1\nnever; sys_platform == 'plan9'\n")
    assert [str(one) for one in read_requirements(path)] == ["far[x]>=1"]
    for text, code in (("-r other.txt", ErrorCode.UNSUPPORTED), ("a b", ErrorCode.INVALID)):
        path.write_text(f"far\n{text}\n")
        with pytest.raises(DsecError, match=r"requirements\.txt:2") as refused:
            read_requirements(path)
        assert refused.value.code is code
