"""The embedded parts start, answer and end."""

import redis


def test_valkey_answers(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.set("key", "value")
        assert client.get("key") == b"value"
