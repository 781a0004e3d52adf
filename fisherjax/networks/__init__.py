"""Networks of the papers in flax, with their initialisation, and pure functions of flax modules.

No other module of the library needs flax: models accept any `apply(params, inputs) -> outputs`.

Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024 (LeNet for MNIST-like images, the FedNet
CNN for 32 x 32 images, both without biases); Li, Diao, Chen, He, Federated Learning on Non-IID Data
Silos, ICDE 2022, and its code, NIID-Bench (SimpleCNN and SimpleCNNMNIST); Huang, Shi, Cai, Suzuki,
ICLR 2024 (NormedCNN). Deviation: images are [H, W, C] and are flattened in that order. The
docstrings of the others have their sources.
"""

from fisherjax.networks.functions import apply_fn, augmented, init, model
from fisherjax.networks.images import (
    CNN,
    MLP,
    DropoutCNN,
    LeNet,
    NormedCNN,
    ResidualMLP,
    SimpleCNN,
    SimpleCNNMNIST,
)
from fisherjax.networks.residual import ResNet18
from fisherjax.networks.statistics import from_flax, from_moments, to_flax, to_moments
from fisherjax.networks.transformer import Transformer, VisionTransformer

__all__ = [
    "CNN",
    "MLP",
    "DropoutCNN",
    "LeNet",
    "NormedCNN",
    "ResNet18",
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
