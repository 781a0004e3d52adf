"""Convolution and pooling that are fast inside compiled loops, on a CPU above all.

XLA's CPU convolution is slow, several times more so inside a loop; a convolution written as
patches times a matrix is not. `conv_general_dilated` has the signature of lax's, so it is injected
with `flax.linen.Conv(..., conv_general_dilated=nn.conv_general_dilated)`, and the parameters keep
their shape.

Images are [B, H, W, C]; kernels are [kh, kw, cin, cout].
"""

from fisherjax.nn.convolution import conv_general_dilated, observe_convolutions, patches
from fisherjax.nn.generator import Generator, doubled_convolution, generate, init_generator
from fisherjax.nn.pooling import max_pool

__all__ = [
    "Generator",
    "conv_general_dilated",
    "doubled_convolution",
    "generate",
    "init_generator",
    "max_pool",
    "observe_convolutions",
    "patches",
]
