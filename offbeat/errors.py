"""Every error that Offbeat raises on purpose, in one tree.

    OffbeatError
    ├── InvalidRequestError       422  the caller's input is wrong; the message says how to mend it
    │   └── InvalidDataError      422  a row of the data is wrong; names the row
    ├── UnauthorizedError         401
    ├── NotFoundError             404
    ├── ConflictError             409  somebody else was first, or the state forbids it
    │   └── LeaseLostError        409  this attempt no longer holds the job: stop, drop the result
    ├── UnavailableError          503  a dependency does not answer; trying again may help
    │   └── ObjectNotFoundError   404  no object under this key
    ├── IntegrityError            500  bytes or policies are not what their hash or canary says
    └── WorkerError               500  a job cannot be done, now or ever
        ├── NotFiniteError        500  a loss or a gradient is NaN or infinite
        └── PermanentJobError     500  trying it again would fail in the same way

Each error carries the HTTP status and the stable problem type under which services report it. All
are built from one message, so they survive pickling between processes.
"""

from typing import ClassVar


class OffbeatError(Exception):
    """The base. `slug` becomes the problem type `https://offbeat.dev/problems/<slug>`."""

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"

    @property
    def detail(self) -> str:
        """The message for people."""
        return str(self.args[0]) if self.args else self.title


class InvalidRequestError(OffbeatError):
    """The caller's input is wrong."""

    status = 422
    slug = "invalid-request"
    title = "The request is not valid"


class InvalidDataError(InvalidRequestError):
    """A row of the data, or the data as a whole, is wrong."""

    slug = "invalid-data"
    title = "The data is not valid"


class UnauthorizedError(OffbeatError):
    """No key, or a wrong one."""

    status = 401
    slug = "unauthorized"
    title = "A valid key is needed"


class NotFoundError(OffbeatError):
    """There is no such thing, or the caller may not see it."""

    status = 404
    slug = "not-found"
    title = "Not found"


class ConflictError(OffbeatError):
    """The state of the thing forbids the request."""

    status = 409
    slug = "conflict"
    title = "The request conflicts with the current state"


class LeaseLostError(ConflictError):
    """This attempt does not hold the job."""

    slug = "lease-lost"
    title = "The lease is not held by this attempt"


class UnavailableError(OffbeatError):
    """A dependency does not answer."""

    status = 503
    slug = "unavailable"
    title = "A dependency is unavailable"


class ObjectNotFoundError(UnavailableError):
    """There is no object under this key."""

    status = 404
    slug = "object-not-found"
    title = "No such object"


class IntegrityError(OffbeatError):
    """Bytes or a policy are not what they claim to be."""

    slug = "integrity"
    title = "Content does not match its hash"


class WorkerError(OffbeatError):
    """A job failed; another attempt may succeed."""

    slug = "job-failed"
    title = "The job failed"


class NotFiniteError(WorkerError):
    """A loss or a gradient is NaN or infinite."""

    slug = "not-finite"
    title = "A loss or gradient is not finite"


class PermanentJobError(WorkerError):
    """A job failed in a way that another attempt would repeat."""

    slug = "job-failed-permanently"
    title = "The job cannot succeed"
