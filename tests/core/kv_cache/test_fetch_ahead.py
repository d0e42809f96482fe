"""Which contexts are copied back ahead of their calls: what is needed soonest, where there is room."""

from __future__ import annotations

from weft.core.kv_cache.fetch_ahead import Expected, contexts_to_fetch, expect
from weft.core.kv_cache.policies import Context, Memory
from weft.core.prediction import KnownTime


def waiting(name: str, expected_s: float, *, device: int = 0, host: int = 0) -> Expected[str]:
    return Expected(name, expected_s, is_called=True, device_tokens=device, host_tokens=host)


def fetched(*contexts: Expected[str], room_tokens: float = 100) -> list[str]:
    return contexts_to_fetch(contexts, room_tokens=room_tokens, copy_token_s=0.01)


def test_the_context_that_is_needed_first_is_fetched_first() -> None:
    """The link copies one after another, so the order decides which call waits for its copy."""
    assert fetched(waiting("later", 9.0, host=10), waiting("sooner", 1.0, host=10)) == ["sooner", "later"]


def test_a_fetch_takes_no_room_from_what_is_needed_sooner() -> None:
    """Otherwise a copy would push out what has to be copied again at once."""
    assert fetched(waiting("kept", 1.0, device=95), waiting("later", 2.0, host=10)) == []
    assert fetched(waiting("kept", 3.0, device=95), waiting("sooner", 2.0, host=10)) == ["sooner"]


def test_a_call_that_has_not_arrived_is_fetched_for_when_there_is_just_time() -> None:
    """It may never come, and what is fetched for it takes room until then."""
    far = Expected("tool runs", 30.0, is_called=False, device_tokens=0, host_tokens=10)
    assert fetched(far) == []
    assert fetched(far._replace(expected_s=1.05)) == ["tool runs"]


def test_a_context_without_room_leaves_it_to_smaller_ones() -> None:
    """A fetch brings all that the host has of a context, or nothing."""
    assert fetched(waiting("large", 1.0, host=101), waiting("small", 2.0, host=50)) == ["small"]


def test_what_no_call_will_likely_continue_is_fetched_only_for_a_call() -> None:
    """What a compaction has left behind comes back neither by its pause nor when its engine has nothing to do."""
    memory = Memory(0.0, 0, 1e-3, copy_token_s=1e-5)
    context = Context("p", "agent", 0.0, KnownTime(1.0), host_tokens=10)
    assert fetched(expect(context, memory, now_s=5.0)) == [context]
    context.chance = 0.4
    assert fetched(expect(context, memory, now_s=5.0)) == []
    context.called_s = 5.0
    assert fetched(expect(context, memory, now_s=5.0)) == [context]
