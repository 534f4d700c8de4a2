"""How large names and numbers may be that others send: what tables and keys have room for."""

from typing import Annotated

from pydantic import Field, StringConstraints

INT_MAX = 2**31 - 1
"""The largest INTEGER of PostgreSQL."""
BYTES_MAX = 2**53 - 1
"""The largest integer that every JSON reader keeps exact."""

Count = Annotated[int, Field(ge=0, le=INT_MAX)]
ByteCount = Annotated[int, Field(ge=0, le=BYTES_MAX)]
Version = Annotated[int, Field(ge=0, le=INT_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT_MAX)]
TokenId = Annotated[int, Field(ge=0, le=INT_MAX)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
"""Of a worker, a metric, a module."""
Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Of a run or a job: it becomes a part of object keys, so it leads nowhere else."""
ObjectKey = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Metrics = Annotated[dict[Name, float], Field(max_length=256)]
