from __future__ import annotations

import pytest

from dsec.channel import may_ask_again, wait_before
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode


@pytest.mark.parametrize(
    ("error", "once_only", "repeatable"),
    [
        (DsecError(ErrorCode.EXHAUSTED, "full"), True, True),
        (DsecError(ErrorCode.UNAVAILABLE, "no nodes"), True, True),
        (DsecError(ErrorCode.UNAVAILABLE, "lost", details={MAY_HAVE_HAPPENED: True}), False, True),
        (DsecError(ErrorCode.TIMEOUT, "late"), False, True),
        (DsecError(ErrorCode.EXHAUSTED, "never fits", retryable=False), False, False),
        (DsecError(ErrorCode.INVALID, "no"), False, False),
        (DsecError(ErrorCode.INTERNAL, "broken"), False, False),
    ],
)
def test_a_request_is_sent_again_only_when_that_cannot_do_a_thing_twice(
    error: DsecError, *, once_only: bool, repeatable: bool
) -> None:
    assert may_ask_again(error, repeatable=False) is once_only
    assert may_ask_again(error, repeatable=True) is repeatable


def test_the_server_says_how_long_to_wait_else_the_wait_grows_to_a_limit() -> None:
    told = DsecError(ErrorCode.EXHAUSTED, "full", retry_after_s=4.0)
    assert 3.0 <= wait_before(1, told) <= 5.0
    silent = DsecError(ErrorCode.EXHAUSTED, "full")
    assert wait_before(1, silent) < wait_before(4, silent)
    assert wait_before(30, silent) <= 2.5
