"""The application: routes, middleware and the scheduler's life."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from offbeat.request_bodies import BodyLimit
from offbeat.web import PROBLEMS, RequestId, install_errors
from services.orchestrator import (
    artifacts_api,
    diagnosis_api,
    health_api,
    internal_api,
    model_api,
    openai_api,
    plan_api,
    projects_api,
    replay_api,
    retention_api,
    runs_api,
)
from services.orchestrator.collector import CollectorThread
from services.orchestrator.dependencies import Services


def create_app(services: Services) -> FastAPI:
    """The application over the given services. Its scheduler runs while the application does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        collecting = CollectorThread(services.collector, lambda: services.scheduler.leads)
        services.scheduler.start()
        collecting.start()
        yield
        collecting.stop()
        services.scheduler.stop()
        await services.chats.close()

    app = FastAPI(
        title="Offbeat orchestrator",
        version="1",
        description="Submit, watch and steer runs of asynchronous GRPO.",
        lifespan=lifespan,
        responses=PROBLEMS,
    )
    app.state.services = services
    install_errors(app)
    app.add_middleware(BodyLimit)
    app.add_middleware(RequestId)
    for module in (
        internal_api,  # routes are tried in this order, and workers ask most often
        runs_api,
        artifacts_api,
        model_api,
        diagnosis_api,
        replay_api,
        retention_api,
        openai_api,
        plan_api,
        projects_api,
        health_api,
    ):
        app.include_router(module.router)
    return app
