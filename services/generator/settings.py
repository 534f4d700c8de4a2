"""What a generator process reads from its environment."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from offbeat.settings import WorkerSettings
from services.generator.engines.vllm_command import LoraRank, parse_arguments


def _checked_arguments(text: str) -> str:
    parse_arguments(text)
    return text


class GeneratorSettings(WorkerSettings):
    """`OFFBEAT_*`; the number of threads is torch's own `OMP_NUM_THREADS`."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """`transformers` computes in this process, on a CPU or one GPU. `vllm` is for GPUs at work: a
    server that is reached at `vllm_url`, or started here with `vllm_python`."""
    sequences_max: Annotated[int, Field(ge=1)] = 64
    """Samples decoded at once; a GPU with room for more is faster with more."""
    adapters_max: Annotated[int, Field(ge=0)] = 2
    """Superseded versions of a run that stay loaded, for evaluations."""
    models_max: Annotated[int, Field(ge=1)] = 1
    """Base models held at once; a run on another model closes the one used longest ago."""
    vllm_url: str | None = None
    """A vLLM server of this generator alone that runs already, as `http://127.0.0.1:8000`. It reads
    adapters from `data_dir`, which it must see under the same path."""
    vllm_python: str | None = None
    """The Python of the environment that holds vLLM; a server is started for each base model."""
    vllm_args: Annotated[str, AfterValidator(_checked_arguments)] = ""
    """More arguments for the server that is started here, as `--gpu-memory-utilization 0.8`."""
    vllm_api_key: SecretStr | None = None
    """The server's `--api-key`; one that is started here gets it too."""
    vllm_max_loras: Annotated[int, Field(ge=1)] = 8
    """The server's `--max-loras`: at least the `staleness.max_versions` of every run and 2. Each
    takes GPU memory for an adapter of the highest rank."""
    vllm_max_lora_rank: Annotated[LoraRank, BeforeValidator(int)] = 64
    """The server's `--max-lora-rank`."""
    vllm_start_timeout_s: Annotated[float, Field(gt=0)] = 1200.0
    """How long a server may take until it answers: it reads the model and compiles kernels."""
    vllm_request_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """How long one completion may take, its wait for a place in the batch included. A server that
    takes longer hangs, and the job is tried again."""

    @model_validator(mode="after")
    def _vllm_is_somewhere(self) -> Self:
        if self.engine == "vllm" and (self.vllm_url is None) == (self.vllm_python is None):
            raise ValueError(
                "OFFBEAT_ENGINE=vllm needs either OFFBEAT_VLLM_URL, a server that runs, or "
                "OFFBEAT_VLLM_PYTHON, the Python with which to start one"
            )
        return self
