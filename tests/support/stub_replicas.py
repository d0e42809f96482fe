"""`weft.AsyncMultiLLMEngine` with replicas that have a process each, but no vLLM in it, so that they start at once."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from weft.engine.processes.launch import Launch
from weft.engine.replicas.launcher import LocalLauncher


class StubLLM:
    """The part of `AsyncLLM` that a replica uses."""

    errored = False
    output_handler = None
    swap_stats = None
    why_dead = None

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.is_shut_down = False

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def shutdown(self, timeout: float | None = None) -> None:
        del timeout
        self.is_shut_down = True


class StubLauncher(LocalLauncher):
    """Makes replicas whose process sleeps.

    Attributes:
        made: all processes and engines that any replica has had.
    """

    config: Any = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, hang_timeout_s=None)
        self.processes: list[BaseProcess] = []
        self.engines: list[StubLLM] = []

    def make(self, model: str, arguments: Any) -> Any:
        replica = super().make(model, arguments)
        replica._construct = self._construct  # type: ignore[method-assign]
        return replica

    def _construct(self, launch: Launch) -> Any:
        return launch.run(lambda: self.config, self._make_engine)

    def _make_engine(self, config: Any) -> StubLLM:
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), name="EngineCore")
        process.start()
        self.processes.append(process)
        self.engines.append(StubLLM(config))
        return self.engines[-1]


@contextmanager
def stub_launchers(model: Path) -> Iterator[list[StubLauncher]]:
    """Engines that start inside have stub replicas. Yields the list of their launchers."""
    from weft.core.policies import PolicyConfig
    from weft.engine.options import EngineOptions
    from weft.engine.vllm.start import engine_arguments

    launchers: list[StubLauncher] = []
    arguments = engine_arguments(
        str(model), EngineOptions(policy=PolicyConfig("fcfs"), swap=None, engine_args={"max_model_len": 256})
    )
    config = arguments.create_engine_config()

    def make(_backend: str, engine_id: Any, *, on_account: Any, **_: Any) -> StubLauncher:
        launchers.append(StubLauncher(engine_id, (), (), on_account))
        launchers[-1].config = config
        return launchers[-1]

    with mock.patch("weft.engine.multi.make_launcher", make):
        yield launchers
