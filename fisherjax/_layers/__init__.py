"""Find how each parameter of a network is used, from the equations of its jaxpr.

The files are the stages of a small compiler, which reads any `apply(params, inputs) -> outputs`
and knows no network library:

1. `equations` traces the network to one flat list of equations, in which `rewriting` turns products
   with computed kernels, expressions of leaves (`computed`), into products with the leaves, and
   `choices` those with kernels that are chosen for each example.
2. `views` follows each parameter leaf through equations that only move its entries.
3. `operations` reads the equation in which a leaf meets the examples (a product, a convolution, a
   lookup, a sum, an elementwise product), and `uses` collects all of them.
4. `layer` groups these uses into layers, each with one weight matrix V, or one for each group of
   inputs; `reading` does all of this for a network, at many examples, and `mixing` tells whether it
   mixes them.
5. `feeders` (which layer feeds which) and `graph` (whose units a layer takes) connect the layers.
6. `pairs` runs the network and returns each layer's inputs and output gradients, in the layout that
   `arrangement` gives them; `locations` tells which of them are padding.
7. `loops` does the same for a network whose blocks are steps of a scan, without unrolling it, where
   `blocks` can read all blocks by the first one.

Beside these stages, `normalization` finds the leaves of BatchNorm, LayerNorm and the like.
"""
