"""The Gittins index of a distribution of work: how soon serving a program is expected to pay.

A program has had work a. Serve it for d more, or until it ends. It costs E[min(S - a, d) | S > a] of service, and it
ends, worth w(S), with probability P(S - a <= d | S > a). The best d costs least for each unit of worth:

    G(a) = inf over d > 0 of  E[min(S - a, d); S > a] / E[w(S); a < S <= a + d]

Both sides have the factor P(S > a), which cancels. With the survival function P(S > x) and its integral I(x), the
cost is I(a + d) - I(a), and with W(x) = E[w(S); S <= x] the worth is W(a + d) - W(a). So two cumulative sums give the
whole table. Serving the program of the least G minimises the weighted mean response time of a single server with
Poisson arrivals (Gittins 1979, "Bandit processes and dynamic allocation indices"; as a rank that depends on age:
Scully, Harchol-Balter and Scheller-Wolf 2018, "SOAP: One clean analysis of all age-based scheduling policies").

The rank is the running maximum of G over age. SOAP shows that the worst rank so far decides how long a program is
delayed, so a dip below it is of little use: the program would be preempted when its rank rises again.

The policy ranks with w = 1, which serves mean response time (`weft.core.policies.learned`).
"""

from __future__ import annotations

import numpy as np

from weft.core.policies.service.distribution import AGES, EDGES, Array, Distribution, integral


def gittins_index(distribution: Distribution, weights: Array | None = None) -> Array:
    """The running maximum of the index, in tokens, at the lower bound of each bucket of ages. The least goes first.

    Args:
        distribution: Of the work of a program.
        weights: The worth of the end of a program, for each cell of sizes. None: 1.
    """
    survival = distribution.survival
    costs = integral(survival)
    worths = np.concatenate(([0.0], np.cumsum(distribution.mass if weights is None else distribution.mass * weights)))
    at_age = np.interp(AGES, EDGES, costs), np.interp(AGES, EDGES, worths)
    cost = costs[None, :] - at_age[0][:, None]
    worth = worths[None, :] - at_age[1][:, None]
    is_later = (EDGES[None, :] > AGES[:, None] * (1 + 1e-9)) & (worth > 1e-9)
    index = np.where(is_later, cost / np.where(is_later, worth, 1.0), np.inf).min(axis=1)
    finite = np.where(np.isfinite(index), index, 0.0)  # nobody of this age was seen: the rank stays
    return np.maximum.accumulate(finite)
