"""Policies on the tiny model with true canaries: PEFT computes them, plainly and over the whole
text, so they check an engine against code that it shares nothing with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.numpy import save
from transformers import AutoModelForCausalLM

from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Canary, Manifest
from offbeat.objects import ObjectStore
from tests.adapters import TARGETS, adapter_config, adapter_tensors, upload

RANK = 2
PROMPT_IDS = (1, 40, 41, 42, 0, 1, 50)
NEW_TOKENS = 8
STEP = 0.0003
"""How far each weight drifts from one version to the next. It moves log-probabilities by some
thousandths, a fifth of what a step at learning rate 1e-4 does to SmolLM2."""

Tensors = Mapping[str, np.ndarray]


def policy_tensors(version: int, *, step: float = STEP, rank: int = RANK) -> dict[str, np.ndarray]:
    """A run's adapter after so many steps: B starts at zero, and everything drifts."""
    tensors = adapter_tensors(0, rank=rank)
    for number in range(1, version + 1):
        generator = np.random.default_rng(number)
        for name, tensor in tensors.items():
            tensors[name] = tensor + generator.normal(scale=step, size=tensor.shape).astype("f4")
    return tensors


def peft_files(tensors: Tensors, rank: int = RANK) -> dict[str, bytes]:
    """The two files of a PEFT folder."""
    return {ADAPTER_WEIGHTS: save(dict(tensors)), ADAPTER_CONFIG: adapter_config(rank)}


def write_policy(folder: Path, tensors: Tensors) -> Path:
    """A PEFT folder on disk."""
    folder.mkdir(parents=True)
    for name, body in peft_files(tensors).items():
        (folder / name).write_bytes(body)
    return folder


class Reference:
    """The tiny model under PEFT, without a cache and without batching."""

    def __init__(
        self, model_folder: Path, tensors: Tensors | None = None, *, rank: int = RANK
    ) -> None:
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS))
        self._rank = rank
        self._model = get_peft_model(base, config).eval()
        if tensors is not None:
            self.install(tensors)

    def install(self, tensors: Tensors) -> None:
        """Compute with this adapter from now on."""
        weights = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
        set_peft_model_state_dict(self._model, weights)

    @torch.no_grad()
    def distributions(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        """log pi over the vocabulary at each completion token and after the last: (T + 1, V)."""
        text = torch.tensor([[*prompt_ids, *ids]])
        return self._model(input_ids=text).logits[0, len(prompt_ids) - 1 :].log_softmax(-1)

    def logprobs(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> tuple[float, ...]:
        """log pi of each completion token."""
        logprobs_TV = self.distributions(prompt_ids, ids)
        return tuple(float(logprobs_TV[place, token]) for place, token in enumerate(ids))

    def greedy(
        self, prompt_ids: Sequence[int], num_tokens: int, eos_ids: Sequence[int] = (0,)
    ) -> tuple[int, ...]:
        """The most likely continuation, up to an end-of-text token."""
        ids: list[int] = []
        while len(ids) < num_tokens and not set(ids) & set(eos_ids):
            ids.append(int(self.distributions(prompt_ids, ids)[-1].argmax()))
        return tuple(ids)

    def canary(self, version: int, parent: int | None = None) -> Canary:
        """What a trainer would put into the manifest of this version, whose parent is the one
        before it unless another is named."""
        self.install(policy_tensors(version, rank=self._rank))
        ids = self.greedy(PROMPT_IDS, NEW_TOKENS)
        logprobs = self.logprobs(PROMPT_IDS, ids)
        parent_logprobs: tuple[float, ...] = ()
        if version:
            before = version - 1 if parent is None else parent
            self.install(policy_tensors(before, rank=self._rank))
            parent_logprobs = self.logprobs(PROMPT_IDS, ids)
        return Canary(
            prompt_ids=PROMPT_IDS,
            completion_ids=ids,
            logprobs=logprobs,
            parent_logprobs=parent_logprobs,
        )


def upload_policy(
    store: ObjectStore, run_id: str, version: int, canary: Canary, rank: int = RANK
) -> Manifest:
    """Put a version's files into the store; the manifest would publish them."""
    files = peft_files(policy_tensors(version, rank=rank), rank)
    return upload(store, run_id, version, files, rank=rank, canary=canary)
