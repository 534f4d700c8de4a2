"""The `generate` and `evaluate` jobs with real parts: store, weight-proxy, engine and scorer."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars
import pytest
import torch

from offbeat import keys
from offbeat.contracts.jobs import EvaluateInput, GenerateInput, GroupRequest, JobInput
from offbeat.contracts.leases import Lease, WorkerEvent
from offbeat.errors import LeaseLostError
from offbeat.models import load_tokenizer
from offbeat.objects import S3ObjectStore
from offbeat.rewards.scorer import RewardScorer
from offbeat.tables import PromptRow, decode_prompts, decode_rollouts, encode_prompts
from offbeat.worker import JobContext
from services.generator.engines.model import LoraModel
from services.generator.engines.transformers import TransformersEngine
from services.generator.evaluate import evaluate
from services.generator.models import BaseModel, BaseModels
from services.generator.rollout import generate
from services.generator.sample import Generator
from services.generator.weights import RunPolicies
from tests.policies import Reference, policy_tensors, upload_policy
from tests.specs import spec
from tests.weight_proxy import RunningProxy

PROMPTS = [
    PromptRow(
        prompt_id=f"train-{row}",
        prompt=f"prompt {row}",
        prompt_ids=tuple(range(40, 44 + row)),
        columns={"prompt": f"prompt {row}", "answer": "e"},
    )
    for row in range(3)
]
GROUPS = (
    GroupRequest(group_id="g-0", prompt_row=2, seed=10),
    GroupRequest(group_id="g-1", prompt_row=0, seed=2**62),
)
REWARDS = [{"type": "regex", "name": "letter", "pattern": "[a-m]"}]


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardScorer]:
    with RewardScorer() as scorer:
        yield scorer


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run with versions 0 and 1, and a generator."""

    run_id: str
    generator: Generator
    events: list[WorkerEvent]

    def context(self, job: JobInput, *, job_id: str = "job-1", **changes: Any) -> JobContext:
        sections: dict[str, Any] = {"rewards": REWARDS, "rollout": {"group_size": 3}}
        return JobContext(
            Lease(
                job_id=job_id,
                attempt=2,
                run_id=self.run_id,
                run_name="test",
                spec=spec(**{**sections, **changes}),
                input=job,
                expires_at=datetime.now(UTC),
                heartbeat_interval_s=5.0,
            )
        )

    def generate_job(self, min_version: int = 0) -> GenerateInput:
        key = keys.prompts(self.run_id, "prepare", 1, "train")
        return GenerateInput(prompts_key=key, groups=GROUPS, min_version=min_version)


@pytest.fixture
def setting(
    proxy: RunningProxy,
    store: S3ObjectStore,
    scorer: RewardScorer,
    tiny_model: Path,
    tmp_path: Path,
    run_id: str,
) -> Iterator[Setting]:
    reference = Reference(tiny_model)
    for version in (0, 1):
        manifest = upload_policy(store, run_id, version, reference.canary(version))
        proxy.client.publish(manifest)
    store.put(keys.prompts(run_id, "prepare", 1, "train"), encode_prompts(PROMPTS))
    events: list[WorkerEvent] = []
    generator = Generator(
        store=store,
        prompts=lambda key: decode_prompts(store.get(key)),
        models=BaseModels(
            lambda model: open_model(tiny_model, tmp_path, proxy, events), models_max=1
        ),
        scorer=scorer,
        tell=events.append,
        worker_id="generator-1",
    )
    yield Setting(run_id=run_id, generator=generator, events=events)
    generator.models.close()


def open_model(
    folder: Path, adapters: Path, proxy: RunningProxy, events: list[WorkerEvent]
) -> BaseModel:
    tokenizer = load_tokenizer(folder, None)
    model = LoraModel.open(folder, torch.float32, torch.device("cpu"))
    engine = TransformersEngine(model, tokenizer, sequences_max=64)
    return BaseModel(
        engine=engine,
        tokenizer=tokenizer,
        new_policies=lambda run_id: RunPolicies(
            run_id,
            engine=engine,
            model=spec().model,
            proxy=proxy.client,
            tell=events.append,
            folder=adapters,
            spare_max=1,
        ),
    )


def test_a_job_writes_a_row_for_each_sample(
    setting: Setting, store: S3ObjectStore, tiny_model: Path
) -> None:
    """S11: ids and logprobs are the engine's own, one logprob for each id, under one version."""
    output = generate(setting.context(setting.generate_job(min_version=1)), setting.generator)
    assert output.rollouts_key == keys.rollouts(setting.run_id, "job-1", 2)
    rows = decode_rollouts(store.get(output.rollouts_key))
    assert [(row.group_id, row.prompt_id, row.sample) for row in rows] == [
        (group, prompt, sample)
        for group, prompt in (("g-0", "train-2"), ("g-1", "train-0"))
        for sample in range(3)
    ]
    (served,) = [v for v in setting.generator.models.serving() if v.version == 1]
    reference = Reference(tiny_model, policy_tensors(1))
    tokenizer = load_tokenizer(tiny_model, None)
    for row in rows:
        assert (row.policy_version, row.adapter_sha256) == (1, served.adapter_sha256)
        assert row.prompt_ids == PROMPTS[int(row.prompt_id[-1])].prompt_ids
        expected = reference.logprobs(row.prompt_ids, row.completion_ids)
        assert row.logprobs == pytest.approx(expected, abs=1e-4)
        text = tokenizer.decode(list(row.completion_ids), skip_special_tokens=True)
        assert row.completion == text
        assert row.reward == row.rewards["letter"] == float(any("a" <= c <= "m" for c in text))
        assert (row.generator_id, row.engine) == ("generator-1", "transformers")


