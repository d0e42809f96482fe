"""Why a server refuses a request before it has made a call."""

from __future__ import annotations

from enum import StrEnum

from weft.core.errors import EngineClosedError, KeyLimitError, OverloadedError, WeftError


class Refused(StrEnum):
    """Why a request was refused. The limits of an API key have their names in the file of keys."""

    NO_API_KEY = "no_api_key"
    WRONG_API_KEY = "wrong_api_key"
    FOREIGN_PAGE = "foreign_page"  # the server has no keys, and a page of another site may have sent the request
    MAX_CALLS = "max_calls"
    MAX_PROGRAMS = "max_programs"
    MAX_BODY_BYTES = "max_body_bytes"  # of the key or of the server
    OVERLOADED = "overloaded"  # the server has as many calls, or holds as much of arriving requests, as it takes
    SLOW = "slow"  # the body was not complete in time
    MALFORMED = "malformed"  # the fields that Weft reads
    STOPPING = "stopping"  # the server


def refused_by(error: WeftError) -> Refused:
    """The reason that an error stands for."""
    if isinstance(error, KeyLimitError):
        return Refused(error.limit_name)
    if isinstance(error, OverloadedError):
        return Refused.OVERLOADED
    return Refused.STOPPING if isinstance(error, EngineClosedError) else Refused.MALFORMED
