"""vLLM's records of errors that Weft reports by itself."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import ValidationError

from weft.core.errors import DeadlineError, ReplicaLostError
from weft.engine.vllm_compat.logs import LOGGERS, leave_out_expected_ends
from weft.engine.vllm_compat.names import ChatCompletionStreamResponse, EngineDeadError, EngineGenerateError

pytestmark = pytest.mark.engine


def lost() -> Exception:
    return ReplicaLostError("engine-0/1", 7, 1)


def translated() -> Exception:
    """As vLLM's application gets an error of Weft's."""
    error = EngineGenerateError()
    error.__cause__ = lost()
    return error


def of_stream(chunk: str) -> Exception:
    """The error of vLLM's Messages about a chunk of the stream that they convert."""
    with pytest.raises(ValidationError) as raised:
        ChatCompletionStreamResponse.model_validate_json(chunk)
    return raised.value


def logged(error: Exception, logger: str, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether a record of vLLM's about an error gets into the log."""
    leave_out_expected_ends()
    leave_out_expected_ends()
    caplog.clear()
    try:
        raise error
    except Exception:
        logging.getLogger(logger).exception("Error in a stream generator.")
    return bool(caplog.records)


@pytest.mark.parametrize("logger", LOGGERS)
def test_an_expected_end_leaves_no_traceback(logger: str, caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets the error, and Weft logs the death of an engine. Other errors are logged as before."""
    assert not logged(lost(), logger, caplog)
    assert not logged(translated(), logger, caplog)
    assert not logged(EngineDeadError(), logger, caplog)
    assert not logged(
        of_stream('{"error": {"message": "the call was not done within 1 s", "code": 504}}'), logger, caplog
    )
    assert logged(KeyError("choices"), logger, caplog)
    assert logged(of_stream('{"choices": 1}'), logger, caplog)
    assert logged(EngineGenerateError(), logger, caplog)


def test_a_record_without_an_error_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Most records have none."""
    leave_out_expected_ends()
    logging.getLogger(LOGGERS[0]).warning("said")
    assert caplog.messages == ["said"]


@pytest.mark.parametrize("logger", LOGGERS)
def test_the_loggers_are_those_of_vllms_modules(logger: str) -> None:
    """vLLM names a logger after its module. Each of these logs errors with their tracebacks."""
    spec = find_spec(logger)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert re.search(r"^logger = \w+(\.\w+)?\(__name__\)$", source, re.MULTILINE)
    assert "logger.exception(" in source


def test_a_deadline_is_an_expected_end(caplog: pytest.LogCaptureFixture) -> None:
    """The kind of the error does not matter, nor where in the chain of causes it is."""
    outer = RuntimeError("Caught handled exception, but response already started.")
    outer.__cause__ = error = translated()
    error.__cause__ = DeadlineError("call", 0.7, 0)
    assert not logged(outer, "vllm.entrypoints.anthropic.serving", caplog)


def test_the_server_leaves_the_levels_of_the_applications_loggers() -> None:
    """A package that vLLM's server imports sets the root logger and its handlers to ERROR, which would silence an
    application that starts `weft.testing.ScriptedServer`."""
    code = """
import logging
logging.basicConfig(level=logging.INFO)
from weft.engine.vllm_compat.server_names import build_app
print(logging.root.level, logging.root.handlers[0].level)
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert completed.stdout.split()[-2:] == ["20", "0"]
