"""A network's own certificate authority, which issues a certificate to each server.

The CA's key is not kept after it has signed these certificates. To add a host, make all
certificates of the network anew.
"""

import datetime
import inspect
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 825
LOOPBACK = "127.0.0.1"
_CA_USAGE = {
    name: name in {"digital_signature", "key_cert_sign", "crl_sign"}
    for name in inspect.signature(x509.KeyUsage).parameters
}


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA certificate with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> str:
        """The certificate as PEM."""
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def issue(
        self, host: str, now: datetime.datetime, others: Iterable[str] = ()
    ) -> tuple[str, str]:
        """Issues a server's certificate and key (PEM) for ``host``, ``others`` and localhost."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [_general_name(each) for each in {host, *others, "localhost", LOOPBACK}]
        certificate = (
            _builder(host, self.certificate.subject, key.public_key(), now)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return certificate.public_bytes(Encoding.PEM).decode(), private.decode()


def make_authority(now: datetime.datetime) -> Authority:
    """Makes a fresh CA, valid from a day before ``now``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = "Riffle network CA"
    certificate = (
        _builder(name, _name(name), key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**_CA_USAGE), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
