"""`offbeat plan`: what a run needs on given hardware. Computed here; no service is asked."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic_core import to_json

from offbeat.cli.plan_table import plan_table
from offbeat.cli.session import JsonOption, console, exit_codes
from offbeat.contracts.plan import PlanOptions
from offbeat.plan.dry_run import dry_run
from offbeat.plan.known_models import architecture_of
from offbeat.plan.report import make_plan
from offbeat.specs import load_spec

SpecFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", exists=True, dir_okay=False, help="The spec: .toml, .yaml or .json."
    ),
]
OWN, SETTINGS = "In place of the spec's", "Settings, chosen where neither this nor the spec says"
Checkpointing = Annotated[
    bool | None,
    typer.Option(
        "--checkpointing/--no-checkpointing",
        help="Compute activations again in the backward.",
        rich_help_panel=SETTINGS,
    ),
]
Offload = Annotated[
    bool | None,
    typer.Option(
        "--offload/--no-offload",
        help="Keep parameters and optimizer states on the host.",
        rich_help_panel=SETTINGS,
    ),
]


def plan(
    file: SpecFile,
    gpus: Annotated[
        str, typer.Option(help="Of one node: 2x24GB, 8xA100-80GB, 1xH100.", metavar="GPUS")
    ],
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="Equal nodes.")] = 1,
    link: Annotated[
        float, typer.Option(min=0.001, max=10_000, help="Gbit/s between nodes.")
    ] = 10.0,
    model: Annotated[
        str | None, typer.Option(help="A model id or a folder.", rich_help_panel=OWN)
    ] = None,
    quantization: Annotated[
        Literal["none", "nf4"] | None,
        typer.Option(help="nf4: QLoRA.", rich_help_panel=OWN),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Train all weights.", rich_help_panel=OWN)
    ] = False,
    lora_rank: Annotated[
        int | None, typer.Option(min=1, max=512, help="Train an adapter.", rich_help_panel=OWN)
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(min=64, max=2**24, help="Tokens at once.", rich_help_panel=SETTINGS),
    ] = None,
    checkpointing: Checkpointing = None,
    offload: Offload = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=2**20, help="Length of a prompt; the spec has none.")
    ] = 256,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Also count the tensors of a sharded step, without data or GPU (needs the "
            "worker's packages; minutes).",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell what a run needs: memory by kind, settings, speed, traffic, and whether it fits."""
    with exit_codes():
        spec = load_spec(file)
        options = PlanOptions(
            model=model,
            quantization=quantization,
            full=full,
            lora_rank=lora_rank,
            token_budget=token_budget,
            gradient_checkpointing=checkpointing,
            offload=offload,
            prompt_tokens=prompt_tokens,
            link_gbit_per_s=link,
        )
        architecture = architecture_of(model or spec.model.id)
        made = make_plan(architecture, spec, gpus, nodes, options, count=dry_run if dry else None)
    if as_json:
        typer.echo(to_json(made, indent=2))
    else:
        console(stderr=False).print(plan_table(made))
