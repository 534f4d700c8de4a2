"""Is a vLLM server what Offbeat needs, and is it enough for a run?

A server is asked what it can be asked: its version, its models and its metrics. What it has no
answer for shows in two probes. A sample with `top_k = 1` has log-probability 0 under
`--logprobs-mode processed_logprobs` and under no other mode; and a blank adapter of the largest
rank can be loaded and used only with adapters enabled, with routes to load them, with a large
enough `--max-lora-rank` and with a shared folder. What `--generation-config` sets is sent with
every request, so it needs no check.
"""

import re
import shutil
from pathlib import Path
from uuid import uuid4

import structlog

from offbeat.contracts.run_spec import ModelSection, RunSpec
from offbeat.errors import PermanentJobError, UnavailableError
from services.generator.engines.base import Completion, SampleRequest, Sampling, never_cancelled
from services.generator.engines.vllm_command import AdapterLimits
from services.generator.engines.vllm_completions import URGENT, complete, completion_bodies
from services.generator.engines.vllm_http import ModelCard, VllmClient
from services.generator.engines.vllm_model import ModelOutline, write_blank_adapter

log = structlog.get_logger(__name__)

VERSION_MIN = (0, 12)
"""The first with all routes, fields and ranks used here."""
VERSION_TESTED = (0, 32)
STOP_MAX = 4
"""Stop strings that vLLM takes."""
SLOTS_BESIDE_VERSIONS = 2
"""The version that a job holds may be `max_versions` old, and the newest is loaded before one goes:
with fewer slots versions in use wait for one another."""
PROBE_TOKENS = 2
PROBE_TIMEOUT_S = 180.0
PROBE = SampleRequest(prompt_ids=(1, 2, 3), seeds=(0,))
CERTAIN = Sampling(max_new_tokens=PROBE_TOKENS, temperature=1.0, top_k=1)
ROUNDING = 1e-5


def check_run(spec: RunSpec, limits: AdapterLimits) -> None:
    """Raise `PermanentJobError` unless engines with these limits can serve the run."""
    needed = spec.staleness.max_versions + SLOTS_BESIDE_VERSIONS
    if limits.max_loras < needed:
        raise PermanentJobError(
            f"staleness.max_versions = {spec.staleness.max_versions} needs {needed} adapters at "
            f"once, vLLM has --max-loras {limits.max_loras}: lower the one, or raise "
            "OFFBEAT_VLLM_MAX_LORAS (and --max-loras of a server that you start yourself)"
        )
    if spec.lora is not None and spec.lora.rank > limits.max_lora_rank:
        raise PermanentJobError(
            f"lora.rank = {spec.lora.rank} is above vLLM's --max-lora-rank {limits.max_lora_rank}: "
            "lower the one, or raise OFFBEAT_VLLM_MAX_LORA_RANK (and --max-lora-rank)"
        )
    if len(spec.rollout.stop) > STOP_MAX:
        raise PermanentJobError(f"rollout.stop: vLLM takes at most {STOP_MAX} stop strings")


def check_server(client: VllmClient) -> ModelCard:
    """Raise `PermanentJobError` unless the server has the right version and log-probabilities; its
    base model."""
    version = client.version()
    number = version_number(version)
    if number < VERSION_MIN:
        raise PermanentJobError(f"vLLM {version} is too old: 0.12 or newer is needed")
    if number > VERSION_TESTED:
        log.warning("vLLM is newer than the versions that were tested.", version=version)
    base = next((card for card in client.models() if card.parent is None), None)
    if base is None:
        raise PermanentJobError("vLLM lists no base model: is it a server for embeddings?")
    if any(abs(value) > ROUNDING for value in _probe(client, base.id).logprobs):
        raise PermanentJobError(
            "vLLM's log-probabilities are not those of the sampled distribution: start it with "
            "--logprobs-mode processed_logprobs"
        )
    return base


def check_model(cards: tuple[ModelCard, ...], model: ModelSection, folder: Path) -> None:
    """Raise `PermanentJobError` unless the server serves the run's model: the canary of a version
    would find it out too, but not say how to mend it."""
    bases = [card for card in cards if card.parent is None]
    if not any(card.id == model.id or card.root in (model.id, str(folder)) for card in bases):
        raise PermanentJobError(
            f"vLLM serves {bases[0].id!r} and the run is on {model.id!r}: give each base model a "
            f"pool of its own, or start vLLM with --served-model-name {model.id}"
        )


def check_adapters(
    client: VllmClient, outline: ModelOutline, folder: Path, limits: AdapterLimits
) -> None:
    """Load, use and unload a blank adapter that is written below the folder."""
    name = f"offbeat-probe-{uuid4().hex}"
    probe = folder / name
    try:
        write_blank_adapter(probe, outline, limits.max_lora_rank)
        client.load(name, probe)
        if name not in {card.id for card in client.models()}:
            raise UnavailableError("vLLM took an adapter but does not list it")
        _probe(client, name)
        client.unload(name)
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    max_loras = client.max_loras()
    if max_loras is not None and max_loras < limits.max_loras:
        raise PermanentJobError(
            f"vLLM was started with --max-loras {max_loras}: start it with --max-loras "
            f"{limits.max_loras}, or set OFFBEAT_VLLM_MAX_LORAS={max_loras}"
        )


def version_number(version: str) -> tuple[int, int]:
    """Major and minor. vLLM calls a build from source 0.1.dev, which counts as tested."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or version.startswith("0.1.dev"):
        return VERSION_TESTED
    return int(found[1]), int(found[2])


def _probe(client: VllmClient, model: str) -> Completion:
    bodies = completion_bodies([PROBE], model, CERTAIN, priority=URGENT)
    (completion,) = complete(
        client.address, bodies, at_once=1, timeout_s=PROBE_TIMEOUT_S, check=never_cancelled
    )
    return completion
