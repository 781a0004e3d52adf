"""Make the TLS certificates of a superlink, and a key for each node that may join.

    python -m experiments.flower keys runs/keys --nodes 2 --hosts server.example.org

The folder then holds ca.crt, which every node and `run` need; server.crt and server.key for the
superlink; and for each node node-I.pem and sums-I.key, which go to that node alone, and node-I.pub,
which the superlink registers. Nodes sign their messages of secure sums with sums-I.key, and
verifiers.txt, which every node and `run` need, has the public keys. A second call adds the keys of
further nodes. The key that signed the
certificate is not kept, so that nobody can sign another: for other hosts, make a new folder.
"""

import dataclasses
import datetime
import importlib.util
import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from experiments.harness import commands
from fisherjax.secure_aggregation import keys as sums

PROGRAM = "experiments.flower keys"
CA, CERTIFICATE, KEY = "ca.crt", "server.crt", "server.key"
VERIFIERS = "verifiers.txt"
_AUTHORITY = "fisherjax superlink's authority"


@dataclasses.dataclass(frozen=True)
class Config:
    """Certificates and keys."""

    folder: Annotated[Path, tyro.conf.Positional] = Path("runs/keys")
    """Folder for the files."""
    nodes: int = 2
    """Number of nodes that may join."""
    hosts: tuple[str, ...] = ()
    """Names and addresses of the superlink besides localhost, as nodes write them."""
    days: int = 365
    """Number of days for which the certificate is valid."""


def private(folder: Path, node: int) -> Path:
    """Return the path of a node's private key."""
    return folder / f"node-{node}.pem"


def _public(folder: Path, node: int) -> Path:
    return private(folder, node).with_suffix(".pub")


def public(folder: Path) -> list[Path]:
    """Return the public keys of all nodes."""
    return sorted(folder.glob("node-*.pub"))


def signing(folder: Path, node: int) -> Path:
    """Return the path of the key by which a node signs its messages of secure sums."""
    return folder / f"sums-{node}.key"


def verifiers(folder: Path) -> list[str]:
    """Return the public keys of secure sums, one for each node."""
    path = folder / VERIFIERS
    return path.read_text().splitlines() if path.exists() else []


def _check(asked: Config) -> None:
    for option in ("nodes", "days"):
        commands.check(asked, option, "1 or more", lambda number: number >= 1)


@commands.command(PROGRAM, __doc__, Config, _check, continues=False, cached=False)
def main(asked: Config, console: Console) -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise ValueError("keys needs the package cryptography: pip install 'fisherjax[secure]'")
    asked.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (asked.folder / CERTIFICATE).exists():
        _write_certificates(asked)
    elif asked.hosts:
        raise ValueError(
            f"{asked.folder} has a certificate, and the key that signed it was not kept: choose "
            "another folder for --hosts"
        )
    # The public key tells: the private one may have been moved to its node.
    made = [n for n in range(asked.nodes) if not _public(asked.folder, n).exists()]
    for node in made:
        _write_node(asked.folder, node)
    _write_sums(asked.folder, asked.nodes)
    files = ", ".join(sorted(path.name for path in asked.folder.iterdir()))
    console.print(f"In {asked.folder}/: {files}")


def _write_certificates(asked: Config) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    ca, own = _new_key(), _new_key()
    names = [_named(host) for host in ("localhost", "127.0.0.1", "::1", *asked.hosts)]
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca.public_key())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    root = _certificate(
        _AUTHORITY,
        ca.public_key(),
        asked.days,
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage(key_cert_sign=True), True),
        (identifier, False),
    )
    leaf = _certificate(
        "fisherjax superlink",
        own.public_key(),
        asked.days,
        (x509.SubjectAlternativeName(names), False),
        (_usage(digital_signature=True), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (issuer, False),
    )
    _write(asked.folder / CA, _signed(root, ca))
    _write(asked.folder / KEY, _private(own, "PKCS8"))
    # The last one, by which a second call sees that all are there.
    _write(asked.folder / CERTIFICATE, _signed(leaf, ca))


def _certificate(name: str, key: Any, days: int, *extensions: tuple[Any, bool]) -> Any:
    """Return a certificate of the authority that is not signed yet."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, _AUTHORITY)
    )
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    made = made.serial_number(x509.random_serial_number())
    # Clocks differ by minutes.
    made = made.not_valid_before(now - datetime.timedelta(hours=1))
    made = made.not_valid_after(now + datetime.timedelta(days=days))
    for extension, critical in extensions:
        made = made.add_extension(extension, critical=critical)
    return made


def _usage(**allowed: bool) -> Any:
    from cryptography import x509

    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})


def _named(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    # Flower takes keys on NIST's curves.
    return ec.generate_private_key(ec.SECP384R1())


def _signed(builder: Any, key: Any) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    return builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _private(key: Any, form: str) -> bytes:
    from cryptography.hazmat.primitives import serialization

    how = serialization.Encoding.PEM, getattr(serialization.PrivateFormat, form)
    return key.private_bytes(*how, serialization.NoEncryption())


def _write_node(folder: Path, node: int) -> None:
    from cryptography.hazmat.primitives import serialization

    key = _new_key()
    how = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    _write(private(folder, node), _private(key, "OpenSSH"))
    # The last one, by which a second call sees that both are there.
    _write(_public(folder, node), key.public_key().public_bytes(*how))


def _write_sums(folder: Path, nodes: int) -> None:
    """Add the keys of nodes that have none to the public ones, a line for each node."""
    lines = verifiers(folder)
    for node in range(len(lines), nodes):
        own = os.urandom(sums.SECRET)
        _write(signing(folder, node), own)
        lines.append(sums.verifier(own).hex())
    _write(folder / VERIFIERS, "".join(f"{line}\n" for line in lines).encode())


def _write(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
