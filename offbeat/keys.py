"""Every object key is built here.

    runs/<run>/prompts/<job>-<attempt>/train.parquet      prompts (in a supervised run, examples),
                                                          rendered and tokenised
    runs/<run>/prompts/<job>-<attempt>/eval.parquet       held-out ones
    runs/<run>/rollouts/<job>-<attempt>.parquet           samples of one generate job
    runs/<run>/evals/<version:06>-<job>-<attempt>.parquet samples of one evaluation
    runs/<run>/versions/<version:06>-<job>-<attempt>/     one attempt at one policy version:
        adapter_model.safetensors, adapter_config.json    the PEFT folder that generators pull
        trainer_state.safetensors, trainer_state.json     masters, moments, step, random state
    runs/<run>/skipped/<version:06>-<job>-<attempt>.json  the batch of a step that was not finite
    runs/<run>/manifests/<version:06>.json                the manifest that won

A key that a worker writes holds its job and attempt, so no two attempts can write the same object
and nothing depends on conditional writes.
"""

import re
from dataclasses import dataclass

from offbeat.contracts.weights import Manifest

_OF_ATTEMPT = re.compile(
    r"runs/[^/]+/(?P<folder>prompts|rollouts|evals|versions)/"
    r"((?P<version>\d{6,})-)?(?P<job_id>[^/]+)-(?P<attempt>\d+)[./](?P<name>[^/]+)"
)


@dataclass(frozen=True, kw_only=True)
class AttemptKey:
    """What a key says that a job's attempt has written; the inverse of the functions below."""

    folder: str
    version: int | None
    """Of the policy, where the key names it: in `evals` and `versions`."""
    job_id: str
    attempt: int
    name: str
    """The file's name within the attempt's folder, or its suffix."""


def parse(key: str) -> AttemptKey | None:
    """The parts of a key of `prompts`, `rollouts`, `evals` or `versions`; None for any other."""
    match = _OF_ATTEMPT.fullmatch(key)
    if match is None:
        return None
    version = match["version"]
    return AttemptKey(
        folder=match["folder"],
        version=int(version) if version is not None else None,
        job_id=match["job_id"],
        attempt=int(match["attempt"]),
        name=match["name"],
    )


def run_prefix(run_id: str) -> str:
    """The folder, with its final slash, of everything that a run has."""
    return f"runs/{run_id}/"


def _attempt(job_id: str, attempt: int) -> str:
    return f"{job_id}-{attempt}"


def prompts(run_id: str, job_id: str, attempt: int, split: str) -> str:
    """The table of prompts, or examples, of one split: `train` or `eval`."""
    return f"runs/{run_id}/prompts/{_attempt(job_id, attempt)}/{split}.parquet"


def rollouts(run_id: str, job_id: str, attempt: int) -> str:
    """The samples of one generate job."""
    return f"runs/{run_id}/rollouts/{_attempt(job_id, attempt)}.parquet"


def evaluation(run_id: str, version: int, job_id: str, attempt: int) -> str:
    """The samples of one evaluation."""
    return f"runs/{run_id}/evals/{version:06d}-{_attempt(job_id, attempt)}.parquet"


def version_prefix(run_id: str, version: int, job_id: str, attempt: int) -> str:
    """The folder, with its final slash, that only this attempt writes."""
    return f"runs/{run_id}/versions/{version:06d}-{_attempt(job_id, attempt)}/"


def version_file(manifest: Manifest, name: str) -> str:
    """One file of a published version."""
    return manifest.prefix + manifest.file(name).name


def skipped_batch(run_id: str, version: int, job_id: str, attempt: int) -> str:
    """The input of a step whose loss or gradient was not finite, set aside."""
    return f"runs/{run_id}/skipped/{version:06d}-{_attempt(job_id, attempt)}.json"


def manifest(run_id: str, version: int) -> str:
    """The copy of the winning manifest from which the weight-proxy's table can be rebuilt."""
    return f"runs/{run_id}/manifests/{version:06d}.json"


def manifests(run_id: str | None = None) -> str:
    """The prefix of all manifests of a run, or of all runs."""
    return f"runs/{run_id}/manifests/" if run_id else "runs/"


def adapter_name(run_id: str, version: int) -> str:
    """The name of a policy in an engine. It is never used for any other content."""
    return f"{run_id}-v{version}"
