"""Links where one expects what they lead to."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec import DsecError, ErrorCode
from stack import Stack


async def test_a_link_is_downloaded_as_what_it_leads_to(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        await sandbox.exec(
            "mkdir /d; echo x > /d/f; ln -s /d /to-d; ln -s /d/f /to-f; ln -s /n /no"
        )
        assert await sandbox.download("/to-d", tmp_path / "d") == 1
        assert (tmp_path / "d" / "f").read_text() == "x\n"
        assert await sandbox.download("/to-f", tmp_path / "f") == 2
        with pytest.raises(DsecError) as caught:
            await sandbox.download("/no", tmp_path / "no")
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert not (tmp_path / "no").exists()
