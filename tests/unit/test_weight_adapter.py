"""The header of an adapter's safetensors file: what passes, and what is refused why."""

import io
import json
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from offbeat.errors import InvalidRequestError
from services.weight_proxy.adapter import HEADER_BYTES_MAX, Shape, check_shapes, read_shapes
from tests.adapters import adapter_tensors


def shapes_of(content: bytes) -> dict[str, Shape]:
    return read_shapes(io.BufferedReader(io.BytesIO(content)), len(content))


def file_with(header: object, data_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_shapes_are_those_that_were_saved() -> None:
    tensors = adapter_tensors(1, rank=4)
    shapes = shapes_of(save(tensors, metadata={"format": "pt"}))
    assert shapes == {name: tensor.shape for name, tensor in tensors.items()}
    assert shapes["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"] == (16, 4)


def test_half_precision_takes_two_bytes() -> None:
    assert shapes_of(save({"x.lora_A.weight": np.zeros((2, 3), np.float16)})) == {
        "x.lora_A.weight": (2, 3)
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "claims 0 bytes in a file of 0"),
        (b"\xff" * 8, "claims 18446744073709551615 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "claims 100 bytes in a file of 10"),
        ((HEADER_BYTES_MAX + 1).to_bytes(8, "little") + bytes(HEADER_BYTES_MAX + 1), "claims"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "Invalid JSON"),
        ((5).to_bytes(8, "little") + b"[" * 5, "Invalid JSON"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "Invalid JSON"),
        (file_with([], 0), "should be an object"),
        (file_with({"a": 1}, 0), "at 'a'"),
        (file_with({"a" * 600: entry([0, 0], 0, 0)}, 0), "at most 512 characters"),
        (file_with({"a": entry([2, 2], 0, 16, "I8")}, 16), "'a.dtype': Input should be 'F64'"),
        (file_with({"a": entry([4], 0, 16)}, 16), "'a.shape'"),
        (file_with({"a": entry([-2, -2], 0, 16)}, 16), "'a.shape.0'"),
        (file_with({"a": entry([10**30, 1], 0, 16)}, 16), "'a.shape.0'"),
        (file_with({"a": entry([2, 2], 4, 20)}, 20), "should begin at 0"),
        (file_with({"a": entry([2, 2], 0, 12)}, 12), "one of 16 bytes"),
        (file_with({"a": entry([2, 2], 0, 16), "b": entry([1, 1], 12, 16)}, 16), "begin at 16"),
        (file_with({"a": entry([2, 2], 0, 16), "b": entry([1, 1], 20, 24)}, 24), "begin at 16"),
        (file_with({"a": entry([2, 2], 0, 16)}, 15), "take 16 bytes but the file holds 15"),
        (file_with({"a": entry([2, 2], 0, 16)}, 17), "take 16 bytes but the file holds 17"),
    ],
)
def test_a_hostile_or_cut_header_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        shapes_of(content)
    assert len(refused.value.detail) < 500


@given(st.binary(max_size=200), st.integers(0, 64))
def test_no_bytes_do_more_than_be_refused(noise: bytes, header_bytes: int) -> None:
    for content in (noise, header_bytes.to_bytes(8, "little") + noise):
        try:
            assert all(len(shape) == 2 for shape in shapes_of(content).values())
        except InvalidRequestError:
            continue


WHOLE: Mapping[str, Shape] = {"q.lora_A.weight": (2, 32), "q.lora_B.weight": (16, 2)}


def test_whole_factors_pass() -> None:
    check_shapes(WHOLE, 2, None)
    check_shapes(WHOLE, 2, WHOLE)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, "0 A and 0 B factors"),
        ({"q.lora_A.weight": (2, 32)}, "1 A and 0 B factors"),
        ({"q.lora_A.weight": (2, 32), "v.lora_B.weight": (16, 2)}, "one of each"),
        ({**WHOLE, "q.lora_A.weight": (1, 32)}, r"has shape \(1, 32\)"),
        ({**WHOLE, "q.lora_B.weight": (16, 1)}, r"has shape \(16, 1\)"),
        ({**WHOLE, "lm_head.weight": (9, 2)}, "'lm_head.weight' is no LoRA factor"),
    ],
)
def test_other_shapes_do_not(shapes: Mapping[str, Shape], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_shapes(shapes, 2, None)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({**WHOLE, "q.lora_B.weight": (8, 2)}, r"has shape \(8, 2\), but \(16, 2\) in the parent"),
        (
            {**WHOLE, "k.lora_A.weight": (2, 32), "k.lora_B.weight": (16, 2)},
            r"'k.lora_A.weight' has shape \(2, 32\), but None in the parent",
        ),
    ],
)
def test_shapes_never_change_between_versions(shapes: Mapping[str, Shape], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_shapes(shapes, 2, WHOLE)
