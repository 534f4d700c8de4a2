from dataclasses import replace
from typing import Any

import pytest

from offbeat.contracts.plan import PlanOptions
from offbeat.contracts.run_spec import RunSpec
from offbeat.errors import InvalidRequestError
from offbeat.plan.choice import budgets, choose, verdict_of
from offbeat.plan.gpus import Cluster, parse_gpus
from offbeat.plan.known_models import KNOWN
from offbeat.plan.remedies import remedies
from offbeat.plan.traffic import traffic_of
from offbeat.plan.wanted import Wanted, wanted_of
from tests.specs import spec

SEVENTY = KNOWN["llama-2-70b"]
GIB = 2**30


def a_spec(**changes: Any) -> RunSpec:
    sections: dict[str, Any] = {
        "model": {"id": "llama-2-70b", "dtype": "bfloat16"},
        "lora": {"rank": 16, "alpha": 32},
        "rollout": {"group_size": 8, "groups_per_step": 16, "max_new_tokens": 512},
    }
    for section, fields in changes.items():
        sections[section] = {**sections.get(section, {}), **fields}
    return spec(**sections)


def wanted(options: PlanOptions | None = None, **changes: Any) -> Wanted:
    return wanted_of(a_spec(**changes), options or PlanOptions(), SEVENTY)


def cluster(gpus: str, nodes: int = 1) -> Cluster:
    count, gpu = parse_gpus(gpus)
    return Cluster(gpu=gpu, gpus_per_node=count, num_nodes=nodes)


def test_the_spec_and_the_options_say_what_is_wanted() -> None:
    asked = wanted()
    assert (asked.method, asked.rank, asked.dtype_bytes) == ("lora", 16, 2)
    assert (asked.sequence_tokens, asked.step_tokens) == (768, 128 * 512 + 16 * 256)
    assert (asked.token_budget, asked.is_checkpointed, asked.is_offloaded) == (None, None, None)
    said = wanted(train={"token_budget": 4096, "gradient_checkpointing": True})
    assert (said.token_budget, said.is_checkpointed) == (4096, True)
    over = PlanOptions(
        quantization="nf4",
        lora_rank=4,
        token_budget=2048,
        gradient_checkpointing=False,
        offload=True,
        prompt_tokens=100,
    )
    asked = wanted(over, train={"token_budget": 4096, "gradient_checkpointing": True})
    assert (asked.method, asked.rank, asked.sequence_tokens) == ("qlora", 4, 612)
    assert (asked.token_budget, asked.is_checkpointed, asked.is_offloaded) == (2048, False, True)


def test_full_fine_tuning_and_four_bits_exclude_each_other() -> None:
    assert wanted(PlanOptions(full=True)).method == "full"
    with pytest.raises(InvalidRequestError, match="leave out full, or nf4"):
        wanted(PlanOptions(full=True, quantization="nf4"))


@pytest.mark.parametrize(
    ("total", "verdict"),
    [(86, "fits"), (87, "tight"), (117, "tight"), (118, "does not fit")],
)
def test_a_run_is_refused_only_above_the_band(total: float, verdict: str) -> None:
    assert verdict_of(total, 100) == verdict


def test_budgets_lie_between_the_longest_sequence_and_what_a_rank_has_in_a_step() -> None:
    one, eight = cluster("1xA100"), cluster("8xA100")
    assert budgets(wanted(), one) == [16384, 8192, 4096, 2048, 1024, 768]
    fewer = wanted(rollout={"groups_per_step": 4})
    assert budgets(fewer, eight) == [4096, 2048, 1024, 768]
    assert budgets(replace(wanted(), token_budget=100), one) == [768]
    assert budgets(replace(wanted(), token_budget=3000), one) == [3000]


def test_what_fits_without_checkpointing_is_trained_without() -> None:
    choice = choose(SEVENTY, wanted(), cluster("8xA100-80GB"))
    assert choice.verdict == "fits"
    assert not choice.setup.is_checkpointed
    assert not choice.setup.is_offloaded
    assert choice.sharding == "within nodes"


def test_what_is_said_is_kept() -> None:
    asked = wanted(train={"token_budget": 2048, "gradient_checkpointing": True})
    setup = choose(SEVENTY, asked, cluster("8xA100-80GB")).setup
    assert (setup.token_budget, setup.is_checkpointed) == (2048, True)


