"""A tiny LoRA adapter for the model of `tests/tiny_model.py`, as a trainer would leave it in the
store."""

import hashlib
import json

import numpy as np
from safetensors.numpy import save

from offbeat import keys
from offbeat.contracts.weights import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Canary,
    Manifest,
    VersionFile,
)
from offbeat.objects import ObjectStore

NUM_LAYERS = 2
HIDDEN = 32
TARGETS = {"q_proj": 32, "v_proj": 16}
"""Rows of each target module of the tiny model."""
TRAINER_STATE = "trainer_state.json"


def adapter_tensors(version: int, *, rank: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """PEFT's names and shapes, float32; as in training, B is zero in version 0 only."""
    generator = np.random.default_rng((seed, version))
    tensors: dict[str, np.ndarray] = {}
    for layer in range(NUM_LAYERS):
        for target, rows in TARGETS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            a = generator.normal(size=(rank, HIDDEN))
            b = generator.normal(size=(rows, rank)) if version else np.zeros((rows, rank))
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    return tensors


def adapter_config(rank: int) -> bytes:
    """PEFT's `adapter_config.json`."""
    return json.dumps(
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "tiny",
            "r": rank,
            "lora_alpha": 2 * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(TARGETS),
        }
    ).encode()


def upload(
    store: ObjectStore,
    run_id: str,
    version: int,
    files: dict[str, bytes],
    *,
    rank: int = 2,
    job_id: str = "job-x",
    attempt: int = 1,
    canary: Canary | None = None,
) -> Manifest:
    """Put the files under their prefix and describe them truthfully."""
    prefix = keys.version_prefix(run_id, version, job_id, attempt)
    for name, body in files.items():
        store.put(prefix + name, body)
    return Manifest(
        run_id=run_id,
        version=version,
        parent=version - 1 if version else None,
        job_id=job_id,
        attempt=attempt,
        prefix=prefix,
        files=tuple(
            VersionFile(name=name, size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
            for name, body in files.items()
        ),
        base_model="tiny",
        base_revision=None,
        rank=rank,
        alpha=2 * rank,
        target_modules=tuple(TARGETS),
        canary=canary
        or Canary(
            prompt_ids=(5, 6, 7),
            completion_ids=(8, 9),
            logprobs=(-1.0, -2.0),
            parent_logprobs=(-1.5, -2.5) if version else (),
        ),
    )


def adapter_files(version: int, *, rank: int = 2, seed: int = 0) -> dict[str, bytes]:
    """The objects of a version by name: the PEFT folder and a trainer state."""
    return {
        ADAPTER_WEIGHTS: save(adapter_tensors(version, rank=rank, seed=seed)),
        ADAPTER_CONFIG: adapter_config(rank),
        TRAINER_STATE: json.dumps({"step": version}).encode(),
    }


def publishable(
    store: ObjectStore,
    run_id: str,
    version: int,
    *,
    rank: int = 2,
    seed: int = 0,
    job_id: str = "job-x",
    attempt: int = 1,
    canary: Canary | None = None,
) -> Manifest:
    """Upload a tiny plausible adapter and return the manifest that would publish it."""
    return upload(
        store,
        run_id,
        version,
        adapter_files(version, rank=rank, seed=seed),
        rank=rank,
        job_id=job_id,
        attempt=attempt,
        canary=canary,
    )
