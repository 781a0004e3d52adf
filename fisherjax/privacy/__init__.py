"""Differential privacy: clipped contributions, Gaussian noise on their sum, and its cost.

`private` makes an algorithm whose merged model hides whether a client took part. `dp_sgd` makes a
model whose training hides whether an example took part. Both clip the norm of each contribution and
add Gaussian noise to the sum, and `epsilon` computes what that costs. Two neighbouring data sets
differ in one client, or in one example, whose contribution is zero in one of them. Keys of the
noise come from `system_key`. For sums of integers that clients mask, `discrete_gaussian` samples
noise exactly, and `discrete_epsilon` computes its cost.
"""

from fisherjax.privacy.accounting import Ledger, epsilon
from fisherjax.privacy.clipping import Clipped, norms
from fisherjax.privacy.discrete import discrete_epsilon, discrete_gaussian
from fisherjax.privacy.example_gradients import dp_sgd
from fisherjax.privacy.keys import system_key
from fisherjax.privacy.sums import private

__all__ = [
    "Clipped",
    "Ledger",
    "discrete_epsilon",
    "discrete_gaussian",
    "dp_sgd",
    "epsilon",
    "norms",
    "private",
    "system_key",
]
