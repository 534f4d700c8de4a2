"""What of a server or a run is refused, and in which words."""

from pathlib import Path

import pytest

from offbeat.errors import IntegrityError, OffbeatError, PermanentJobError, UnavailableError
from services.generator.engines.vllm_checks import VERSION_TESTED, check_run, version_number
from services.generator.engines.vllm_command import AdapterLimits
from services.generator.engines.vllm_completions import completion_refusal
from services.generator.engines.vllm_http import load_refusal
from tests.specs import spec

FOLDER = Path("/data/adapters/v1")


def limits(max_loras: int = 8, max_lora_rank: int = 64) -> AdapterLimits:
    return AdapterLimits(max_loras=max_loras, max_lora_rank=max_lora_rank)


def test_l1_a_run_needs_two_adapters_more_than_its_staleness() -> None:
    run = spec(staleness={"max_versions": 4})
    check_run(run, limits(max_loras=6))
    with pytest.raises(PermanentJobError) as refused:
        check_run(run, limits(max_loras=5))
    assert "staleness.max_versions = 4 needs 6 adapters at once" in refused.value.detail
    assert "--max-loras 5" in refused.value.detail
    assert "OFFBEAT_VLLM_MAX_LORAS" in refused.value.detail


def test_a_rank_above_the_servers_is_refused() -> None:
    run = spec(lora={"rank": 32})
    check_run(run, limits(max_lora_rank=32))
    with pytest.raises(PermanentJobError, match=r"lora.rank = 32 is above .*--max-lora-rank 16"):
        check_run(run, limits(max_lora_rank=16))


def test_more_stop_strings_than_vllm_takes_are_refused() -> None:
    check_run(spec(rollout={"stop": ["a", "b", "c", "d"]}), limits())
    with pytest.raises(PermanentJobError, match="at most 4 stop strings"):
        check_run(spec(rollout={"stop": ["a", "b", "c", "d", "e"]}), limits())


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("0.32.0", (0, 32)),
        ("0.11.2", (0, 11)),
        ("1.0.0rc1", (1, 0)),
        ("0.1.dev123+g1234", VERSION_TESTED),
        ("main", VERSION_TESTED),
    ],
)
def test_versions_are_ordered_by_number(version: str, number: tuple[int, int]) -> None:
    assert version_number(version) == number


@pytest.mark.parametrize(
    ("status", "message", "kind", "told"),
    [
        (404, "Not Found", PermanentJobError, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (404, "Loading lora a failed: No adapter found for <path>", UnavailableError, "mount"),
        (500, "LoRA is not enabled. Use --enable-lora.", PermanentJobError, "--enable-lora"),
        (500, "LoRA rank 64 is greater than max_lora_rank 16.", IntegrityError, "--max-lora-rank"),
        (500, "out of memory", UnavailableError, "vLLM failed: out of memory"),
        (400, "bad module", IntegrityError, "vLLM refuses the adapter: bad module"),
        (401, "Unauthorized", PermanentJobError, "OFFBEAT_VLLM_API_KEY"),
    ],
)
def test_a_refused_load_names_what_mends_it(
    status: int, message: str, kind: type[OffbeatError], told: str
) -> None:
    refusal = load_refusal(status, message, FOLDER)
    assert type(refusal) is kind
    assert told in refusal.detail


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (404, "The model `a` does not exist.", UnavailableError),
        (400, "Out of range float values are not JSON compliant", IntegrityError),
        (400, "Token id 5000 is out of vocabulary", PermanentJobError),
        (400, "priority scheduling is not enabled", PermanentJobError),
        (500, "EngineCore encountered an issue.", UnavailableError),
    ],
)
def test_a_refused_completion_is_tried_again_only_where_that_helps(
    status: int, message: str, kind: type[OffbeatError]
) -> None:
    assert type(completion_refusal(status, message)) is kind
