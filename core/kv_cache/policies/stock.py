"""Least recently used, as stock vLLM evicts, and the same with ended programs first."""

from __future__ import annotations

from weft.core.kv_cache.policies.decisions import KvPolicy, register


@register("lru", "what was used longest ago is evicted first, as in stock vLLM")
class Lru(KvPolicy):
    """Evicts in the order of use, whether programs have ended or not."""

    evicts_ended_first = False
    follows_use = True


@register("ended-first", "programs that have ended are evicted first, then what was used longest ago")
class EndedFirst(KvPolicy):
    """Evicts in the order of use, after the blocks of ended programs. It predicts nothing."""

    follows_use = True
