"""Secure aggregation: the server computes a sum over clients without seeing any client's term.

Clients write their vectors in fixed point, add masks that cancel in the sum, and share the keys of
the masks in case that clients drop out. `secure_merge` runs all parties in one process, for any
algorithm whose updates add up; `protocol` has each of the four messages as a function, for any
transport, and `messages` what they send. Install the extra `secure` to use it.
"""

from fisherjax.secure_aggregation import fixed_point, keys, messages, protocol, shares
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
    "messages",
    "protocol",
    "secure_merge",
    "secure_sum",
    "shares",
]
