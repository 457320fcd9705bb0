"""Speak TLS in a host's name, to a sandbox that trusts an authority of its own for it."""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CONTEXTS = 32
_LEAF_DAYS = 365


class Authority:
    """A certificate authority that one sandbox trusts, and nobody else. Its key lives in memory only."""

    def __init__(self, key_pem: bytes, certificate_pem: bytes) -> None:
        self._key = serialization.load_pem_private_key(key_pem, None)
        self._certificate = x509.load_pem_x509_certificate(certificate_pem)
        # One for all hosts: making keys is what a flood of made-up names would cost most.
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self.context = lru_cache(maxsize=_CONTEXTS)(self._context)

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
        key = self._leaf_key
        builder = _builder(x509.Name([]), self._certificate.subject, key.public_key(), days=_LEAF_DAYS)
        above = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        certificate = (
            builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(above), critical=False)
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
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
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
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
