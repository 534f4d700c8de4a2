"""Packed attention against the plain one under a dense mask: values and gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import eager_attention_forward

from offbeat.algorithms.example_packing import Example, pack_examples
from offbeat.algorithms.packing import PackedBatch, PackedTokens, Row
from services.trainer.attention import packed_attention, row_layouts, use_packed_attention
from services.trainer.faithful import unscored

HEADS, KEY_HEADS, HEAD_SIZE = 6, 2, 8
SCALING = 0.3


class Module(nn.Module):
    """What the plain attention asks of its layer."""

    num_key_value_groups = HEADS // KEY_HEADS


def batch(*rows: tuple[int, tuple[int, ...]]) -> PackedBatch:
    """Rows by the length of the prompt and of each completion."""
    return PackedBatch.of_rows(
        [
            Row(prompt_ids=(1,) * prompt, completions=tuple(unscored((2,) * n) for n in lengths))
            for prompt, lengths in rows
        ]
    )


def examples(*lengths: int) -> PackedTokens:
    """Two rows of nine and seven tokens and a short one, which have nothing in common."""
    made = [Example(ids=(1,) * n, is_target=(False, *[True] * (n - 1))) for n in lengths]
    [packed] = pack_examples(made, 27)
    return packed


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(batch((1, (1,))), id="a prompt and a completion of one token"),
        pytest.param(batch((5, (3, 3, 3))), id="equal lengths"),
        pytest.param(batch((4, (1, 7, 2))), id="ragged"),
        pytest.param(batch((3, (2, 5)), (9, (1, 1, 1, 1)), (1, (4,))), id="padded rows"),
        pytest.param(examples(7, 5, 4, 2), id="examples without a prompt"),
    ],
)
def test_it_is_the_plain_attention_under_a_dense_mask(packed: PackedTokens) -> None:
    generator = torch.Generator().manual_seed(1)
    B, T = packed.ids_BT.shape
    query, key, value = (
        torch.randn(B, heads, T, HEAD_SIZE, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    is_token_BT = packed.segments_BT >= 0
    # What follows from the output of padding must not matter.
    direction = torch.randn(B, T, HEADS, HEAD_SIZE, generator=generator, dtype=torch.float64)
    direction = direction * is_token_BT[:, :, None, None]

    def results(mixed: Tensor, *inputs: Tensor) -> list[Tensor]:
        gradients = torch.autograd.grad((mixed * direction).sum(), inputs)
        return [mixed[is_token_BT], *gradients]

    q, k, v = inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    mask = torch.zeros(packed.allowed_B1TT().shape, dtype=torch.float64)
    mask.masked_fill_(~packed.allowed_B1TT(), -1e300)
    plain, _ = eager_attention_forward(Module(), q, k, v, mask, SCALING)
    expected = results(plain, *inputs)

    layouts = row_layouts(packed.segments_BT)
    mixed, _ = packed_attention(Module(), q, k, v, None, SCALING, layouts=layouts)
    for got, wanted in zip(results(mixed, *inputs), expected, strict=True):
        # The plain one computes its softmax in float32.
        assert torch.allclose(got, wanted, atol=1e-6)
    assert mixed[~is_token_BT].count_nonzero() == 0


def test_only_models_with_the_plain_attention_are_switched(tiny_model: Path) -> None:
    assert use_packed_attention(LlamaForCausalLM.from_pretrained(tiny_model))
    config = Gemma2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    assert not use_packed_attention(Gemma2ForCausalLM(config))
