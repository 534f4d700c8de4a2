"""What generates in the generator benchmark: Offbeat's engine, and transformers in two ways.

Each takes the same prompts, draws at temperature 1 from the whole vocabulary, and answers with the
tokens of each sample up to its end. Only Offbeat's also gives log-probabilities.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from offbeat.contracts.run_spec import LoraSection
from offbeat.models import load_tokenizer
from services.generator.engines.adapter import Adapter
from services.generator.engines.base import Completion, SampleRequest, Sampling
from services.generator.engines.decode import left_padded
from services.generator.engines.model import LoraModel
from services.generator.engines.transformers import TransformersEngine

Ids = list[int]
Generate = Callable[[Sequence[SampleRequest], int], Sequence[Ids]]
"""The completions of these requests, of at most so many tokens."""

B_SCALE = 0.002
"""Of the weights of the adapter's B, which a run begins with at zero."""
BASE, NEW_ADAPTER, ADAPTER = "base", "new", "adapter"
"""Policies. A new adapter's B is zero: the same answers as the base model's, computed with it."""
SEQUENCES_MAX = 64
"""The default of generators."""
PAD_ID = 0
PAGE_TOKENS, PAGES = 256, 128
"""The cache of continuous batching: 64 sequences of two pages. Its own guess is 90 % of the
machine's memory."""
CONTINUOUS_TOKENS_MAX = 4096
"""Tokens of one of its forwards: all prompts of a workload at once."""


class BenchModel(LoraModel):
    """The engine's model, which also serves the base model under a folder that is not there."""

    def read_adapter(self, folder: Path) -> Adapter:
        """No factors for the base model."""
        if folder.name == BASE:
            return Adapter(factors={}, scaling=1.0)
        return super().read_adapter(folder)

    @property
    def module(self) -> nn.Module:
        """What computes, for whoever wants to time its parts."""
        return self._model


@dataclass(frozen=True, kw_only=True)
class Contenders:
    """The same weights three times: in the engine, plain, and plain under PEFT."""

    model: BenchModel
    engine: TransformersEngine
    """On this model."""
    plain: GenerationMixin
    peft: PeftModel

    @classmethod
    def load(cls, source: Path, folder: Path, dtype: torch.dtype) -> "Contenders":
        """Read the base model three times; adapters are made and left in the folder."""
        peft = adapted(source, dtype)
        peft.save_pretrained(str(folder / NEW_ADAPTER))
        change_base(peft)
        peft.save_pretrained(str(folder / ADAPTER))
        model = BenchModel.open(source, dtype, torch.device("cpu"))
        engine = TransformersEngine(model, load_tokenizer(source, None), SEQUENCES_MAX)
        for policy in (BASE, NEW_ADAPTER, ADAPTER):
            engine.load(policy, folder / policy)
        plain = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        return cls(model=model, engine=engine, plain=plain, peft=peft)

    def by_name(self, *, adapter: bool) -> dict[str, Generate]:
        """All that can do the workload."""
        policy = ADAPTER if adapter else BASE
        plain = cast(GenerationMixin, self.peft) if adapter else self.plain
        eos_ids = self.model.eos_ids

        def offbeat(requests: Sequence[SampleRequest], new_tokens: int) -> list[Ids]:
            return [list(one.ids) for one in self.completions(requests, new_tokens, policy)]

        return {
            "offbeat": offbeat,
            "generate": partial(plain_generate, plain, eos_ids),
            "generate_batch": partial(continuous_generate, plain, eos_ids),
        }

    def completions(
        self, requests: Sequence[SampleRequest], new_tokens: int, policy: str
    ) -> list[Completion]:
        """Offbeat's, flat."""
        sampling = Sampling(max_new_tokens=new_tokens, temperature=1.0)
        groups = self.engine.generate(requests, policy, sampling)
        return [completion for group in groups for completion in group]


def adapted(source: Path, dtype: torch.dtype) -> PeftModel:
    """The base model under PEFT, with a new adapter of the default form."""
    base = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    default = LoraSection()
    config = LoraConfig(
        r=default.rank,
        lora_alpha=int(default.alpha),
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return cast(PeftModel, get_peft_model(base, config, autocast_adapter_dtype=False)).eval()


def change_base(peft: PeftModel) -> None:
    """Give the adapter a B, as after some steps."""
    draw = torch.Generator().manual_seed(0)
    for name, parameter in peft.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=B_SCALE, generator=draw)


@torch.no_grad()
def plain_generate(
    model: GenerationMixin,
    eos_ids: frozenset[int],
    requests: Sequence[SampleRequest],
    new_tokens: int,
) -> Sequence[Ids]:
    """One call of `model.generate`, the prompts padded to one length."""
    prompts = _prompt_of_each_sample(requests)
    ids_NT, mask_NT = left_padded(prompts, torch.device("cpu"))
    torch.manual_seed(0)
    # transformers' own types do not fit one another here.
    texts = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        input_ids=ids_NT,
        attention_mask=mask_NT,
        generation_config=_generation(eos_ids, new_tokens),
    )
    return [until_end(ids, eos_ids) for ids in texts[:, ids_NT.shape[1] :].tolist()]


@torch.no_grad()
def continuous_generate(
    model: GenerationMixin,
    eos_ids: frozenset[int],
    requests: Sequence[SampleRequest],
    new_tokens: int,
) -> Sequence[Ids]:
    """One call of `model.generate_batch`."""
    outputs = model.generate_batch(
        inputs=[list(prompt) for prompt in _prompt_of_each_sample(requests)],
        generation_config=_generation(eos_ids, new_tokens),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_TOKENS, num_blocks=PAGES, max_batch_tokens=CONTINUOUS_TOKENS_MAX
        ),
        warmup=False,
    )
    return [output.generated_tokens for output in outputs.values()]


def until_end(ids: Ids, eos_ids: frozenset[int]) -> Ids:
    """The tokens up to the first that ends a text, which is one of them."""
    return next((ids[: n + 1] for n, token in enumerate(ids) if token in eos_ids), ids)


def _prompt_of_each_sample(requests: Sequence[SampleRequest]) -> list[tuple[int, ...]]:
    return [request.prompt_ids for request in requests for _ in request.seeds]


def _generation(eos_ids: frozenset[int], new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        eos_token_id=sorted(eos_ids),
        pad_token_id=PAD_ID,
    )
