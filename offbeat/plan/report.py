"""A plan from a spec and a description of the hardware."""

from collections.abc import Callable
from dataclasses import fields, replace

from offbeat.contracts.plan import (
    DryRun,
    MemoryByKind,
    Plan,
    PlanOptions,
    PlanSettings,
    PlanSpeed,
    RankMemory,
)
from offbeat.contracts.run_spec import RunSpec
from offbeat.plan.architecture import Architecture
from offbeat.plan.choice import BAND, Choice, choose
from offbeat.plan.gpus import Cluster, parse_gpus
from offbeat.plan.memory import Moment, host_bytes, largest_unit, peak, trained_parameters
from offbeat.plan.parameters import parameters_of
from offbeat.plan.remedies import remedies
from offbeat.plan.setup import OFFBEAT, Setup
from offbeat.plan.speed import flops_per_token
from offbeat.plan.traffic import traffic_of
from offbeat.plan.wanted import Wanted, wanted_of


def make_plan(
    model: Architecture,
    spec: RunSpec,
    gpus: str,
    nodes: int,
    options: PlanOptions,
    *,
    count: Callable[[Architecture, Setup], DryRun] | None = None,
) -> Plan:
    """What the run needs on so many nodes with these GPUs each; `count` makes a dry run of it.

    Raises `InvalidRequestError`.
    """
    num_cards, gpu = parse_gpus(gpus)
    cluster = Cluster(
        gpu=gpu,
        gpus_per_node=num_cards,
        num_nodes=nodes,
        link_bytes_per_s=options.link_gbit_per_s * 1e9 / 8,
    )
    wanted = wanted_of(spec, options, model)
    choice = choose(model, wanted, cluster)
    traffic = traffic_of(model, choice, cluster)
    total = choice.peak.total
    return Plan(
        model=options.model or spec.model.id,
        kind=wanted.kind,
        num_parameters=parameters_of(model).total,
        num_trained=trained_parameters(model, choice.setup),
        gpus=f"{num_cards}x{gpu.name}",
        nodes=nodes,
        usable_bytes=round(gpu.usable_bytes),
        settings=_settings(choice, wanted),
        memory=_by_kind(choice.peak),
        low_bytes=round(total * (1 - BAND)),
        high_bytes=round(total * (1 + BAND)),
        ranks=_ranks(model, choice, cluster),
        largest_unit=largest_unit(model, choice.setup, OFFBEAT),
        verdict=choice.verdict,
        remedies=remedies(model, wanted, cluster) if choice.verdict == "does not fit" else (),
        speed=_speed(model, choice, wanted, cluster, traffic.between_nodes_s),
        traffic=traffic,
        assumptions=_assumptions(choice, wanted, cluster, options),
        dry_run=count(model, choice.setup) if count else None,
    )


def _settings(choice: Choice, wanted: Wanted) -> PlanSettings:
    setup = choice.setup
    asked = {
        "token_budget": wanted.token_budget,
        "gradient_checkpointing": wanted.is_checkpointed,
        "offload": wanted.is_offloaded,
        "sharding": None,
    }
    return PlanSettings(
        method=setup.method,
        lora_rank=setup.rank if setup.trains_adapter else None,
        token_budget=setup.token_budget,
        gradient_checkpointing=setup.is_checkpointed,
        offload=setup.is_offloaded,
        sharding=choice.sharding,
        chosen=tuple(name for name, value in asked.items() if value is None),
    )


def _by_kind(moment: Moment) -> MemoryByKind:
    kinds = {
        field.name: round(getattr(moment, field.name))
        for field in fields(moment)
        if field.name != "phase"
    }
    return MemoryByKind(moment=moment.phase, total=sum(kinds.values()), **kinds)


def _ranks(model: Architecture, choice: Choice, cluster: Cluster) -> tuple[RankMemory, ...]:
    last = cluster.num_gpus - 1

    def rank(name: str, *, publishes: bool) -> RankMemory:
        recipe = OFFBEAT
        if not publishes and choice.setup.trains_adapter:
            recipe = replace(OFFBEAT, trained_bytes=0, moment_bytes=0, update_bytes=0)
        return RankMemory(
            ranks=name,
            gpu_bytes=round(peak(model, choice.setup, recipe).total),
            host_bytes=round(host_bytes(model, choice.setup, recipe, publishes=publishes)),
        )

    others = (rank("1" if last == 1 else f"1–{last}", publishes=False),) if last else ()
    return (rank("0", publishes=True), *others)


def _speed(
    model: Architecture, choice: Choice, wanted: Wanted, cluster: Cluster, between_s: float
) -> PlanSpeed | None:
    peak_flops = cluster.gpu.flops_per_s
    if peak_flops is None:
        return None
    # What crosses between nodes for every micro-batch is in its time already.
    step_s = choice.step_s + (between_s if choice.sharding != "across nodes" else 0.0)
    tokens_per_s = wanted.step_tokens / step_s
    once = replace(choice.setup, is_checkpointed=False)
    useful = flops_per_token(model, once, wanted.sequence_tokens)
    return PlanSpeed(
        tokens_per_s=round(tokens_per_s),
        mfu=tokens_per_s * useful / (cluster.num_gpus * peak_flops),
        step_s=step_s,
    )


def _assumptions(
    choice: Choice, wanted: Wanted, cluster: Cluster, options: PlanOptions
) -> tuple[str, ...]:
    gpu = cluster.gpu
    said = [
        f"Estimates are within {BAND:.0%} of the published measurements; a run on your own "
        "hardware tells more.",
    ]
    if wanted.kind == "grpo":
        said.append(
            f"Prompts of {options.prompt_tokens} tokens, completions of full length "
            f"({wanted.sequence_tokens - options.prompt_tokens})."
        )
    else:
        said.append(f"Examples of {wanted.sequence_tokens} tokens.")
    if gpu.flops_per_s is None:
        said.append("No speed: only the memory of the GPUs is known. Name them, as in 8xA100-80GB.")
    else:
        said.append(
            f"{gpu.name}: {gpu.flops_per_s / 1e12:g} TFLOP/s in bfloat16, of which large products "
            f"reach {gpu.reached:.0%}; {gpu.link_bytes_per_s / 1e9:g} GB/s to the other GPUs of "
            f"the node, {gpu.host_bytes_per_s / 1e9:g} GB/s to the host. No time is counted for "
            "waiting: a model of less than 4B parameters is often slower."
        )
    if cluster.num_nodes > 1:
        said.append(f"{options.link_gbit_per_s:g} Gbit/s between nodes.")
    if choice.setup.is_offloaded and not choice.setup.trains_adapter:
        said.append("The host's memory moves 200 GB/s; AdamW on the CPU is bound by it.")
    return tuple(said)
