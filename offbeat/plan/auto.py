"""What a trainer puts in place of `auto`: what the plan chooses for the GPUs that it really has."""

from offbeat.contracts.plan import PlanOptions
from offbeat.contracts.run_spec import RunSpec
from offbeat.plan.architecture import Architecture
from offbeat.plan.choice import choose
from offbeat.plan.gpus import USABLE_SHARE, Cluster, Gpu
from offbeat.plan.wanted import wanted_of


def decided(spec: RunSpec, model: Architecture, gpu_bytes: int, num_ranks: int = 1) -> RunSpec:
    """The spec with its token budget and gradient checkpointing settled for `num_ranks` GPUs that
    have so many bytes each. What the spec says itself stays."""
    gpu = Gpu(name="own", memory_gib=gpu_bytes / 2**30 / USABLE_SHARE)
    wanted = wanted_of(spec, PlanOptions(offload=False), model)
    setup = choose(model, wanted, Cluster(gpu=gpu, gpus_per_node=num_ranks)).setup
    train = spec.train
    settled = train.model_copy(
        update={
            "token_budget": train.token_budget
            if train.token_budget != "auto"
            else setup.token_budget,
            "gradient_checkpointing": setup.is_checkpointed,
        }
    )
    return spec.model_copy(update={"train": settled})
