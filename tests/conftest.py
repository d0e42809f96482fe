"""What the tests share: one real engine on a tiny random Llama, since it takes half a minute to start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for tiny_model
ROOT = Path(__file__).parent.parent

if TYPE_CHECKING:
    import weft

# Before anything imports vLLM or torch: their own output has no place in a test report.
os.environ.setdefault("TORCH_LOGS", "-torch._library")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the engine's processes; this one's are errors


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """vLLM, LangGraph and AutoGen run on asyncio only."""
    return "asyncio"


@pytest.fixture(name="weft")
def weft_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: its exit code, and what it and its children print on both outputs."""
    from weft import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        code = cli.main()
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a chat template."""
    from tiny_model import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session", autouse=True)
def begun_early(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What `begin` of test_exactness.py gives, if its shorter tests are to be run."""
    items = [item for item in request.session.items if item.path.name == "test_exactness.py"]
    if all(item.get_closest_marker("soak") for item in items):
        yield None
        return
    with items[0].module.begin(request.getfixturevalue("tiny_model"), tmp_path_factory.mktemp("exactness")) as findings:
        yield findings


class Played(NamedTuple):
    """An example that has been run, and where."""

    done: subprocess.CompletedProcess[str]
    folder: Path


def _play(arguments: list[str], folder: Path) -> Played:
    command = [sys.executable, str(ROOT / "examples" / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    return Played(done, folder)


@pytest.fixture(scope="session")
def _plays(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Played]]]:
    """The examples of all tests that are to be run, two at a time: an engine that starts keeps one core busy."""
    with ThreadPoolExecutor(2) as pool:
        plays = {}
        for item in request.session.items:
            for mark in item.iter_markers("example"):
                arguments = [str(tiny_model) if part == "TINY" else part for part in mark.args]
                plays[item.nodeid] = pool.submit(_play, arguments, tmp_path_factory.mktemp("example"))
        yield plays
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def played(request: pytest.FixtureRequest, _plays: dict[str, Future[Played]]) -> Played:
    """The test's example, run as a user would run it: `@pytest.mark.example(file in examples/, *arguments)`."""
    example = _plays[request.node.nodeid].result()
    assert example.done.returncode == 0, example.done.stderr[-3000:]
    assert "Traceback" not in example.done.stderr
    return example


@pytest.fixture(scope="session")
def engine(tiny_model: Path) -> Iterator[weft.Engine]:
    """The session's engine. Its table must be empty again after each test that uses it."""
    import weft
    from tiny_model import ENGINE_ARGS

    with weft.Engine(tiny_model, **ENGINE_ARGS) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _table_is_left_empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """A program that outlives its test is a leak."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        if engine.is_alive:
            engine.table.check_integrity()
            assert len(engine.table) == 0
            assert engine.sessions == {}
