"""The `prepare` job: from the spec's data to the two prompt tables, every row checked.

It is the first job of a run, so whatever is wrong with model, data or rewards fails the run here,
with the row number, before any other work.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import structlog

from offbeat.contracts.jobs import PrepareOutput
from offbeat.contracts.run_spec import RewardSection
from offbeat.data.prompts import build_prompts
from offbeat.data.rows import SourceRow
from offbeat.data.sources import source_rows
from offbeat.errors import InvalidDataError, InvalidRequestError, PermanentJobError
from offbeat.models import load_tokenizer, max_positions, resolve_model
from offbeat.objects import S3ObjectStore
from offbeat.prepared import RowWatch, put_tables
from offbeat.rewards.registry import missing_column
from offbeat.rewards.scorer import RewardScorer
from offbeat.tables import encode_prompts
from offbeat.worker import JobContext

log = structlog.get_logger(__name__)


def prepare(
    context: JobContext, *, store: S3ObjectStore, models_dir: Path, scorer: RewardScorer
) -> PrepareOutput:
    """Write the prompts of the run; the output names them.

    Raises `InvalidRequestError` or `PermanentJobError` for what the user must mend.
    """
    spec = context.lease.spec
    folder = resolve_model(spec.model, models_dir, store)
    tokens_max = max_prompt_tokens(folder, spec.rollout.max_new_tokens)
    tokenizer = load_tokenizer(folder, spec.model.chat_template)
    check_rewards(scorer, spec.rewards)
    train, evaluation = build_prompts(
        spec.data,
        with_reward_columns(spec.rewards, source_rows(spec.data, store)),
        tokenizer,
        tokens_max,
        on_row=RowWatch(context).see,
    )
    tables = put_tables(store, context.lease, train, evaluation, encode_prompts)
    log.info("Wrote the prompts.", prompts=len(train), eval_prompts=len(evaluation))
    return PrepareOutput(**tables.model_dump())


def max_prompt_tokens(folder: Path, max_new_tokens: int) -> int | None:
    """The tokens that a prompt may have so that its completion fits too; None: no limit known."""
    positions = max_positions(folder)
    if positions is None:
        return None
    if max_new_tokens >= positions:
        raise InvalidRequestError(
            f"rollout.max_new_tokens ({max_new_tokens}) leaves no room for a prompt: the model has "
            f"{positions} positions"
        )
    return positions - max_new_tokens


def check_rewards(scorer: RewardScorer, parts: Sequence[RewardSection]) -> None:
    """Raise for parts that cannot score anything: a wrong path, a regex that is none."""
    failures = scorer.check(parts)
    if failures:
        reasons = "; ".join(f"reward {failure.part!r}: {failure.message}" for failure in failures)
        raise PermanentJobError(reasons)


def with_reward_columns(
    parts: Sequence[RewardSection], rows: Iterable[SourceRow]
) -> Iterator[SourceRow]:
    """The rows, until one lacks what a part scores by."""
    for row in rows:
        for part in parts:
            lack = missing_column(part, row.columns)
            if lack:
                raise InvalidDataError(f"{row.place}: reward {part.label!r} finds {lack}")
        yield row
