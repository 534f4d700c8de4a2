"""The vLLM engines of a generator process, as its settings describe them: a server that runs
elsewhere, or one that is started here for each base model."""

import os
import signal
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from offbeat.contracts.jobs import JobOutput
from offbeat.contracts.run_spec import ModelSection
from offbeat.worker import HandIn, Handler, JobContext
from services.generator.engines.vllm import VllmEngine, VllmOptions
from services.generator.engines.vllm_checks import check_run, check_server
from services.generator.engines.vllm_command import (
    SERVER_ENVIRONMENT,
    AdapterLimits,
    parse_arguments,
    server_command,
)
from services.generator.engines.vllm_http import ServerAddress, VllmClient
from services.generator.engines.vllm_server import VllmServer, free_port, wait_until_healthy
from services.generator.settings import GeneratorSettings


class VllmEngines:
    """Opens engines; the adapters folder is what servers read from."""

    def __init__(self, settings: GeneratorSettings, adapters_folder: Path) -> None:
        self._settings = settings
        self._adapters_folder = adapters_folder
        self._limits = AdapterLimits(
            max_loras=settings.vllm_max_loras, max_lora_rank=settings.vllm_max_lora_rank
        )

    def wait_for_server(self) -> None:
        """Return once a server that runs elsewhere is ready and right; before the first job, so
        that a wrong flag ends the process with a reason instead of spoiling jobs."""
        if self._settings.vllm_url is None:
            return
        client = VllmClient(self._address(self._settings.vllm_url))
        wait_until_healthy(client.is_healthy, lambda: None, self._settings.vllm_start_timeout_s)
        check_server(client)
        client.close()

    def checked(self, handler: Handler) -> Handler:
        """The handler, for runs that the engines can serve."""

        def handle(context: JobContext) -> JobOutput | HandIn:
            check_run(context.lease.spec, self._limits)
            return handler(context)

        return handle

    def open(
        self, model: ModelSection, folder: Path, tokenizer: PreTrainedTokenizerBase
    ) -> VllmEngine:
        """An engine for the base model in the folder. Its server may still be starting."""
        settings, server = self._settings, None
        url = settings.vllm_url
        if url is None:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            server = self._start(model, folder, port)
        return VllmEngine(
            VllmOptions(
                address=self._address(url),
                limits=self._limits,
                sequences_max=settings.sequences_max,
                start_timeout_s=settings.vllm_start_timeout_s,
                request_timeout_s=settings.vllm_request_timeout_s,
            ),
            model=model,
            model_folder=folder,
            tokenizer=tokenizer,
            adapters_folder=self._adapters_folder,
            server=server,
        )

    def _start(self, model: ModelSection, folder: Path, port: int) -> VllmServer:
        assert self._settings.vllm_python is not None
        command = server_command(
            self._settings.vllm_python,
            folder=folder,
            model_id=model.id,
            dtype=model.dtype,
            port=port,
            limits=self._limits,
            arguments=parse_arguments(self._settings.vllm_args),
        )
        key = self._settings.vllm_api_key
        secret = {"VLLM_API_KEY": key.get_secret_value()} if key else {}
        return VllmServer(command, {**SERVER_ENVIRONMENT, **secret}, end_this_worker)

    def _address(self, url: str) -> ServerAddress:
        return ServerAddress(url=url, api_key=self._settings.vllm_api_key)


def end_this_worker() -> None:
    """As from outside: a worker without an engine would only spoil jobs that others can do."""
    os.kill(os.getpid(), signal.SIGTERM)
