"""A web server of this machine while a test runs. In: a handler, what it knows, a folder. Out: HOST:PORT."""

import contextlib
import datetime as dt
import functools
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@contextlib.contextmanager
def serving(
    handler: type[BaseHTTPRequestHandler],
    folder: Path | None = None,
    *,
    context: ssl.SSLContext | None = None,
    **told: Any,
) -> Iterator[str]:
    """Serve on a free port by handlers with `told` as attributes, quiet if they have no log of their own."""
    if handler.log_message is BaseHTTPRequestHandler.log_message:
        told["log_message"] = lambda *_: None
    bound = type("Bound", (handler,), told)
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(bound, directory=folder) if folder else bound
    ) as server:
        server.daemon_threads = True
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def certificate(folder: Path) -> Path:
    """A file with a certificate of this machine's names, which is its own authority, and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 7)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "localhost.pem"
    path.write_bytes(key.private_bytes(*form) + made.public_bytes(serialization.Encoding.PEM))
    return path
