"""``dsec-pack`` on the command line: what it prints, and what its exit code says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsec.cli.pack import app
from dsec.pack.manifest import Target
from packages import manifest_of, package_files, package_of, write_project


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_PACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def _document(*arguments: str) -> dict[str, Any]:
    done = _run(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _native(tmp_path: Path) -> Path:
    manifest = manifest_of(package_files(), target=Target.parse("cp39-linux-riscv64"))
    path = tmp_path / "native.dsec"
    path.write_bytes(package_of(manifest=manifest.encode()))
    return path


def test_a_package_is_built_signed_looked_into_and_verified(tmp_path: Path) -> None:
    write_project(tmp_path / "p", {"agent.py": "try:\n  import nowhere\nexcept ImportError: ...\n"})
    key = _run("keygen", "key").stdout.strip()
    (tmp_path / "key.pub").write_text(key + "\n")
    built = _run("build", "p", "--sign-key", "key")
    assert built.stdout.startswith("tester-1.0.dsec ")
    assert "agent.py:2 does without nowhere" in built.stderr
    told = _document("inspect", "tester-1.0.dsec")
    assert (told["signed_by"], told["built_for"]) == (key, None)
    assert [it["path"] for it in told["files"]] == ["agent.yaml", "app/agent.py"]
    assert _document("verify", "tester-1.0.dsec", "--public-key", "key.pub")["fits"] is True
    same = _document("build", "--code", "p", "--asdl", "p/agent.yaml", "--output", "x.dsec")
    assert same["file"] == "x.dsec"
    refused = _run("verify", "x.dsec", "--public-key", key)
    assert (refused.exit_code, "not signed" in refused.stderr) == (1, True)
    again = _run("keygen", "key")
    assert (again.exit_code, "File exists" in again.stderr) == (1, True)


def test_native_code_for_elsewhere_is_said_and_refused_where_it_shall_run(tmp_path: Path) -> None:
    package = str(_native(tmp_path))
    said = _run("verify", package)
    assert said.exit_code == 0
    assert "was built for cp39-linux-riscv64" in said.stderr
    assert _document("verify", package)["fits"] is False
    assert _run("verify", package, "--target", "cp39-linux-riscv64").exit_code == 0
    refused = _run("verify", package, "--target", "cp312-linux-x86_64")
    assert (refused.exit_code, "does not run on cp312" in refused.stderr) == (1, True)
    assert _run("verify", package, "--target", "linux").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("build",), 2, "give a directory or a file"),
        (("build", "p", "--code", "p"), 2, "give a directory or a file"),
        (("build", "nowhere"), 1, "nothing at nowhere"),
        (("inspect", "nowhere.dsec"), 1, "no package at nowhere.dsec"),
        (("build", "p", "--sign-key", "p/agent.py"), 1, "no key to sign with"),
        (("build", "p", "-o", "none/x.dsec"), 1, "cannot be written"),
        (("build", "p", "--trace", "'"), 1, "is no command"),
        (("build", "p", "--require", "a b"), 1, "is no requirement"),
    ],
)
def test_what_cannot_be_done_is_said_in_plain_words(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    write_project(tmp_path / "p")
    done = _run(*arguments)
    assert done.exit_code == code, done.stderr
    assert said in done.stderr
    assert not list(tmp_path.glob("*.dsec"))


def test_a_file_whose_name_no_package_may_have_is_refused_when_it_is_packed(tmp_path: Path) -> None:
    project = write_project(tmp_path / "p")
    (project / "line\nfeed").write_text("x")
    done = _run("build", "p")
    assert (done.exit_code, "no name that a file" in done.stderr) == (1, True)
    (project / "line\nfeed").unlink()
    Path(str(project) + "/\udcff").write_text("x")
    done = _run("build", "p")
    assert (done.exit_code, "no name that a file" in done.stderr) == (1, True)
