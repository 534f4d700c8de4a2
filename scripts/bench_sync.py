"""`make bench-sync`: how soon a published version is in use, by all generators at once.

    python -m scripts.bench_sync [--data-dir .offbeat] [--versions 50] [--quick]

The S3 server, the weight-proxy and the generators are processes of their own; this one is the
trainer, without the training. Times begin when everything is in the store and the manifest is sent.
The figures are printed, and written to `<data-dir>/bench/sync.json` after every case.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from offbeat import keys
from offbeat.contracts.run_spec import ModelSection
from offbeat.models import resolve_model
from offbeat.specs import load_spec
from offbeat.worker_api import WeightProxyClient
from scripts.bench.machine import machine
from scripts.bench.sync_cases import ADAPTERS, CASES, QUICK_CASES, SyncCase, sync_spec
from scripts.bench.sync_figures import STAGES, Gaps, figures, table_of
from scripts.bench.sync_generator import GeneratorTask, Mark, Steps
from scripts.bench.sync_parts import Generators, SyncServers, running_servers
from scripts.bench.sync_publisher import Publication, Publisher
from scripts.demo import EXAMPLE
from scripts.processes import interrupt_on_signals
from services.trainer.policy import Policy

RUN_ID = "run-bench"
VERSIONS, QUICK_VERSIONS = 50, 8
REST_S = 1.0
"""Between two versions: a trainer's step, in which generators work undisturbed."""


def run_case(case: SyncCase, model: Path, versions: int, folder: Path) -> dict[str, object]:
    """Publish the versions one by one, each once all generators have used the one before."""
    spec = sync_spec(str(model), ADAPTERS[case.size], versions)
    policy = Policy.load(model, spec.model, spec.adapter, torch.device("cpu"))
    with running_servers(folder) as servers:
        publisher = Publisher(
            run_id=RUN_ID,
            spec=spec,
            policy=policy,
            light=case.engine == "light",
            store=servers.store,
            proxy=WeightProxyClient(servers.proxy_url),
            store_bytes=servers.store_bytes,
        )
        tasks = tasks_of(case, spec.model, servers.proxy_url, folder)
        generators = Generators(tasks, folder)
        published: list[Publication] = []
        read_bytes: list[float] = []
        try:
            generators.start(torch.get_num_threads())
            for version in range(versions + 1):
                publication = publisher.publish()
                generators.wait_until_sampled(version)
                published.append(publication)
                read_bytes.append(bytes_read(servers, publication))
                # What a run would keep for good would fill the disk here.
                shutil.rmtree(servers.objects / publication.manifest.prefix)
                time.sleep(REST_S)
            steps = generators.finish()
        finally:
            generators.stop()
    # Version 0 finds everything cold and has no version before it.
    return figures_of(case, published[1:], read_bytes[1:], generators.marks, steps)


def tasks_of(
    case: SyncCase, model: ModelSection, proxy_url: str, folder: Path
) -> dict[str, GeneratorTask]:
    """One for each generator, by its name."""
    names = [f"generator-{number}" for number in range(1, case.generators + 1)]
    return {
        name: GeneratorTask(
            name=name,
            run_id=RUN_ID,
            proxy_url=proxy_url,
            model=model,
            engine=case.engine,
            folder=folder / name,
        )
        for name in names
    }


def bytes_read(servers: SyncServers, publication: Publication) -> float:
    """What was read from the store since the manifest was sent; the copy of the manifest, which the
    weight-proxy writes, passed through it too."""
    manifest = publication.manifest
    written = servers.store.size_bytes(keys.manifest(manifest.run_id, manifest.version))
    assert written is not None, "the publish was answered after this write"
    return servers.store_bytes() - publication.store_bytes - written


def figures_of(
    case: SyncCase,
    published: Sequence[Publication],
    read_bytes: Sequence[float],
    marks: Sequence[Mark],
    steps: dict[str, Steps],
) -> dict[str, object]:
    """The figures of a case from everything that was noted."""
    asked_at = {one.manifest.version: one.asked_at for one in published}
    ours = [mark for mark in marks if mark.version in asked_at]
    served_at = {(m.generator, m.version): m.at for m in marks if m.stage == "served"}
    return figures(
        case=case.name,
        engine=case.engine,
        generators=case.generators,
        adapter_bytes=published[0].adapter_bytes,
        delays={
            stage: [mark.at - asked_at[mark.version] for mark in ours if mark.stage == stage]
            for stage in STAGES
        },
        upload_s=[one.asked_at - one.began_at for one in published],
        read_bytes=read_bytes,
        gaps=Gaps.of(
            # What came before the first version was served is start-up.
            {name: [at for at in its.at if at > served_at[name, 0]] for name, its in steps.items()},
            {
                name: [(asked_at[version], served_at[name, version]) for version in asked_at]
                for name in steps
            },
        ),
    )


def main() -> int:
    """Measure every case and report after each."""
    parser = argparse.ArgumentParser(description="Measure how soon a version is in use.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--versions", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="two cases, few versions")
    arguments = parser.parse_args()
    interrupt_on_signals()
    disable_progress_bar()
    # As in the stack, generator and trainer share the cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    bench: Path = arguments.data_dir / "bench"
    bench.mkdir(parents=True, exist_ok=True)
    model = resolve_model(load_spec(EXAMPLE).model, arguments.data_dir / "models", None).resolve()
    versions = arguments.versions or (QUICK_VERSIONS if arguments.quick else VERSIONS)
    before, cases = machine(), list[dict[str, object]]()
    for case in QUICK_CASES if arguments.quick else CASES:
        print(f"  {case.name}", flush=True)
        with TemporaryDirectory(dir=bench, prefix="sync-") as folder:
            cases.append(run_case(case, model, versions, Path(folder).resolve()))
        report = {**before, "cases": cases}
        (bench / "sync.json").write_text(json.dumps(report, indent=2) + "\n")
        Console().print(table_of(cases))
    print(f"Figures: {bench}/sync.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
