"""The limit of calls in flight that an API key may have."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.errors import KeyLimitError
from weft.core.routing.admission import Admission
from weft.engine.http.http_errors import error_code, error_headers, error_status
from weft.engine.serve.keys import ApiKey
from weft.engine.serve.requests import ServedRequests


def no_requests() -> ServedRequests:
    programs: Any = None
    return ServedRequests(programs, Admission(lambda: 1), lambda: 0.0)


def test_a_key_at_its_limit_is_refused_until_a_call_ends() -> None:
    """The answer says when to try again, in the words that OpenAI's clients know. Other keys are not affected."""
    calls, key = no_requests(), ApiKey("a", max_calls=2)
    for _ in range(2):
        calls.count_call(key)
    with pytest.raises(KeyLimitError, match="2 calls in flight, which is its limit") as caught:
        calls.count_call(key)
    assert (error_status(caught.value), error_code(caught.value)) == (429, "rate_limit_exceeded")
    assert int(error_headers(caught.value)["retry-after"]) >= 1
    calls.count_call(ApiKey("b", max_calls=1))
    calls.uncount_call(key)
    calls.count_call(key)
    with pytest.raises(KeyLimitError):
        calls.count_call(key)


def test_a_key_without_a_limit_is_not_counted() -> None:
    """The engine's own limit holds for it."""
    calls, key = no_requests(), ApiKey("a")
    for _ in range(3):
        calls.count_call(key)
    calls.uncount_call(key)
