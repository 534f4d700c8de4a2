import json
import pickle
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.contracts.run_spec import RunSpec
from offbeat.plain_json import DEPTH_MAX, VALUES_MAX
from offbeat.spec_problems import problem_lines
from offbeat.specs import (
    FILE_BYTES_MAX,
    InvalidSpecError,
    SpecFormat,
    load_spec,
    parse_spec,
    validate_spec,
)
from tests.specs import spec_dict

TOML = """
name = "sums"
[model]
id = "tiny"
[data]
source = "jsonl"
uri = "sums.jsonl"
[[rewards]]
type = "exact_match"
[train]
steps = 3
learning_rate = 1e-4
"""
YAML = """
name: sums
model: {id: tiny}
data: {source: jsonl, uri: sums.jsonl}
rewards: [{type: exact_match}]
train: {steps: 3, learning_rate: 1e-4}
"""
JSON = """{"name": "sums", "model": {"id": "tiny"}, "rewards": [{"type": "exact_match"}],
"data": {"source": "jsonl", "uri": "sums.jsonl"}, "train": {"steps": 3, "learning_rate": 1e-4}}"""
NO_ANCHORS = "not valid YAML: anchors, aliases and tags are not supported: write the value out"


def complaints(raw: object) -> list[str]:
    with pytest.raises(InvalidSpecError) as caught:
        validate_spec(raw)
    return problem_lines(caught.value.fields)


def complaints_of(**changes: Any) -> list[str]:
    return complaints(spec_dict(**changes))


def test_dora_is_refused_because_no_engine_serves_it() -> None:
    (complaint,) = complaints_of(lora={"use_dora": True})
    assert "use_dora cannot be served: vLLM refuses DoRA adapters; leave it out" in complaint


