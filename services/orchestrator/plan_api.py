"""`POST /v1/plan`: what a run would need on given hardware, by formula. Nothing is stored."""

from fastapi import APIRouter, Depends

from offbeat.contracts.plan import Plan, PlanRequest
from offbeat.plan.architecture import architecture_from_config
from offbeat.plan.known_models import known_architecture
from offbeat.plan.report import make_plan
from offbeat.specs import validate_spec
from services.orchestrator.dependencies import UserRoute, user

router = APIRouter(prefix="/v1", route_class=UserRoute, dependencies=[Depends(user)])


@router.post("/plan")
def plan(request: PlanRequest) -> Plan:
    """Memory by kind and rank, settings, speed and traffic of a run that nobody has to submit.

    A model is found by its name or described by its `config.json`, never read from the service's
    own disk.
    """
    spec = validate_spec(request.spec)
    name = request.options.model or spec.model.id
    model = (
        known_architecture(name)
        if request.config is None
        else architecture_from_config(name, request.config)
    )
    return make_plan(model, spec, request.gpus, request.nodes, request.options)
