"""The `tokenize` job: from the spec's data to the two tables of examples, every row checked.

It is the first job of a supervised run, so whatever is wrong with model or data fails the run here,
with the row number, before any other work.
"""

import structlog

from offbeat.contracts.jobs import TokenizeOutput
from offbeat.data.sft_examples import build_examples
from offbeat.data.sft_rows import row_reader
from offbeat.data.sources import source_rows
from offbeat.errors import InvalidRequestError
from offbeat.models import load_tokenizer, max_positions
from offbeat.prepared import RowWatch, put_tables
from offbeat.tables import encode_examples
from offbeat.worker import JobContext
from services.trainer.publish import Trainer

log = structlog.get_logger(__name__)


def tokenize(context: JobContext, trainer: Trainer) -> TokenizeOutput:
    """Write the examples of the run; the output names them.

    Raises `InvalidRequestError` or `PermanentJobError` for what the user must mend.
    """
    spec = context.lease.spec
    folder = trainer.memory.folder(spec.model)
    positions_max = max_positions(folder)
    _check_cut(spec.sft.max_length, positions_max)
    examples = build_examples(
        spec.data,
        spec.sft,
        source_rows(spec.data, trainer.store, row_reader(spec)),
        load_tokenizer(folder, spec.model.chat_template),
        positions_max,
        RowWatch(context).see,
    )
    tables = put_tables(
        trainer.store, context.lease, examples.train, examples.eval, encode_examples
    )
    log.info("Wrote the examples.", examples=len(examples.train), eval_examples=len(examples.eval))
    return TokenizeOutput(
        **tables.model_dump(),
        num_target_tokens=sum(sum(row.is_target) for row in examples.train),
        num_cut=examples.num_cut,
    )


def _check_cut(max_length: int | None, positions_max: int | None) -> None:
    if max_length is not None and positions_max is not None and max_length > positions_max:
        raise InvalidRequestError(
            f"sft.max_length ({max_length}) is above the {positions_max} positions of the model"
        )
