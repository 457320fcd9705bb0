"""TLS as far as the proxy looks into it: whom a client wants to speak to, and certificates in that one's name."""

from __future__ import annotations

import os
import ssl
import struct
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

HANDSHAKE = 0x16
_HELLO_LIMIT = 16 << 10


class Incomplete(Exception):
    """More bytes are needed to tell."""


def server_name(data: bytes) -> str | None:
    """Return the name in a client's first message, None if it names nobody; raise ValueError for what is not one."""
    message = _first_message(data)
    at = 2 + 32
    at += 1 + message[at]
    at += 2 + struct.unpack_from("!H", message, at)[0]
    at += 1 + message[at]
    if at >= len(message):
        return None
    end = at + 2 + struct.unpack_from("!H", message, at)[0]
    at += 2
    while at + 4 <= min(end, len(message)):
        kind, size = struct.unpack_from("!HH", message, at)
        if kind == 0:
            length = struct.unpack_from("!H", message, at + 7)[0]
            return message[at + 9 : at + 9 + length].decode("ascii")
        at += 4 + size
    return None


def _first_message(data: bytes) -> bytes:
    """Put the client's hello together from the records it is spread over."""
    message, at = b"", 0
    while True:
        if len(data) < at + 5:
            raise Incomplete
        kind, major, _, size = struct.unpack_from("!BBBH", data, at)
        if kind != HANDSHAKE or major != 3 or not 0 < size <= 1 << 14:
            raise ValueError("this is not TLS")
        message += data[at + 5 : at + 5 + size]
        if len(message) >= 4:
            if message[0] != 1:
                raise ValueError("this is not a hello")
            length = int.from_bytes(message[1:4], "big")
            if length > _HELLO_LIMIT:
                raise ValueError("the hello is too long")
            if len(message) >= 4 + length:
                return message[4 : 4 + length]
        if len(data) < at + 5 + size:
            raise Incomplete
        at += 5 + size


class Authority:
    """A certificate authority that one sandbox trusts, and nobody else. Its key lives in memory only."""

    def __init__(self, key_pem: bytes, certificate_pem: bytes) -> None:
        self._key = serialization.load_pem_private_key(key_pem, None)
        self._certificate = x509.load_pem_x509_certificate(certificate_pem)
        self.context = lru_cache(maxsize=256)(self._context)

    def _context(self, host: str) -> ssl.SSLContext:
        """Return what is needed to speak TLS in the name of a host, over HTTP/1 so that requests can be read."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        memory = os.memfd_create("certificate", os.MFD_CLOEXEC)
        try:
            os.write(memory, self._issue(host))
            context.load_cert_chain(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)
        return context

    def _issue(self, host: str) -> bytes:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(x509.Name([]), self._certificate.subject, key.public_key(), days=7)
        certificate = (
            builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self._key, hashes.SHA256())  # type: ignore[arg-type]
        )
        return _pem(key) + certificate.public_bytes(serialization.Encoding.PEM)


def new_authority() -> tuple[bytes, bytes]:
    """Make the key and certificate of a new authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Skep sandbox")])
    certificate = (
        _builder(name, name, key.public_key(), days=3650)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pem(key), certificate.public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(issuer, subject, key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=days))
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
