"""Secrets that somebody wrote into a spec, where everybody who may see the run could read them.

Found by form: an address with a user and a password or with a signature, and a key that is named
like a secret where keys are free (`tags`, a task's `config`). The message never repeats the value.
Rows of inline data are not looked at: they are text to learn from.
"""

import re
from collections.abc import Iterator

from offbeat.contracts.runs import ProblemField
from offbeat.plain_json import DEPTH_MAX
from offbeat.spec_problems import SECRET_KEY, Path, show_path

_USERINFO = re.compile(r"\s*[a-z][a-z0-9+.-]*://[^/?#\s]*@", re.IGNORECASE)
_SIGNED = re.compile(
    r"\s*[a-z][a-z0-9+.-]*://\S*[?&][^=&\s]*(signature|sig|token|secret|passw|key|credential)"
    r"[^=&\s]*=",
    re.IGNORECASE,
)
_ROWS = ("data", "rows")
_ADVICE = "a spec is stored and shown; give the workers their credentials in their environment"


def secret_values(value: object, path: Path) -> Iterator[ProblemField]:
    """One problem for each value that looks like a secret."""
    if path == _ROWS or len(path) > DEPTH_MAX:
        return
    if isinstance(value, str):
        complaint = _complaint(value, path)
        if complaint:
            yield ProblemField(field=show_path(path), message=f"{complaint}: {_ADVICE}")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from secret_values(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from secret_values(inner, (*path, index))


def _complaint(text: str, path: Path) -> str | None:
    if _USERINFO.match(text):
        return "has a user name or password in the address"
    if _SIGNED.match(text):
        return "has a signature or a key in the address"
    has_free_keys = path[:1] == ("tags",) or "config" in path
    if has_free_keys and any(SECRET_KEY.search(part) for part in path if isinstance(part, str)):
        return "is named like a secret"
    return None
