"""Counting the tensors of one training step of one rank, without weights, data or a GPU.

The model is made of fake tensors (shapes without storage), sharded among ranks that do not exist,
and taken through two steps, while a tracker notes every tensor's life. Run as a program: a
`DryRunRequest` on stdin, a `DryRun` on stdout.

It leaves out what is no tensor of PyTorch: the allocator's slack, CUDA's context, NCCL's buffers.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from offbeat.algorithms.logprobs import CHUNK_POSITIONS, completion_logprobs
from offbeat.algorithms.packing import ROW_TOKENS_MAX
from offbeat.contracts.plan import DryRun
from offbeat.plan.architecture import Architecture
from offbeat.plan.dry_run import DryRunRequest
from offbeat.plan.memory import peak
from offbeat.plan.setup import Recipe, Setup

COUNTED = Recipe(copy_bytes=0, update_bytes=0, keeps_gradients=False, slack=0.0, context_bytes=0)
"""What the formula has to say of the same tensors: one micro-batch a step, masters that are cast
when they are gathered, all of them sharded, and no more than tensors."""
STEPS = 2
"""Only the second one begins with optimizer states."""
CPU = torch.device("cpu")


class ScoringHead(nn.Linear):
    """A head that gives log-probabilities of targets, a few logits at a time."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_ND: Tensor, targets_N: Tensor
    ) -> Tensor:
        """log pi of every target: as the trainer computes it, or where the head is trained too,
        piece by piece and again in the backward."""
        if not self.weight.requires_grad:
            # No view: FSDP hangs its backward on the output itself.
            return completion_logprobs(hidden_ND, self.weight, targets_N)[0].clone()
        parts = (tensor.split(CHUNK_POSITIONS) for tensor in (hidden_ND, targets_N))
        pieces = zip(*parts, strict=True)
        return torch.cat([checkpoint(self._score, *piece, use_reentrant=False) for piece in pieces])

    def _score(self, hidden_CD: Tensor, targets_C: Tensor) -> Tensor:
        logits_CV = super().forward(hidden_CD).float()
        return logits_CV.log_softmax(-1).gather(1, targets_C[:, None])[:, 0]


class ScoredModel(nn.Module):
    """A decoder with that head."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model, self.lm_head = model.model, model.lm_head
        self.lm_head.__class__ = ScoringHead

    def forward(self, ids_BT: Tensor) -> Tensor:
        """log pi of every token, as if each of them were a target."""
        hidden_BTD = self.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return self.lm_head(hidden_BTD.flatten(0, 1), ids_BT.flatten())


def count(model: Architecture, setup: Setup) -> DryRun:
    """The peak of a step, by the tracker's kinds."""
    scored = scored_model(model, setup)
    with fake_ranks(setup.num_shards) as mesh, FakeTensorMode():
        make_fake(scored)
        shard(scored, model, setup, mesh)
        trained = [weight for weight in scored.parameters() if weight.requires_grad]
        # With foreach the tracker takes the update's temporaries for the whole model's.
        optimizer = torch.optim.AdamW(trained, foreach=False)
        rows = -(-setup.token_budget // ROW_TOKENS_MAX)
        ids_BT = torch.zeros(rows, setup.token_budget // rows, dtype=torch.long)
        tracker = FSDPMemTracker(scored, optimizer)
        tracker.track_inputs((ids_BT,))
        with tracker:
            for _ in range(STEPS):
                tracker.reset_mod_stats()
                scored(ids_BT).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        seen = tracker.get_tracker_snapshot("peak")[CPU]
    kinds = {str(getattr(kind, "value", kind)): size for kind, size in seen.items()}
    return DryRun(
        total=kinds.pop("Total"),
        by_kind={kind: size for kind, size in kinds.items() if size},
        formula=round(peak(model, setup, COUNTED).total),
    )


def scored_model(model: Architecture, setup: Setup) -> ScoredModel:
    """The model with what the setup trains, on the meta device."""
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.mlp,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocabulary,
        tie_word_embeddings=model.is_tied,
        max_position_embeddings=ROW_TOKENS_MAX,
    )
    dtype = torch.float32 if setup.method == "full" else _dtype(setup)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    base = cast(LlamaForCausalLM, made)
    if setup.trains_adapter:
        base.requires_grad_(False)
        adapter = LoraConfig(
            r=setup.rank,
            target_modules=sorted(setup.targets),
            lora_dropout=0.1 if setup.has_dropout else 0.0,
        )
        inject_adapter_in_model(adapter, base, low_cpu_mem_usage=True)
    if setup.is_checkpointed:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    return ScoredModel(base.train())


def make_fake(scored: ScoredModel) -> None:
    """Put fake tensors in place of those on the meta device; what is trained is float32."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in scored.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight not in made:
                dtype = torch.float32 if weight.requires_grad else weight.dtype
                made[weight] = nn.Parameter(
                    torch.empty(weight.shape, dtype=dtype), requires_grad=weight.requires_grad
                )
            setattr(module, name, made[weight])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def shard(scored: ScoredModel, model: Architecture, setup: Setup, mesh: DeviceMesh) -> None:
    """Block by block, then the embedding, the head with the last norm, and what is left."""
    precision = MixedPrecisionPolicy(param_dtype=_dtype(setup), reduce_dtype=torch.float32)
    units: list[nn.Module | list[nn.Module]] = [*scored.model.layers]
    if not model.is_tied:
        units += [scored.model.embed_tokens, [scored.model.norm, scored.lm_head]]
    for unit in (*units, scored):
        fully_shard(unit, mesh=mesh, mp_policy=precision)


@contextmanager
def fake_ranks(num_ranks: int) -> Iterator[DeviceMesh]:
    """The mesh of a process group whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        dist.destroy_process_group()


def _dtype(setup: Setup) -> torch.dtype:
    return torch.bfloat16 if setup.dtype_bytes == 2 else torch.float32


def main() -> None:
    """Answer one request."""
    warnings.simplefilter("ignore")  # Nobody reads them, and stdout has the answer alone.
    request = DryRunRequest.model_validate_json(sys.stdin.read())
    sys.stdout.write(count(request.model, request.setup).model_dump_json())


if __name__ == "__main__":
    main()
