"""Packed rows against every sample alone, on a real tiny model."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from offbeat.algorithms.logprobs import completion_logprobs
from offbeat.algorithms.packing import Completion, PackedBatch, Row, pack, with_signal


def completion(sample: int, *ids: int, advantage: float = 1.0) -> Completion:
    return Completion(
        sample=sample,
        ids=ids,
        behaviour_logprobs=tuple(-float(token) for token in ids),
        advantage=advantage,
    )


GROUPS = [
    Row(
        prompt_ids=(5, 6, 7),
        completions=(completion(0, 10, 11, 12, 13), completion(1, 20), completion(2, 30, 31)),
    ),
    Row(prompt_ids=(8,), completions=(completion(3, 40), completion(4, 50, 51, 52))),
]


@pytest.fixture(params=["eager", "sdpa"])
def model(tiny_model: Path, request: pytest.FixtureRequest) -> PreTrainedModel:
    return LlamaForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32, attn_implementation=request.param
    )


def packed_logprobs(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    mask = torch.zeros(batch.allowed_B1TT().shape)
    hidden = model.base_model(
        input_ids=batch.ids_BT,
        position_ids=batch.positions_BT,
        attention_mask=mask.masked_fill(~batch.allowed_B1TT(), torch.finfo(torch.float32).min),
        use_cache=False,
    ).last_hidden_state
    head = model.get_parameter("model.embed_tokens.weight")
    states = hidden.flatten(0, 1)[batch.predictors_N]
    return completion_logprobs(states, head.detach(), batch.targets_N)[0]


def separate_logprobs(model: PreTrainedModel, prompt: tuple[int, ...], one: Completion) -> Tensor:
    ids = torch.tensor([[*prompt, *one.ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]


@pytest.mark.parametrize(("token_budget", "num_batches"), [(7, 3), (10, 2), (1000, 1)])
def test_packed_equals_separate(
    model: PreTrainedModel, token_budget: int, num_batches: int
) -> None:
    """T23: ragged lengths, a prompt of one token, completions of one token, padded rows."""
    batches = pack(GROUPS, token_budget)
    assert len(batches) == num_batches
    packed = {
        (int(sample), index): logprob
        for batch in batches
        for index, (sample, logprob) in enumerate(
            zip(batch.samples_N, packed_logprobs(model, batch), strict=True)
        )
    }
    by_sample = [
        torch.stack([value for (sample, _), value in sorted(packed.items()) if sample == wanted])
        for wanted in range(5)
    ]
    separate = [
        separate_logprobs(model, group.prompt_ids, one)
        for group in GROUPS
        for one in group.completions
    ]
    for together, alone in zip(by_sample, separate, strict=True):
        assert torch.allclose(together, alone, atol=1e-5)
    weights = [0.5, -1.0, 2.0, 0.3, -0.7]
    layer = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    packed_gradient, separate_gradient = (
        torch.autograd.grad(
            torch.stack([w * v.sum() for w, v in zip(weights, values, strict=True)]).sum(), layer
        )[0]
        for values in (by_sample, separate)
    )
    assert torch.allclose(packed_gradient, separate_gradient, atol=1e-5)


def test_a_row_lists_every_completion_after_the_shared_prompt() -> None:
    batch = PackedBatch.of_rows(GROUPS)
    assert batch.ids_BT.tolist() == [
        [5, 6, 7, 10, 11, 12, 13, 20, 30, 31],
        [8, 40, 50, 51, 52, 0, 0, 0, 0, 0],
    ]
    assert batch.positions_BT.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 3, 3, 4],
        [0, 1, 1, 2, 3, 0, 0, 0, 0, 0],
    ]
    assert batch.segments_BT.tolist() == [
        [0, 0, 0, 1, 1, 1, 1, 2, 3, 3],
        [0, 1, 2, 2, 2, -1, -1, -1, -1, -1],
    ]
    assert batch.predictors_N.tolist() == [2, 3, 4, 5, 2, 2, 8, 10, 10, 12, 13]
    assert batch.targets_N.tolist() == [10, 11, 12, 13, 20, 30, 31, 40, 50, 51, 52]
    assert batch.samples_N.tolist() == [0, 0, 0, 0, 1, 2, 2, 3, 4, 4, 4]
    assert batch.behaviour_logprobs_N.tolist() == [-float(token) for token in batch.targets_N]


def test_a_completion_sees_the_prompt_and_itself() -> None:
    row = Row(prompt_ids=(5,), completions=(completion(0, 10, 11), completion(1, 20)))
    assert PackedBatch.of_rows([row]).allowed_B1TT().int().tolist() == [
        [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]]
    ]


def test_a_group_above_the_budget_is_split_and_rows_share_batches_within_it() -> None:
    batches = pack(GROUPS, 8)
    assert [batch.ids_BT.shape for batch in batches] == [(1, 8), (1, 5), (1, 5)]
    assert [sorted(set(batch.samples_N.tolist())) for batch in batches] == [[0, 1], [2], [3, 4]]


def test_a_completion_above_the_budget_is_a_batch_of_its_own() -> None:
    assert [batch.ids_BT.shape for batch in pack(GROUPS[:1], 2)] == [(1, 7), (1, 5), (1, 4)]


def test_zero_advantages_are_not_forwarded() -> None:
    mixed = Row(
        prompt_ids=(5,),
        completions=(completion(0, 10, advantage=0.0), completion(1, 20, advantage=-0.5)),
    )
    silent = Row(prompt_ids=(6,), completions=(completion(2, 30, advantage=0.0),))
    kept = with_signal([mixed, silent])
    assert [[one.sample for one in group.completions] for group in kept] == [[1]]


def test_packing_nothing_gives_no_batch() -> None:
    assert pack([], 1024) == []
