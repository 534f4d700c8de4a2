"""Losses, corrections and punishment against TRL's own code on the same tensors.

TRL's GRPOTrainer is given completions with the log-probabilities of another engine, makes
advantages and importance weights of them itself, and computes its loss for a policy that is a table
of log-probabilities. Engine, trainer and policy differ, so all three log-probabilities do.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaForCausalLM
from trl.rewards.other_rewards import get_soft_overlong_punishment
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from offbeat.algorithms.advantages import group_mean
from offbeat.algorithms.corrections import CORRECTIONS, is_near_policy
from offbeat.algorithms.kl import k3
from offbeat.algorithms.losses import LOSSES, Clip, LossTokens
from offbeat.algorithms.overlong import soft_overlong

pytestmark = pytest.mark.filterwarnings(
    # TRL says of every rollout function that its interface may change.
    "ignore:You are using 'rollout_func':UserWarning"
)

PROMPT_IDS = [5, 6, 7]
COMPLETION_IDS = [[20, 21, 22, 23, 24], [30, 31], [40, 41, 42], [50, 51, 52, 53], [60], [70, 71]]
REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0]
GROUP_SIZE = 3
LOW, HIGH, CAP, BETA, LENGTH_MAX = 0.2, 0.28, 2.0, 0.05, 12
SPREAD = 0.5
"""Of the log-ratios: wide enough to take both sides of every bound."""
TRL_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1 + HIGH},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
}
TRL_CORRECTIONS: dict[str, dict[str, Any]] = {
    "tis": {"vllm_importance_sampling_mode": "token_truncate"},
    "tis_sequence": {"vllm_importance_sampling_mode": "sequence_truncate"},
    "mis": {
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 1 / CAP,
    },
}


class Table(nn.Module):
    """A policy whose log-probabilities of the completions are its parameters."""

    def __init__(self, logprobs_BT: Tensor) -> None:
        super().__init__()
        self.logprobs_BT = nn.Parameter(logprobs_BT)

    def forward(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(
            log_probs=self.logprobs_BT, entropy=torch.zeros_like(self.logprobs_BT)
        )


def near(logprobs: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return logprobs + SPREAD * torch.randn(logprobs.shape, generator=generator)


@pytest.fixture(scope="module")
def behaviour_logprobs(tiny_model: Path) -> list[list[float]]:
    """What an engine that is not quite the model reports."""
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    behaviour: list[list[float]] = []
    for seed, ids in enumerate(COMPLETION_IDS):
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([PROMPT_IDS + ids])).logits[0]
        logprobs_TV = logits_TV[len(PROMPT_IDS) - 1 : -1].log_softmax(-1)
        logprobs_T = logprobs_TV.gather(1, torch.tensor(ids)[:, None])[:, 0]
        behaviour.append(near(logprobs_T, seed).tolist())
    return behaviour


def trl_step(
    model: Path, folder: Path, behaviour_logprobs: list[list[float]], config: dict[str, Any]
) -> tuple[GRPOTrainer, dict[str, Tensor]]:
    """TRL's trainer and what it makes of the completions."""
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": len(COMPLETION_IDS),
        "num_generations": GROUP_SIZE,
        "max_completion_length": LENGTH_MAX,
        "scale_rewards": "none",
        "epsilon": LOW,
        "epsilon_high": HIGH,
        "beta": BETA,
        # TRL multiplies k3 by the ratio by default, which here stays the plain estimator.
        "use_bias_correction_kl": False,
        "vllm_importance_sampling_clip_max": CAP,
        **config,
    }
    prompts = [{"prompt": "x"}] * len(COMPLETION_IDS)
    trainer = GRPOTrainer(
        str(model),
        reward_funcs=lambda **_: list[float | None](REWARDS),
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=lambda *_: {
            "prompt_ids": [PROMPT_IDS] * len(COMPLETION_IDS),
            "completion_ids": COMPLETION_IDS,
            "logprobs": behaviour_logprobs,
        },
    )
    # Importance weights belong to vLLM in TRL; the rollout function stands where the engine would.
    trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    return trainer, trainer._generate_and_score_completions(prompts)


def own_loss(
    table: Table, inputs: dict[str, Tensor], name: str, correction: str, threshold: float | None
) -> Tensor:
    mask_BT = inputs["completion_mask"].bool()
    lengths_S = mask_BT.sum(1)
    samples_N = torch.arange(len(lengths_S)).repeat_interleave(lengths_S)
    logprobs_N, behaviour_N, proximal_N, reference_N = (
        logprobs_BT[mask_BT]
        for logprobs_BT in (
            table.logprobs_BT,
            inputs["sampling_per_token_logps"],
            inputs["old_per_token_logps"],
            inputs["ref_per_token_logps"],
        )
    )
    corrected = CORRECTIONS[correction](proximal_N, behaviour_N, samples_N, CAP)
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        old_logprobs_N=corrected.old_logprobs_N,
        advantages_N=group_mean(torch.tensor(REWARDS).view(-1, GROUP_SIZE)).flatten()[samples_N],
        samples_N=samples_N,
    )
    loss, weights_N = LOSSES[name], corrected.weights_N
    if threshold is not None:
        weights_N = weights_N * is_near_policy(
            logprobs_N.detach(), behaviour_N, tokens.advantages_N, samples_N, threshold
        )
    terms_N = weights_N * loss.term(loss.ratio(tokens), tokens, Clip(low=LOW, high=HIGH))
    terms_N = terms_N + BETA * k3(logprobs_N, reference_N)
    return (terms_N * loss.reduction(lengths_S, LENGTH_MAX)[samples_N]).sum()


@pytest.mark.parametrize(
    ("name", "correction", "threshold"),
    [
        *((name, "tis", None) for name in TRL_LOSSES),
        ("dapo", "tis_sequence", None),
        ("dapo", "mis", None),
        ("gspo", "mis", 0.1),
        ("dapo", "tis", 0.1),
    ],
)
def test_value_and_gradient_are_those_of_trl(
    name: str,
    correction: str,
    threshold: float | None,
    tiny_model: Path,
    behaviour_logprobs: list[list[float]],
    tmp_path: Path,
) -> None:
    config = {
        **TRL_LOSSES[name],
        **TRL_CORRECTIONS[correction],
        "off_policy_mask_threshold": threshold,
    }
    trainer, inputs = trl_step(tiny_model, tmp_path, behaviour_logprobs, config)
    table = Table(near(inputs["old_per_token_logps"], seed=100))
    value = own_loss(table, inputs, name, correction, threshold)
    expected = trainer.compute_loss(table, inputs)
    assert value.item() == pytest.approx(expected.item(), abs=1e-5)
    (gradient_BT,), (expected_BT,) = (
        torch.autograd.grad(loss, table.logprobs_BT) for loss in (value, expected)
    )
    assert expected_BT.abs().max() > 0.01
    assert torch.allclose(gradient_BT, expected_BT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cache", [0, 1, 20, 100])
def test_the_punishment_of_length_is_trls(cache: int) -> None:
    lengths = [0, 1, 79, 80, 81, 90, 99, 100, 101, 500]
    expected = get_soft_overlong_punishment(100, cache)([[1] * length for length in lengths])
    assert soft_overlong(torch.tensor(lengths), 100, cache).tolist() == pytest.approx(expected)
