"""How examples are laid out in rows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.algorithms.example_packing import Example, pack_examples


def example(*ids: int, targets: tuple[int, ...]) -> Example:
    """Tokens, and the places of the targets."""
    return Example(ids=ids, is_target=tuple(at in targets for at in range(len(ids))))


A = example(10, 11, 12, 13, targets=(2, 3))
B = example(20, 21, 22, targets=(1,))
C = example(30, 31, targets=(1,))


def test_examples_share_a_row_and_do_not_see_one_another() -> None:
    [batch] = pack_examples([B, A], 64)
    assert batch.ids_BT.tolist() == [[10, 11, 12, 13, 20, 21, 22]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.segments_BT.tolist() == [[1, 1, 1, 1, 2, 2, 2]]
    assert batch.predictors_N.tolist() == [1, 2, 4]
    assert batch.targets_N.tolist() == [12, 13, 21]
    assert batch.allowed_B1TT()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1],
    ]


def test_a_full_row_is_followed_by_another_one() -> None:
    """Five tokens hold A, then B and C together; the two rows do not fit into one batch."""
    batches = pack_examples([A, B, C], 5)
    assert [batch.ids_BT.tolist() for batch in batches] == [
        [[20, 21, 22, 30, 31]],
        [[10, 11, 12, 13]],
    ]
    assert batches[0].predictors_N.tolist() == [0, 3]


def test_rows_stand_side_by_side_and_are_padded() -> None:
    [batch] = pack_examples([Example(ids=(1,) * 2000, is_target=(False, *[True] * 1999)), A], 4096)
    assert batch.ids_BT.shape == (1, 2004)
    batches = pack_examples([A, Example(ids=(1,) * 2047, is_target=(False, *[True] * 2046))], 4096)
    [two_rows] = batches
    assert two_rows.ids_BT.shape == (2, 2047)
    assert two_rows.segments_BT[1, :6].tolist() == [1, 1, 1, 1, -1, -1]
    assert two_rows.predictors_N[-2:].tolist() == [2047 + 1, 2047 + 2]
    assert two_rows.targets_N[-2:].tolist() == [12, 13]


def test_an_example_beyond_the_budget_is_a_batch_of_its_own() -> None:
    batches = pack_examples([A, B], 3)
    assert [batch.ids_BT.tolist() for batch in batches] == [[[10, 11, 12, 13]], [[20, 21, 22]]]


@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30), budget=st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_every_token_is_forwarded_once_and_every_target_predicted_by_its_own_example(
    lengths: list[int], budget: int
) -> None:
    """Each token has a number of its own, and its target is the number after it."""
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    made = [
        Example(ids=tuple(range(start, start + n)), is_target=(False, *[True] * (n - 1)))
        for start, n in zip(starts, lengths, strict=True)
    ]
    batches = pack_examples(made, budget)
    tokens: list[int] = []
    for batch in batches:
        num_rows, width = batch.ids_BT.shape
        assert num_rows == 1 or num_rows * width <= budget
        is_token_BT = batch.segments_BT >= 0
        tokens += batch.ids_BT[is_token_BT].tolist()
        before = batch.ids_BT.flatten()[batch.predictors_N]
        assert (before + 1).tolist() == batch.targets_N.tolist()
        assert len(batch.targets_N) == int((batch.positions_BT[is_token_BT] > 0).sum())
    assert sorted(tokens) == list(range(sum(lengths)))
