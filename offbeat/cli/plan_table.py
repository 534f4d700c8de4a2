"""A plan as a terminal shows it. Pure: values in, rich out."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offbeat.cli import text
from offbeat.contracts.plan import DryRun, Plan, Verdict

GIB = 2**30
_STYLES: dict[Verdict, str] = {"fits": "green", "tight": "yellow", "does not fit": "red"}
_METHODS = {"lora": "LoRA", "qlora": "QLoRA (nf4)", "full": "full fine-tuning"}
_MOMENTS = {
    "head": "the end of the forward",
    "backward": "the backward of the last block",
    "end": "the backward of the first block",
    "update": "the optimizer's update",
}
_KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits",
    "gathered": "gathered, dequantised",
    "overhead": "allocator, CUDA, NCCL",
}


def plan_table(plan: Plan) -> RenderableType:
    """Verdict, settings, memory, network and speed, what would help, and the assumptions."""
    return Group(
        *_title(plan),
        Text(),
        _section("settings", _settings(plan)),
        _section(f"one GPU at its peak, {_MOMENTS[plan.memory.moment]}", _memory(plan)),
        _section("ranks", _ranks(plan)),
        _section("a step", _step(plan)),
        *_dry_run(plan.dry_run),
        *_remedies(plan),
        _section("assumptions", ((f"– {said}",) for said in plan.assumptions)),
    )


def _title(plan: Plan) -> Iterable[Text]:
    rank = f" of rank {plan.settings.lora_rank}" if plan.settings.lora_rank else ""
    yield Text(
        f"{text.safe(plan.model)}: {_count(plan.num_parameters)} parameters, "
        f"{_METHODS[plan.settings.method]}{rank} ({_count(plan.num_trained)} trained), "
        f"kind {plan.kind}",
        "bold",
    )
    nodes = f"{plan.nodes} nodes with {plan.gpus} each" if plan.nodes > 1 else plan.gpus
    yield Text.assemble(
        f"{nodes}: ",
        (plan.verdict, _STYLES[plan.verdict]),
        f", {_gib(plan.memory.total)} GiB of {_gib(plan.usable_bytes)} "
        f"(within {_gib(plan.low_bytes)} to {_gib(plan.high_bytes)})",
    )


def _settings(plan: Plan) -> Iterable[tuple[str, ...]]:
    settings = plan.settings
    shown = {
        "token_budget": f"{settings.token_budget:,} tokens at once on each GPU",
        "gradient_checkpointing": "yes" if settings.gradient_checkpointing else "no",
        "offload": "yes" if settings.offload else "no",
        "sharding": settings.sharding,
    }
    for name, value in shown.items():
        yield name.replace("_", " "), value, "chosen" if name in settings.chosen else ""


def _memory(plan: Plan) -> Iterable[tuple[str, ...]]:
    for kind, name in _KINDS.items():
        size_bytes: int = getattr(plan.memory, kind)
        if size_bytes:
            yield name, f"{_gib(size_bytes):>8} GiB"
    yield "together", f"{_gib(plan.memory.total):>8} GiB"


def _ranks(plan: Plan) -> Iterable[tuple[str, ...]]:
    for rank in plan.ranks:
        yield (
            f"rank {rank.ranks}",
            f"{_gib(rank.gpu_bytes):>8} GiB on the GPU",
            f"{_gib(rank.host_bytes):>8} GiB on the host",
        )
    if unit := plan.largest_unit:
        yield "gathered at once", f"{_gib(unit.size_bytes):>8} GiB, {unit.name}"


def _step(plan: Plan) -> Iterable[tuple[str, ...]]:
    traffic = plan.traffic
    yield "micro-batches", f"{traffic.micro_batches}"
    if traffic.within_node_bytes:
        yield "to each GPU from its node", _size(traffic.within_node_bytes)
    if plan.nodes > 1:
        yield (
            "over each node's link",
            f"{_size(traffic.between_nodes_bytes)}, {text.duration(traffic.between_nodes_s)}",
        )
    yield "a version, to the store", _size(traffic.published_bytes)
    if plan.speed:
        yield "time", text.duration(plan.speed.step_s)
        yield "speed", f"{plan.speed.tokens_per_s:,} tokens/s, MFU {plan.speed.mfu:.0%}"


def _dry_run(counted: DryRun | None) -> Iterable[RenderableType]:
    if counted is None:
        return
    rows = [(kind, f"{_gib(size):>8} GiB") for kind, size in counted.by_kind.items()]
    rows.append(("together", f"{_gib(counted.total):>8} GiB"))
    rows.append(("by formula", f"{_gib(counted.formula):>8} GiB"))
    yield _section("tensors of one GPU, counted in a dry run", rows)


def _remedies(plan: Plan) -> Iterable[RenderableType]:
    if plan.verdict != "does not fit":
        return
    if plan.remedies:
        rows = [
            (remedy.change, f"{_gib(remedy.gpu_bytes):>8} GiB", remedy.verdict)
            for remedy in plan.remedies
        ]
    else:
        rows = [("nothing that is known here: take a smaller model, or larger GPUs",)]
    yield _section("what would fit", rows)


def _section(title: str, rows: Iterable[tuple[str, ...]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    return Group(Text(title, "dim"), Padding(grid, (0, 0, 1, 2), expand=False))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}" if size_bytes >= GIB / 20 else f"{size_bytes / GIB:.2g}"


def _size(size_bytes: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= unit:
            return f"{text.number(float(f'{size_bytes / unit:.3g}'))} {name}"
    return f"{size_bytes} bytes"


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return str(number)
