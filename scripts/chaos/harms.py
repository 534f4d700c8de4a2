"""What can be done to a running fleet, by name. Each kind of harm has a module of its own."""

from collections.abc import Mapping

from scripts.chaos.broker_harms import BROKER_HARMS
from scripts.chaos.call_harms import CALL_HARMS
from scripts.chaos.harm import Harm
from scripts.chaos.host_harms import HOST_HARMS
from scripts.chaos.process_harms import PROCESS_HARMS
from scripts.chaos.store_harms import STORE_HARMS

HARMS: Mapping[str, Harm] = {
    harm.name: harm
    for harm in (
        *PROCESS_HARMS,
        *BROKER_HARMS,
        *STORE_HARMS,
        *CALL_HARMS,
        *HOST_HARMS,
    )
}
