"""A LoRA adapter as an engine computes with it, read from a PEFT folder that is not trusted.

Only plain LoRA is served: whatever else an `adapter_config.json` may ask for would change the
policy without changing a shape, so it is refused. Axes: R rank, I inputs, O outputs of a layer.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from offbeat.errors import IntegrityError

PEFT_PREFIX = "base_model.model."
FACTORS = (".lora_A.weight", ".lora_B.weight")
NOT_PLAIN = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "exclude_modules",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
)
"""Settings of PEFT that make an adapter something else than W + scaling B A on each target."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The factors by the name of the layer they change: A is (R, I), B is (O, R)."""

    factors: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float


def read_adapter(folder: Path, layers: Mapping[str, nn.Linear]) -> Adapter:
    """The adapter in the folder, as it was saved.

    Raises `IntegrityError` unless it is plain LoRA, finite, and has whole factors for exactly the
    layers that its configuration targets.
    """
    rank, scaling, targets = _read_config(folder / ADAPTER_CONFIG)
    tensors = _read_tensors(folder / ADAPTER_WEIGHTS)
    targeted = [name for name in layers if _is_target(name, targets)]
    expected = {PEFT_PREFIX + name + factor for name in targeted for factor in FACTORS}
    if not targeted or tensors.keys() != expected:
        odd = sorted(tensors.keys() ^ expected)[:3]
        raise IntegrityError(
            f"the adapter has {len(tensors)} tensors, this model's layers ask for {len(expected)}; "
            f"they differ in {', '.join(odd)}"
        )
    factors = {}
    for name in targeted:
        a_RI, b_OR = (tensors[PEFT_PREFIX + name + factor] for factor in FACTORS)
        layer = layers[name]
        wanted = ((rank, layer.in_features), (layer.out_features, rank))
        if (tuple(a_RI.shape), tuple(b_OR.shape)) != wanted:
            raise IntegrityError(
                f"{name} needs factors of shapes {wanted}, the adapter has {tuple(a_RI.shape)} and "
                f"{tuple(b_OR.shape)}: was a shard saved as if it were whole?"
            )
        factors[name] = (a_RI, b_OR)
    return Adapter(factors=factors, scaling=scaling)


def _read_config(path: Path) -> tuple[int, float, frozenset[str]]:
    try:
        config = json.loads(path.read_bytes())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        targets = frozenset[str](config["target_modules"])
    except (OSError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise IntegrityError(f"{ADAPTER_CONFIG} is no PEFT configuration: {error!r}") from error
    refused = [name for name in NOT_PLAIN if config.get(name)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or refused:
        raise IntegrityError(
            f"the adapter is not plain LoRA: type {config.get('peft_type')}, "
            f"bias {config.get('bias')}, {refused or 'nothing else'}"
        )
    return rank, scaling, targets


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{ADAPTER_WEIGHTS} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise IntegrityError(f"{name} has values that are not finite")
    return tensors


def _is_target(layer: str, targets: frozenset[str]) -> bool:
    """PEFT's rule: a target is a layer's name or the end of it."""
    return any(layer == target or layer.endswith(f".{target}") for target in targets)
