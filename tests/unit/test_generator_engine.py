"""The transformers engine on a tiny real model, against PEFT computing the same text plainly."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offbeat.errors import ConflictError, LeaseLostError, NotFoundError, UnavailableError
from offbeat.models import load_tokenizer
from services.generator.engines.attention import GROUPED
from services.generator.engines.base import Completion, SampleRequest, Sampling
from services.generator.engines.model import LoraModel
from services.generator.engines.transformers import TransformersEngine, batches
from tests.policies import Reference, policy_tensors, write_policy

SAMPLED = Sampling(max_new_tokens=24, temperature=1.0)
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
TENSORS = {f"v{version}": policy_tensors(version) for version in range(3)} | {
    "far": policy_tensors(1, step=1.0)
}
"""Version 0 is the base model; each later one is a step further, `far` a very large one."""
EOS_IDS = [0, *range(100, 115)]
PROMPTS = ((1, 40, 41, 42, 0, 1, 50), (1, 60), tuple(range(30, 60)))
REQUESTS = [
    SampleRequest(prompt_ids=prompt, seeds=tuple(range(100 * k, 100 * k + 4)))
    for k, prompt in enumerate(PROMPTS)
]


@pytest.fixture(scope="module")
def model_folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with so many end-of-text tokens that samples end at all lengths."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_model, folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, "eos_token_id": EOS_IDS}))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_policy(folder / name, tensors) for name, tensors in TENSORS.items()}


@pytest.fixture(scope="module")
def engine(model_folder: Path, adapters: dict[str, Path]) -> Iterator[TransformersEngine]:
    engine = new_engine(model_folder)
    for name, folder in adapters.items():
        engine.load(name, folder)
    yield engine
    engine.close()


def new_engine(
    folder: Path, *, sequences_max: int = 64, dtype: torch.dtype = torch.float32
) -> TransformersEngine:
    model = LoraModel.open(folder, dtype, torch.device("cpu"))
    return TransformersEngine(model, load_tokenizer(folder, None), sequences_max)


def flat(completions: list[list[Completion]]) -> list[Completion]:
    return [completion for group in completions for completion in group]


@pytest.mark.parametrize("name", ["v0", "v2", "far"])
def test_logprobs_are_those_of_a_plain_forward_under_peft(
    engine: TransformersEngine, model_folder: Path, name: str
) -> None:
    """W12; each prompt is computed once, padded, cached and copied for its samples."""
    reference = Reference(model_folder, TENSORS[name])
    completions = engine.generate(REQUESTS, name, SAMPLED)
    for request, group in zip(REQUESTS, completions, strict=True):
        for completion in group:
            expected = reference.logprobs(request.prompt_ids, completion.ids)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_greedy_is_the_argmax_of_a_plain_forward(
    engine: TransformersEngine, model_folder: Path
) -> None:
    reference = Reference(model_folder, TENSORS["v2"])
    requests = [SampleRequest(prompt_ids=prompt, seeds=(0,)) for prompt in PROMPTS]
    for prompt, (completion,) in zip(PROMPTS, engine.generate(requests, "v2", GREEDY), strict=True):
        assert completion.ids == reference.greedy(prompt, 12, EOS_IDS)
        expected = reference.logprobs(prompt, completion.ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_guess_gives_the_greedy_completion_up_to_its_first_mistake(
    engine: TransformersEngine,
) -> None:
    """In one forward: a second one would ask `check` again."""
    for prompt in PROMPTS:
        request = SampleRequest(prompt_ids=prompt, seeds=(0,))
        ((plain,),) = engine.generate([request], "v2", GREEDY)
        wrong_at = len(plain.ids) // 2
        wrong = (*plain.ids[:wrong_at], 200, *plain.ids[wrong_at + 1 :])
        assert wrong != plain.ids
        for guess, num_tokens in ((plain.ids, len(plain.ids)), (wrong, wrong_at + 1)):
            checks: list[None] = []
            ((told,),) = engine.generate(
                [replace(request, guess=guess)],
                "v2",
                GREEDY,
                urgent=True,
                check=lambda checks=checks: checks.append(None),
            )
            assert told.ids == plain.ids[:num_tokens]
            assert told.logprobs == pytest.approx(plain.logprobs[:num_tokens], abs=1e-5)
            assert len(checks) == 1


def test_a_sample_depends_on_its_seed_and_on_nothing_else(engine: TransformersEngine) -> None:
    """Alone, in a batch, or in another order: the same ids, though rows leave at other times."""
    together = engine.generate(REQUESTS, "v2", SAMPLED)
    lengths = {len(completion.ids) for completion in flat(together)}
    assert len(lengths) > 3, "samples must end at different steps for the test to mean anything"
    for request, group in zip(REQUESTS, together, strict=True):
        for seed, completion in zip(request.seeds, group, strict=True):
            alone = SampleRequest(prompt_ids=request.prompt_ids, seeds=(seed,))
            (again,) = flat(engine.generate([alone], "v2", SAMPLED))
            assert again.ids == completion.ids
            assert again.logprobs == pytest.approx(completion.logprobs, abs=1e-5)
    reordered = engine.generate(REQUESTS[::-1], "v2", SAMPLED)[::-1]
    assert [c.ids for c in flat(reordered)] == [c.ids for c in flat(together)]


def test_the_same_call_gives_the_same_bits(engine: TransformersEngine) -> None:
    assert engine.generate(REQUESTS, "v1", SAMPLED) == engine.generate(REQUESTS, "v1", SAMPLED)


@pytest.mark.parametrize("sequences_max", [3, 64])
def test_the_tokens_of_the_first_sample_are_heard_as_they_come(
    model_folder: Path, adapters: dict[str, Path], sequences_max: int
) -> None:
    engine = new_engine(model_folder, sequences_max=sequences_max)
    engine.load("v2", adapters["v2"])
    heard: list[int] = []
    completions = flat(engine.generate(REQUESTS, "v2", SAMPLED, on_tokens=heard.extend))
    engine.close()
    assert tuple(heard) == completions[0].ids
    assert len(completions) == 12


def test_a_job_larger_than_the_batch_gives_the_same_samples(
    engine: TransformersEngine, model_folder: Path, adapters: dict[str, Path]
) -> None:
    small = new_engine(model_folder, sequences_max=3)
    small.load("v2", adapters["v2"])
    completions = small.generate(REQUESTS, "v2", SAMPLED)
    small.close()
    expected = engine.generate(REQUESTS, "v2", SAMPLED)
    assert [c.ids for c in flat(completions)] == [c.ids for c in flat(expected)]


def test_batches_split_requests_and_keep_the_order() -> None:
    requests = [
        SampleRequest(prompt_ids=(1,), seeds=(1, 2, 3)),
        SampleRequest(prompt_ids=(2,), seeds=(4, 5)),
    ]
    split = [[(r.prompt_ids[0], r.seeds) for r in batch] for batch in batches(requests, 2)]
    assert split == [[(1, (1, 2))], [(1, (3,)), (2, (4,))], [(2, (5,))]]


def test_the_adapter_decides_what_is_generated(engine: TransformersEngine) -> None:
    """W5, W6: a large B must change greedy output."""
    base = engine.generate(REQUESTS[:1], "v0", GREEDY)[0][0]
    far = engine.generate(REQUESTS[:1], "far", GREEDY)[0][0]
    assert base.ids != far.ids


def test_versions_in_flight_together_keep_their_own_adapter(engine: TransformersEngine) -> None:
    names = ("v0", "far", "v2")
    expected = [engine.generate(REQUESTS, name, SAMPLED) for name in names]
    with ThreadPoolExecutor(3) as pool:
        mixed = list(pool.map(lambda name: engine.generate(REQUESTS, name, SAMPLED), names))
    assert mixed == expected


def test_the_end_of_text_is_part_of_the_completion(engine: TransformersEngine) -> None:
    completions = flat(engine.generate(REQUESTS, "v2", SAMPLED))
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped
    assert all(c.ids[-1] in EOS_IDS and not set(EOS_IDS) & {*c.ids[:-1]} for c in stopped)
    cut = [c for c in completions if c.finish_reason == "length"]
    assert cut
    assert all(len(c.ids) == 24 and not set(EOS_IDS) & {*c.ids} for c in cut)


def test_a_stop_string_ends_a_completion_at_the_token_that_completes_it(
    engine: TransformersEngine, model_folder: Path
) -> None:
    tokenizer = load_tokenizer(model_folder, None)
    plain = next(
        c for c in flat(engine.generate(REQUESTS, "v2", SAMPLED)) if c.finish_reason == "length"
    )
    stop = tokenizer.decode(list(plain.ids[5:7]))
    assert isinstance(stop, str)
    sampling = Sampling(max_new_tokens=24, temperature=1.0, stop=("never there", stop))
    completions = flat(engine.generate(REQUESTS, "v2", sampling))
    (ended,) = [c for c in completions if c.ids == plain.ids[: len(c.ids)] and len(c.ids) > 1]
    assert ended.finish_reason == "stop"
    assert ended.ids == plain.ids[:7]
    assert ended.logprobs == plain.logprobs[:7]


def test_logprobs_are_of_the_processed_distribution(
    engine: TransformersEngine, model_folder: Path
) -> None:
    """S14: after temperature and top-k, which a plain log_softmax over the survivors repeats."""
    rule = Sampling(max_new_tokens=6, temperature=0.7, top_k=5)
    (completion,) = engine.generate([SampleRequest(prompt_ids=PROMPTS[0], seeds=(3,))], "v1", rule)[
        0
    ]
    logits_TV = Reference(model_folder, TENSORS["v1"]).distributions(PROMPTS[0], completion.ids)
    top_TK = logits_TV[:-1].div(0.7).topk(5)
    processed_TK = top_TK.values.log_softmax(-1)
    for place, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True)):
        rank = top_TK.indices[place].tolist().index(token)
        assert logprob == pytest.approx(float(processed_TK[place, rank]), abs=1e-4)


def test_work_that_is_taken_away_stops_within_one_step(engine: TransformersEngine) -> None:
    steps = 0

    def check() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise LeaseLostError("taken")

    with pytest.raises(LeaseLostError, match="taken"):
        engine.generate(REQUESTS, "v1", SAMPLED, check=check)
    assert steps == 3


def test_names_mean_one_adapter_as_long_as_they_are_loaded(
    model_folder: Path, adapters: dict[str, Path]
) -> None:
    engine = new_engine(model_folder)
    with pytest.raises(NotFoundError, match="v1 is not loaded"):
        engine.generate(REQUESTS, "v1", GREEDY)
    engine.load("v1", adapters["v1"])
    with pytest.raises(ConflictError, match="a name has one content"):
        engine.load("v1", adapters["v2"])
    assert engine.loaded() == {"v1"}
    engine.unload("v1")
    engine.unload("v1")
    assert engine.loaded() == frozenset()
    engine.close()


def test_a_closed_engine_says_so(model_folder: Path, adapters: dict[str, Path]) -> None:
    engine = new_engine(model_folder)
    engine.load("v1", adapters["v1"])
    engine.close()
    with pytest.raises(UnavailableError, match="closed"):
        engine.load("v2", adapters["v2"])
    with pytest.raises(UnavailableError, match="closed"):
        engine.generate(REQUESTS, "v1", GREEDY)


def test_bfloat16_decoding_stays_near_float32(
    engine: TransformersEngine, model_folder: Path, adapters: dict[str, Path]
) -> None:
    half = new_engine(model_folder, dtype=torch.bfloat16)
    half.load("v2", adapters["v2"])
    request = SampleRequest(prompt_ids=PROMPTS[0], seeds=(0,))
    one_token = Sampling(max_new_tokens=1, temperature=0.0)
    ((low,),) = half.generate([request], "v2", one_token)
    ((high,),) = engine.generate([request], "v2", one_token)
    half.close()
    assert low.ids == high.ids
    assert low.logprobs == pytest.approx(high.logprobs, abs=0.05)


def test_llamas_attention_is_grouped(model_folder: Path) -> None:
    model = LoraModel.open(model_folder, torch.float32, torch.device("cpu"))
    assert model._model.config._attn_implementation == GROUPED
