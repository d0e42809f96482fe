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
from scheduler_harness import SchedulerHarness, expected_output, share_memory

from weft.core.ids import CallId, ProgramId
from weft.core.kv_cache.config import CopySpeed
from weft.core.kv_cache.policies import KV_POLICIES
from weft.core.policies import POLICIES
from weft.engine.kv_cache.connector import WorkerReport
from weft.engine.kv_cache.shared import SharedFolder
from weft.engine.vllm_compat.names import KVConnectorOutput
from weft.engine.wire.control import SpillProgram, TakeBack, encode_control

_CALLS = 50


class Run:
    """One run. `Run(folder, seed).play()` raises if it finds an error.

    Args:
        folder: An existing folder for the model's configuration.
        seed: Decides everything.
        **chosen: Options of the harness, and `kv_policy`, `policy` and `fails`, that are not left to chance.

    Attributes:
        done: How often each thing happened.
        others: Runs on other replicas, to which programs move.
        disturbances: What disturbs the calls.
        initial: Of the names of its programs.
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
        self.names = {"name": options.pop("policy"), "kv_policy": options.pop("kv_policy")}
        fails = options.pop("fails")
        self.others: list[Run] = []
        self.disturbances = _DISTURBANCES
        self.initial = "p"
        self._folder, self._options = folder, options
        self._copies_per_s = rng.choice((1e12, 1e12, 2e3))
        chance = random.Random(seed + 1)
        self._fails = lambda: chance.random() < fails
        self._start()
        self.prefixes = [[50 + kind] * rng.choice((0, 16, 40, 80)) for kind in range(3)]
        self.contexts: dict[str, list[int]] = {}  # of open programs
        self.isolated: dict[str, dict[str, str]] = {}
        self.calls: dict[str, tuple[str, list[int], int]] = {}  # under way: program, prompt and number of tokens
        self.done: Counter[str] = Counter()
        self._disturb = rng.choice((0.02, 0.1, 0.3))
        self._quiet = 0  # steps in which no call comes, so that the engine becomes idle

    def _start(self) -> None:
        self.h = h = SchedulerHarness(self._folder, self.names, prefix_caching=True, **self._options)
        h.scheduler._has_own_client = True
        assert h.scheduler._swap is not None
        self.swap = h.scheduler._swap
        self.swap.choice.observe_copy(CopySpeed(0.0, self._copies_per_s, self._copies_per_s))
        h.worker.fails = self._fails
        loads_beside = h.scheduler.connector.loads_beside

        def counted(*args: Any) -> bool:
            waits = loads_beside(*args)
            self.done["waits for a copy"] += waits
            return waits

        h.scheduler.connector.loads_beside = counted

    def restart(self) -> None:
        """The processes die, and others start in their place. The shared memory stays."""
        host = self.h.worker.host
        self._start()
        self.h.worker.host = host
        for program, _, _ in self.calls.values():
            if not self.contexts[program]:
                self._end(program)
        self.calls.clear()
        self.done["restarts"] += 1

    def play(self) -> Counter[str]:
        """Play until all calls have ended, and check that nothing is left over."""
        while not self.is_over:
            self.step()
        self.finish()
        return self.done

    @property
    def is_over(self) -> bool:
        return self.done["calls"] >= _CALLS and not self.calls

    def step(self) -> None:
        """Let something happen, and run a step."""
        rng, h = self.rng, self.h
        self._take_finished()
        self._quiet = self._quiet - 1 if self._quiet else rng.randrange(20, 60) * (rng.random() < 0.01)
        if not self._quiet and self.done["calls"] < _CALLS and len(self.calls) < 6 and rng.random() < 0.6:
            self._call()
        if rng.random() < self._disturb:
            what = rng.choice(self.disturbances)
            what(self)
            h.scheduler.check_integrity()
        h.step_s, h.asks_meanwhile = rng.choice((0.02, 0.02, 0.3, 1.0)), rng.random() < 0.9
        h.step()
        self.done["steps"] += 1

    def finish(self) -> None:
        """End all programs, and check that nothing is left over."""
        h = self.h
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
            moved=counts.moved_tokens // block_tokens,
            fetched=counts.fetched_tokens // block_tokens,
            failed=h.worker.failures,
        )

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

    @property
    def _idle(self) -> list[str]:
        """The programs between two calls."""
        busy = {program for run in (self, *self.others) for program, _, _ in run.calls.values()}
        return sorted(self.contexts.keys() - busy)

    def _call(self) -> None:
        rng, h, idle = self.rng, self.h, self._idle
        if idle and rng.random() < 0.7:
            program = rng.choice(idle)
            if rng.random() < 0.2:
                happened(h, "tool_ended", program, "search", took_s=1.0)
            prompt = self.contexts[program] + [rng.randrange(60, 900) for _ in range(rng.randrange(1, 20))]
            if self.others and rng.random() < 0.5:
                self._bring_kv(program)
        else:
            program = f"{self.initial}{self.done['calls']}"
            prompt = rng.choice(self.prefixes) + [rng.randrange(60, 900) for _ in range(rng.randrange(3, 80))]
            self.contexts[program] = []
            self.isolated[program] = rng.choice(({}, {}, {}, {"cache_salt": "x"}, {"adapter": "y"}))
        self.done["calls"] += 1
        name, count = f"call-{self.done['calls']}", rng.randrange(1, 20)
        self.calls[name] = program, prompt, count
        who = {"program_id": program, "program_name": program[:1], "call_id": name}
        h.add(name, prompt=prompt, max_tokens=count, **self.isolated[program], **who)

    def _bring_kv(self, program: str) -> None:
        """Have the other replicas copy out what they have of a program, and wait for it for some steps, as a router
        does."""
        for other in self.others:
            message = SpillProgram(ProgramId(program), begins=True)
            for _ in range(self.rng.choice((0, 2, 20))):
                if not other.h.scheduler(encode_control(message))["copying"]:
                    break
                message = message._replace(begins=False)
                self.done["waits for another replica"] += 1
                other.h.step()

    def _end(self, program: str) -> None:
        del self.contexts[program]
        for run in (self, *self.others):
            end(run.h, program)

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
            if self.rng.random() < 0.5:  # otherwise the step of an aborted call may be under way
                self.h.drain()
            self.h.scheduler.use_policy(self.h.scheduler._policy.make())
            self.done["policies replaced"] += 1

    def end_program(self) -> None:
        if idle := self._idle:
            self._end(self.rng.choice(idle))

    def announce(self) -> None:
        if idle := self._idle:
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


_RESETS = {Run.reset, Run.reset_connector, Run.lose_memory}  # after which a replica shares no more


def play_together(folder: Path, seed: int) -> Counter[str]:
    """Two replicas that share host memory. Programs move between them, and replicas die and start again."""
    rng, memory = random.Random(seed), SharedFolder()
    try:
        links = [memory.add(number) for number in range(2)]
        chosen = {"swap_blocks": rng.choice((20, 40, 100)), "fails": rng.choice((0.0, 0.0, 0.0, 0.1))}
        one, two = runs = [Run(folder, 2 * seed + number, shared=link, **chosen) for number, link in enumerate(links)]
        one.others, two.others, two.initial = [two], [one], "q"
        two.contexts, two.isolated, two.prefixes = one.contexts, one.isolated, one.prefixes
        if rng.random() < 0.8:
            for run in runs:
                run.disturbances = tuple(each for each in _DISTURBANCES if each not in _RESETS)
        share_memory({link: run.h for link, run in zip(links, runs, strict=True)})
        restarts = rng.choice((0.0, 0.0, 0.003))
        while left := [run for run in runs if not run.is_over]:
            run = rng.choice(left)
            run.step()
            if rng.random() < restarts:
                run.restart()
                share_memory({link: run.h for link, run in zip(links, runs, strict=True)})
        for run in runs:
            run.finish()
        return one.done + two.done
    finally:
        memory.close()
