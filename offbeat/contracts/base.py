"""The base of every contract: frozen, closed to unknown keys, finite numbers only."""

from pydantic import BaseModel, ConfigDict


class Contract(BaseModel):
    """A value that crosses a process boundary.

    NaN and infinity are refused because JSON has no spelling for them that every reader accepts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
