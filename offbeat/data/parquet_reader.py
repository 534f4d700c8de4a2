"""A Parquet file's rows, decoded in a process of its own.

A few bytes of a Parquet file can stand for gigabytes of rows, and its decoder is a large program in
C++. So it runs where running out of memory, or a crash, ends nothing but the reading of this file.

    python -m offbeat.data.parquet_reader PATH

writes the rows as JSON lines; where it cannot, its last words on standard error say why.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from offbeat.data.rows import row_bytes
from offbeat.errors import InvalidDataError

BATCH_ROWS = 64
"""Rows decoded at once: 64 MiB at most of rows that pass."""
MEMORY_BYTES_MAX = 2 * 2**30
"""Of the process: room for the largest page of a file that any writer makes."""
CPU_SECONDS_MAX = 1800
"""Of the process: a file of 1 GiB takes a minute."""
LAST_WORDS_CHARS_MAX = 2000
UNREADABLE = "is not a readable Parquet file"


def parquet_values(path: Path, name: str) -> Iterator[Mapping[str, object]]:
    """The rows as plain values, in order. `InvalidDataError` for a wrong row or file, by name."""
    command = [sys.executable, "-m", __name__, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                if line.endswith(b"\n"):  # else it broke off
                    yield json.loads(line)
            last_words = process.stderr.read(LAST_WORDS_CHARS_MAX).decode(errors="replace").strip()
            code = process.wait()
        finally:
            process.kill()
    if code < 0:
        last_words = (
            f"{UNREADABLE}: its reader ended with {signal.Signals(-code).name}: write it anew, "
            "with shorter rows and smaller row groups"
        )
    if code:
        raise InvalidDataError(last_words.replace(UNREADABLE, f"{name} {UNREADABLE}", 1))


def main(path: Path, output: BinaryIO) -> None:
    """Write the rows."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS_MAX, CPU_SECONDS_MAX))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    try:
        _write_rows(path, output)
    except InvalidDataError as error:
        sys.exit(error.detail)
    except MemoryError:
        sys.exit(
            f"{UNREADABLE}: a few rows of it take over {MEMORY_BYTES_MAX} bytes of "
            "memory: write it anew, with shorter rows and smaller row groups"
        )
    except (pa.ArrowException, OSError, ValueError) as error:
        sys.exit(f"{UNREADABLE}: {error}")


def _write_rows(path: Path, output: BinaryIO) -> None:
    index = 0
    with pq.ParquetFile(path, pre_buffer=False) as table:
        for batch in table.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
            for values in batch.to_pylist():
                row_bytes(f"row {index}", values)
                output.write(json.dumps(values).encode() + b"\n")
                index += 1


if __name__ == "__main__":
    pa.set_memory_pool(pa.system_memory_pool())  # it returns what it has freed, and knows limits
    pa.set_cpu_count(1)
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as lines:
        main(Path(sys.argv[1]), lines)
