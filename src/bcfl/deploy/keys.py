"""The keys of a federation: its certificate authority, the server's certificate, and a key for every node."""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

A_YEAR = timedelta(days=365)
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
