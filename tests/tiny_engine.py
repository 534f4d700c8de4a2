"""The transformers engine on the tiny model, for tests that give it further abilities."""

from pathlib import Path

import torch

from offbeat.models import load_tokenizer
from services.generator.engines.model import LoraModel
from services.generator.engines.transformers import TransformersEngine

SEQUENCES_MAX = 8


class TinyEngine(TransformersEngine):
    """In float32, on the CPU."""

    def __init__(self, folder: Path) -> None:
        model = LoraModel.open(folder, torch.float32, torch.device("cpu"))
        super().__init__(model, load_tokenizer(folder, None), SEQUENCES_MAX)
