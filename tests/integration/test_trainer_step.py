"""The step's numbers against the plain computation: one sample at a time, with full logits."""

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load
from torch import Tensor
from transformers import AutoModelForCausalLM

from offbeat import keys
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import ADAPTER_FILES, Manifest
from offbeat.objects import S3ObjectStore
from services.trainer.checkpoint import STATE_TENSORS
from services.trainer.publish import Trainer
from tests.specs import spec
from tests.trainer import BAD, GOOD, PROMPT_IDS, WORSE, Run, Sample, trainer_on
from tests.weight_proxy import RunningProxy

GROUPS = [
    [
        Sample(ids=GOOD, reward=1.0, logprobs=(-5.0, -5.5, -6.0)),
        Sample(ids=BAD, reward=0.0, logprobs=(-4.0, -7.0)),
        Sample(ids=(50, 51), reward=None, logprobs=(-6.0, -6.0)),
    ],
    [
        Sample(ids=WORSE, reward=0.5, logprobs=(-5.0,)),
        Sample(ids=GOOD, reward=1.0, logprobs=(-8.0, -5.0, -5.0)),
        Sample(ids=BAD, reward=0.0, logprobs=(-4.0, -5.0)),
    ],
    [Sample(ids=WORSE, reward=0.3), Sample(ids=BAD, reward=0.3)],
]
ADVANTAGES = [[0.5, -0.5, 0.0], [0.0, 0.5, -0.5], [0.0, 0.0]]
LONG_PROMPT = tuple(range(100, 160))
"""With a budget of 64 tokens every completion has a micro-batch of its own."""
LENGTHS = [3, 2, 2, 1, 3, 2, 1, 2]
LENGTH_MAX = 4
TEMPERATURE = 0.8


def run_of(run_id: str, spec: RunSpec, store: S3ObjectStore, proxy: RunningProxy) -> Run:
    return Run(run_id=run_id, spec=spec, store=store, proxy=proxy.client)


def peft_model(base: Path, run: Run, manifest: Manifest, folder: Path) -> PeftModel:
    """What any user of PEFT makes of the published files."""
    for name in ADAPTER_FILES:
        (folder / name).write_bytes(run.store.get(keys.version_file(manifest, name)))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(folder), is_trainable=True)


