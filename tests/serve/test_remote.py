"""Remote images: limits of time and size, and no way into this network, also not by a redirect."""

import contextlib
import ipaddress
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dgemma_jax.serve import remote

BODY = b"pixels" * 1000


class Site(BaseHTTPRequestHandler):
    """Answers by the path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        kind, _, rest = self.path[1:].partition("?")
        with contextlib.suppress(ConnectionError):
            getattr(self, f"do_{kind}")(rest)

    def do_picture(self, _):
        self._head(200, {"Content-Length": len(BODY)})
        self.wfile.write(BODY)

    def do_redirect(self, to):
        self._head(302, {"Location": to, "Content-Length": 0})

    def do_missing(self, _):
        self._head(404, {"Content-Length": 0})

    def do_slow(self, _):
        """A byte now and then: no single read ever times out."""
        self._head(200, {"Connection": "close"})
        for _ in range(100):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.1)

    def do_short(self, _):
        self._head(200, {"Content-Length": 10**6, "Connection": "close"})
        self.wfile.write(BODY)
        self.close_connection = True

    def _head(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def open_site(site, monkeypatch):
    """The site as if its address were public, and no other of this machine."""
    monkeypatch.setattr(remote, "is_public", lambda address: str(address) == "127.0.0.1")
    return site


def test_a_picture_is_fetched_also_behind_redirects(open_site):
    assert remote.fetch(open_site + "/picture") == BODY
    assert remote.fetch(f"{open_site}/redirect?{open_site}/redirect?/picture") == BODY


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/missing", "its server answers 404"),
        ("/short", r"cannot be fetched \(IncompleteRead\)"),
        ("/redirect?/redirect?/redirect?/redirect?/picture", "more than 3 redirects"),
        ("/redirect?http://127.0.0.2:1/", "image host '127.0.0.2' has an address that is not public"),
        ("/redirect?http://localhost.localdomain.invalid/", r"cannot be fetched \(gaierror\)"),
        ("/redirect?file:///etc/passwd", "expected http://HOST/"),
        ("/redirect?//user:word@127.0.0.1/", "expected http://HOST/"),
    ],
)
def test_what_is_refused_on_the_way(open_site, path, message):
    with pytest.raises(ValueError, match=message) as error:
        remote.fetch(open_site + path)
    assert "\n" not in str(error.value)


def test_limits_of_size_and_time(open_site):
    with pytest.raises(ValueError, match="is longer than 5,999 bytes"):
        remote.fetch(open_site + "/picture", most_bytes=len(BODY) - 1)
    assert remote.fetch(open_site + "/picture", most_bytes=len(BODY)) == BODY
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"not fetched within 0.3 seconds"):
        remote.fetch(open_site + "/slow", seconds=0.3)
    assert time.monotonic() - started < 3


def test_a_private_address_is_refused(site):
    with pytest.raises(ValueError, match="has an address that is not public; it is not fetched"):
        remote.fetch(site + "/picture")


def test_all_addresses_of_a_host_count(open_site, monkeypatch):
    """A name with a public and a private address: whichever would be connected to."""
    both = [(0, 0, 0, "", ("127.0.0.1", 80)), (0, 0, 0, "", ("10.0.0.1", 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with pytest.raises(ValueError, match="not public"):
        remote.fetch(open_site + "/picture")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False), ("0.0.0.0", False),
        ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False), ("fe80::1", False), ("fc00::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:8.8.8.8", True), ("2002:7f00:1::", False), ("64:ff9b::a00:1", False),
        ("64:ff9b::808:808", True), ("ff02::1", False), ("::", False),
    ],
)  # fmt: skip
def test_public_addresses(address, public):
    assert remote.is_public(ipaddress.ip_address(address)) == public


@pytest.mark.parametrize(
    "url", ["ftp://a.example/b", "http://", "http://a:b@c.example/", "http://a.example:x/", "http://a.example/ b", "x"]
)
def test_what_is_no_url_to_fetch(url):
    with pytest.raises(ValueError, match="image ") as error:
        remote.fetch(url)
    assert "\n" not in str(error.value)
