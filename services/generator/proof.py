"""Is a version what its manifest says, and does the engine compute with it?"""

import json
from pathlib import Path

from offbeat.canary import CanaryVerdict, tolerance_of, verify_canary
from offbeat.contracts.run_spec import ModelSection
from offbeat.contracts.weights import ADAPTER_CONFIG, Canary, Manifest
from offbeat.errors import IntegrityError
from services.generator.engines.base import Engine, SampleRequest, Sampling


def check_manifest(manifest: Manifest, model: ModelSection, folder: Path) -> None:
    """Raise `IntegrityError` unless the version is of this base model, and its folder what the
    manifest says: alpha / rank scales the whole adapter."""
    if (manifest.base_model, manifest.base_revision) != (model.id, model.revision):
        raise IntegrityError(
            f"the version was trained on {manifest.base_model!r} at {manifest.base_revision!r}, "
            f"the run's model is {model.id!r} at {model.revision!r}"
        )
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        told = (
            config["r"],
            config["lora_alpha"],
            bool(config.get("use_rslora")),
            set(config["target_modules"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{ADAPTER_CONFIG} cannot be read: {error!r}") from error
    expected = (
        manifest.rank,
        manifest.alpha,
        manifest.use_rslora,
        set(manifest.target_modules),
    )
    if told != expected:
        raise IntegrityError(
            f"{ADAPTER_CONFIG} has rank, alpha, use_rslora and targets {told}, the manifest "
            f"{expected}"
        )


def prove(engine: Engine, policy: str, canary: Canary, model: ModelSection) -> CanaryVerdict:
    """Have the engine continue the canary's prompt greedily, before other work, and compare."""
    request = SampleRequest(prompt_ids=canary.prompt_ids, seeds=(0,), guess=canary.completion_ids)
    greedy = Sampling(max_new_tokens=len(canary.completion_ids), temperature=0.0)
    ((completion,),) = engine.generate([request], policy, greedy, urgent=True)
    return verify_canary(canary, completion.ids, completion.logprobs, tolerance_of(model))
