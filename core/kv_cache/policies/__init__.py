"""KV policies: what happens to a program's KV between two calls, and what is evicted first.

To add a KV policy, write its module with `@register(...)` and import its class here.
"""

from typing import Final

from weft.core.kv_cache.policies.decisions import LEAVE as LEAVE
from weft.core.kv_cache.policies.decisions import MOST_HOLD_S as MOST_HOLD_S
from weft.core.kv_cache.policies.decisions import MOST_SOON_S as MOST_SOON_S
from weft.core.kv_cache.policies.decisions import Action as Action
from weft.core.kv_cache.policies.decisions import Context as Context
from weft.core.kv_cache.policies.decisions import Decision as Decision
from weft.core.kv_cache.policies.decisions import KvPolicy as KvPolicy
from weft.core.kv_cache.policies.decisions import KvPolicyConfig as KvPolicyConfig
from weft.core.kv_cache.policies.decisions import Memory as Memory
from weft.core.kv_cache.policies.decisions import as_kv_config as as_kv_config
from weft.core.kv_cache.policies.decisions import register as register
from weft.core.kv_cache.policies.decisions import registrations as registrations
from weft.core.kv_cache.policies.least_waste import LeastWaste as LeastWaste
from weft.core.kv_cache.policies.next_use import NextUse as NextUse
from weft.core.kv_cache.policies.saga import Saga as Saga
from weft.core.kv_cache.policies.saga import Ttl as Ttl
from weft.core.kv_cache.policies.saga import WaLru as WaLru
from weft.core.kv_cache.policies.stock import EndedFirst as EndedFirst
from weft.core.kv_cache.policies.stock import Lru as Lru

KV_POLICIES: Final = tuple(each.name for each in registrations())
