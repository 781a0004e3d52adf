"""Sums over clients whose terms the server never sees: fixed point, masks, shares, four messages.

Needs the extra `secure`. `secure_merge` plays it for an algorithm in one process; `protocol` has
the messages one by one, for any transport.
"""

from fisherjax.secure_aggregation import fixed_point, keys, protocol, shares
from fisherjax.secure_aggregation.simulation import (
    SecureSum,
    contributions,
    secure_merge,
    secure_sum,
)

__all__ = [
    "SecureSum",
    "contributions",
    "fixed_point",
    "keys",
    "protocol",
    "secure_merge",
    "secure_sum",
    "shares",
]
