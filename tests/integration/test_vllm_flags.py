"""What the vLLM engine checks of a server before it uses it, and the flag that it names."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import IntegrityError, PermanentJobError
from tests.vllm_engine import REQUESTS, SAMPLED, VllmSetting, flat
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"version": "0.11.2"}, "vLLM 0.11.2 is too old"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"served_name": "base", "model_folder": Path("/other")}, "--served-model-name tiny"),
        ({"has_lora_routes": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"lora_enabled": False}, "--enable-lora"),
        ({"max_loras": 4}, "--max-loras 8, or set OFFBEAT_VLLM_MAX_LORAS=4"),
        ({"has_priorities": False}, "--scheduling-policy priority"),
        ({"api_key": "secret"}, "OFFBEAT_VLLM_API_KEY"),
    ],
)
def test_a_wrong_flag_is_named(setting: VllmSetting, fault: dict[str, Any], told: str) -> None:
    for name, value in fault.items():
        setattr(setting.fake, name, value)
    engine = setting.another_engine()
    with pytest.raises(PermanentJobError, match=told):
        engine.load("run-v0", setting.policy(0))
    engine.close()


def test_a_rank_that_the_server_does_not_take_is_named(setting: VllmSetting) -> None:
    setting.fake.max_lora_rank = 8
    engine = setting.another_engine()
    with pytest.raises(
        IntegrityError, match=r"16 is greater than max_lora_rank 8.*--max-lora-rank"
    ):
        engine.loaded()
    engine.close()


def test_the_checks_leave_nothing_behind(setting: VllmSetting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    assert list(setting.fake.roots) == ["run-v0"]
    assert list(setting.folder.iterdir()) == [setting.policy(0)]


def test_a_server_with_a_key_is_given_it(setting: VllmSetting) -> None:
    setting.fake.api_key = "secret"
    engine = setting.another_engine(api_key="secret")
    engine.load("run-v0", setting.policy(0))
    assert len(flat(engine.generate(REQUESTS, "run-v0", SAMPLED))) == 4
    engine.close()


def test_a_server_that_is_starting_is_waited_for(setting: VllmSetting) -> None:
    setting.fake.starting = True
    engine = setting.another_engine(start_timeout_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(engine.load, "run-v0", setting.policy(0))
        wait_until(lambda: setting.fake.unready_answers >= 2)
        setting.fake.starting = False
        loading.result()
    assert engine.loaded() == {"run-v0"}
    engine.close()
