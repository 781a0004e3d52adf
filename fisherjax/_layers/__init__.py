"""How a network uses its parameters, read off the equations of its jaxpr.

Any `apply(params, inputs) -> outputs` is read: nothing here knows a network library.
"""
