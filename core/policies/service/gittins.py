"""The Gittins index of a distribution of work: the least expected cost of serving a program, for each end.

Let a program have had work a, and serve it for d more, or until it ends. That costs E[min(S - a, d) | S > a] of
service, and the program ends with probability P(S - a <= d | S > a). The best d has the least cost for each end:

    G(a) = inf over d > 0 of  E[min(S - a, d); S > a] / P(a < S <= a + d)

Both sides have the factor P(S > a), which cancels. With the survival function P(S > x) and its integral I(x), the cost
is I(a + d) - I(a), and with the distribution function F the chance of an end is F(a + d) - F(a). So two cumulative sums
give the whole table. Serving the program with the least G minimises the mean response time of a single server with
Poisson arrivals (Gittins 1979, "Bandit processes and dynamic allocation indices"; as a rank that depends on age:
Scully, Harchol-Balter and Scheller-Wolf 2018, "SOAP: One clean analysis of all age-based scheduling policies").

The rank is the running maximum of G over age. SOAP shows that the worst rank so far decides how long a program is
delayed. A dip below the maximum is therefore of little use: the program would be preempted when its rank rises again.
"""

from __future__ import annotations

import numpy as np

from weft.core.policies.service.distribution import AGES, EDGES, Array, Distribution, integral


def gittins_index(distribution: Distribution) -> Array:
    """The running maximum of the index, in tokens, at the lower bound of each bucket of ages. The least goes first.

    Args:
        distribution: The distribution of the work of a program.

    Returns:
        The ranks, of the shape of `AGES`.
    """
    survival = distribution.survival
    costs = integral(survival)
    ended = np.concatenate(([0.0], np.cumsum(distribution.mass)))  # the distribution function at each edge
    at_age = np.interp(AGES, EDGES, costs), np.interp(AGES, EDGES, ended)
    cost = costs[None, :] - at_age[0][:, None]
    chance = ended[None, :] - at_age[1][:, None]
    is_later = (EDGES[None, :] > AGES[:, None] * (1 + 1e-9)) & (chance > 1e-9)
    index = np.where(is_later, cost / np.where(is_later, chance, 1.0), np.inf).min(axis=1)
    finite = np.where(np.isfinite(index), index, 0.0)  # no program of this age was seen: the rank stays
    return np.maximum.accumulate(finite)
