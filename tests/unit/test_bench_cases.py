import pytest

from scripts.bench.cases import CASES, GROUP_SIZE, GROUPS, Case, samples_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_has_64_ragged_samples_and_every_group_a_signal(case: Case) -> None:
    samples = samples_of(case, 0)
    lengths = [len(sample.completion_ids) for sample in samples]
    assert len(samples) == GROUPS * GROUP_SIZE == 64
    assert max(lengths) == case.new_tokens
    assert min(lengths) >= case.new_tokens / 2
    for start in range(0, len(samples), GROUP_SIZE):
        group = samples[start : start + GROUP_SIZE]
        assert len({sample.prompt_ids for sample in group}) == 1
        assert [sample.reward for sample in group] == [1, 0, 0, 0, 1, 0, 0, 0]


def test_the_same_seed_gives_the_same_samples_and_another_seed_others() -> None:
    assert samples_of(CASES[0], 3) == samples_of(CASES[0], 3)
    assert samples_of(CASES[0], 3) != samples_of(CASES[0], 4)
