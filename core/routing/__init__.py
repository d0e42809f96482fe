"""Routing: which replica takes a call, which replicas there are, and how many calls are admitted.

To add a balancer, write its module with `@register(...)` and import its class here (docs/how-to/add-a-balancer.md).
"""

from typing import Final

from weft.core.routing.balancer import DEFAULT_BALANCER as DEFAULT_BALANCER
from weft.core.routing.balancer import Arrival as Arrival
from weft.core.routing.balancer import AssigningBalancer as AssigningBalancer
from weft.core.routing.balancer import Balancer as Balancer
from weft.core.routing.balancer import BalancerConfig as BalancerConfig
from weft.core.routing.balancer import EngineLoad as EngineLoad
from weft.core.routing.balancer import Loads as Loads
from weft.core.routing.balancer import register as register
from weft.core.routing.balancer import registration as registration
from weft.core.routing.balancer import registrations as registrations
from weft.core.routing.balancers import AdaptiveLocality as AdaptiveLocality
from weft.core.routing.balancers import Affinity as Affinity
from weft.core.routing.balancers import LeastUsed as LeastUsed
from weft.core.routing.balancers import Locality as Locality
from weft.core.routing.balancers import RoundRobinBalancer as RoundRobinBalancer
from weft.core.routing.stealing import StealingConfig as StealingConfig

BALANCERS: Final = tuple(each.name for each in registrations())
