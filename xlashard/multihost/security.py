"""Certificates for JAX's coordination service."""

from typing import Any

from xlashard.lazily import dataclass


@dataclass(frozen=True)
class MutualTLS:
    """Certificates by which the coordination service and its clients make sure of each other.

    Attributes:
        certificate: Path of this process's certificate chain, in PEM.
        key: Path of its private key, in PEM.
        authority: Path of the certificates by which that of the other end is checked, in PEM.
        peer_uri_prefix: What a URI among the names of the other end's certificate must begin with,
            such as `"spiffe://example.org/"`. By default clients check the coordinator's host name.

    Example:
        >>> from xlashard import multihost
        >>> tls = multihost.MutualTLS("own.pem", "own.key", "ca.pem")
        >>> tls.authority
        'ca.pem'
    """

    certificate: str
    key: str
    authority: str
    peer_uri_prefix: str | None = None

    def for_jax(self) -> dict[str, Any]:
        """What `jax.distributed.initialize` takes."""
        return {
            "mtls_cert_file": self.certificate,
            "mtls_key_file": self.key,
            "mtls_ca_file": self.authority,
            "mtls_peer_uri_prefix": self.peer_uri_prefix,
            "verify_secure_credentials": True,
        }
