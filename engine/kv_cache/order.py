"""What the scheduler tells the object that orders vLLM's free blocks, and the one that leaves them in vLLM's order."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from weft.core.kv_cache.retention import KvEvent, ProgramGone
from weft.core.kv_cache.stats import ToolStats
from weft.engine.vllm_compat.names import BlockPool, KVCacheManager, Request


class CallKv(NamedTuple):
    """A call and the KV blocks that it holds."""

    request: Request
    program: Hashable
    manager: KVCacheManager
    next_tool: str | None = None  # that begins when the call has ended, if the client knows it already
    is_next_soon: bool = False  # the client has announced the program's next call
    level: int = 0  # of the scheduling policy's queue in which the call was last


class NextStep(Protocol):
    """What is known of a step before vLLM forms it. Each answer takes time, and is only asked for if it matters."""

    def most_blocks(self) -> int:
        """The most KV blocks that the step can take. While another step runs: as far as calls do not end meanwhile."""

    def queue(self) -> Iterator[tuple[Hashable, int]]:
        """The programs of the calls that wait and the levels of their queues, the call that starts next first."""


class KvOrder:
    """Leaves the order as vLLM has it. Others change it, and nothing else: no block is held, and none is counted.

    Times are seconds on the scheduler's clock.

    Attributes:
        host_tokens: The tokens of open programs' contexts that host memory has room for.
    """

    host_tokens: int = 0

    def call_arrived(self, request: Request, program: Hashable, now_s: float, *, tool: str | None = None) -> None:
        """A call arrived, and waits. `tool` has run since the program's last call, if the client names it."""

    def call_began(
        self, request: Request, program: Hashable, name: str, found_tokens: int, now_s: float, *, level: int = 0
    ) -> None:
        """A call starts to run, or runs again, and has found `found_tokens` of its tokens in vLLM's cache or in host
        memory. The program's name may be empty. `level` is that of the queue in which it has waited."""

    def call_left(self, call: CallKv, now_s: float) -> None:
        """A call leaves for good, and vLLM is about to free its blocks. If it waited, it may have none."""

    def call_preempted(self, call: CallKv, now_s: float) -> None:
        """A call that ran waits again, and vLLM is about to free its blocks."""

    def happened(self, program: Hashable, event: KvEvent, now_s: float) -> None:
        """Something has happened in a program between two calls, or it has ended."""

    def spill(self, program: Hashable, *, begins: bool) -> bool:
        """A program goes on on another replica, which reads this one's host memory. With `begins` its contexts are to
        be copied there now. Returns whether contexts of it are being copied."""
        return False

    def on_host(self, program: Hashable) -> list[bytes]:
        """The hashes of a program's blocks that host memory has, those of the context that was used last first."""
        return []

    def use_prefill_speed(self, token_s: float) -> None:
        """Computing a prompt token takes `token_s` seconds."""

    def loads_beside(self, request: Request, found_tokens: int, spared_blocks: int, now_s: float) -> bool:
        """A call is about to start. Whether it waits instead, while its KV comes from host memory beside the steps.

        Args:
            found_tokens: In vLLM's cache, in full blocks.
            spared_blocks: The free blocks that the call and those that run will take besides.
        """
        return False

    @property
    def calls_loading(self) -> int:
        """How many calls wait for that."""
        return 0

    def is_loading(self, request_id: str) -> bool:
        """Whether the call of a request waits for that."""
        return False

    def before_step(self, step: NextStep, now_s: float) -> None:
        """vLLM is about to allocate the blocks of a step."""

    def while_step_runs(self, step: NextStep, now_s: float) -> None:
        """The workers compute a step. What is done for the next one now delays nobody. vLLM may leave this call out,
        and then `before_step` has to do it."""

    def let_go(self) -> None:
        """Give back what blocks it has taken: vLLM is about to empty its prefix cache."""

    def reset(self, now_s: float) -> None:
        """vLLM has emptied its prefix cache."""

    @property
    def wants_step(self) -> bool:
        """Whether a step without calls would be of use."""
        return False

    @property
    def held_blocks(self) -> int:
        """The blocks of contexts that are kept for now."""
        return 0

    @property
    def programs_held(self) -> int:
        """The programs whose contexts these are."""
        return 0

    def tools(self) -> tuple[ToolStats, ...]:
        """What is known of the times of tools."""
        return ()

    @property
    def knows_contexts(self) -> bool:
        """Whether it knows what programs have between their calls."""
        return False

    def tokens_of(self, program: Hashable) -> tuple[int, int] | None:
        """The tokens of a program's contexts on the device and in host memory; None if it knows no contexts."""
        return None

    def check_integrity(self) -> None:
        """Assert that all sums agree. For tests."""


_MOST_OWNERS: Final = 16  # a block that more programs share is a common prefix, which the next program shares too


@dataclass(slots=True)
class _Owned:
    """A block that programs have used."""

    content: Any  # its hash; another one means that vLLM has evicted it
    owners: dict[Hashable, None] = field(default_factory=dict)
    is_common: bool = False


class EndedFirstOrder(KvOrder):
    """Knows which programs use which cached blocks, at most 16 programs for each block.

    Args:
        pool: vLLM's blocks, of a model with one kind of attention.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._owned: dict[int, _Owned] = {}  # by block
        self._blocks: dict[Hashable, dict[int, None]] = {}  # by program, in the order of its contexts
        self._due: dict[int, Any] = {}  # blocks of ended programs with their hashes

    def call_left(self, call: CallKv, now_s: float) -> None:
        program = call.program
        mine = self._blocks.setdefault(program, {})
        for number in call.manager.get_block_ids(call.request.request_id)[0]:
            content = self._pool.blocks[number].block_hash
            if content is None:  # it is not full, and no other call can find it
                continue
            owned = self._owned.get(number)
            if owned is None or owned.content != content:
                self._drop(number)
                owned = self._owned[number] = _Owned(content)
            self._due.pop(number, None)
            if owned.is_common or program in owned.owners:
                continue
            owned.owners[program] = mine[number] = None
            if len(owned.owners) > _MOST_OWNERS:
                owned.is_common = True
                for each in owned.owners:
                    del self._blocks[each][number]
                owned.owners.clear()

    def happened(self, program: Hashable, event: KvEvent, now_s: float) -> None:
        if not isinstance(event, ProgramGone):
            return
        for number in self._blocks.pop(program, ()):
            owned = self._owned[number]
            del owned.owners[program]
            if not owned.owners:
                del self._owned[number]
                self._due[number] = owned.content

    def before_step(self, step: NextStep, now_s: float) -> None:
        """Move the blocks of ended programs to the front of the free list, the ends of their contexts first.

        A block that is in use follows when it is free.
        """
        if not self._due:
            return
        queue, free, in_use = self._pool.free_block_queue, [], {}
        for number, content in self._due.items():
            block = self._pool.blocks[number]
            if block.block_hash != content:  # vLLM has evicted it
                continue
            if block.ref_cnt:
                in_use[number] = content
                continue
            queue.remove(block)
            free.append(block)
        queue.prepend_n(free[::-1])
        self._due = in_use

    def _drop(self, number: int) -> None:
        """vLLM has evicted what a block held."""
        owned = self._owned.pop(number, None)
        for program in owned.owners if owned is not None else ():
            del self._blocks[program][number]

    def check_integrity(self) -> None:
        forward = {(program, number) for program, blocks in self._blocks.items() for number in blocks}
        backward = {(program, number) for number, owned in self._owned.items() for program in owned.owners}
        if forward != backward:
            raise AssertionError(f"programs and blocks disagree: {forward ^ backward}")
