"""Fetching an image that a client names by its URL, without becoming the client's way into this network."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from contextlib import suppress
from urllib.parse import SplitResult, urljoin, urlsplit

SECONDS = 10.0  # for everything, redirects included
MOST_BYTES = 16 << 20
MOST_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ipaddress.ip_network("64:ff9b::/96")


def fetch(url: str, seconds: float = SECONDS, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes behind an http or https URL. ValueError, in one line, for whatever is not given within the limits.

    Every address that a host has, also after a redirect, must be public, and the connection goes to the very address
    that was checked.
    """
    deadline = time.monotonic() + seconds
    try:
        for _ in range(1 + MOST_REDIRECTS):
            found = _once(_checked(url), deadline, most_bytes)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
    except TimeoutError:
        raise ValueError(f"image {url!r:.100}: not fetched within {seconds:g} seconds") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise ValueError(f"image {url!r:.100} cannot be fetched ({type(error).__name__})") from None
    raise ValueError(f"image {url!r:.100}: more than {MOST_REDIRECTS} redirects")


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (raises where it is no number)
    except ValueError as error:
        raise ValueError(f"image {url!r:.100} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise ValueError(f"image {url!r:.100} is no URL to fetch; expected http://HOST/... or https://HOST/...")
    if not url.isascii() or any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        raise ValueError(f"image {url!r:.100} holds characters that no URL has; percent-encode them")
    return parts


def _once(parts: SplitResult, deadline: float, most_bytes: int) -> bytes | str:
    """The body of one response, or where it redirects to."""
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    host = parts.hostname or ""  # `_checked` refuses a URL without
    with _Line(_connected(host, port, deadline), _left(deadline)) as line:
        if parts.scheme == "https":
            line.encrypt(host)
        return _exchange(line.socket, parts, most_bytes)


def _exchange(sock: socket.socket, parts: SplitResult, most_bytes: int) -> bytes | str:
    connection = http.client.HTTPConnection(parts.netloc)
    connection.sock = sock
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("GET", path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
    with connection.getresponse() as response:
        if response.status in REDIRECTS and (place := response.getheader("Location")):
            return place
        if response.status != 200:
            raise ValueError(f"image {parts.geturl()!r:.100}: its server answers {response.status}")
        body = response.read(most_bytes + 1)
        if len(body) > most_bytes:
            raise ValueError(f"image {parts.geturl()!r:.100} is longer than {most_bytes:,} bytes")
        if response.length:  # that is still to come, and will not
            raise http.client.IncompleteRead(body, response.length)
    return body


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first of a host's addresses that answers; all of them must be public."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(address[0]).split("%")[0]) for *_, address in found]
    if not all(map(is_public, addresses)):
        raise ValueError(f"image host {host!r:.100} has an address that is not public; it is not fetched")
    for address in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection((str(address), port), timeout=_left(deadline))
    return socket.create_connection((str(addresses[-1]), port), timeout=_left(deadline))


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is one of the open internet; one that carries an IPv4 address must be so with it."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Line:
    """A connection that is closed at the end and cut after some seconds, whatever it waits for: then TimeoutError."""

    def __init__(self, sock: socket.socket, seconds: float):
        self.socket, self._cut = sock, False
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True

    def encrypt(self, host: str) -> None:
        """Goes on in TLS with a host of this name."""
        context = ssl.create_default_context()
        self.socket = context.wrap_socket(self.socket, server_hostname=host, do_handshake_on_connect=False)
        self.socket.do_handshake()

    def __enter__(self) -> _Line:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self.socket.close()
        if self._cut:
            raise TimeoutError from None

    def _expire(self) -> None:
        self._cut = True
        with suppress(OSError):  # closed at this very moment
            self.socket.shutdown(socket.SHUT_RDWR)
