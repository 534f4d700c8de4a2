"""The canary of a version: what the policy answers to one short prompt, greedily.

A generator repeats it on its own engine before it serves the version. Beside the log-probabilities
stand those of the parent for the same tokens, by which the check tells the two versions apart.
"""

from torch import Tensor

from offbeat.algorithms.packing import PackedBatch, Row
from offbeat.contracts.weights import Canary
from services.trainer.faithful import unscored
from services.trainer.model import Tensors
from services.trainer.policy import Policy

PROMPT_TOKENS_MAX = 64
NEW_TOKENS = 8
"""Enough to tell versions apart; few enough to cost a generator well under a second."""

Ids = tuple[int, ...]


def canary_prompt(prompt_ids: Ids) -> Ids:
    """The prompt that stays through a run: the end of its first training prompt."""
    return prompt_ids[-PROMPT_TOKENS_MAX:]


def first_canary(policy: Policy, masters: Tensors, prompt_ids: Ids) -> Canary:
    """The canary of version 0, which has no parent."""
    policy.install(masters)
    completion_ids, logprobs = _greedy(policy, prompt_ids, guess=())
    return Canary(prompt_ids=prompt_ids, completion_ids=completion_ids, logprobs=logprobs)


def next_canary(
    policy: Policy, masters: Tensors, parent: Canary, parent_masters: Tensors
) -> Canary:
    """The canary under new weights. The policy is left with them, so that the next step finds them
    there, unless the answer is no longer the parent's."""
    policy.install(masters)
    completion_ids, logprobs = _greedy(policy, parent.prompt_ids, guess=parent.completion_ids)
    parent_logprobs = parent.logprobs
    if completion_ids != parent.completion_ids:
        policy.install(parent_masters)
        logprobs_NV = _distributions(policy, parent.prompt_ids, completion_ids)
        parent_logprobs = _chosen(logprobs_NV, completion_ids)
    return Canary(
        prompt_ids=parent.prompt_ids,
        completion_ids=completion_ids,
        logprobs=logprobs,
        parent_logprobs=parent_logprobs,
    )


def _greedy(policy: Policy, prompt_ids: Ids, guess: Ids) -> tuple[Ids, tuple[float, ...]]:
    """The greedy continuation and its log-probabilities.

    One forward checks a whole guess, and the parent's answer is usually still the right one; every
    further forward settles at least one more token.
    """
    tokens, num_settled = guess, 0
    while True:
        logprobs_NV = _distributions(policy, prompt_ids, tokens)
        best: list[int] = logprobs_NV.argmax(-1).tolist()
        while num_settled < len(tokens) and best[num_settled] == tokens[num_settled]:
            num_settled += 1
        ended = len(tokens) == NEW_TOKENS or (tokens[-1:] and tokens[-1] in policy.eos_token_ids)
        if num_settled == len(tokens) and ended:
            return tokens, _chosen(logprobs_NV, tokens)
        tokens = (*tokens[:num_settled], best[num_settled])
        num_settled += 1


def _distributions(policy: Policy, prompt_ids: Ids, tokens: Ids) -> Tensor:
    """log pi at each token and at the place after the last."""
    placeholder = 0
    row = Row(prompt_ids=prompt_ids, completions=(unscored((*tokens, placeholder)),))
    return policy.distributions(PackedBatch.of_rows([row]).to(policy.device))


def _chosen(logprobs_NV: Tensor, tokens: Ids) -> tuple[float, ...]:
    return tuple(float(logprobs_NV[place, token]) for place, token in enumerate(tokens))
