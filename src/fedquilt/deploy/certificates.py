"""Creates the certificates and keys of a federation: authority, server certificate, node keys.

Files that exist are used again; nothing is overwritten. Private keys are created with mode 0600, so
that other users can never read them.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedquilt.errors import ConfigError
from fedquilt.files import write_text

LOOPBACK = ("localhost", "127.0.0.1")
VALID_DAYS = 365  # of a certificate
CLOCK_MARGIN = datetime.timedelta(hours=1)  # for nodes whose clocks are behind


@dataclass(frozen=True)
class Certificates:
    """The paths of the authority's certificate, and of the server's certificate and key."""

    authority: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class NodeKey:
    """The paths of a node's private key, and of its public key, which the server registers."""

    private: Path
    public: Path


def ensure_server_certificates(folder: Path, hosts: Sequence[str] = ()) -> Certificates:
    """Creates an authority, and a server certificate for this machine and the given hosts."""
    _make_private_folder(folder)
    names = tuple(dict.fromkeys((*LOOPBACK, *hosts)))
    authority_key = _ensure_key(folder / "ca.key", serialization.PrivateFormat.PKCS8)
    authority = folder / "ca.crt"
    if not authority.exists():
        write_text(authority, _to_pem(_issue_authority(authority_key)))
    issuer = _read_certificate(authority)
    key = _ensure_key(folder / "server.key", serialization.PrivateFormat.PKCS8)
    certificate = folder / "server.crt"
    if not certificate.exists():
        write_text(certificate, _to_pem(_issue_certificate(key, names, issuer, authority_key)))
    _check_names(_read_certificate(certificate), names, certificate)
    return Certificates(authority, certificate, folder / "server.key")


def ensure_node_key(folder: Path, name: str) -> NodeKey:
    """Creates the key pair that a node authenticates with, in OpenSSH's format."""
    _make_private_folder(folder)
    private, public = folder / name, folder / f"{name}.pub"
    key = _ensure_key(private, serialization.PrivateFormat.OpenSSH)
    if not public.exists():
        ssh = serialization.PublicFormat.OpenSSH
        line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, ssh)
        write_text(public, f"{line.decode()} {name}\n")
    return NodeKey(private, public)


def _make_private_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _ensure_key(path: Path, form: serialization.PrivateFormat) -> ec.EllipticCurvePrivateKey:
    """Reads a private key, or creates it if the file does not exist."""
    is_ssh = form is serialization.PrivateFormat.OpenSSH
    if path.exists():
        read = serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
        try:
            stored = read(path.read_bytes(), password=None)
        except (ValueError, TypeError) as problem:
            raise ConfigError(
                f"the key {path} cannot be read; remove it to create another"
            ) from problem
        if not isinstance(stored, ec.EllipticCurvePrivateKey):
            raise ConfigError(
                f"the key {path} is not an elliptic-curve key; remove it to create another"
            )
        return stored
    key = ec.generate_private_key(ec.SECP384R1())
    content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return key


def _issue_authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _make_name("fedquilt federation")
    return (
        _start_certificate(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )


def _issue_certificate(
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    issuer: x509.Certificate,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        _start_certificate(_make_name(names[0]), issuer.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([_make_general_name(n) for n in names]), critical=False
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(authority_id, critical=False)
        .sign(issuer_key, hashes.SHA384())
    )


def _start_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_MARGIN)
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _make_key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _make_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _make_general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _to_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _read_certificate(path: Path) -> x509.Certificate:
    """Reads a certificate, and checks that it has not expired."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as problem:
        raise ConfigError(
            f"the certificate {path} cannot be read; remove it to create another"
        ) from problem
    if datetime.datetime.now(datetime.timezone.utc) >= certificate.not_valid_after_utc:
        raise ConfigError(
            f"the certificate {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; "
            "remove it to create another"
        )
    return certificate


def _check_names(certificate: x509.Certificate, names: Sequence[str], path: Path) -> None:
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    for name in names:
        if _make_general_name(name) not in extension.value:
            raise ConfigError(
                f"the certificate {path} is not valid for '{name}'; remove it to create another"
            )
