"""GPUs by name or by memory: `8xA100-80GB`, `1xH100`, `2x24GB`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.errors import InvalidRequestError

GPUS_MAX = 64
"""In one node: more than any machine has."""
USABLE_SHARE = 0.985
"""Of the memory that a card is sold with; the rest is the firmware's."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of card."""

    name: str
    memory_gib: float
    flops_per_s: float | None = None
    """Peak of dense bfloat16 products with float32 sums; none where only the memory is known."""
    reached: float = 0.5
    """Share of the peak that large products reach: from a published run, else a half."""
    memory_bytes_per_s: float = 1e12
    link_bytes_per_s: float = 20e9
    """To the other cards of the node: NVLink, or PCIe."""
    host_bytes_per_s: float = 20e9
    """To the host's memory."""

    @property
    def usable_bytes(self) -> float:
        """What a process can allocate."""
        return self.memory_gib * 2**30 * USABLE_SHARE


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes."""

    gpu: Gpu
    gpus_per_node: int
    num_nodes: int = 1
    link_bytes_per_s: float = 10e9 / 8
    """Between nodes."""

    @property
    def num_gpus(self) -> int:
        """In all nodes."""
        return self.gpus_per_node * self.num_nodes


def _card(
    name: str,
    memory_gib: float,
    tera_flops: float,
    reached: float,
    memory_gb_per_s: float,
    link_gb_per_s: float,
    host_gb_per_s: float = 20,
) -> Gpu:
    return Gpu(
        name=name,
        memory_gib=memory_gib,
        flops_per_s=tera_flops * 1e12,
        reached=reached,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        link_bytes_per_s=link_gb_per_s * 1e9,
        host_bytes_per_s=host_gb_per_s * 1e9,
    )


_CARDS = (
    # The shares of A100, H100, A5000, 3090 and 4090 are those of `tests/unit/plan`'s points.
    _card("A100-40GB", 40, 312, 0.58, 1555, 250),
    _card("A100-80GB", 80, 312, 0.58, 2039, 250),
    _card("H100", 80, 989, 0.37, 3350, 400, 45),
    _card("H200", 141, 989, 0.37, 4800, 400, 45),
    _card("B200", 180, 2250, 0.37, 8000, 800, 45),
    _card("L4", 24, 121, 0.5, 300, 20),
    _card("L40S", 48, 362, 0.5, 864, 20),
    _card("A10", 24, 125, 0.5, 600, 20),
    _card("A5000", 24, 111, 0.41, 768, 20),
    _card("A6000", 48, 155, 0.5, 768, 20),
    _card("3090", 24, 71, 0.55, 936, 10, 10),
    _card("4090", 24, 165, 0.75, 1008, 20),
    _card("5090", 32, 210, 0.5, 1792, 40, 40),
)
CARDS: Mapping[str, Gpu] = {card.name: card for card in _CARDS}
_ALIASES = {"A100": "A100-80GB", "H100-80GB": "H100", "RTX3090": "3090", "RTX4090": "4090"}
_GPUS = re.compile(r"(?P<count>[0-9]+) *[x×*] *(?P<kind>[A-Za-z0-9.+ -]+)")
_MEMORY = re.compile(r"(?P<size>[0-9]+(\.[0-9]+)?) *G(i?B)?", re.IGNORECASE)


def parse_gpus(gpus: str) -> tuple[int, Gpu]:
    """How many cards a node has, and of which kind. Raises `InvalidRequestError`."""
    found = _GPUS.fullmatch(gpus.strip())
    if found is None:
        raise InvalidRequestError(
            f"gpus {gpus!r} is not a number of cards and their kind: write 2x24GB, 8xA100-80GB or "
            "1xH100"
        )
    count = int(found["count"])
    if not 1 <= count <= GPUS_MAX:
        raise InvalidRequestError(
            f"gpus {gpus!r}: a node has 1 to {GPUS_MAX} cards; `nodes` says how many nodes"
        )
    return count, _gpu(found["kind"])


def _gpu(kind: str) -> Gpu:
    if memory := _MEMORY.fullmatch(kind.strip()):
        size = float(memory["size"])
        if not 1 <= size <= 1024:
            raise InvalidRequestError(f"a card with {size:g} GB: give 1 to 1024 GB")
        return Gpu(name=f"{size:g}GB", memory_gib=size)
    name = re.sub(r"[ -]+", "-", kind.strip().upper())
    name = _ALIASES.get(name, name).removeprefix("RTX-")
    if name not in CARDS:
        raise InvalidRequestError(
            f"there is no card {kind!r} here: give its memory, as in 2x24GB, or one of "
            f"{', '.join(CARDS)}"
        )
    return CARDS[name]
