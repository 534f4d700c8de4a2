"""What must hold of containers, besides that they work."""

from scripts.compose.commands import ComposeTestError
from scripts.compose.stack import ComposeStack
from scripts.compose.waiting import wait_until

OWN_SERVICES = ("generator", "orchestrator", "trainer", "weight-proxy")
CALM_TIMEOUT_S = 180.0


def check_without_torch(stack: ComposeStack) -> None:
    """The control plane's image holds no torch."""
    found = stack.execute(
        "orchestrator",
        "python -c 'from importlib.util import find_spec; print(find_spec(\"torch\"))'",
    )
    _expect(found == "None", f"the image offbeat-control holds torch: {found}")


def check_contained(stack: ComposeStack) -> None:
    """Own services run as nobody in particular, and write to nothing but their volumes."""
    for service in OWN_SERVICES:
        user = stack.execute(service, "id -u")
        _expect(user == "10001", f"{service} runs as {user}")
        written = stack.execute(service, "touch /app/x 2>/dev/null && echo yes || echo no")
        _expect(written == "no", f"{service} can write to its own code")
        rights = stack.execute(service, "grep CapEff /proc/self/status").split()[1]
        _expect(int(rights, 16) == 0, f"{service} has the capabilities {rights}")


def check_restarts(stack: ComposeStack) -> None:
    """Each container that was killed came back once, none restarts by itself, all are well."""
    wait_until(
        lambda: all(container.is_well for container in stack.containers()),
        CALM_TIMEOUT_S,
        lambda: f"{[each for each in stack.containers() if not each.is_well]}",
    )
    restless = [container for container in stack.containers() if container.restarts > 1]
    _expect(not restless, f"restarted by themselves: {restless}")


def _expect(holds: bool, complaint: str) -> None:
    if not holds:
        raise ComposeTestError(complaint)
