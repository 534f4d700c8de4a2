"""Run specs that tests start from."""

from typing import Any

from offbeat.contracts.run_spec import RunSpec


def spec_dict(**changes: Any) -> dict[str, Any]:
    """A small valid spec; `train={"steps": 3}` merges into the section of that name."""
    spec: dict[str, Any] = {
        "name": "test",
        "model": {"id": "tiny", "dtype": "float32"},
        "lora": {"rank": 2, "alpha": 4},
        "data": {
            "source": "inline",
            "rows": [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)],
        },
        "rewards": [{"type": "exact_match"}],
        "rollout": {"group_size": 2, "groups_per_step": 2, "max_new_tokens": 4},
        "train": {"steps": 2, "learning_rate": 0.01},
    }
    return _changed(spec, changes)


def spec(**changes: Any) -> RunSpec:
    """The same as a parsed spec."""
    return RunSpec.model_validate(spec_dict(**changes))


def sft_spec_dict(**changes: Any) -> dict[str, Any]:
    """A small valid spec of a supervised run, changed in the same way."""
    spec: dict[str, Any] = {
        "name": "test-sft",
        "kind": "sft",
        "model": {"id": "tiny", "dtype": "float32"},
        "lora": {"rank": 2, "alpha": 4},
        "data": {
            "source": "inline",
            "rows": [{"prompt": f"{n} + 1 =", "completion": str(n + 1)} for n in range(8)],
        },
        "sft": {"batch_size": 4},
        "train": {"steps": 3, "learning_rate": 0.01},
    }
    return _changed(spec, changes)


def sft_spec(**changes: Any) -> RunSpec:
    """The same as a parsed spec."""
    return RunSpec.model_validate(sft_spec_dict(**changes))


def _changed(spec: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for section, value in changes.items():
        old = spec.get(section)
        spec[section] = {**old, **value} if isinstance(old, dict) else value
    return spec
