"""The limit of calls in flight that an API key may have."""

from __future__ import annotations

import pytest

from weft.core.errors import KeyLimitError
from weft.engine.http.http_errors import error_code, error_headers, error_status
from weft.engine.serve.keys import ApiKey
from weft.engine.serve.requests import CallsOfKeys


def test_a_key_at_its_limit_is_refused_until_a_call_ends() -> None:
    """The answer says when to try again, in the words that OpenAI's clients know. Other keys are not affected."""
    calls, key = CallsOfKeys(), ApiKey("a", max_calls=2)
    for _ in range(2):
        calls.enter(key, 0.0)
    with pytest.raises(KeyLimitError, match="2 calls in flight, which is its limit") as caught:
        calls.enter(key, 0.0)
    assert (error_status(caught.value), error_code(caught.value)) == (429, "rate_limit_exceeded")
    assert int(error_headers(caught.value)["retry-after"]) >= 1
    calls.enter(ApiKey("b", max_calls=1), 0.0)
    calls.leave(key, 1.0)
    calls.enter(key, 1.0)
    assert calls.count(key) == 2


def test_a_key_without_a_limit_is_not_counted() -> None:
    """The engine's own limit holds for it."""
    calls, key = CallsOfKeys(), ApiKey("a")
    calls.enter(key, 0.0)
    calls.leave(key, 0.0)
    assert calls.count(key) == 0
