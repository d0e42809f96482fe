"""TLS by vLLM's options, with a certificate that the test signs itself."""

from __future__ import annotations

import datetime as dt
import ipaddress
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from weft.engine.serve.options import parse_options
from weft.engine.serve.server import uvicorn_config

pytestmark = pytest.mark.engine  # vLLM's parser, no engine


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "server.pem", folder / "server.key"
    cert_file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    )
    return cert_file, key_file


async def application(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret"})


def test_connections_are_kept_as_long_as_vllm_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variable is set where a load balancer keeps connections longer than the 5 s of its default."""
    options, _engine = parse_options([])
    assert uvicorn_config(application, options).timeout_keep_alive == 5
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75")
    assert uvicorn_config(application, options).timeout_keep_alive == 75


def test_the_server_speaks_tls(tmp_path: Path) -> None:
    """A client that knows the certificate is answered, another one refuses, and plain text gets nothing."""
    cert_file, key_file = certificate(tmp_path)
    options, _engine = parse_options(["--ssl-certfile", str(cert_file), "--ssl-keyfile", str(key_file)])
    config = uvicorn_config(application, options)
    config.lifespan = "off"
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            context = ssl.create_default_context(cafile=str(cert_file))
            assert httpx.get(f"https://127.0.0.1:{port}/", verify=context).text == "secret"
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                httpx.get(f"https://127.0.0.1:{port}/")
            with pytest.raises(httpx.RemoteProtocolError):
                httpx.get(f"http://127.0.0.1:{port}/")
        finally:
            server.should_exit = True
            thread.join()
