"""A network on this machine that stops to carry anything, as one that drops packets: no connection is ended."""

import socket
import threading


class SilentNetwork:
    """Passes on what comes to its own ``port`` to ``target``, until it falls silent; then it swallows everything.

    Args:
        target: port of a server on this machine.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._sockets: list[socket.socket] = []
        self._left: int | None = None
        self.is_silent = threading.Event()
        self.silent_calls = 0
        """Connections that were made while it was silent."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def fall_silent(self, after: int) -> None:
        """Carry ``after`` bytes more to the server, then nothing in either direction."""
        self._left = after

    def recover(self) -> None:
        """Carry new connections again."""
        self._left = None
        self.is_silent.clear()

    def close(self) -> None:
        """End all connections."""
        for end in (self._listener, *self._sockets):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            if self.is_silent.is_set():
                self.silent_calls += 1
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets.append(server)
            for source, sink, up in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._carry, args=(source, sink, up), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(65536):
                if up and self._left is not None:
                    self._left -= len(data)
                    if self._left < 0:
                        self.is_silent.set()
                if self.is_silent.is_set():
                    return  # both sockets stay open
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return
