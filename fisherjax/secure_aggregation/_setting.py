"""Make and check the public parameters of a sum, on which all parties agree before."""

from collections.abc import Sequence

from fisherjax._core import checks
from fisherjax.secure_aggregation import keys
from fisherjax.secure_aggregation.messages import Setting


def setting(
    num_clients: int,
    threshold: int | None,
    length: int,
    bits: int,
    session: bytes,
    encoding: bytes = b"",
    verifiers: Sequence[bytes] = (),
) -> Setting:
    """Make the public parameters of a sum; see `Setting`.

    Without a threshold it is 2 num_clients // 3 + 1. A lower one is accepted, down to more than
    half of the clients, if messages are not signed.

    Raises:
        ValueError: If the threshold is above the number of clients or below the least safe one, or
            there is not one public key for each client.
    """
    checks.count("num_clients", num_clients, 2)
    checks.one_of("bits", bits, (32, 64))
    checks.instance("session", session, bytes, "bytes that are unique to this sum")
    checks.instance("encoding", encoding, bytes, "bytes, such as those of fixed_point.digest")
    checks.instance("verifiers", verifiers, Sequence, "a public Ed25519 key for each client")
    verifiers = tuple(verifiers)
    sizes = {len(x) if isinstance(x, bytes) else None for x in verifiers}
    numbers = {len(verifiers), len(set(verifiers))}
    if verifiers and (sizes != {keys.SECRET} or numbers != {num_clients}):
        raise ValueError(
            f"There are {len(verifiers)} verifiers of {num_clients} clients; expected a public "
            f"Ed25519 key of {keys.SECRET} bytes for each, all different, from keys.verifier."
        )
    # From two thirds on, a server that lies and less than a third of the clients cannot collect
    # both secrets of anybody, as an honest client confirms one list of survivors. At half or less,
    # two groups without a common client could.
    safe = 2 * num_clients // 3 + 1
    least = safe if verifiers else num_clients // 2 + 1
    threshold = safe if threshold is None else checks.count("threshold", threshold)
    if not least <= threshold <= num_clients:
        kind = "signed" if verifiers else "unsigned"
        expected = f"{least} to {num_clients}" if least < num_clients else num_clients
        raise ValueError(
            f"threshold is {threshold} with {num_clients} clients; expected {expected} with "
            f"{kind} messages, as fewer clients could reveal the vector of another, and no more "
            "than all clients can stay."
        )
    length = checks.count("length", length)
    return Setting(int(num_clients), threshold, length, int(bits), session, encoding, verifiers)


def stages(agreed: Setting) -> tuple[str, ...]:
    """Return the names of the stages at which clients send a message, in order."""
    check = ("confirm",) if agreed.verifiers else ()
    return ("advertise", "share", "accept", "mask", *check, "unmask")


def checked_setting(agreed: Setting) -> Setting:
    """Return a setting as `setting` makes it, to be hashed; raise if it would make none such."""
    checks.instance("agreed", agreed, Setting, "the result of protocol.setting")
    return setting(*agreed)
