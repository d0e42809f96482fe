"""Converts Weft's errors to responses of OpenAI's API."""

from __future__ import annotations

import httpx2

from weft.core.errors import WeftError
from weft.engine.http.http_errors import error_body, error_headers, error_status, openai_error


def error_response(error: WeftError) -> httpx2.Response:
    """Convert an error to a response. Its headers say whether a retry may succeed, and after how long."""
    return httpx2.Response(error_status(error), headers=error_headers(error), json=error_body(error))


def refusal(status: int, message: str, code: str) -> httpx2.Response:
    """Make the response to a request that is wrong, and that should not be sent again.

    Args:
        status: The HTTP status.
        message: The message for the user.
        code: The code for programs.
    """
    return httpx2.Response(status, headers={"x-should-retry": "false"}, json=openai_error(status, message, code))
