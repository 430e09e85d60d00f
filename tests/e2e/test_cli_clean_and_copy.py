"""From a shell: importing without residue, and copying inside a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

from stack import Stack


def test_residue_and_patterns_are_left_out_of_an_import(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    for name in ("work/.git/HEAD", "work/m.py", "work/__pycache__/m.pyc", "work/a.log", "work/b"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    done = stack.dsec(
        *("layer", "import", str(tmp_path), "--kind", "workspace", "--name", "cleaned"),
        *("--version", "1", "--clean", "--git", "drop", "--exclude", "**/*.log", "--json"),
    )
    # The repository and its file, the cache and its file, the log.
    assert json.loads(done.stdout)["left_out"] == 5
    created = stack.dsec_json("sandbox", "create", base, "--workspace", "cleaned@1")
    sandbox = created["sandbox_id"]
    try:
        shown = stack.dsec("sandbox", "exec", sandbox, "--", "ls", "-A", "/work").stdout
        assert sorted(shown.split()) == ["b", "m.py"]
        copied = stack.dsec_json("sandbox", "cp", f"{sandbox}:/work", f"{sandbox}:/srv-copy")
        assert copied == {"entries": 3}
        stack.dsec("sandbox", "mv", f"{sandbox}:/work", "/moved")
        said = stack.dsec("sandbox", "exec", sandbox, "--", "cat", "/moved/b", "/srv-copy/m.py")
        assert said.stdout == "work/bwork/m.py"
        # What is a directory is gone into, as cp and mv do.
        (tmp_path / "work/b").chmod(0o600)
        for source, target in (("b", "/moved"), ("", "/moved"), (".", "/moved/flat")):
            stack.dsec(
                "sandbox", "cp", f"{tmp_path}/work/{source}".rstrip("/"), f"{sandbox}:{target}"
            )
        stack.dsec("sandbox", "cp", f"{sandbox}:/moved/b", f"{sandbox}:/srv-copy")
        stack.dsec("sandbox", "mv", f"{sandbox}:/srv-copy", "/moved")
        line = "cd /moved; ls -d b work/b flat/b srv-copy/b"
        found = stack.dsec("sandbox", "exec", "-c", sandbox, line).stdout
        assert found.split() == ["b", "flat/b", "srv-copy/b", "work/b"]
        listed = stack.dsec_json("sandbox", "ls", f"{sandbox}:/moved/b")
        assert [entry["path"] for entry in listed] == ["/moved/b"]
        other = stack.dsec("sandbox", "cp", f"{sandbox}:/moved", "x.y:/moved", check=False)
        assert other.returncode == 2
    finally:
        stack.dsec("sandbox", "rm", sandbox)
        stack.dsec("layer", "rm", "cleaned@1")
