"""Attention for decoding on a CPU: one query a sample against a cache that is read, not copied.

transformers' eager attention first repeats every key and value for each of the query heads that
share it, which triples or quadruples the memory traffic of a step. Here those query heads become
rows of one product. Axes: B samples, H query heads, K key heads, G = H / K, Q queries, T cached
tokens, D head size.
"""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from offbeat.attention import has_plain_attention

GROUPED = "offbeat_grouped"


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model to grouped attention if its own is the plain one."""
    if not has_plain_attention(model):
        return
    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, eager_mask)
    model.set_attn_implementation(GROUPED)


def grouped_attention(
    module: nn.Module,
    query_BHQD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Softmax attention as transformers' interface wants it: (B, Q, H, D), and no weights."""
    B, H, Q, D = query_BHQD.shape
    K, T = key_BKTD.shape[1:3]
    rows_BKRD = query_BHQD.reshape(B, K, -1, D)
    scores_BKGQT = (rows_BKRD @ key_BKTD.transpose(2, 3)).view(B, K, H // K, Q, T) * scaling
    if attention_mask is not None:
        scores_BKGQT = scores_BKGQT + attention_mask[:, :, None]
    weights_BKGQT = scores_BKGQT.softmax(-1, dtype=torch.float32).to(query_BHQD.dtype)
    mixed_BKRD = weights_BKGQT.view(B, K, -1, T) @ value_BKTD
    return mixed_BKRD.view(B, H, Q, D).transpose(1, 2).contiguous(), None
