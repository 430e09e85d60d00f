"""The errors that requests which must fail end with."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from dsec_common.errors import DsecError


async def refused(asking: Awaitable[Any]) -> DsecError:
    """Return the error that ``asking`` ends with; it must."""
    with pytest.raises(DsecError) as caught:
        await asking
    return caught.value
