"""A supervised run, job by job: a real store, a real weight-proxy, a tiny real model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from offbeat import keys
from offbeat.contracts.jobs import (
    ReplayInput,
    TokenizeInput,
    TrainInput,
)
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import ADAPTER_FILES, ADAPTER_WEIGHTS
from offbeat.errors import InvalidDataError, InvalidRequestError, LeaseLostError, PermanentJobError
from offbeat.objects import S3ObjectStore
from offbeat.tables import ExampleRow, decode_examples
from services.trainer.publish import Trainer
from services.trainer.run import replay
from services.trainer.sft_tokenize import tokenize
from tests.sft_run import SftRun
from tests.specs import sft_spec_dict, spec
from tests.tiny_model import write_overflowing_model
from tests.trainer import Run, Sample, hashes, trainer_on
from tests.weight_proxy import RunningProxy

EVALUATED: dict[str, Any] = {"data": {"eval_size": 2}, "eval": {"every_steps": 2}}


@pytest.fixture
def new_run(proxy: RunningProxy) -> Callable[..., SftRun]:
    def make(source: dict[str, Any] | None = None, **changes: Any) -> SftRun:
        run_id = f"run-{uuid4().hex[:10]}"
        raw = sft_spec_dict(**changes)
        spec = RunSpec.model_validate({**raw, "data": source or raw["data"]})
        return SftRun(run_id=run_id, spec=spec, proxy=proxy.client)

    return make


def test_the_data_becomes_two_tables(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun], store: S3ObjectStore
) -> None:
    data = new_run(**EVALUATED).tokenize(new_trainer())
    assert (data.num_prompts, data.num_eval_prompts, data.num_cut) == (6, 2, 0)
    table = decode_examples(store.get(data.prompts_key))
    rows = table.take(range(6))
    assert data.num_target_tokens == sum(sum(row.is_target) for row in rows) == 6 * 3
    assert data.eval_prompts_key is not None
    held_out = decode_examples(store.get(data.eval_prompts_key)).take([0, 1])
    assert {row.ids for row in held_out}.isdisjoint({row.ids for row in rows})
    assert data.stored_bytes == sum(
        store.size_bytes(key) or 0 for key in (data.prompts_key, data.eval_prompts_key)
    )


def test_a_wrong_row_fails_the_job_with_its_number(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n\n{"text": ""}\n')
    run = new_run(source={"source": "jsonl", "uri": str(path)})
    with pytest.raises(InvalidDataError, match=r"line 3 \(row 2\): 'text' is empty: drop the row"):
        run.tokenize(new_trainer())


def test_more_than_the_model_has_positions_is_refused(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun]
) -> None:
    with pytest.raises(InvalidRequestError, match=r"sft.max_length \(257\) is above the 256 posit"):
        new_run(sft={"max_length": 257}).tokenize(new_trainer())


def test_a_job_that_was_taken_away_reads_no_further(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "a{n}"}}\n' for n in range(2000)))
    run = new_run(source={"source": "jsonl", "uri": str(path)})
    context = run.context(TokenizeInput(), "tokenize")
    context.revoke()
    with pytest.raises(LeaseLostError):
        tokenize(context, new_trainer())


def losses(model: PeftModel, rows: list[ExampleRow]) -> list[float]:
    """Of every target, by a plain forward over each example alone."""
    found: list[float] = []
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.ids])).logits[0].double()
        logprobs = logits.log_softmax(-1)
        found += [
            -logprobs[at - 1, token].item()
            for at, (token, is_target) in enumerate(zip(row.ids, row.is_target, strict=True))
            if is_target
        ]
    return found


def test_versions_carry_the_losses_of_their_weights(
    new_trainer: Callable[[], Trainer],
    new_run: Callable[..., SftRun],
    store: S3ObjectStore,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """A step reports the loss before it, and validation the one after: both as any user of PEFT
    computes them from the published files."""
    trainer, run = new_trainer(), new_run(**EVALUATED, train={"steps": 4})
    data = run.tokenize(trainer)
    versions = [run.init(trainer, data)]
    versions += [run.train(trainer, data, base, (0, 1, 5, base)) for base in range(4)]
    assert data.eval_prompts_key is not None
    training = decode_examples(store.get(data.prompts_key))
    held_out = decode_examples(store.get(data.eval_prompts_key)).take([0, 1])
    for number, manifest in enumerate(versions):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ADAPTER_FILES:
            (folder / name).write_bytes(store.get(keys.version_file(manifest, name)))
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(folder)).eval()
        if number < 4:
            found = losses(model, training.take([0, 1, 5, number]))
            reported = versions[number + 1].metrics["loss"]
            assert reported == pytest.approx(sum(found) / len(found), abs=1e-5)
        found = losses(model, held_out)
        expected = sum(found) / len(found) if number in (0, 2, 4) else None
        assert manifest.metrics.get("eval_loss") == pytest.approx(expected, abs=1e-5)
    metrics = versions[2].metrics
    rows = training.take([0, 1, 5, 1])
    assert metrics["num_tokens"] == sum(len(row.ids) for row in rows)
    assert metrics["epoch"] == pytest.approx(2 * 4 / 6)
    assert metrics["learning_rate"] == 0.01
    assert {"entropy", "mean_token_accuracy", "grad_norm", "perf/eval_s"} <= metrics.keys()
    assert 0 < metrics["batch/forwarded_tokens_per_step"] == metrics["num_tokens"]


def test_the_same_seed_gives_the_same_bytes_and_so_does_a_resumed_run(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun]
) -> None:
    """A trainer that starts with nothing but the store goes on where the first one died."""
    changes = {"lr_scheduler": "cosine", "warmup_steps": 1, "weight_decay": 0.1}
    made: list[list[dict[str, str]]] = []
    for is_interrupted in (False, False, True):
        trainer, run = new_trainer(), new_run(train=changes, lora={"dropout": 0.1})
        data = run.tokenize(trainer)
        versions = [run.init(trainer, data)]
        for base in range(3):
            trainer = new_trainer() if is_interrupted else trainer
            versions.append(run.train(trainer, data, base, (base, 7, 3)))
        made.append([hashes(version) for version in versions])
    assert made[0] == made[1] == made[2]
    assert len({version[ADAPTER_WEIGHTS] for version in made[0]}) == 4


def test_a_step_replays_to_the_same_adapter(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun]
) -> None:
    trainer, run = new_trainer(), new_run()
    data = run.tokenize(trainer)
    run.init(trainer, data)
    published = run.train(trainer, data, 0, (2, 1))
    job = ReplayInput(base_version=0, examples=run.step(data, 0, (2, 1)).examples)
    replayed = replay(run.context(job, "replay"), new_trainer())
    assert replayed.recomputed_sha256 == replayed.published_sha256 == published.adapter_sha256


def test_learned_answers_become_certain(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun]
) -> None:
    trainer, run = new_trainer(), new_run(train={"steps": 12, "learning_rate": 0.05})
    data = run.tokenize(trainer)
    run.init(trainer, data)
    versions = [run.train(trainer, data, base, tuple(range(8))) for base in range(12)]
    assert versions[-1].metrics["loss"] < versions[0].metrics["loss"] - 2.0


def test_a_step_that_is_not_finite_is_skipped_and_the_third_in_a_row_is_fatal(
    new_run: Callable[..., SftRun], store: S3ObjectStore, proxy: RunningProxy, tmp_path: Path
) -> None:
    """A model that overflows on one token; what learned nothing is published all the same."""
    folder = write_overflowing_model(tmp_path, "~")
    rows = [{"text": "fine"}, {"text": "a~b"}]
    run = new_run({"source": "inline", "rows": rows, "shuffle": False}, train={"steps": 4})
    trainer = trainer_on(folder, store, proxy.client)
    data = run.tokenize(trainer)
    version_0 = run.init(trainer, data)
    first, second = (run.train(trainer, data, base, (0, 1)) for base in range(2))
    assert first.skipped is not None
    assert second.skipped is not None
    assert (first.skipped.in_a_row, second.skipped.in_a_row) == (1, 2)
    assert first.skipped.reason == "the loss of version 1 is nan"
    assert hashes(first) == hashes(second) == hashes(version_0)
    assert "loss" not in first.metrics
    aside = TrainInput.model_validate_json(store.get(first.skipped.batch_key))
    assert aside == run.step(data, 0, (0, 1))
    with pytest.raises(PermanentJobError, match="2 steps before this one were no better: lower"):
        run.train(trainer, data, 2, (1,))
    assert run.train(trainer, data, 2, (0,)).skipped is None


def test_a_grpo_run_starts_from_a_supervised_one(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun], store: S3ObjectStore
) -> None:
    trainer, run = new_trainer(), new_run()
    data = run.tokenize(trainer)
    run.init(trainer, data)
    version_1 = run.train(trainer, data, 0, (0, 1, 2, 3))
    successor = Run(
        run_id=f"{run.run_id}-grpo",
        spec=spec(lora={"init_from": f"{run.run_id}@1"}),
        store=store,
        proxy=run.proxy,
    )
    version_0 = successor.init(trainer)
    assert version_0.adapter_sha256 == version_1.adapter_sha256
    group = [Sample(ids=(20, 21), reward=1.0), Sample(ids=(30,), reward=0.0)]
    trained = successor.train(trainer, 0, successor.put_groups(version_0, [group]))
    weights = load(store.get(keys.version_file(trained, ADAPTER_WEIGHTS)))
    before = load(store.get(keys.version_file(version_1, ADAPTER_WEIGHTS)))
    assert any(not torch.equal(weights[name], before[name]) for name in weights)
