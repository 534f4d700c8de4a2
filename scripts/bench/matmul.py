"""How fast this machine multiplies matrices of the step's shapes, and how much the step multiplies.

    python -m scripts.bench.matmul <model folder>

prints the rate in FLOP/s. Axes: T tokens, I inputs and O outputs of a linear layer.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import linear

TOKENS = 1024
"""Rows of a product: the trainer's micro-batch on a CPU."""
ROUNDS = 30
WARM_UP_ROUNDS = 5
MULTIPLY_ADD = 2


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The products of a decoder: the linear layers of one block, and the head."""

    linears: tuple[tuple[int, int], ...]
    """(outputs, inputs) of every linear layer of a block."""
    num_blocks: int
    head: tuple[int, int]

    @classmethod
    def of_llama(cls, folder: Path) -> "Layers":
        """From the model's `config.json`."""
        config = json.loads((folder / "config.json").read_text())
        hidden, inner, heads = (
            config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
        )
        head_size = config.get("head_dim") or hidden // heads
        query, key = heads * head_size, config["num_key_value_heads"] * head_size
        return cls(
            linears=(
                *((query, hidden), (key, hidden), (key, hidden), (hidden, query)),
                *((inner, hidden), (inner, hidden), (hidden, inner)),
            ),
            num_blocks=config["num_hidden_layers"],
            head=(config["vocab_size"], hidden),
        )


def step_flops(layers: Layers, *, rank: int, forwarded_tokens: int, scored_tokens: int) -> int:
    """Multiplications and additions that one LoRA step cannot do without.

    The base's products run forward and for dX; the adapter's also for its own gradient; the head's
    forward and for dX at the scored positions only.
    """
    base = 2 * sum(outputs * inputs for outputs, inputs in layers.linears)
    adapter = 3 * rank * sum(outputs + inputs for outputs, inputs in layers.linears)
    body = layers.num_blocks * (base + adapter) * forwarded_tokens
    head = 2 * layers.head[0] * layers.head[1] * scored_tokens
    return MULTIPLY_ADD * (body + head)


def measured_rate(linears: Sequence[tuple[int, int]]) -> float:
    """bfloat16 FLOP/s over a block's products, forward and dX: the median round."""
    weights_OI = [torch.randn(shape, dtype=torch.bfloat16) for shape in linears]
    inputs_TI = [torch.randn(TOKENS, shape[1], dtype=torch.bfloat16) for shape in linears]
    slopes_TO = [torch.randn(TOKENS, shape[0], dtype=torch.bfloat16) for shape in linears]
    seconds: list[float] = []
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        began = time.perf_counter()
        for weight_OI, input_TI, slope_TO in zip(weights_OI, inputs_TI, slopes_TO, strict=True):
            linear(input_TI, weight_OI)
            torch.mm(slope_TO, weight_OI)
        seconds.append(time.perf_counter() - began)
    products = 2 * sum(outputs * inputs for outputs, inputs in linears)
    return MULTIPLY_ADD * TOKENS * products / median(seconds[WARM_UP_ROUNDS:])


if __name__ == "__main__":
    print(measured_rate(Layers.of_llama(Path(sys.argv[1])).linears))
