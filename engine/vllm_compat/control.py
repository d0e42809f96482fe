"""The control channel: messages from the front end to the scheduler, whichever process it runs in.

A utility call of vLLM names an attribute of `EngineCore`. `EngineCoreProc._handle_client_request` fetches the attribute
and calls it. `EngineCore.scheduler` is a `WeftScheduler`, so the utility call "scheduler" runs
`WeftScheduler.__call__(message)`. vLLM tests the truth of the attribute before it calls it, so the class must define
neither `__bool__` nor `__len__`.

A message is a dict of scalars and of lists of scalars, since it travels as msgpack: a tuple arrives as a list, and any
other object raises TypeError here. Messages are ordered with requests, and a message wakes an idle engine. An exception
in the scheduler does not end the engine; it is logged there and raised here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from weft.core.errors import EngineDiedError, EngineError
from weft.engine.vllm_compat.names import AsyncLLM, EngineDeadError, InprocClient, LLMEngine

_ATTRIBUTE: Final = "scheduler"  # of EngineCore
_WATCH_S: Final = 0.5


async def send_to_scheduler(llm: AsyncLLM, message: Mapping[str, Any]) -> Any:
    """Call `WeftScheduler.__call__(message)` in the engine's process, and return what it returns.

    Use it on the event loop that `llm` was started on.

    Raises:
        EngineDiedError: the engine has died or was shut down, before or while it handled the message.
        EngineError: the scheduler raised an exception.
        TypeError: the message holds an object that msgpack does not carry.
    """
    answer = asyncio.ensure_future(llm.engine_core.call_utility_async(_ATTRIBUTE, dict(message)))
    try:
        # vLLM ends the requests of an engine that dies, but would let its utility calls wait for ever.
        while not answer.done():
            await asyncio.wait([answer], timeout=_WATCH_S)
            if llm.errored and not answer.done():
                raise EngineDiedError
        return answer.result()
    except (EngineError, TypeError):
        raise
    except EngineDeadError as error:
        raise EngineDiedError from error
    except Exception as error:
        raise _failed(message, error) from error
    finally:
        answer.cancel()


def send_to_scheduler_sync(engine: LLMEngine, message: Mapping[str, Any]) -> Any:
    """Do the same for a blocking `LLMEngine`, whose scheduler may live in this process.

    Raises:
        EngineDiedError: the engine had died before it got the message.
        EngineError: the scheduler raised an exception.
        TypeError: the message holds an object that msgpack does not carry, and the scheduler is not in this process.
    """
    client = engine.engine_core
    is_here = isinstance(client, InprocClient)
    try:
        if is_here:
            return client.engine_core.scheduler(dict(message))
        return client.call_utility(_ATTRIBUTE, dict(message))
    except EngineDeadError as error:
        raise EngineDiedError from error
    except Exception as error:
        if isinstance(error, TypeError) and not is_here:
            raise
        raise _failed(message, error) from error


def _failed(message: Mapping[str, Any], error: Exception) -> EngineError:
    return EngineError(
        f"the scheduler failed on the message {dict(message)!r:.200}: {error}. The engine's log has the traceback."
    )
