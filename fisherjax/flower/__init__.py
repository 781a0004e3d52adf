"""Run an algorithm on Flower, where clients are other people's machines.

`client_app` and `server_app` make Flower's apps of the same `Algorithm` object that `rounds` runs:
wrappers, state and keys are the same, and so are the results. Uploads travel as the bytes of upload
files. Install the extra `flower` to use this module; no other module imports it.
"""

try:
    import flwr  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "fisherjax.flower needs the package flwr: pip install 'fisherjax[flower]'."
    ) from error

from fisherjax.flower._client import client_app
from fisherjax.flower._grid import InProcess, Streaming
from fisherjax.flower._secure import Secure
from fisherjax.flower._server import server_app, strategy
from fisherjax.flower._state import Report, ServerState, Terms
from fisherjax.flower._strategy import Strategy
from fisherjax.flower._wire import upload_file

__all__ = [
    "InProcess",
    "Report",
    "Secure",
    "ServerState",
    "Strategy",
    "Streaming",
    "Terms",
    "client_app",
    "server_app",
    "strategy",
    "upload_file",
]
