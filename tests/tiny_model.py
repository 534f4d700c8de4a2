"""A small real model: a two-layer Llama with random weights and a byte-level tokenizer with a chat
template."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from offbeat.objects import ObjectStore

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|im_end|>", "<|im_start|>")
MAX_POSITIONS = 256


def upload(store: ObjectStore, folder: Path, prefix: str) -> None:
    """Put the files of a model below a prefix."""
    for path in folder.iterdir():
        store.put(prefix + path.name, path.read_bytes())


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    tie_word_embeddings: bool = True,
    head_dim: int = 8,
    hidden_size: int = 32,
) -> Path:
    """Write config, weights (float32) and tokenizer; the same seed gives the same bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=tie_word_embeddings,
            eos_token_id=0,
            pad_token_id=0,
            bos_token_id=None,
            initializer_range=0.2,
        )
    )
    model.save_pretrained(folder)
    return folder


def write_overflowing_model(folder: Path, text: str) -> Path:
    """One whose loss is not finite where this token is read."""
    write_tiny_model(folder, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    [token] = PreTrainedTokenizerFast.from_pretrained(folder)(text).input_ids
    weights["model.embed_tokens.weight"][token] = torch.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
