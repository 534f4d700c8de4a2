"""Every error that Offbeat raises on purpose, in one tree.

    OffbeatError
    ├── InvalidRequestError       422  the caller's input is wrong; the message says how to mend it
    │   └── InvalidDataError      422  a row of the data is wrong; names the row
    ├── UnauthorizedError         401
    ├── ForbiddenError            403  the key is valid and may not do this
    ├── QuotaExceededError        403  the project uses all that it may; waiting alone mends nothing
    ├── NotFoundError             404
    │   └── GoneError             410  it was there and was removed, as the run's retention says
    ├── ConflictError             409  somebody else was first, or the state forbids it
    │   └── LeaseLostError        409  this attempt no longer holds the job: stop, drop the result
    ├── HeldBackError             423  the worker gets no job now; the message went back
    ├── UnavailableError          503  a dependency does not answer; trying again may help
    │   ├── OutageError           503  one that the whole fleet needs is away: nobody is to blame
    │   ├── ObjectNotFoundError   404  no object under this key
    │   └── RateLimitedError      429  too many requests with one key
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


class ForbiddenError(OffbeatError):
    """The key is valid and may not do this."""

    status = 403
    slug = "forbidden"
    title = "The key may not do this"


class QuotaExceededError(OffbeatError):
    """The project uses all that it may."""

    status = 403
    slug = "quota-exceeded"
    title = "A quota of the project is used up"


class NotFoundError(OffbeatError):
    """There is no such thing, or the caller may not see it."""

    status = 404
    slug = "not-found"
    title = "Not found"


class GoneError(NotFoundError):
    """The thing was there and was removed."""

    status = 410
    slug = "gone"
    title = "It was removed"


class ConflictError(OffbeatError):
    """The state of the thing forbids the request."""

    status = 409
    slug = "conflict"
    title = "The request conflicts with the current state"


class LeaseLostError(ConflictError):
    """This attempt does not hold the job."""

    slug = "lease-lost"
    title = "The lease is not held by this attempt"


class HeldBackError(OffbeatError):
    """The worker gets no job for `retry_after_s`; what it asked for waits for another one."""

    status = 423
    slug = "held-back"
    title = "The worker is held back"

    def __init__(self, detail: str, retry_after_s: int) -> None:
        super().__init__(detail, retry_after_s)
        self.retry_after_s = retry_after_s


class UnavailableError(OffbeatError):
    """A dependency does not answer."""

    status = 503
    slug = "unavailable"
    title = "A dependency is unavailable"


class OutageError(UnavailableError):
    """The object store or a service is away: whoever needed it did nothing wrong."""

    slug = "outage"
    title = "A part that all workers need is away"


class ObjectNotFoundError(UnavailableError):
    """There is no object under this key."""

    status = 404
    slug = "object-not-found"
    title = "No such object"


class RateLimitedError(UnavailableError):
    """Too many requests with one key."""

    status = 429
    slug = "rate-limited"
    title = "Too many requests"

    def __init__(self, detail: str, retry_after_s: int = 1) -> None:
        super().__init__(detail, retry_after_s)
        self.retry_after_s = retry_after_s


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
