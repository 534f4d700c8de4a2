"""Which models may have their attention replaced by one of Offbeat's own."""

import inspect
import sys

from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama


def has_plain_attention(model: PreTrainedModel) -> bool:
    """Whether the model's own eager attention is the plain one.

    Plain means word for word Llama's, as in most families; one with a soft cap or with sinks would
    silently become another model.
    """
    own = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    plain = modeling_llama.eager_attention_forward
    return own is not None and inspect.getsource(own) == inspect.getsource(plain)
