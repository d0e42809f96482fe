"""Random programs on vLLM's scheduler with host memory and without a model, for `tests/fuzz/kv_runs.py` and the suite.

One run draws a KV policy, a policy, sizes of memories that are too small, and whether steps overlap and copies fail.
Then programs with common prefixes come, and everything happens to them that makes plans void: resets of every kind,
calls that are taken back, aborted or forced out, host memory that is lost, and copies that fail. The harness checks in
each step that nothing is written twice and that every block which can be found holds what it is found by. Each call's
tokens are compared with those of a call that nobody disturbs.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

from host_programs import end, happened
from scheduler_harness import SchedulerHarness, expected_output

from weft.core.ids import CallId, ProgramId
from weft.core.kv_cache.config import CopySpeed
from weft.core.kv_cache.policies import KV_POLICIES
from weft.core.policies import POLICIES
from weft.engine.kv_cache.connector import WorkerReport
from weft.engine.vllm_compat.names import KVConnectorOutput
from weft.engine.wire.control import TakeBack, encode_control

_CALLS = 50


class Run:
    """One run. `Run(folder, seed).play()` raises if it finds an error.

    Args:
        folder: An existing folder for the model's configuration.
        seed: Decides everything.
        **chosen: Options of the harness, and `kv_policy`, `policy` and `fails`, that are not left to chance.

    Attributes:
        done: How often each thing happened.
    """

    def __init__(self, folder: Path, seed: int, **chosen: Any) -> None:
        self.rng = rng = random.Random(seed)
        drawn: dict[str, Any] = {
            "kv_policy": rng.choice(sorted(KV_POLICIES)),
            "policy": rng.choice(sorted(POLICIES)),
            "fails": rng.choice((0.0, 0.0, 0.05, 0.3)),
            "in_flight": rng.choice((1, 2, 2)),
            "blocks": rng.choice((14, 18, 24, 40)),
            "swap_blocks": rng.choice((6, 20, 40, 100)),
            "slots": rng.choice((2, 3, 5)),
            "batched_tokens": rng.choice((32, 48, 128, 512)),
            "min_tokens": rng.choice((0, 0, 0, 40)),
            "beside": rng.choice((None, seed, seed)),
        }
        self.config = drawn | chosen
        options = dict(self.config)
        names = {"name": options.pop("policy"), "kv_policy": options.pop("kv_policy")}
        fails = options.pop("fails")
        self.h = h = SchedulerHarness(folder, names, prefix_caching=True, **options)
        h.scheduler._has_own_client = True
        assert h.scheduler._swap is not None
        self.swap = h.scheduler._swap
        self.swap.choice.observe_copy(CopySpeed(0.0, *([rng.choice((1e12, 1e12, 2e3))] * 2)))
        chance = random.Random(seed + 1)
        h.worker.fails = lambda: chance.random() < fails
        loads_beside = h.scheduler.connector.loads_beside

        def counted(*args: Any) -> bool:
            waits = loads_beside(*args)
            self.done["waits for a copy"] += waits
            return waits

        h.scheduler.connector.loads_beside = counted
        self.prefixes = [[50 + kind] * rng.choice((0, 16, 40, 80)) for kind in range(3)]
        self.contexts: dict[str, list[int]] = {}  # of open programs
        self.isolated: dict[str, dict[str, str]] = {}
        self.calls: dict[str, tuple[str, list[int], int]] = {}  # under way: program, prompt and number of tokens
        self.done: Counter[str] = Counter()
        self._disturb = rng.choice((0.02, 0.1, 0.3))

    def play(self) -> Counter[str]:
        """Play until all calls have ended, and check that nothing is left over."""
        rng, h = self.rng, self.h
        quiet = 0  # steps in which no call comes, so that the engine becomes idle
        while self.done["calls"] < _CALLS or self.calls:
            self._take_finished()
            quiet = quiet - 1 if quiet else rng.randrange(20, 60) * (rng.random() < 0.01)
            if not quiet and self.done["calls"] < _CALLS and len(self.calls) < 6 and rng.random() < 0.6:
                self._call()
            if rng.random() < self._disturb:
                what = rng.choice(_DISTURBANCES)
                what(self)
                h.scheduler.check_integrity()
            h.step_s, h.asks_meanwhile = rng.choice((0.02, 0.02, 0.3, 1.0)), rng.random() < 0.9
            h.step()
            self.done["steps"] += 1
        self._take_finished()
        for program in list(self.contexts):
            self._end(program)
        h.settle()
        left = self.swap.tier.tree.contexts()  # by ended programs, where copies run beside steps
        assert not any(context.is_needed for context in left), "what no open program needs is freed"
        assert self.swap.copies_beside or self.swap.stats().used == 0, "ended programs leave nothing"
        pool = h.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == len(pool.blocks) - 1, "a block of the device is lost"
        stats, counts = self.swap.stats(), self.swap.counts
        block_tokens = self.swap.block_tokens
        self.done.update(
            swapped=stats.swaps_in,
            loaded=counts.loaded_tokens // block_tokens,
            fetched=counts.fetched_tokens // block_tokens,
            failed=h.worker.failures,
        )
        return self.done

    def _take_finished(self) -> None:
        rng, h = self.rng, self.h
        for name in [name for name in self.calls if name in h.finished]:
            program, prompt, count = self.calls.pop(name)
            assert h.tokens[name] == expected_output(prompt, count), f"{name} has wrong tokens"
            self.contexts[program] = prompt + h.tokens[name]
            if rng.random() < 0.15 or len(self.contexts[program]) > 150:
                self._end(program)
            elif rng.random() < 0.7:
                happened(h, "tool_started", program, rng.choice(("search", "python")))

    def _call(self) -> None:
        rng, h = self.rng, self.h
        idle = sorted(self.contexts.keys() - {program for program, _, _ in self.calls.values()})
        if idle and rng.random() < 0.7:
            program = rng.choice(idle)
            if rng.random() < 0.2:
                happened(h, "tool_ended", program, "search", took_s=1.0)
            prompt = self.contexts[program] + [rng.randrange(60, 900) for _ in range(rng.randrange(1, 20))]
        else:
            program = f"p{self.done['calls']}"
            prompt = rng.choice(self.prefixes) + [rng.randrange(60, 900) for _ in range(rng.randrange(3, 80))]
            self.contexts[program] = []
            self.isolated[program] = rng.choice(({}, {}, {}, {"cache_salt": "x"}, {"adapter": "y"}))
        self.done["calls"] += 1
        name, count = f"call-{self.done['calls']}", rng.randrange(1, 20)
        self.calls[name] = program, prompt, count
        who = {"program_id": program, "program_name": program[:1], "call_id": name}
        h.add(name, prompt=prompt, max_tokens=count, **self.isolated[program], **who)

    def _end(self, program: str) -> None:
        del self.contexts[program]
        end(self.h, program)

    def _lose(self, name: str) -> None:
        """A call will not end. Its program goes on, or ends too."""
        program = self.calls.pop(name)[0]
        if not self.contexts[program] or self.rng.random() < 0.5:
            self._end(program)

    # -- what disturbs them

    def abort(self) -> None:
        names = sorted(self.calls.keys() - set(self.h.finished))
        if names:
            name = self.rng.choice(names)
            self.h.abort(name)
            self._lose(name)
            self.done["aborts"] += 1

    def take_back(self) -> None:
        keys = tuple((ProgramId(program), CallId(name)) for name, (program, _, _) in self.calls.items())
        answer = self.h.scheduler(encode_control(TakeBack(keys, self.rng.randrange(1, 4), 10**6)))
        for _, name in answer["taken"]:
            self._lose(name)
            self.done["taken back"] += 1

    def force_out(self) -> None:
        running = self.h.scheduler.running
        for request in self.rng.sample(running, self.rng.randint(0, len(running))):
            self.h.scheduler.force_out(request)
            self.done["forced out"] += 1

    def reset(self) -> None:
        if is_drained := self.rng.random() < 0.5:
            self.h.drain()
        try:
            self.h.scheduler.reset_prefix_cache(
                reset_running_requests=self.rng.random() < 0.6, reset_connector=self.rng.random() < 0.5
            )
        except RuntimeError:  # vLLM cannot reset calls whose steps are in flight
            assert not is_drained
            assert self.config["in_flight"] == 2
            self.done["resets that vLLM refused"] += 1
        assert self.swap.stats().used == 0
        self.done["resets"] += 1

    def reset_connector(self) -> None:
        self.h.scheduler.reset_connector_cache()
        self.done["resets of host memory"] += 1

    def use_policy(self) -> None:
        if not self.h.scheduler.requests:
            self.h.drain()
            self.h.scheduler.use_policy(self.h.scheduler._policy.make())
            self.done["policies replaced"] += 1

    def end_program(self) -> None:
        idle = sorted(self.contexts.keys() - {program for program, _, _ in self.calls.values()})
        if idle:
            self._end(self.rng.choice(idle))

    def announce(self) -> None:
        idle = sorted(self.contexts.keys() - {program for program, _, _ in self.calls.values()})
        if idle:
            happened(self.h, "prefetch", self.rng.choice(idle))

    def lose_memory(self) -> None:
        if self.rng.random() < 0.05:
            report = KVConnectorOutput(kv_connector_worker_meta=WorkerReport(has_memory=False))
            self.h.scheduler.connector.update_connector_output(report)
            self.done["memories lost"] += 1


_DISTURBANCES = (
    Run.abort,
    Run.take_back,
    Run.force_out,
    Run.force_out,
    Run.reset,
    Run.reset_connector,
    Run.use_policy,
    Run.end_program,
    Run.announce,
    Run.lose_memory,
)
