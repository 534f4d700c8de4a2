"""What workers are told of the weight-proxy and the object store."""

from offbeat.contracts.connection import Connection, StoreAccess
from offbeat.settings import ObjectStoreSettings
from services.orchestrator.settings import WorkersSettings


def connection_of(
    workers: WorkersSettings, store: ObjectStoreSettings, weight_proxy_url: str
) -> Connection:
    """The orchestrator's own view, but for what is set for the workers."""
    return Connection(
        weight_proxy_url=workers.weight_proxy_url or weight_proxy_url,
        store=StoreAccess(
            endpoint_url=workers.s3_endpoint_url or store.endpoint_url,
            bucket=store.bucket,
            region=store.region,
            access_key_id=workers.s3_access_key_id or store.access_key_id,
            secret_access_key=workers.s3_secret_access_key or store.secret_access_key,
        ),
    )