def test_two_small_cards_hold_70b_in_four_bits_on_the_host() -> None:
    asked = wanted(PlanOptions(quantization="nf4"))
    choice = choose(SEVENTY, asked, cluster("2x24GB"))
    assert choice.verdict == "fits"
    assert choice.setup.is_offloaded
    assert choice.setup.is_checkpointed


def test_a_model_that_no_node_holds_is_spread_over_all() -> None:
    asked = wanted(PlanOptions(full=True, offload=False))
    one, two = cluster("8xA100-80GB"), cluster("8xA100-80GB", nodes=4)
    assert choose(SEVENTY, asked, one).verdict == "does not fit"
    choice = choose(SEVENTY, asked, two)
    assert (choice.verdict, choice.sharding) == ("fits", "across nodes")


def test_a_lone_card_shares_nothing() -> None:
    choice = choose(KNOWN["qwen3-0.6b"], wanted(), cluster("1x24GB"))
    assert (choice.verdict, choice.sharding) == ("fits", "none")


def test_what_would_help_comes_cheapest_first() -> None:
    asked = wanted(PlanOptions(full=True, offload=False, gradient_checkpointing=False))
    found = remedies(SEVENTY, asked, cluster("8xA100-80GB"))
    assert [remedy.change for remedy in found] == [
        "offload to the CPU",
        "LoRA in place of full fine-tuning",
        'QLoRA (quantization = "nf4")',
        "4 nodes (32 GPUs)",
    ]
    assert all(remedy.verdict in ("fits", "tight") for remedy in found)


def test_a_smaller_token_budget_may_be_all_that_is_needed() -> None:
    asked = wanted(
        PlanOptions(offload=False, gradient_checkpointing=False, token_budget=16384), train={}
    )
    found = remedies(SEVENTY, asked, cluster("8xA100-80GB"))
    assert 'token_budget = "auto"' in [remedy.change for remedy in found]
    assert found[0].change == "gradient checkpointing"


def test_changes_add_up_where_none_is_enough() -> None:
    asked = wanted(PlanOptions(full=True, offload=False, gradient_checkpointing=False))
    (found,) = remedies(SEVENTY, asked, cluster("1x24GB"))
    assert found.change.startswith("gradient checkpointing, offload to the CPU")
    assert found.gpu_bytes < 28 * GIB


def test_nothing_helps_a_card_that_is_too_small_for_anything() -> None:
    assert remedies(SEVENTY, wanted(PlanOptions(full=True)), cluster("1x1GB")) == ()


def test_only_the_adapter_and_its_gradient_cross_between_nodes_that_hold_the_model() -> None:
    two = cluster("8xA100-80GB", nodes=2)
    choice = choose(SEVENTY, wanted(), two)
    traffic = traffic_of(SEVENTY, choice, two)
    # Half of each gradient goes out twice: 4 bytes x 207,093,760, at 1.25 GB/s.
    # Gradients in float32, and the adapter in bfloat16 for the step and twice for the canary.
    assert traffic.between_nodes_bytes == (4 + 2) * 207_093_760
    assert traffic.between_nodes_s == pytest.approx(0.9941, abs=1e-4)
    assert traffic.published_bytes == 2 * 207_093_760


def test_all_weights_cross_for_every_micro_batch_where_no_node_holds_the_model() -> None:
    asked = wanted(
        PlanOptions(token_budget=4096, gradient_checkpointing=True, offload=False), lora={"rank": 1}
    )
    four = cluster("2x24GB", nodes=8)
    choice = choose(SEVENTY, asked, four)
    assert choice.sharding == "across nodes"
    traffic = traffic_of(SEVENTY, choice, four)
    # 69,632 tokens on 16 ranks: two micro-batches of 4,096, each with all weights twice.
    assert traffic.micro_batches == 2
    weights = 2 * (68_976_648_192 - 8192)
    assert traffic.between_nodes_bytes == pytest.approx(2 * 2 * weights * 15 / 16)


def test_a_supervised_run_has_examples_in_place_of_completions() -> None:
    supervised = RunSpec.model_validate(
        {
            "kind": "sft",
            "model": {"id": "llama-2-70b"},
            "lora": {"rank": 8},
            "data": {"source": "inline", "rows": [{"prompt": "1 + 1 =", "completion": "2"}]},
            "sft": {"batch_size": 4, "max_length": 512},
            "train": {"steps": 2},
        }
    )
    asked = wanted_of(supervised, PlanOptions(), SEVENTY)
    assert (asked.kind, asked.method, asked.rank) == ("sft", "lora", 8)
    assert (asked.sequence_tokens, asked.step_tokens) == (512, 2048)
