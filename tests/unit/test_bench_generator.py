from scripts.bench.generator_cases import GeneratorCase, requests_of
from scripts.bench.generator_contenders import until_end
from scripts.bench.generator_figures import Call, case_figures, table_of

CASE = GeneratorCase(sequences=16, new_tokens=24, adapter=True)


def test_figures_are_medians_and_ratios_put_offbeat_on_top() -> None:
    calls = {
        "offbeat": [Call(tokens=160, seconds=2.0), Call(tokens=320, seconds=2.0)],
        "generate": [Call(tokens=240, seconds=4.0)],
    }
    figures = case_figures(CASE, calls)
    assert figures["case"] == "16 x 24 LoRA"
    assert figures["tokens_per_s"] == {"offbeat": 120.0, "generate": 60.0}
    assert figures["ratio"] == {"generate": 2.0}
    assert figures["mean_tokens"] == {"offbeat": 15.0, "generate": 15.0}
    assert table_of([CASE], [calls]).row_count == 1


def test_requests_are_groups_of_eight_with_seeds_of_their_own() -> None:
    first, second = requests_of(CASE, [(1, 2), (3,), (4,)])
    assert (first.prompt_ids, second.prompt_ids) == ((1, 2), (3,))
    assert first.seeds + second.seeds == tuple(range(16))
    (alone,) = requests_of(GeneratorCase(sequences=1, new_tokens=24, adapter=False), [(1, 2)])
    assert alone.seeds == (0,)


def test_a_completion_ends_with_its_first_end_of_text() -> None:
    assert until_end([5, 6, 2, 7, 2], frozenset({2})) == [5, 6, 2]
    assert until_end([5, 6], frozenset({2})) == [5, 6]
