"""Two runs of different rank side by side on one engine, as a mixed fleet has them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from offbeat.contracts.leases import WorkerEvent
from offbeat.models import load_tokenizer
from offbeat.objects import S3ObjectStore
from offbeat.tables import PromptRow
from services.generator.engines.base import Completion, Sampling, never_cancelled
from services.generator.engines.model import LoraModel
from services.generator.engines.transformers import TransformersEngine
from services.generator.models import BaseModel
from services.generator.sample import Group, sample
from services.generator.weights import RunPolicies
from tests.policies import Reference, policy_tensors, upload_policy
from tests.specs import spec
from tests.weight_proxy import running_proxy

RANKS = {"narrow": 2, "wide": 8}
VERSION = 1
PROMPT_IDS = (1, 40, 41, 42, 0, 1, 50)
GROUP = Group(
    group_id="g-0",
    prompt=PromptRow(prompt_id="p-0", prompt="-", prompt_ids=PROMPT_IDS, columns={}),
    seeds=tuple(range(8)),
)
SAMPLED = Sampling(max_new_tokens=16, temperature=1.0)


def test_two_runs_of_different_rank_share_an_engine(
    store: S3ObjectStore, tiny_model: Path, tmp_path: Path, run_id: str
) -> None:
    """Each samples with its own adapter at the same time, and as if it were alone."""
    references = {name: Reference(tiny_model, rank=rank) for name, rank in RANKS.items()}
    events: list[WorkerEvent] = []
    with running_proxy(store, tmp_path) as proxy:
        for name, rank in RANKS.items():
            for version in range(VERSION + 1):
                canary = references[name].canary(version)
                proxy.client.publish(
                    upload_policy(store, f"{run_id}-{name}", version, canary, rank)
                )
        model = LoraModel.open(tiny_model, torch.float32, torch.device("cpu"))
        tokenizer = load_tokenizer(tiny_model, None)
        engine = TransformersEngine(model, tokenizer, sequences_max=64)
        base = BaseModel(
            engine=engine,
            tokenizer=tokenizer,
            new_policies=lambda run: RunPolicies(
                run,
                engine=engine,
                model=spec().model,
                proxy=proxy.client,
                tell=events.append,
                folder=tmp_path,
                spare_max=1,
            ),
        )

        def completions(name: str) -> Sequence[Completion]:
            with base.policies(f"{run_id}-{name}").newest(VERSION) as policy:
                return sample(base, policy, [GROUP], SAMPLED, never_cancelled).completions[0]

        with ThreadPoolExecutor(len(RANKS)) as pool:
            together = dict(zip(RANKS, pool.map(completions, RANKS), strict=True))
        alone = {name: completions(name) for name in RANKS}
        base.close()

    assert together == alone
    assert {event.kind for event in events} == {"version_served"}
    for name, rank in RANKS.items():
        references[name].install(policy_tensors(VERSION, rank=rank))
        for completion in together[name]:
            expected = references[name].logprobs(PROMPT_IDS, completion.ids)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
