"""Names of tenants."""

from __future__ import annotations

from reader_rag.errors import ConfigError

_LONGEST = 256


def checked_tenant(tenant: str) -> str:
    """Check and return a tenant's name.

    Args:
        tenant: One line of at most 256 characters; "" is the default tenant. Names are compared character by character.

    Raises:
        ConfigError: The name is not a string, is too long, or has control or invisible characters.
    """
    if not isinstance(tenant, str):
        raise ConfigError(f"a tenant's name must be a string, not {type(tenant).__name__}")
    if len(tenant) > _LONGEST:
        raise ConfigError(f"a tenant's name has at most {_LONGEST} characters, not {len(tenant)}: use a shorter one")
    if not tenant.isprintable():
        raise ConfigError(f"a tenant's name cannot have control or invisible characters; remove them from {tenant!r}")
    return tenant