def test_the_three_formats_mean_the_same(tmp_path: Path) -> None:
    for name, text in {"a.toml": TOML, "a.yaml": YAML, "a.YML": YAML, "a.json": JSON}.items():
        (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
        spec = load_spec(tmp_path / name)
        assert (spec.name, spec.train.steps, spec.train.learning_rate) == ("sums", 3, 1e-4)
    assert parse_spec(TOML, "toml") == parse_spec(YAML, "yaml") == parse_spec(JSON, "json")


def test_unknown_keys_come_with_the_nearest_known_one() -> None:
    raw = spec_dict(
        trian={},
        learning_rate=1,
        seed=3,
        colour="red",
        train={"learning_rat": 1},
        data={"prompt_fild": "p"},
        rewards=[{"type": "exact_match", "weigth": 2}],
        limits={"max_runtime": 3},
    )
    assert complaints(raw) == [
        "data.prompt_fild: unknown key; did you mean prompt_field?",
        "rewards[0].weigth: unknown key; did you mean weight?",
        "train.learning_rat: unknown key; did you mean learning_rate?",
        "limits.max_runtime: unknown key; did you mean max_runtime_s?",
        "trian: unknown key; did you mean train?",
        "learning_rate: unknown key; it belongs in train",
        "seed: unknown key; it belongs in data or train",
        "colour: unknown key; known here: name, kind, pool, priority, tags, model, lora, data, "
        "rewards, rollout, sft, train, staleness, eval, limits, retention",
    ]


def test_only_the_keys_of_the_chosen_source_are_known() -> None:
    raw = spec_dict()
    raw["data"] = {"source": "reasoning_gym", "tasks": [{"nam": "x"}], "rows": []}
    assert complaints(raw) == [
        "data.tasks[0].name: missing; it has no default",
        "data.tasks[0].nam: unknown key; did you mean name?",
        "data.rows: unknown key; known here: system_prompt, size, seed, shuffle, eval_size, "
        "source, tasks",
    ]


def test_sources_and_types_are_told_apart_by_name() -> None:
    raw = spec_dict(rewards=[{"type": "regexx"}, {}, {"type": 3}, "x"])
    raw["data"] = {"source": "jsnl"}
    types = "reasoning_gym, exact_match, regex, python"
    assert complaints(raw) == [
        'data.source: "jsnl" is not one of reasoning_gym, jsonl, parquet, huggingface, inline; '
        "did you mean jsonl?",
        f'rewards[0].type: "regexx" is not one of {types}; did you mean regex?',
        f"rewards[1].type: missing; one of {types}",
        f"rewards[2].type: 3 is not one of {types}",
        'rewards[3]: must be a section, not "x"',
    ]


def test_wrong_types_are_told_in_plain_words() -> None:
    train = {
        "steps": "3",
        "learning_rate": True,
        "token_budget": "atuo",
        "gradient_checkpointing": 1,
        "loss": "dapoo",
        "seed": 1.5,
    }
    raw = {
        **spec_dict(name=False, kind="dpo", tags=["a"], rewards={}, train=train),
        "model": None,
        "lora": {"target_modules": "all"},
        "rollout": [],
    }
    assert complaints(raw) == [
        "name: must be text, not false",
        'kind: "dpo" is not one of grpo, sft',
        "tags: must be a section, not a list",
        "model: must be a section, not null",
        'lora.target_modules: must be "all-linear" or a list, not "all"',
        "rewards: must be a list, not a section",
        "rollout: must be a section, not a list",
        'train.steps: must be a whole number, not "3"',
        'train.loss: "dapoo" is not one of grpo, dapo, bnpo, dr_grpo, cispo, gspo, sapo, dppo; '
        "did you mean dapo?",
        "train.learning_rate: must be a number, not true",
        'train.token_budget: must be a whole number or "auto", not "atuo"',
        'train.gradient_checkpointing: must be true or false or "auto", not 1',
        "train.seed: must be a whole number, not 1.5",
    ]


def test_values_out_of_range_are_told_with_the_range() -> None:
    raw = spec_dict(
        name="!",
        pool="GPU",
        model={"id": "", "revision": "x" * 129},
        lora={"dropout": 1, "target_modules": ["q_proj", ""]},
        rewards=[{"type": "python", "path": "f"}],
        rollout={"group_size": 0, "temperature": 0, "top_p": 1.5},
        train={"token_budget": 3},
    )
    assert complaints(raw) == [
        'name: "!" is not a name: 1 to 64 letters, digits, spaces, ".", "_" or "-", the first a '
        "letter or digit",
        'pool: "GPU" is not a pool: 1 to 32 small letters, digits or "-", the first a letter or '
        "digit",
        "model.id: must not be empty",
        "model.revision: may have at most 128 characters",
        "lora.dropout: must be below 1.0, not 1",
        "lora.target_modules[1]: must not be empty",
        'rewards[0].path: "f" is not a function: write package.module:function',
        "rollout.group_size: must be at least 1, not 0",
        "rollout.temperature: must be above 0.0, not 0",
        "rollout.top_p: must be at most 1.0, not 1.5",
        "train.token_budget: must be at least 64, not 3",
    ]
    assert complaints_of(rewards=[]) == ["rewards: a GRPO run needs at least one"]
    assert complaints_of(rewards=[{"type": "exact_match"}] * 33) == [
        "rewards: may have at most 32 entries, not 33"
    ]


def test_rules_between_fields_say_what_to_change() -> None:
    assert complaints_of(eval={"every_steps": 1}) == [
        "eval.every_steps needs held-out prompts: set data.eval_size"
    ]
    assert complaints_of(train={"warmup_steps": 2}) == [
        "train: warmup_steps (2) must be below steps (2)"
    ]
    assert complaints_of(train={"loss": "dppo"}) == [
        'train: loss = "dppo" takes its ratio against the policy that sampled, which needs '
        'correction = "none"'
    ]
    assert complaints_of(train={"overlong_cache": 5}) == [
        "train.overlong_cache (5) must not exceed rollout.max_new_tokens (4)"
    ]
    assert complaints_of(rewards=[{"type": "exact_match", "extract": "regex"}]) == [
        'rewards[0]: extract = "regex" needs a pattern whose group 1 is the answer'
    ]


def test_what_no_database_or_json_can_hold_is_refused() -> None:
    raw = spec_dict(
        name="a\0b",
        tags={1: "x", "day": date(2026, 1, 2), "half": "\ud800", "inf": float("inf")},
        train={"learning_rate": float("nan"), "seed": 2**63},
    )
    assert complaints(raw) == [
        "name: has a NUL character or half of a character",
        "train.learning_rate: must be a finite number",
        "train.seed: the number is too large",
        "tags: the key 1 is not text: put it in quotes",
    ]
    del raw["tags"][1]
    assert complaints(raw)[-3:] == [
        "tags.day: a date cannot be used here: put it in quotes",
        "tags.half: has a NUL character or half of a character",
        "tags.inf: must be a finite number",
    ]


def test_odd_but_sound_unicode_is_kept() -> None:
    rows = [{"prompt": "Ω 👩‍👧 \u202e\u2028 \x1b", "answer": "ñ"}]
    spec = validate_spec(spec_dict(data={"rows": rows}))
    assert spec.data.model_dump()["rows"] == tuple(rows)


def test_input_is_echoed_short_and_harmless() -> None:
    (line,) = complaints_of(pool="x" * 500)
    assert line.startswith('pool: "' + "x" * 78 + "… is not a pool")
    assert complaints_of(pool="\x1b[31m")[0].startswith('pool: "\\u001b[31m" is not a pool')
    assert complaints_of(tags={"\x1b[31m": 3})[0].startswith('tags."\\u001b[31m": ')
    assert complaints_of(**{"k" * 500: 1})[0].startswith('"' + "k" * 78 + "…: unknown key")


def test_what_stands_under_a_secret_key_is_never_echoed() -> None:
    tags = {"hf_token": 11111, "apikey": 11111, "aws_secret": 11111, "db_password": 11111}
    assert complaints_of(tags=tags, model={"api_key": "11111"}) == [
        *(f"tags.{key}: must be text" for key in tags),
        "model.api_key: unknown key; known here: id, revision, dtype, quantization, chat_template",
    ]
    assert complaints_of(train={"token_budget": 3}) == [
        "train.token_budget: must be at least 64, not 3"
    ]


def test_a_spec_full_of_mistakes_is_answered_briefly() -> None:
    lines = complaints_of(train={f"steps{number}": 1 for number in range(1000)})
    assert len(lines) == 51
    assert lines[-1] == "and more"
    big = {"train": {f"{number}": 1 for number in range(VALUES_MAX + 1)}}
    assert complaints(big) == ["has more than 100,000 values: put the data in a file of its own"]


def test_nesting_is_bounded() -> None:
    nested: object = "x"
    for _ in range(DEPTH_MAX + 1):
        nested = [nested]
    (line,) = complaints_of(data={"rows": [{"prompt": nested}]})
    assert line.endswith(": nested more than 64 levels deep")
    endless: list[object] = []
    endless.append(endless)
    assert complaints({"tags": endless})[0].startswith("has more than")


@pytest.mark.parametrize(
    ("text", "spec_format", "line"),
    [
        ("a = ", "toml", "not valid TOML: Invalid value (at end of document)"),
        (
            "a: b: c",
            "yaml",
            "not valid YAML: mapping values are not allowed here (line 1, column 5)",
        ),
        ('{"a": }', "json", "not valid JSON: Expecting value: line 1 column 7 (char 6)"),
        ('{"a": 1, "a": 2}', "json", "not valid JSON: the key 'a' is given twice"),
        ("a: 1\na: 2", "yaml", "not valid YAML: the key 'a' is given twice (line 2, column 1)"),
        ("a: 2026-13-01", "yaml", "not valid YAML: month must be in 1..12"),
        ("a: &x 1", "yaml", f"{NO_ANCHORS} (line 1, column 4)"),
        ("a: !!python/name:os.system ", "yaml", f"{NO_ANCHORS} (line 1, column 4)"),
        ("[" * 100_000, "json", "nested more than 64 levels deep"),
        ("[" * 1_000, "yaml", "nested more than 64 levels deep"),
        ("a = " + "[" * 5_000, "toml", "nested more than 64 levels deep"),
        ('{"a": NaN}', "json", "a: must be a finite number"),
        ("", "yaml", "the spec must be a table with the sections model, data, rewards and train"),
    ],
)
def test_what_cannot_be_parsed_is_told_in_a_line(
    text: str, spec_format: SpecFormat, line: str
) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        parse_spec(text, spec_format)
    assert problem_lines(caught.value.fields) == [line]


def test_a_yaml_bomb_is_refused_before_it_grows() -> None:
    levels = [f"l{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 9)}]" for n in range(9)]
    with pytest.raises(InvalidSpecError, match="anchors, aliases and tags are not supported"):
        parse_spec("\n".join(["l0: &l0 lol", *levels]), "yaml")


def test_files_that_are_no_specs_are_refused(tmp_path: Path) -> None:
    bodies = {
        "a.txt": b"",
        "a.toml": b"\xff",
        "a.json": b" " * (FILE_BYTES_MAX + 1),
    }
    lines = []
    for name, body in bodies.items():
        (tmp_path / name).write_bytes(body)
        with pytest.raises(InvalidSpecError) as caught:
            load_spec(tmp_path / name)
        lines += problem_lines(caught.value.fields)
    assert lines == [
        "a.txt is not a spec file: name it .toml, .yaml, .yml or .json",
        "the file is not UTF-8 text (byte 0)",
        "the file is larger than 16 MiB: put the data in S3",
    ]
    with pytest.raises(FileNotFoundError):
        load_spec(tmp_path / "missing.toml")


def test_the_error_survives_pickling_with_its_fields() -> None:
    with pytest.raises(InvalidSpecError) as caught:
        validate_spec(spec_dict(train={"stepz": 1}))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.fields == caught.value.fields
    assert copy.detail == "train.stepz: unknown key; did you mean steps?"


def test_every_pattern_of_the_spec_is_explained() -> None:
    """A pattern that nobody has put into words would be shown as it is."""
    shown = str(complaints_of(name="!", pool="!", rewards=[{"type": "python", "path": "!"}]))
    assert "of the form" not in shown
    patterns = re.findall(r'"pattern": "([^"]*)"', json.dumps(RunSpec.model_json_schema()))
    assert len(set(patterns)) == 3


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
SECTIONS = st.sampled_from([*RunSpec.model_fields, "steps", "source", "type", "uri", "tasks"])


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(SECTIONS, JSON_VALUES | st.dictionaries(SECTIONS, JSON_VALUES), max_size=6),
    st.booleans(),
)
def test_no_input_raises_anything_but_the_error_of_the_tree(
    raw: dict[str, Any], with_base: bool
) -> None:
    try:
        validate_spec({**spec_dict(), **raw} if with_base else raw)
    except InvalidSpecError as error:
        lines = problem_lines(error.fields)
    else:
        lines = ["valid"]
    assert lines
    assert not any("pydantic" in line or line.endswith(": ") for line in lines)
