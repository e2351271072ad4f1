"""The keys of a federation: its authority, the server's certificate, and a key for every node."""

import contextlib
import ipaddress
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
    ssh_key_fingerprint,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

A_YEAR = timedelta(days=365)
CLOCKS_APART = 305.0  # seconds; what Flower allows
REFUSED = 412  # a status with which a SuperNode shows its user the reason; at 401 it would end without a word
Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]
USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def make_authority(certificate: Path, key: Path) -> Authority:
    """An authority for ten years, kept in these files."""
    key_pair = ec.generate_private_key(ec.SECP384R1())
    builder = _builder("bcfl federation", key_pair.public_key(), 10 * A_YEAR)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    made = builder.issuer_name(_name("bcfl federation")).sign(key_pair, SHA384())
    certificate.write_bytes(made.public_bytes(Encoding.PEM))
    _write_private(key, key_pair, PrivateFormat.PKCS8)
    return made, key_pair


def make_server_certificate(authority: Authority, hosts: Sequence[str], certificate: Path, key: Path) -> None:
    """A certificate for two years, signed by the authority, for the server that goes by these names and addresses."""
    key_pair, (issuer, issuer_key) = ec.generate_private_key(ec.SECP384R1()), authority
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = _builder("bcfl server", key_pair.public_key(), 2 * A_YEAR).issuer_name(issuer.subject)
    builder = builder.add_extension(names, critical=False).add_extension(issued_by, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage("digital_signature"), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    certificate.write_bytes(builder.sign(issuer_key, SHA384()).public_bytes(Encoding.PEM))
    _write_private(key, key_pair, PrivateFormat.PKCS8)


def make_node_key(key: Path, comment: str) -> None:
    """A key as `ssh-keygen` makes them, which Flower wants, and beside it the public one."""
    made = ec.generate_private_key(ec.SECP384R1())
    _write_private(key, made, PrivateFormat.OpenSSH)
    public = made.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    key.with_suffix(".pub").write_text(f"{public.decode()} {comment}\n")


def _builder(name: str, key: ec.EllipticCurvePublicKey, lasts: timedelta) -> x509.CertificateBuilder:
    now = datetime.now(UTC) - timedelta(hours=1)  # clocks differ
    builder = x509.CertificateBuilder().subject_name(_name(name)).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now).not_valid_after(now + lasts)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in USES})


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> None:
    path.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))


@dataclass
class Nodes:
    """The public keys in a folder; one that comes or goes is noticed within seconds."""

    folder: Path
    known: dict[bytes, ec.EllipticCurvePublicKey] = field(default_factory=dict)  # by their encoding in a request
    read_at: float = -60.0

    def refusal(self, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """A status and the reason why these headers let nobody in; None if one of the nodes has just signed them."""
        try:
            encoded = b64decode(headers[b"flwr-public-key"], validate=True)
            signature = b64decode(headers[b"flwr-signature"], validate=True)
            signed_at = headers[b"flwr-timestamp"]
            age = abs((datetime.now(UTC) - datetime.fromisoformat(signed_at.decode())).total_seconds())
            key = self._find(encoded)
            if key is None:
                place = f"{self.folder.parent.name}/{self.folder.name}"
                return REFUSED, f"its key {fingerprint(encoded)} is not among those in {place}/"
            key.verify(signature, signed_at, ec.ECDSA(SHA256()))
        except (KeyError, ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            return 401, "its request is not signed as a node's"
        if age > CLOCKS_APART:
            return REFUSED, f"its clock is {age:.0f} seconds off the server's"
        return None

    def _find(self, encoded: bytes) -> ec.EllipticCurvePublicKey | None:
        since = time.monotonic() - self.read_at
        if since > 5 or (since > 0.5 and encoded not in self.known):
            found = [_public_key(path) for path in self.folder.glob("*.pub")]
            pem, form = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
            self.known = {key.public_bytes(pem, form): key for key in found if key is not None}
            self.read_at = time.monotonic()
        return self.known.get(encoded)


def _public_key(path: Path) -> ec.EllipticCurvePublicKey | None:
    with contextlib.suppress(OSError, ValueError, UnsupportedAlgorithm):
        key = load_ssh_public_key(path.read_bytes())
        return key if isinstance(key, ec.EllipticCurvePublicKey) else None
    return None


def fingerprint(encoded: bytes) -> str:
    """A public key by the name that `ssh-keygen -l` gives it."""
    key = load_pem_public_key(encoded)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("no node's key")
    return "SHA256:" + b64encode(ssh_key_fingerprint(key, SHA256())).decode().rstrip("=")
