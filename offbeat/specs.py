"""From a file or parsed data to a `RunSpec`: TOML, YAML and JSON of one shape.

Used by whoever takes a spec from outside: the client, the command line and `POST /v1/runs`. It
reads no data and asks no service, so a spec that passes can still name a model that is not there.
"""

import json
import re
import tomllib
from collections.abc import Callable, Hashable, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ValidationError

from offbeat import spec_problems
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import ProblemField
from offbeat.errors import InvalidRequestError
from offbeat.plain_json import (
    TOO_DEEP,
    TOO_LARGE,
    first_repeated,
    is_large,
    odd_values,
    parse_json,
)
from offbeat.spec_secrets import secret_values

FILE_BYTES_MAX = 16 * 2**20
"""As much as `POST /v1/runs` takes: an inline data set of 1,000 rows fits."""

SpecFormat = Literal["toml", "yaml", "json"]

_SUFFIXES: Mapping[str, SpecFormat] = {
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
}


class InvalidSpecError(InvalidRequestError):
    """The spec is wrong; `fields` says where, why and how to mend it."""

    slug = "invalid-spec"
    title = "The spec is not valid"

    def __init__(self, fields: tuple[ProblemField, ...]) -> None:
        super().__init__("; ".join(spec_problems.problem_lines(fields)))
        self.fields = fields

    def __reduce__(self) -> tuple[type["InvalidSpecError"], tuple[tuple[ProblemField, ...]]]:
        return type(self), (self.fields,)


def load_spec(path: Path) -> RunSpec:
    """Read a spec file. Raises `InvalidSpecError`, or OSError where there is no such file."""
    spec_format = _SUFFIXES.get(path.suffix.lower())
    if spec_format is None:
        raise _whole(f"{path.name} is not a spec file: name it .toml, .yaml, .yml or .json")
    with path.open("rb") as file:
        body = file.read(FILE_BYTES_MAX + 1)
    if len(body) > FILE_BYTES_MAX:
        raise _whole(f"the file is larger than {FILE_BYTES_MAX // 2**20} MiB: put the data in S3")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _whole(f"the file is not UTF-8 text (byte {error.start})") from error
    return parse_spec(text, spec_format)


def parse_spec(text: str, format: SpecFormat) -> RunSpec:
    """Parse and validate. Raises `InvalidSpecError`."""
    try:
        raw = _PARSERS[format](text)
    except RecursionError as error:
        raise _whole(TOO_DEEP) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise _whole(f"not valid YAML: {error.problem}{where}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise _whole(f"not valid {format.upper()}: {' '.join(str(error).split())}") from error
    return validate_spec(raw)


def validate_spec(raw: object) -> RunSpec:
    """The spec that parsed TOML, YAML or JSON stands for. Raises `InvalidSpecError`.

    Types are strict, so that `steps: yes` is a mistake and not one step.
    """
    if not isinstance(raw, dict):
        raise _whole("the spec must be a table with the sections model, data, rewards and train")
    if is_large(raw):
        raise _whole(TOO_LARGE)
    found = chain(odd_values(raw), secret_values(raw, ()))
    odd = tuple(islice(found, spec_problems.PROBLEMS_MAX))
    if odd:
        raise InvalidSpecError(odd)
    try:
        # Through JSON, because only there a strict tuple may be given as a list.
        return RunSpec.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        raise InvalidSpecError(spec_problems.explain(error)) from None


def _whole(message: str) -> InvalidSpecError:
    return InvalidSpecError((ProblemField(field="", message=message),))


class _YamlLoader(yaml.SafeLoader):
    """YAML without what makes a small file large (aliases) or a key count twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse anchors, aliases and tags where they stand."""
        event = self.peek_event()
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            message = "anchors, aliases and tags are not supported: write the value out"
            raise yaml.MarkedYAMLError(problem=message, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        """Refuse a key that is given twice."""
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = first_repeated([key.value for key in keys])
        if twice is not None:
            raise yaml.MarkedYAMLError(
                problem=f"the key {keys[twice].value!r:.80} is given twice",
                problem_mark=keys[twice].start_mark,
            )
        return super().construct_mapping(node, deep)


# PyYAML follows YAML 1.1, where `1e-4` is text because it has no dot.
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse_yaml(text: str) -> object:
    return yaml.load(text, Loader=_YamlLoader)


_PARSERS: Mapping[SpecFormat, Callable[[str], object]] = {
    "toml": tomllib.loads,
    "yaml": _parse_yaml,
    "json": parse_json,
}
