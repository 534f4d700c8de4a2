"""What a spec of a supervised run may say."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.contracts.run_kinds import OWN_PARTS
from offbeat.contracts.run_spec import LoraSection, RunSpec, TrainSection
from offbeat.spec_problems import problem_lines
from offbeat.specs import InvalidSpecError, load_spec, validate_spec
from tests.specs import sft_spec, sft_spec_dict, spec_dict


def complaint(raw: dict[str, Any]) -> str:
    with pytest.raises(InvalidSpecError) as caught:
        validate_spec(raw)
    [line] = problem_lines(caught.value.fields)
    return line


def test_a_supervised_run_needs_no_rewards() -> None:
    spec = validate_spec(sft_spec_dict())
    assert (spec.kind, spec.rewards, spec.sft.batch_size) == ("sft", (), 4)
    assert spec.sft.completion_only_loss


@pytest.mark.parametrize(
    "path", sorted(Path("examples").glob("*.toml")), ids=lambda path: path.name
)
def test_the_examples_are_valid(path: Path) -> None:
    assert load_spec(path).train.steps > 0


def test_a_stored_spec_is_read_back_as_it_was() -> None:
    spec = sft_spec(data={"eval_size": 2}, eval={"every_steps": 2})
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_versions_are_validated_where_samples_would_be_evaluated() -> None:
    evaluated: dict[str, Any] = {"data": {"eval_size": 2}, "eval": {"every_steps": 2}}
    sft, grpo = sft_spec(**evaluated), validate_spec(spec_dict(**evaluated))
    assert (sft.eval_versions, sft.validated_versions) == ((), (0, 2, 3))
    assert (grpo.eval_versions, grpo.validated_versions) == ((0, 2), ())
    assert complaint(sft_spec_dict(eval={"every_steps": 2})) == (
        "eval.every_steps needs held-out prompts: set data.eval_size"
    )


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"rollout": {"group_size": 4}}, "rollout"),
        ({"staleness": {"max_versions": 0}}, "staleness"),
        ({"eval": {"temperature": 0.5}}, "eval.temperature"),
        ({"train": {"beta": 0.1}}, "train.beta"),
        ({"train": {"loss": "grpo"}}, "train.loss"),
    ],
)
def test_what_belongs_to_the_other_kind_is_refused(changes: dict[str, Any], part: str) -> None:
    assert complaint(sft_spec_dict(**changes)) == (f'{part} belongs to kind = "grpo": leave it out')


def test_rewards_and_supervised_settings_do_not_go_together() -> None:
    assert complaint(sft_spec_dict(rewards=[{"type": "exact_match"}])) == (
        'rewards: belongs to kind = "grpo": leave it out'
    )
    assert complaint(spec_dict(sft={"batch_size": 4})) == (
        'sft belongs to kind = "sft": leave it out'
    )


def test_without_an_adapter_a_supervised_run_trains_all_weights() -> None:
    raw = sft_spec_dict()
    del raw["lora"]
    run = RunSpec.model_validate(raw)
    assert run.is_full
    assert run.init_from is None
    assert RunSpec.model_validate_json(run.model_dump_json()) == run
    assert not sft_spec().is_full
    without = spec_dict()
    del without["lora"]
    assert RunSpec.model_validate(without).lora == LoraSection()


def test_what_does_not_go_with_all_weights_or_with_an_adapter_is_refused() -> None:
    raw = sft_spec_dict(model={"quantization": "nf4"})
    del raw["lora"]
    assert complaint(raw) == (
        'model.quantization = "nf4": full fine-tuning cannot train weights of 4 bits: '
        "add a [lora] section, or leave it out"
    )
    assert complaint(sft_spec_dict(train={"checkpoint_every": 2})) == (
        "train.checkpoint_every belongs to full fine-tuning: every version of an adapter is a "
        "checkpoint; leave it out"
    )


def test_every_part_that_a_kind_owns_is_there() -> None:
    fields = {
        name for part in OWN_PARTS["grpo"] if part.startswith("train.") for name in [part[6:]]
    }
    assert fields <= TrainSection.model_fields.keys()
    assert {part.split(".")[0] for parts in OWN_PARTS.values() for part in parts} <= (
        RunSpec.model_fields.keys()
    )
