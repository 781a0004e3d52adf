"""Differential privacy: bounded clients and noisy sums, private gradients, and what they cost.

`private` makes an algorithm whose merged model hides whether a client took part, `dp_sgd` a model
whose training hides each example. Both add Gaussian noise to a sum of terms of bounded norm, and
`epsilon` says what that costs. Neighbours differ in one client, or example, whose term is zero.
"""

from fisherjax.privacy.accounting import Ledger, epsilon
from fisherjax.privacy.clipping import Clipped, norms
from fisherjax.privacy.example_gradients import dp_sgd
from fisherjax.privacy.sums import private

__all__ = ["Clipped", "Ledger", "dp_sgd", "epsilon", "norms", "private"]
