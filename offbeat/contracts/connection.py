"""What a worker is told at its start of where the other parts are."""

from typing import Annotated

from pydantic import Field, SecretStr, field_serializer

from offbeat.contracts.base import Contract


class StoreAccess(Contract):
    """The object store, by the names of `ObjectStoreSettings`."""

    endpoint_url: str | None
    """None is AWS."""
    bucket: str
    region: str
    access_key_id: str
    secret_access_key: SecretStr

    @field_serializer("secret_access_key", when_used="json")
    def _reveal(self, secret: SecretStr) -> str:
        return secret.get_secret_value()


class Connection(Contract):
    """`GET /internal/connection`."""

    weight_proxy_url: Annotated[str, Field(min_length=1)]
    store: StoreAccess
