"""Secrets in a spec are refused before anybody stores or shows them."""

import pytest

from offbeat.specs import InvalidSpecError, validate_spec
from tests.specs import spec_dict


@pytest.mark.parametrize(
    ("changes", "field", "complaint"),
    [
        (
            {"data": {"source": "jsonl", "uri": "s3://KEYID:hunter2@bucket/rows", "rows": None}},
            "data.uri",
            "has a user name or password in the address",
        ),
        (
            {"lora": {"init_from": "S3://hunter2@bucket/folder"}},
            "lora.init_from",
            "has a user name or password in the address",
        ),
        (
            {"model": {"id": "https://host/model?X-Amz-Credential=a&X-Amz-Signature=hunter2"}},
            "model.id",
            "has a signature or a key in the address",
        ),
        (
            {"model": {"dtype": "https://x/?access_token=hunter2"}},
            "model.dtype",
            "has a signature or a key in the address",
        ),
        ({"tags": {"wandb_api_key": "hunter2"}}, "tags.wandb_api_key", "is named like a secret"),
        (
            {
                "data": {
                    "source": "reasoning_gym",
                    "tasks": [{"name": "chain_sum", "config": {"password": "hunter2"}}],
                    "rows": None,
                }
            },
            "data.tasks[0].config.password",
            "is named like a secret",
        ),
    ],
)
def test_a_secret_is_refused_and_not_repeated(
    changes: dict[str, dict[str, object]], field: str, complaint: str
) -> None:
    with pytest.raises(InvalidSpecError) as refused:
        validate_spec(spec_dict(**changes))
    (problem,) = refused.value.fields
    assert problem.field == field
    assert problem.message == (
        f"{complaint}: a spec is stored and shown; give the workers their credentials in their "
        "environment"
    )
    assert "hunter2" not in str(refused.value)


def test_text_to_learn_from_and_plain_addresses_are_no_secrets() -> None:
    rows = [{"prompt": "https://user:password@host", "answer": "1", "token": "x"}]
    spec = validate_spec(
        spec_dict(
            data={"rows": rows},
            tags={"mail": "a@b.c", "site": "https://host/@user?page=2"},
            lora={"init_from": "run-1@3"},
        )
    )
    assert spec.tags["site"] == "https://host/@user?page=2"
