"""The papers' networks in flax, with their initialisation, and what makes functions of them.

Nothing else in the library needs flax: any `apply(params, inputs) -> outputs` will do.

Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024 (LeNet for MNIST-like images, the FedNet
CNN for 32 x 32 images, both without biases); Li, Diao, Chen, He, Federated Learning on Non-IID Data
Silos, ICDE 2022, and its code, NIID-Bench (SimpleCNN and SimpleCNNMNIST); Huang, Shi, Cai, Suzuki,
ICLR 2024 (NormedCNN). Deviation: images are [H, W, C] and are flattened in that order. ResidualMLP
and the transformers name their own.
"""

from fisherjax.networks.functions import apply_fn, augmented, init, model
from fisherjax.networks.images import (
    CNN,
    MLP,
    LeNet,
    NormedCNN,
    ResidualMLP,
    SimpleCNN,
    SimpleCNNMNIST,
)
from fisherjax.networks.statistics import from_flax, from_moments, to_flax, to_moments
from fisherjax.networks.transformer import Transformer, VisionTransformer

__all__ = [
    "CNN",
    "MLP",
    "LeNet",
    "NormedCNN",
    "ResidualMLP",
    "SimpleCNN",
    "SimpleCNNMNIST",
    "Transformer",
    "VisionTransformer",
    "apply_fn",
    "augmented",
    "from_flax",
    "from_moments",
    "init",
    "model",
    "to_flax",
    "to_moments",
]
