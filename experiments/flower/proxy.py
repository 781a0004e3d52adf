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
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._bytes = [0, 0]
        self._listen(0)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def _listen(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", port))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def traffic(self) -> Traffic:
        """Return the bytes until now."""
        with self._lock:
            return Traffic(*self._bytes)

    def cut(self) -> None:
        """Close all connections, and refuse new ones."""
        _close(self._server)
        with self._lock:
            connections = list(self._open)
        for each in connections:
            _close(each)

    def mend(self) -> None:
        """Accept connections on the same port again."""
        self._listen(self.port)

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is closed in the end
            while True:
                client, _ = server.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._to) as server:
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


def _close(connection: socket.socket) -> None:
    """Close a socket, on which another thread may wait."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
