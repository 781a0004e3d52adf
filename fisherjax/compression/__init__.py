"""Compress updates: quantise, truncate, send differences, or fill a given number of bytes."""

from fisherjax.compression.base import Codec, compose, compressed, encode, size
from fisherjax.compression.encoded import Encoded, Leaves, declared, decode
from fisherjax.compression.matrices import Root, Triangle, Truncated, roots, triangles, truncated
from fisherjax.compression.quantized import Codes, Difference, differences, quantized
from fisherjax.compression.stream import Slot, Stream
from fisherjax.compression.water_filling import Squares, water_filling

__all__ = [
    "Codec",
    "Codes",
    "Difference",
    "Encoded",
    "Leaves",
    "Root",
    "Slot",
    "Squares",
    "Stream",
    "Triangle",
    "Truncated",
    "compose",
    "compressed",
    "declared",
    "decode",
    "differences",
    "encode",
    "quantized",
    "roots",
    "size",
    "triangles",
    "truncated",
    "water_filling",
]
