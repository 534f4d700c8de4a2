"""Bytes that a forward keeps for its backward, and what the backward needs on top.

Without attention's weights (flash, SDPA), in bfloat16 and with every projection trained or adapted,
a block keeps 22 h + 6 kv + 8 f bytes a token. Of these 8 h are float32 copies that the norms make
of bfloat16 inputs; a float32 model has none, and twice of the rest.
"""

from offbeat.plan.architecture import Architecture
from offbeat.plan.setup import Recipe, Setup

COMPILED_SHARE = 0.72
"""What torch.compile leaves of a block's activations: 51.0 of 60.0 GiB in torchtune's ladder."""
ADAPTED_INPUTS = (("down_proj", ("down_proj",)), ("gate_proj", ("gate_proj", "up_proj")))
"""An MLP projection, and those that share its input: kept only where one of them is trained."""


def block_bytes(model: Architecture, setup: Setup, recipe: Recipe) -> float:
    """What one block keeps of the forward."""
    width, size = _width(model), setup.dtype_bytes
    per_token = size * (3 * model.hidden + 4 * model.query_width + 3 * model.kv_width)
    per_token += size * 4 * width + (8 * model.hidden if size == 2 else 0)
    if model.num_experts > 1:
        # Every expert gets a copy of its tokens and gives one back, twice.
        per_token += size * 6 * model.hidden * model.experts_per_token
    if setup.trains_adapter:
        per_token -= size * _unused_inputs(model, setup)
        inputs = sum(model.linears[name][0] for name in setup.targets)
        per_token += inputs * _adapter_input_bytes(setup, recipe)
    if recipe.is_compiled:
        per_token *= COMPILED_SHARE
    return per_token * setup.token_budget + scores_bytes(model, setup)


def backward_bytes(model: Architecture, setup: Setup, recipe: Recipe) -> float:
    """What the backward of one block needs beside what was kept: in its MLP gradients of the inner
    activations, or in its attention gradients of the weights, when the MLP's are gone."""
    inner = 4 * setup.dtype_bytes * _width(model) * setup.token_budget
    outer = 2 * setup.dtype_bytes * model.hidden * setup.token_budget
    share = COMPILED_SHARE if recipe.is_compiled else 1.0
    return max((inner + outer) * share, 3 * scores_bytes(model, setup) - inner)


def checkpoint_bytes(model: Architecture, setup: Setup) -> int:
    """The inputs of all blocks: what is kept where activations are computed again."""
    return model.num_layers * setup.dtype_bytes * model.hidden * setup.token_budget


def scores_bytes(model: Architecture, setup: Setup) -> int:
    """Attention weights of one block, where they are kept at all."""
    return setup.visible_pairs * model.num_heads * setup.dtype_bytes


def _width(model: Architecture) -> int:
    """Of the MLP, or of all the experts that a token is sent to."""
    return model.mlp * model.experts_per_token


def _adapter_input_bytes(setup: Setup, recipe: Recipe) -> int:
    """What an adapter keeps of its input beside what its projection keeps: a copy in its own type,
    and with dropout the mask and the input without what was dropped."""
    dropped = 1 + max(setup.dtype_bytes, recipe.adapter_input_bytes) if setup.has_dropout else 0
    return recipe.adapter_input_bytes + dropped


def _unused_inputs(model: Architecture, setup: Setup) -> int:
    """Inputs of frozen MLP projections, which no gradient of a weight needs."""
    if model.num_experts > 1:
        return 0
    return sum(
        model.linears[name][0]
        for name, sharing in ADAPTED_INPUTS
        if not setup.targets.intersection(sharing)
    )
