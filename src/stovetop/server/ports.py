"""The port of a server, which its parent opens and holds. It imports nothing heavy, for the parent."""

import socket

from stovetop.errors import InvalidRequest

BACKLOG = 4096  # connections that the system may hold before they are accepted


def listen(host: str, port: int) -> socket.socket:
    """A port that is open: connections wait until the server takes them. Port 0 is a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol is named, for asyncio switches Nagle's algorithm off only then: 40 ms an answer
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise InvalidRequest(f"cannot listen there ({error.strerror}); choose another --port: {host}:{port}") from error
    listening.listen(BACKLOG)
    return listening
