"""What an error of the JetStream API means to a caller."""

from __future__ import annotations

from typing import Any

import pytest

from dsec_common.bus_streams import _error_of
from dsec_common.errors import ErrorCode


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"code": 400, "err_code": 10071, "description": "wrong last sequence"}, "conflict"),
        ({"code": 404, "err_code": 10059, "description": "stream not found"}, "not_found"),
        ({"code": 503, "err_code": 10077, "description": "maximum bytes"}, "exhausted"),
        ({"code": 400, "err_code": 10025, "description": "bad request"}, "invalid"),
        ({"code": 503, "err_code": 10008, "description": "temporarily away"}, "unavailable"),
        # Seen when two services create streams in the first moments of a server.
        ({"code": 500, "err_code": 10049, "description": "error creating store"}, "unavailable"),
    ],
)
def test_an_error_says_whether_to_try_again(error: dict[str, Any], code: str) -> None:
    told = _error_of(error, "JetStream API", "STREAM.CREATE.events")
    assert told.code is ErrorCode(code)
    assert told.details["jetstream_error"] == error["err_code"]
