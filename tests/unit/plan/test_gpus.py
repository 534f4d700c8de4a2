import pytest

from offbeat.errors import InvalidRequestError
from offbeat.plan.gpus import CARDS, parse_gpus


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xA100-80GB", 8, "A100-80GB"),
        ("8 x a100", 8, "A100-80GB"),
        ("2×A100-40GB", 2, "A100-40GB"),
        ("1xH100", 1, "H100"),
        ("4xH100-80GB", 4, "H100"),
        ("2x4090", 2, "4090"),
        ("2xRTX 4090", 2, "4090"),
        ("2xrtx3090", 2, "3090"),
    ],
)
def test_cards_are_known_by_their_names(text: str, count: int, name: str) -> None:
    assert parse_gpus(text) == (count, CARDS[name])


@pytest.mark.parametrize(("text", "gib"), [("2x24GB", 24), ("1x80GiB", 80), ("4 x 11.5 gb", 11.5)])
def test_a_card_may_be_given_by_its_memory_alone(text: str, gib: float) -> None:
    _, card = parse_gpus(text)
    assert card.memory_gib == gib
    assert card.flops_per_s is None
    assert card.usable_bytes == gib * 2**30 * 0.985


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("A100", "write 2x24GB, 8xA100-80GB or 1xH100"),
        ("", "write 2x24GB"),
        ("-1xA100", "write 2x24GB"),
        ("2x", "write 2x24GB"),
        ("0xA100", "a node has 1 to 64 cards"),
        ("65xA100", "`nodes` says how many nodes"),
        ("2xGTX", "there is no card 'GTX' here"),
        ("2x0GB", "give 1 to 1024 GB"),
        ("2x2000GB", "give 1 to 1024 GB"),
    ],
)
def test_wrong_cards_are_refused_with_what_to_write(text: str, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        parse_gpus(text)
