"""Results of jobs that nobody did: what a real worker might answer."""

from hashlib import sha256

from offbeat import keys
from offbeat.contracts.chat import ChatInput, ChatOutput
from offbeat.contracts.jobs import (
    EvaluateInput,
    EvaluateOutput,
    GenerateInput,
    GenerateOutput,
    InitInput,
    InitOutput,
    JobOutput,
    PrepareInput,
    PrepareOutput,
    ReplayInput,
    ReplayOutput,
    TokenizeInput,
    TokenizeOutput,
    TrainInput,
    TrainOutput,
)
from offbeat.contracts.leases import Lease
from offbeat.contracts.rollouts import GroupSummary
from offbeat.contracts.weights import Canary, Manifest, VersionFile

SHA, OTHER_SHA = "ab" * 32, "cd" * 32


def plausible_output(lease: Lease, reward_std: float = 0.5) -> JobOutput:
    """What a real worker might answer."""
    run, job = lease.run_id, lease.job_id
    match lease.input:
        case PrepareInput():
            return PrepareOutput(
                prompts_key=keys.prompts(run, job, lease.attempt, "train"),
                num_prompts=8,
                eval_prompts_key=keys.prompts(run, job, lease.attempt, "eval"),
                num_eval_prompts=lease.spec.data.eval_size,
            )
        case TokenizeInput():
            return TokenizeOutput(
                prompts_key=keys.prompts(run, job, lease.attempt, "train"),
                num_prompts=8,
                eval_prompts_key=keys.prompts(run, job, lease.attempt, "eval"),
                num_eval_prompts=lease.spec.data.eval_size,
                num_target_tokens=40,
                num_cut=1,
            )
        case InitInput():
            return InitOutput(manifest=plausible_manifest(lease, 0))
        case TrainInput(base_version=base):
            return TrainOutput(manifest=plausible_manifest(lease, base + 1))
        case ChatInput():
            return ChatOutput(completion_tokens=3)
        case ReplayInput(base_version=base):
            return ReplayOutput(version=base + 1, published_sha256=SHA, recomputed_sha256=OTHER_SHA)
        case EvaluateInput(version=version):
            return EvaluateOutput(
                version=version,
                rollouts_key=keys.evaluation(run, version, job, lease.attempt),
                metrics={"eval/reward": 0.5, "eval/pass@1": 0.5},
            )
        case GenerateInput(groups=groups, min_version=version):
            return GenerateOutput(
                rollouts_key=keys.rollouts(run, job, lease.attempt),
                groups=tuple(
                    GroupSummary(
                        group_id=group.group_id,
                        policy_version=version,
                        adapter_sha256=SHA,
                        num_samples=2,
                        num_tokens=6,
                        reward_mean=0.5,
                        reward_std=reward_std,
                    )
                    for group in groups
                ),
                generated_tokens=6 * len(groups),
                generate_s=2.0,
            )


ADAPTER = (
    VersionFile(name="adapter_model.safetensors", size_bytes=100, sha256=SHA),
    VersionFile(name="adapter_config.json", size_bytes=10, sha256=SHA),
)
MODEL = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 40}
"""What the last version of full fine-tuning has beside its record."""


def plausible_manifest(lease: Lease, version: int) -> Manifest:
    """A manifest that nobody has checked."""
    manifest = Manifest(
        run_id=lease.run_id,
        version=version,
        parent=version - 1 if version else None,
        job_id=lease.job_id,
        attempt=lease.attempt,
        prefix=keys.version_prefix(lease.run_id, version, lease.job_id, lease.attempt),
        files=_full_files(lease, version) if lease.spec.is_full else ADAPTER,
        base_model=lease.spec.model.id,
        base_revision=None,
        rank=2,
        alpha=4,
        target_modules=("q_proj",),
        canary=Canary(prompt_ids=(1, 2), completion_ids=(3,), logprobs=(-0.5,)),
        metrics=_metrics(lease, version),
    )
    if not lease.spec.is_full:
        return manifest
    without = {"rank": None, "alpha": None, "target_modules": (), "canary": None}
    return manifest.model_copy(update=without)


def _full_files(lease: Lease, version: int) -> tuple[VersionFile, ...]:
    is_last = version == lease.spec.train.steps
    bodies = {"trainer_state.json": b"record", **(MODEL if is_last else {})}
    return tuple(
        VersionFile(name=name, size_bytes=len(body), sha256=sha256(body).hexdigest())
        for name, body in bodies.items()
    )


def _metrics(lease: Lease, version: int) -> dict[str, float]:
    if lease.spec.kind == "sft":
        own = {"loss": 1 / version} if version else {}
        is_validated = version in lease.spec.validated_versions
        return {**own, **({"eval_loss": 4.0 - version} if is_validated else {})}
    return {"reward": 0.25 * version, "sample/staleness_mean": 0.5} if version else {}
