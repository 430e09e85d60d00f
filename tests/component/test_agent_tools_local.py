"""The tools of agents that work here: commands, files, databases, documents."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import pypdf
import pytest

from agent_with_tools import agent, code_of
from dsec.tools.calls import ToolCall
from dsec_common.errors import DsecError


def test_commands_run_and_leave_nothing_behind(tmp_path: Path) -> None:
    with agent("shell") as worker:
        shell = worker.get_tool("shell")
        ran = shell.run(
            "cat; echo $WORD >&2; pwd; exit 3", stdin="in ", cwd=str(tmp_path), env={"WORD": "w"}
        )
        assert (ran.exit_code, ran.stdout, ran.stderr) == (3, f"in {tmp_path}\n", "w\n")
        assert worker.calls[-1].status == "3"
        assert shell.run(["echo", "$HOME"]).stdout == "$HOME\n"
        left = shell.run("sleep 1000 & echo $!")
        assert left.ok
        _until_over(int(left.stdout))
        # One that left the group may hold its output open; nobody waits for that.
        held = shell.run(
            "setsid sh -c 'touch away; exec yes' & until [ -e away ]; do :; done; echo $! >&2",
            cwd=str(tmp_path),
        )
        assert held.ok
        _until_over(int(held.stderr))
        assert shell.run("exec <&-; echo closed", stdin="x" * 1_000_000).stdout == "closed\n"
        assert len(shell.run("cat", stdin="y" * 200_000).stdout) == 200_000
        long = shell.run("head -c 1000000 /dev/zero | tr '\\0' x")
        assert (len(long.stdout), long.truncated) == (256 * 1024, True)
        with pytest.raises(DsecError) as late:
            shell.run("echo begun; sleep 1000", timeout_s=1.5)
        assert (code_of(late), late.value.details["stdout"]) == ("command_timeout", "begun\n")
        with pytest.raises(DsecError) as missing:
            shell.run(["/no/such/program"])
        assert code_of(missing) == "not_found"


def _until_over(pid: int) -> None:
    """Return when a process runs no more; its parent may not have looked yet."""
    deadline = time.monotonic() + 10
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"process {pid} lives"
            time.sleep(0.005)


def test_files_are_written_whole(tmp_path: Path) -> None:
    with agent("files") as worker:
        files = worker.get_tool("files")
        path = tmp_path / "a" / "b.txt"
        assert files.write(path, "wörd") == 5
        assert files.read(path) == "wörd"
        path.chmod(0o600)
        files.write(path, b"\xff")
        assert (files.read_bytes(path), path.stat().st_mode & 0o777) == (b"\xff", 0o600)
        with pytest.raises(DsecError, match="no text in UTF-8"):
            files.read(path)
        assert files.list(tmp_path) == ["a/"]
        assert files.list(path.parent) == ["b.txt"]
        files.delete(path)
        with pytest.raises(DsecError) as missing:
            files.read(path)
        assert code_of(missing) == "not_found"


def test_reading_is_no_permission_to_write(tmp_path: Path) -> None:
    with agent("files", "sql", permissions=["read_file"]) as worker:
        for call in (
            ToolCall("files", "write", {"path": tmp_path / "x", "content": "x"}),
            ToolCall(
                "sql", "execute", {"database": tmp_path / "x", "statement": "CREATE TABLE t (a)"}
            ),
        ):
            assert worker.call(call).status == "denied"
    assert list(tmp_path.iterdir()) == []


def test_sql_asks_and_changes(tmp_path: Path) -> None:
    database, other = tmp_path / "a b?.db", tmp_path / "other.db"
    with agent("sql") as worker:
        sql = worker.get_tool("sql")
        sql.execute(database, "CREATE TABLE t (a INTEGER, b TEXT)")
        assert sql.execute(database, "INSERT INTO t VALUES (?, ?), (2, 'two')", (1, "one")) == 2
        assert sql.query(database, "SELECT * FROM t WHERE a = :a", {"a": 2}) == [
            {"a": 2, "b": "two"}
        ]
        for statement, code in (
            ("DELETE FROM t", "invalid"),  # asking changes nothing
            ("SELECT nothing", "invalid"),
            (f"ATTACH '{other}' AS o", "invalid"),
        ):
            with pytest.raises(DsecError) as refused:
                sql.query(database, statement)
            assert code_of(refused) == code
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"
        with pytest.raises(DsecError) as refused:
            sql.query(database, endless.format("count(*)"), timeout_s=0.1)
        assert code_of(refused) == "command_timeout"
        with pytest.raises(DsecError) as refused:
            sql.query(database, endless.format("i"))
        assert code_of(refused) == "exhausted"
        with pytest.raises(DsecError) as refused:
            sql.query(other, "SELECT 1")
        assert code_of(refused) == "not_found"
        with sqlite3.connect(database) as busy:
            busy.execute("BEGIN IMMEDIATE")
            with pytest.raises(DsecError) as refused:
                sql.execute(database, "DELETE FROM t", timeout_s=0.05)
            busy.rollback()
        busy.close()
        assert (code_of(refused), refused.value.retryable) == ("unavailable", True)
    assert not other.exists()


PAGE = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 4 0 R
/Resources<</Font<</F 5 0 R>>>>>>endobj
4 0 obj<</Length 38>>stream
BT /F 9 Tf 9 50 Td (Cloudy today) Tj ET
endstream endobj
5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj
trailer<</Root 1 0 R>>
startxref
0
%%EOF
"""


def test_a_pdfs_text_is_read_page_by_page(tmp_path: Path) -> None:
    writer = pypdf.PdfWriter()
    writer.append(str(_written(tmp_path / "page.pdf", PAGE)))
    writer.add_blank_page()
    path = tmp_path / "two.pdf"
    writer.write(path)
    writer.close()
    with agent("pdf_parser") as worker:
        parser = worker.get_tool("pdf_parser")
        text = parser.parse(path)
        assert [page.strip() for page in text.pages] == ["Cloudy today", ""]
        assert parser.parse(path.read_bytes()).text == text.text
        for document, code in ((b"no pdf", "invalid"), (tmp_path / "none.pdf", "not_found")):
            with pytest.raises(DsecError) as refused:
                parser.parse(document)
            assert code_of(refused) == code


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
