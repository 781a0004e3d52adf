"""Load on Flower: memory, bytes on the wire and seconds, beside Flower's own averaging."""
