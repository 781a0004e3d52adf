"""Pass bytes between nodes and a superlink: count them, and cut the connections when asked to."""

import contextlib
import socket
import threading
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes that went to the nodes, and that came from them, all of TLS and HTTP included."""

    down: int
    up: int


class Proxy:
    """A proxy on a port of this machine, which knows nothing of what passes.

    Example:
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     with Proxy("127.0.0.1", server.getsockname()[1]) as proxy:
        ...         with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        ...             client.sendall(b"hello")
        ...             received, _ = server.accept()
        ...             print(received.recv(5), proxy.traffic())
        ...             received.close()
        b'hello' Traffic(down=0, up=5)
    """

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._bytes = [0, 0]
        self._is_cut = False

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def traffic(self) -> Traffic:
        """Return the bytes until now."""
        with self._lock:
            return Traffic(*self._bytes)

    def cut(self) -> None:
        """Close all connections, and new ones at once."""
        with self._lock:
            self._is_cut, connections = True, list(self._open)
        for each in connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Pass bytes again."""
        self._is_cut = False

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the socket is closed in the end
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with client:
            if self._is_cut:
                return
            with contextlib.suppress(OSError), socket.create_connection(self._to) as server:
                with self._lock:
                    self._open |= {client, server}
                down = threading.Thread(target=self._pass, args=(server, client, 0), daemon=True)
                down.start()
                self._pass(client, server, 1)
                down.join()
            with self._lock:
                self._open -= {client, server}

    def _pass(self, source: socket.socket, target: socket.socket, way: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                # Counted first: who receives them may look.
                with self._lock:
                    self._bytes[way] += len(data)
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
