"""Certificates and keys of a federation: an authority, the server's certificate, nodes' keys.

What is in the folder already is used again, and nothing is overwritten. Private keys are readable
by their owner alone from the first byte.
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
DAYS = 365  # that a certificate is good for
MARGIN = datetime.timedelta(hours=1)  # for clocks that are behind


@dataclass(frozen=True)
class Certificates:
    """Where the authority is that all trust, and the server's certificate and key."""

    authority: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class NodeKey:
    """Where a node's key is, and its public half, which is registered with the server."""

    private: Path
    public: Path


def server_certificates(folder: Path, hosts: Sequence[str] = ()) -> Certificates:
    """An authority and a certificate for this machine and other names or addresses of it."""
    _private_folder(folder)
    names = tuple(dict.fromkeys((*LOOPBACK, *hosts)))
    authority_key = _key(folder / "ca.key", serialization.PrivateFormat.PKCS8)
    authority = folder / "ca.crt"
    if not authority.exists():
        write_text(authority, _pem(_authority(authority_key)))
    issuer = _read(authority)
    key = _key(folder / "server.key", serialization.PrivateFormat.PKCS8)
    certificate = folder / "server.crt"
    if not certificate.exists():
        write_text(certificate, _pem(_issued(key, names, issuer, authority_key)))
    _refuse_other_names(_read(certificate), names, certificate)
    return Certificates(authority, certificate, folder / "server.key")


def node_key(folder: Path, name: str) -> NodeKey:
    """A key pair with which a node proves who it is, in OpenSSH's format."""
    _private_folder(folder)
    private, public = folder / name, folder / f"{name}.pub"
    key = _key(private, serialization.PrivateFormat.OpenSSH)
    if not public.exists():
        ssh = serialization.PublicFormat.OpenSSH
        line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, ssh)
        write_text(public, f"{line.decode()} {name}\n")
    return NodeKey(private, public)


def _private_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _key(path: Path, form: serialization.PrivateFormat) -> ec.EllipticCurvePrivateKey:
    """The key in a file, made if there is none."""
    is_ssh = form is serialization.PrivateFormat.OpenSSH
    if path.exists():
        read = serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
        try:
            found = read(path.read_bytes(), password=None)
        except (ValueError, TypeError) as problem:
            raise ConfigError(f"{path} is no key that can be read; remove it") from problem
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{path} is no key of an elliptic curve; remove it")
        return found
    key = ec.generate_private_key(ec.SECP384R1())
    content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return key


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _name("fedquilt federation")
    return (
        _dated(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )


def _issued(
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    issuer: x509.Certificate,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        _dated(_name(names[0]), issuer.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general(n) for n in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(by, critical=False)
        .sign(issuer_key, hashes.SHA384())
    )


def _dated(
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
        .not_valid_before(now - MARGIN)
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
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


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _read(path: Path) -> x509.Certificate:
    """A certificate that is good today."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as problem:
        raise ConfigError(f"{path} is no certificate that can be read; remove it") from problem
    if datetime.datetime.now(datetime.timezone.utc) >= found.not_valid_after_utc:
        raise ConfigError(
            f"the certificate {path} was good until {found.not_valid_after_utc:%Y-%m-%d}; remove "
            "it, and another is made"
        )
    return found


def _refuse_other_names(found: x509.Certificate, names: Sequence[str], path: Path) -> None:
    extension = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    for name in names:
        if _general(name) not in extension.value:
            raise ConfigError(
                f"the certificate {path} is not for '{name}'; remove it, and one is made that is"
            )