def test_the_summaries_are_those_of_the_rows(setting: Setting, store: S3ObjectStore) -> None:
    output = generate(setting.context(setting.generate_job()), setting.generator)
    table = polars.read_parquet(store.get(output.rollouts_key))
    for group in output.groups:
        rows = table.filter(polars.col("group_id") == group.group_id)
        assert group.reward_mean == pytest.approx(rows["reward"].mean())
        assert group.reward_std == pytest.approx(rows["reward"].std(ddof=0))
        assert group.num_samples == 3
        assert group.num_tokens == rows["completion_ids"].list.len().sum()
    assert output.generated_tokens == sum(group.num_tokens for group in output.groups)
    assert output.generate_s > 0


def test_the_same_job_gives_the_same_samples(setting: Setting, store: S3ObjectStore) -> None:
    first, second = (
        decode_rollouts(store.get(generate(context, setting.generator).rollouts_key))
        for context in (
            setting.context(setting.generate_job(1), job_id=job_id) for job_id in ("a", "b")
        )
    )
    assert [row.completion_ids for row in first] == [row.completion_ids for row in second]
    assert [row.logprobs for row in first] == [row.logprobs for row in second]
    assert len({row.completion_ids for row in first}) > 1


def test_a_reward_that_fails_is_told_once_and_leaves_no_score(
    setting: Setting, store: S3ObjectStore
) -> None:
    """S8: what could not be scored is None, never 0."""
    rewards = [{"type": "python", "name": "broken", "path": "math:sqrt"}]
    context = setting.context(setting.generate_job(), rewards=rewards)
    output = generate(context, setting.generator)
    assert [group.reward_mean for group in output.groups] == [None, None]
    assert {row.reward for row in decode_rollouts(store.get(output.rollouts_key))} == {None}
    (event,) = [event for event in setting.events if event.kind == "reward_failed"]
    assert event.data == {"part": "broken", "job_id": "job-1"}
    assert "'broken' could not score some samples" in event.message


def test_a_job_that_was_taken_away_writes_nothing(setting: Setting, store: S3ObjectStore) -> None:
    context = setting.context(setting.generate_job())
    context.revoke()
    with pytest.raises(LeaseLostError):
        generate(context, setting.generator)
    assert store.size_bytes(keys.rollouts(setting.run_id, "job-1", 2)) is None


def test_an_evaluation_answers_every_prompt_with_exactly_its_version(
    setting: Setting, store: S3ObjectStore, tiny_model: Path
) -> None:
    key = keys.prompts(setting.run_id, "prepare", 1, "train")
    context = setting.context(EvaluateInput(prompts_key=key, version=0))
    output = evaluate(context, setting.generator)
    assert output.rollouts_key == keys.evaluation(setting.run_id, 0, "job-1", 2)
    rows = decode_rollouts(store.get(output.rollouts_key))
    assert [row.prompt_id for row in rows] == ["train-0", "train-1", "train-2"]
    reference = Reference(tiny_model, policy_tensors(0))
    for row in rows:
        assert row.policy_version == 0
        assert row.completion_ids == reference.greedy(row.prompt_ids, 4)
    rewards = [row.reward or 0.0 for row in rows]
    assert output.metrics == {
        "eval/reward": pytest.approx(sum(rewards) / 3),
        "eval/pass@1": pytest.approx(sum(rewards) / 3),
        "eval/mean_length": sum(len(row.completion_ids) for row in rows) / 3,
        "eval/num_prompts": 3.0,
    }
    assert context.progress == 1.0


def test_an_evaluation_may_draw_several_samples(setting: Setting, store: S3ObjectStore) -> None:
    key = keys.prompts(setting.run_id, "prepare", 1, "train")
    context = setting.context(
        EvaluateInput(prompts_key=key, version=1),
        eval={"temperature": 1.0, "samples_per_prompt": 4},
    )
    output = evaluate(context, setting.generator)
    rows = decode_rollouts(store.get(output.rollouts_key))
    assert [row.sample for row in rows] == [0, 1, 2, 3] * 3
    assert len({row.completion_ids for row in rows}) > 3
    assert output.metrics["eval/pass@4"] >= output.metrics["eval/pass@1"]
