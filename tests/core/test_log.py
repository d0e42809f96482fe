"""Logging: structured, explicit, and silent until the host application configures it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from weft.core.log import get_logger
from weft.core.program import Program


class Records(logging.Handler):
    """Keeps the records that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def records() -> Iterator[Records]:
    """The records of the logger `weft` when the host application has set the level DEBUG."""
    logger = logging.getLogger("weft")
    handler, level = Records(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def in_a_fresh_process(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process in which logging is not configured."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )


def test_bound_values_are_in_the_message_and_on_the_record(records: Records) -> None:
    """Bound values and arguments appear in the text and as attributes of the record."""
    get_logger().bind(program_id="prog-1").info("call left", service_s=0.5)
    [record] = records.records
    assert record.getMessage() == "call left program_id=prog-1 service_s=0.5"
    assert (record.name, record.levelno) == ("weft", logging.INFO)
    assert vars(record)["weft_program_id"] == "prog-1"
    assert vars(record)["weft_service_s"] == 0.5


def test_a_program_logs_under_its_ids(records: Records) -> None:
    """A program's logger has its name, its id and its session's id bound."""
    program = Program("answer", session_id="user-1")
    program.log.warning("slow tool", tool="search")
    attributes = vars(records.records[0])
    assert attributes["weft_program"] == "answer"
    assert attributes["weft_program_id"] == program.program_id
    assert attributes["weft_session_id"] == "user-1"
    assert attributes["weft_tool"] == "search"


def test_binding_makes_a_new_logger(records: Records) -> None:
    """Ids bound for one call are not on the logger they were bound from."""
    log = get_logger()
    log.bind(call_id="call-1").info("first")
    log.info("second")
    assert records.messages == ["first call_id=call-1", "second"]


def test_context_variables_are_not_read(records: Records) -> None:
    """Values that a host binds in structlog's context do not appear in Weft's records."""
    with structlog.contextvars.bound_contextvars(program_id="of the host"):  # noqa: TID251 - only Weft must not use it
        get_logger().info("event")
    assert records.messages == ["event"]


@pytest.mark.parametrize("key", ["name", "message", "args", "levelname", "msg"])
def test_bound_keys_do_not_collide_with_the_record(records: Records, key: str) -> None:
    """A key that the logging module reserves can be bound."""
    get_logger().bind(**{key: "mine"}).info("event")
    assert vars(records.records[0])[f"weft_{key}"] == "mine"


@pytest.mark.parametrize("text", ["100% done", "%s", "%(x)s", "50 % of {x}", "%"])
def test_percent_signs_are_text(records: Records, text: str) -> None:
    """Neither a message nor a value is used as a format string."""
    get_logger().info(text, value=text)
    assert records.messages == [f"{text} value={text}"]


def test_positional_arguments_are_formatted(records: Records) -> None:
    """`logger.info("... %s", value)` works as with the standard library."""
    get_logger().bind(call_id="call-1").info("took %d of %s", 3, "4 %")
    assert records.messages == ["took 3 of 4 % call_id=call-1"]


def test_tracebacks_are_on_the_record(records: Records) -> None:
    """`exception` and `exc_info=True` pass the traceback to the host's handlers and keep it out of the text."""
    log = get_logger()
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("failed", call_id="call-1")
        log.warning("failed", exc_info=True)
    for record in records.records:
        assert record.exc_info is not None
        assert record.exc_info[0] is ValueError
        assert "exc_info" not in record.getMessage()
    assert [record.levelno for record in records.records] == [logging.ERROR, logging.WARNING]


def test_a_silenced_level_costs_nothing(records: Records) -> None:
    """Values of a message below the host's level are not converted to text."""

    class Loud:
        def __str__(self) -> str:
            raise AssertionError("converted to text below the level")

    logging.getLogger("weft").setLevel(logging.ERROR)
    get_logger().info("event", value=Loud())
    assert records.records == []


def test_silent_at_info_by_default() -> None:
    """While logging is not configured, INFO prints nothing and WARNING prints its text to stderr once."""
    done = in_a_fresh_process(
        "from weft.core.log import get_logger\nget_logger().info('quiet')\nget_logger().warning('loud', n=1)"
    )
    assert (done.stdout, done.stderr) == ("", "loud n=1\n")


def test_the_hosts_logging_is_left_alone() -> None:
    """Importing Weft, running a program and logging change neither the root logger nor structlog's configuration."""
    in_a_fresh_process(
        """
import logging, structlog

def state():
    root, weft = logging.getLogger(), logging.getLogger("weft")
    return (
        root.level, list(root.handlers), list(root.filters), root.disabled, logging.raiseExceptions,
        logging.root.manager.disable, logging.getLogRecordFactory(), logging.getLoggerClass(),
        weft.level, list(weft.handlers), weft.propagate,
        structlog.is_configured(), structlog.get_config(),
    )

before = state()
import weft

with weft.Program("p") as program:
    program.log.info("event", n=1)
assert state() == before, (before, state())
assert not structlog.is_configured()
"""
    )
