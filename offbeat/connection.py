"""How a worker that knows the orchestrator finds the rest: what is set here counts, the
orchestrator tells what is not."""

from collections.abc import Callable
from typing import TypeVar

import structlog

from offbeat.contracts.connection import Connection, StoreAccess
from offbeat.settings import WorkerSettings

log = structlog.get_logger(__name__)

CREDENTIALS = frozenset({"access_key_id", "secret_access_key"})

S = TypeVar("S", bound=WorkerSettings)


def connected(settings: S, ask: Callable[[], Connection]) -> S:
    """The settings with the weight-proxy's address and the object store.

    Credentials of the store that are set here belong to a store that is described here: nothing
    of it is then taken from the answer. Nobody is asked where nothing is missing.
    """
    has_credentials = not CREDENTIALS.isdisjoint(settings.store.model_fields_set)
    if settings.weight_proxy_url and has_credentials:
        return settings
    log.info("Asking the orchestrator for what is not set here.", url=settings.orchestrator_url)
    told = ask()
    store = settings.store
    if not has_credentials:
        missing = StoreAccess.model_fields.keys() - store.model_fields_set
        store = store.model_copy(update={name: getattr(told.store, name) for name in missing})
    return settings.model_copy(
        update={
            "weight_proxy_url": settings.weight_proxy_url or told.weight_proxy_url,
            "store": store,
        }
    )
