"""Convolution and pooling that are fast inside compiled loops, above all on a CPU.

XLA's CPU convolution is slow, and several times slower inside a loop; a convolution as a product
of patches and a matrix is fast. `conv_general_dilated` has the signature of lax's function. Use it
with `flax.linen.Conv(..., conv_general_dilated=nn.conv_general_dilated)`; the parameters keep their
shapes.

Images are [B, H, W, C]; kernels are [kh, kw, cin, cout].
"""

from fisherjax.nn.convolution import (
    Padding,
    Pair,
    conv_general_dilated,
    observe_convolutions,
    patches,
)
from fisherjax.nn.generator import Generator, Norm, doubled_convolution, generate, init_generator
from fisherjax.nn.pooling import max_pool

__all__ = [
    "Generator",
    "Norm",
    "Padding",
    "Pair",
    "conv_general_dilated",
    "doubled_convolution",
    "generate",
    "init_generator",
    "max_pool",
    "observe_convolutions",
    "patches",
]