def logprobs_of(
    model: PeftModel, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0
) -> Tensor:
    inputs = torch.tensor([[*prompt, *ids]])
    logits = model(input_ids=inputs).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def plain_terms(loss: str, logprobs: Tensor, old: Tensor, advantage: float) -> Tensor:
    """With epsilon 0.2 / 0.28, for one sample."""
    ratio = (logprobs - old).exp()
    if loss == "dppo":
        change = (logprobs.exp() - old.exp()) * (1 if advantage > 0 else -1)
        return 0.001 * (logprobs - old) ** 2 - ratio * advantage * (change <= 0.2)
    if loss == "gspo":
        ratio = (logprobs - old).mean().exp().expand(len(old))
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def plain_gradient(
    model: PeftModel, loss: str, correction: str, beta: float, off_policy_mask: float | None
) -> dict[str, Tensor]:
    """The whole loss, written out sample by sample."""
    weights = {
        "dapo": [1 / sum(LENGTHS)] * 8,
        "dppo": [1 / sum(LENGTHS)] * 8,
        "grpo": [1 / (8 * length) for length in LENGTHS],
        "gspo": [1 / (8 * length) for length in LENGTHS],
        "dr_grpo": [1 / (8 * LENGTH_MAX)] * 8,
    }[loss]
    samples = [sample for group in GROUPS for sample in group]
    advantages = [advantage for group in ADVANTAGES for advantage in group]
    total = torch.zeros(())
    for sample, advantage, weight in zip(samples, advantages, weights, strict=True):
        logprobs = logprobs_of(model, LONG_PROMPT, sample.ids, TEMPERATURE)
        behaviour = torch.tensor(sample.logprobs or (-1.0,) * len(sample.ids))
        proximal = logprobs.detach()
        old = behaviour if correction == "none" else proximal
        terms = plain_terms(loss, logprobs, old, advantage)
        if correction == "tis":
            terms = terms * (proximal - behaviour).exp().clamp(max=2.0)
        if off_policy_mask is not None and advantage < 0:
            terms = terms * ((behaviour - proximal).mean() <= off_policy_mask)
        if beta:
            with model.disable_adapter(), torch.no_grad():
                difference = logprobs_of(model, LONG_PROMPT, sample.ids, TEMPERATURE)
            difference = difference - logprobs
            terms = terms + beta * (difference.exp() - difference - 1)
        total = total + weight * terms.sum()
    total.backward()
    return {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("token_budget", [64, "auto"])
@pytest.mark.parametrize(
    ("loss", "correction", "beta", "off_policy_mask"),
    [
        ("dapo", "tis", 0.0, None),
        ("grpo", "tis", 0.0, None),
        ("dr_grpo", "none", 0.0, None),
        ("dapo", "none", 0.1, None),
        ("gspo", "none", 0.0, None),
        ("dapo", "tis", 0.0, 0.1),
        ("dppo", "none", 0.0, None),
    ],
)
def test_the_gradient_is_that_of_the_plain_computation(
    loss: str,
    correction: str,
    beta: float,
    off_policy_mask: float | None,
    token_budget: int | str,
    run_id: str,
    store: S3ObjectStore,
    proxy: RunningProxy,
    trainer: Trainer,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """Invariant 6, S6, T14: packed, shared and chunked, in one micro-batch or several.

    The gradient is read from AdamW's first moment of the second step, 0.9 m + 0.1 g.
    """
    changes = {
        "loss": loss,
        "correction": correction,
        "beta": beta,
        "off_policy_mask": off_policy_mask,
        "token_budget": token_budget,
        "max_grad_norm": 1e9,
    }
    run = run_of(
        run_id,
        spec(train=changes, rollout={"temperature": TEMPERATURE, "max_new_tokens": LENGTH_MAX}),
        store,
        proxy,
    )
    groups = [Sample(ids=GOOD, reward=1.0), Sample(ids=BAD, reward=0.0)]
    version_1 = run.train(trainer, 0, run.put_groups(run.init(trainer), [groups]))
    ready = run.put_groups(version_1, GROUPS, name="second", prompt_ids=LONG_PROMPT)
    version_2 = run.train(trainer, 1, ready)
    first, second = (
        load(store.get(keys.version_file(manifest, STATE_TENSORS)))
        for manifest in (version_1, version_2)
    )
    expected = plain_gradient(
        peft_model(tiny_model, run, version_1, tmp_path), loss, correction, beta, off_policy_mask
    )
    assert len(expected) == 2 * 7 * 2
    for name, gradient in expected.items():
        moment = second[f"exp_avg.{name}"] - 0.9 * first[f"exp_avg.{name}"]
        assert gradient.abs().max() > 1e-4
        assert torch.allclose(moment / 0.1, gradient, atol=5e-7, rtol=1e-3), name


def test_checkpointing_changes_no_byte(
    store: S3ObjectStore, proxy: RunningProxy, trainer: Trainer, run_id: str
) -> None:
    """W14, T16: the factors get the same gradient with activations kept or recomputed."""
    made: list[list[str]] = []
    for checkpointing in (False, True):
        changes = {"gradient_checkpointing": checkpointing}
        run = run_of(f"{run_id}-{checkpointing}", spec(train=changes), store, proxy)
        version_1 = run.train(trainer, 0, run.put_groups(run.init(trainer), GROUPS))
        version_2 = run.train(trainer, 1, run.put_groups(version_1, GROUPS, name="second"))
        made.append([version_1.adapter_sha256, version_2.adapter_sha256])
    assert made[0] == made[1]


def test_the_canary_is_what_greedy_decoding_gives(
    run_id: str,
    store: S3ObjectStore,
    proxy: RunningProxy,
    trainer: Trainer,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """Under the version itself and, for the same tokens, under its parent."""
    run = run_of(run_id, spec(train={"learning_rate": 0.1}), store, proxy)
    version_0 = run.init(trainer)
    version_1 = run.train(trainer, 0, run.put_groups(version_0, GROUPS))
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    parent = peft_model(tiny_model, run, version_0, tmp_path / "0").eval()
    model = peft_model(tiny_model, run, version_1, tmp_path / "1").eval()
    canary = version_1.proof
    assert canary.prompt_ids == version_0.proof.prompt_ids == PROMPT_IDS
    generated = model.generate(
        input_ids=torch.tensor([PROMPT_IDS]), do_sample=False, max_new_tokens=8
    )
    assert canary.completion_ids == tuple(generated[0, len(PROMPT_IDS) :].tolist())
    assert canary.completion_ids != version_0.proof.completion_ids
    for logprobs, of_model in ((canary.logprobs, model), (canary.parent_logprobs, parent)):
        expected = logprobs_of(of_model, PROMPT_IDS, canary.completion_ids)
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert version_0.proof.parent_logprobs == ()


def test_the_canary_stops_at_the_end_of_text(
    run_id: str,
    store: S3ObjectStore,
    proxy: RunningProxy,
    trainer: Trainer,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """The end is what the model's generation settings say; the token itself belongs to it."""
    endless = run_of(run_id, spec(), store, proxy).init(trainer).proof.completion_ids
    assert len(endless) == 8
    folder = copytree(tiny_model, tmp_path / "model")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps({**settings, "eos_token_id": [1, endless[0]]})
    )
    stopping = run_of(f"{run_id}-stopping", spec(), store, proxy)
    version_0 = stopping.init(trainer_on(folder, store, proxy.client))
    assert version_0.proof.completion_ids == endless[:1]


def test_rewarded_completions_become_more_likely(
    run_id: str,
    store: S3ObjectStore,
    proxy: RunningProxy,
    trainer: Trainer,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """W7: six synchronous steps move the policy the way of the reward."""
    run = run_of(run_id, spec(train={"steps": 6}), store, proxy)
    manifest = version_0 = run.init(trainer)
    for base_version in range(6):
        ready = run.put_groups(
            manifest,
            [[Sample(ids=GOOD, reward=1.0), Sample(ids=BAD, reward=0.0)]],
            name=f"generate-{base_version}",
        )
        manifest = run.train(trainer, base_version, ready)
    before, after = (
        [logprobs_of(model, PROMPT_IDS, ids).sum().item() for ids in (GOOD, BAD)]
        for model in (
            peft_model(tiny_model, run, version_0, tmp_path),
            peft_model(tiny_model, run, manifest, tmp_path),
        )
    )
    assert after[0] > before[0] + 1.0
    assert after[1] < before[1] - 1.0


def test_the_manifest_carries_the_metrics_of_the_step(
    run_id: str,
    store: S3ObjectStore,
    proxy: RunningProxy,
    trainer: Trainer,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """On samples of the very version, with its own log-probabilities, the ratio is one."""
    run = run_of(run_id, spec(), store, proxy)
    version_0 = run.init(trainer)
    model = peft_model(tiny_model, run, version_0, tmp_path)

    def exact(ids: tuple[int, ...], reward: float) -> Sample:
        logprobs = logprobs_of(model, PROMPT_IDS, ids).tolist()
        return Sample(ids=ids, reward=reward, logprobs=tuple(logprobs))

    groups = [
        [exact(GOOD, 1.0), exact(BAD, 0.0)],
        [exact(WORSE, 0.5), exact(BAD, 0.5)],
    ]
    metrics = run.train(trainer, 0, run.put_groups(version_0, groups)).metrics
    expected = {
        "reward": 0.5,
        "reward_std": 0.125**0.5,
        "rewards/exact_match": 0.5,
        "frac_reward_zero_std": 0.5,
        "ratio": 1.0,
        "ratio/staleness_0": 1.0,
        "clip_ratio/region_mean": 0.0,
        "sampling/importance_sampling_ratio/mean": 1.0,
        "sampling/importance_sampling_capped": 0.0,
        "completions/mean_length": 2.0,
        "completions/min_length": 1,
        "completions/max_length": 3,
        "completions/clipped_ratio": 0.0,
        "num_tokens": 8 + 4 * 4,
        "sample/staleness_mean": 0.0,
        "sample/staleness_max": 0,
        "learning_rate": 0.01,
        "batch/rows_per_step": 1,
        "batch/forwarded_tokens_per_step": 4 + 5,
        # dapo over 8 tokens: -(3 * 0.5 - 2 * 0.5) / 8
        "loss": -0.0625,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["grad_norm"] > 0
    assert metrics["entropy"] > 0
    timed = {"step", "fwd_bwd", "rollout_fetch", "optimizer", "encode", "canary"}
    assert {f"perf/{name}_s" for name in timed} <= metrics.keys()
    assert "perf/trained_tok_s" in metrics
    assert "kl" not in metrics
