"""The shape of a decoder with gated MLPs: all that the formulas know of a model."""

from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes by Hugging Face's names; with experts, `mlp` is the width of one of them."""

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    is_tied: bool
    """The embedding and the head are one table."""
    num_experts: int = 1
    experts_per_token: int = 1

    @property
    def query_width(self) -> int:
        """Outputs of `q_proj`."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Outputs of `k_proj`, and of `v_proj`."""
        return self.num_kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a block's projections; those of an MLP are each expert's."""
        return {
            "q_proj": (self.hidden, self.query_width),
            "k_proj": (self.hidden, self.kv_width),
            "v_proj": (self.hidden, self.kv_width),
            "o_proj": (self.query_width, self.hidden),
            "gate_proj": (self.hidden, self.mlp),
            "up_proj": (self.hidden, self.mlp),
            "down_proj": (self.mlp, self.hidden),
        }


SIZE_MAX = 10**8
"""Far above any model; products of a few sizes stay within a float."""
MLP_LINEARS = frozenset({"gate_proj", "up_proj", "down_proj"})


def architecture_from_config(name: str, config: Mapping[str, object]) -> Architecture:
    """The architecture that a `config.json` describes. Raises `InvalidRequestError` for one that
    lacks a size, or that has another kind of model."""
    inner = config.get("text_config")
    sizes = inner if isinstance(inner, Mapping) else config
    heads = _size(name, sizes, "num_attention_heads")
    hidden = _size(name, sizes, "hidden_size")
    experts = next((key for key in ("num_experts", "num_local_experts") if sizes.get(key)), None)
    of_expert = experts is not None and "moe_intermediate_size" in sizes
    return Architecture(
        name=name,
        hidden=hidden,
        num_layers=_size(name, sizes, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_size(name, sizes, "num_key_value_heads", heads),
        head_dim=_size(name, sizes, "head_dim", hidden // heads),
        mlp=_size(name, sizes, f"{'moe_' if of_expert else ''}intermediate_size"),
        vocabulary=_size(name, sizes, "vocab_size"),
        is_tied=sizes.get("tie_word_embeddings", config.get("tie_word_embeddings")) is True,
        num_experts=_size(name, sizes, experts) if experts else 1,
        experts_per_token=_size(name, sizes, "num_experts_per_tok") if experts else 1,
    )


def _size(name: str, config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= SIZE_MAX:
        raise InvalidRequestError(
            f"the config.json of {name!r} has no usable {key}: a plan is made for decoders whose "
            "config has Llama's fields"
        )
    return value
