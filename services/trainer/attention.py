"""Attention over packed rows that computes only the scores that a token may see.

    queries of the prompt        x  keys of the prompt                              (causal)
    queries of a completion      x  keys of the prompt | keys of that completion    (causal)

A row of examples that share nothing has a prompt of no tokens.

A dense mask over a row of eight completions computes four to seven times as many scores, and keeps
them for the backward; here only the probabilities are kept. For CPUs: on GPUs the fused kernels
with a dense mask are faster.

Axes: T tokens of a row, P of its prompt, S completions in it, C tokens of the longest, X = P + C;
H query heads, K key heads, G = H / K; D head size, N completion tokens of the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from offbeat.attention import has_plain_attention

PACKED = "offbeat_packed"


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """Where a row's completions are."""

    num_prompt: int
    num_completions: int
    own: Tensor
    """Place in the row of every token of S x C; past the end of a completion, of any token."""
    back_N: Tensor
    """Place in S x C of every completion token of the row."""


def row_layouts(segments_BT: Tensor) -> list[RowLayout]:
    """The layout of each row of a packed batch."""
    return [_layout(segments_T) for segments_T in segments_BT]


def _layout(segments_T: Tensor) -> RowLayout:
    num_prompt, *lengths = segments_T[segments_T >= 0].bincount().tolist()
    longest = max(lengths)
    places_C = torch.arange(longest)
    lengths_S1 = torch.tensor(lengths)[:, None]
    own_SC = num_prompt + (lengths_S1.cumsum(0) - lengths_S1) + places_C
    is_token_SC = places_C < lengths_S1
    return RowLayout(
        num_prompt=num_prompt,
        num_completions=len(lengths),
        own=own_SC.where(is_token_SC, 0).flatten(),
        back_N=is_token_SC.flatten().nonzero()[:, 0],
    )


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Switch a model to packed attention if its own is the plain one, and say whether it was
    switched: every forward then needs `layouts=`."""
    if not has_plain_attention(model):
        return False
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, _no_mask)
    model.set_attn_implementation(PACKED)
    return True


def _no_mask(**_: object) -> None:
    """The layout says all that a mask would."""


def packed_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: None,
    scaling: float,
    *,
    layouts: Sequence[RowLayout],
    **_: object,
) -> tuple[Tensor, None]:
    """Softmax attention as transformers' interface wants it: (B, T, H, D), and no weights."""
    rows = zip(query_BHTD, key_BKTD, value_BKTD, layouts, strict=True)
    return torch.stack([_attend(*row, scaling) for row in rows]), None


def _attend(
    query_HTD: Tensor, key_KTD: Tensor, value_KTD: Tensor, row: RowLayout, scaling: float
) -> Tensor:
    """One row: (T, H, D), zeros where it is padded."""
    H, T, D = query_HTD.shape
    P, S, K = row.num_prompt, row.num_completions, len(key_KTD)
    G = H // K
    prompt_key_KPD, prompt_value_KPD = key_KTD[:, :P], value_KTD[:, :P]

    query_KGPD = query_HTD[:, :P].unflatten(0, (K, G))
    scores_KGPP = query_KGPD.flatten(1, 2) @ prompt_key_KPD.mT
    probs_KGPP = _causal_softmax(scores_KGPP.unflatten(1, (G, P)), scaling)
    mixed_KGPD = (probs_KGPP.flatten(1, 2) @ prompt_value_KPD).unflatten(1, (G, P))
    prompt_PHD = mixed_KGPD.permute(2, 0, 1, 3).flatten(1, 2)

    query_KSGCD = _own(query_HTD, row).unflatten(2, (K, G)).permute(2, 0, 3, 1, 4)
    key_KSCD, value_KSCD = (_own(x, row).permute(2, 0, 1, 3) for x in (key_KTD, value_KTD))
    C = query_KSGCD.shape[3]
    query_KSRD = query_KSGCD.flatten(2, 3)
    on_prompt_KSGCP = (query_KSRD.flatten(1, 2) @ prompt_key_KPD.mT).view(K, S, G, C, P)
    on_own_KSGCC = (query_KSRD @ key_KSCD.mT).view(K, S, G, C, C)
    probs_KSGCX = _causal_softmax(torch.cat([on_prompt_KSGCP, on_own_KSGCC], -1), scaling)
    mixed_KSGCD = (probs_KSGCX[..., :P].flatten(1, 3) @ prompt_value_KPD).view(K, S, G, C, D)
    mixed_KSGCD = mixed_KSGCD + (probs_KSGCX[..., P:].flatten(2, 3) @ value_KSCD).view(
        K, S, G, C, D
    )
    own_NHD = mixed_KSGCD.permute(1, 3, 0, 2, 4).reshape(S * C, H, D)[row.back_N]

    padding = query_HTD.new_zeros(T - P - len(own_NHD), H, D)
    return torch.cat([prompt_PHD, own_NHD, padding])


def _own(x_HTD: Tensor, row: RowLayout) -> Tensor:
    """The completions side by side: (S, C, H, D)."""
    own = x_HTD.transpose(0, 1).index_select(0, row.own)
    return own.unflatten(0, (row.num_completions, -1))


def _causal_softmax(scores: Tensor, scaling: float) -> Tensor:
    """Over the last axis; the last C x C of it are a completion's (or the prompt's) own tokens.

    In the type of the scores, within which torch computes in float32: a float32 copy of the
    probabilities would be the largest tensor of the whole forward.
    """
    C, X = scores.shape[-2:]
    hidden_CX = torch.ones(C, X, dtype=torch.bool, device=scores.device).triu(X - C + 1)
    return scores.mul(scaling).masked_fill_(hidden_CX, -torch.inf).softmax(-1)
