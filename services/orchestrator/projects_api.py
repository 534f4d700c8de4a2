"""`/v1/projects`: who may use the service, and how much of it. All but reading one's own project
takes the admin key."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from offbeat.contracts.projects import (
    KeyRequest,
    KeyView,
    NewKey,
    ProjectRequest,
    ProjectView,
    Quotas,
)
from offbeat.contracts.runs import Page
from offbeat.errors import ConflictError, NotFoundError
from services.orchestrator.access import find_project, new_key
from services.orchestrator.dependencies import CallerDep, ServicesDep, UserRoute, admin, user
from services.orchestrator.quotas import quotas_of, use_of
from services.orchestrator.schema import KeyRow, ProjectRow
from services.orchestrator.views import moment

router = APIRouter(
    prefix="/v1/projects",
    tags=["projects"],
    route_class=UserRoute,
    dependencies=[Depends(user)],
)

ADMIN = [Depends(admin)]
Limit = Annotated[int, Query(ge=1, le=200)]
Cursor = Annotated[str, Query(max_length=64)]


@router.post(
    "",
    status_code=201,
    dependencies=ADMIN,
    responses={200: {"model": ProjectView, "description": "It was there already."}},
)
def create(
    services: ServicesDep, caller: CallerDep, request: ProjectRequest, response: Response
) -> ProjectView:
    """Make a project; the same request again gets the same answer, with 200."""
    with services.store.write() as session:
        row = session.get(ProjectRow, request.id)
        if row is not None and quotas_of(row) != request.quotas:
            raise ConflictError(
                f"there is a project {request.id!r} with other quotas: PATCH it to change them"
            )
        if row is None:
            row = ProjectRow(
                id=request.id, created_at=services.clock(), **request.quotas.model_dump()
            )
            session.add(row)
        else:
            response.status_code = 200
    return show(services, caller, request.id)


@router.get("", dependencies=ADMIN)
def list_projects(
    services: ServicesDep, limit: Limit = 50, after: Cursor = ""
) -> Page[ProjectView]:
    """The projects and what they use, by id."""
    with services.store.read() as session:
        rows = session.scalars(
            select(ProjectRow).where(ProjectRow.id > after).order_by(ProjectRow.id).limit(limit + 1)
        ).all()
        shown = rows[:limit]
        more = len(rows) > limit
        return Page(
            data=tuple(_project_view(session, row) for row in shown),
            has_more=more,
            next_cursor=shown[-1].id if more else None,
        )


@router.get("/{project_id}")
def show(services: ServicesDep, caller: CallerDep, project_id: str) -> ProjectView:
    """A project, its quotas and what it uses; a project's key shows its own."""
    with services.store.read() as session:
        return _project_view(session, find_project(session, caller, project_id))


@router.patch("/{project_id}", dependencies=ADMIN)
def change(
    services: ServicesDep, caller: CallerDep, project_id: str, quotas: Quotas
) -> ProjectView:
    """Set the quotas that are given; the others stay."""
    with services.store.write() as session:
        row = find_project(session, caller, project_id)
        for name, value in quotas.model_dump(exclude_unset=True).items():
            setattr(row, name, value)
    return show(services, caller, project_id)


@router.post("/{project_id}/keys", status_code=201, dependencies=ADMIN)
def create_key(
    services: ServicesDep, caller: CallerDep, project_id: str, request: KeyRequest
) -> NewKey:
    """Make a key. Its secret is in this answer and nowhere else."""
    with services.store.write() as session:
        find_project(session, caller, project_id)
        row, secret = new_key(project_id, request.name, services.clock())
        session.add(row)
        return NewKey(key=_key_view(row), secret=secret)


@router.get("/{project_id}/keys", dependencies=ADMIN)
def list_keys(
    services: ServicesDep,
    caller: CallerDep,
    project_id: str,
    limit: Limit = 50,
    after: Cursor = "",
) -> Page[KeyView]:
    """The project's keys, by id, without their secrets."""
    with services.store.read() as session:
        find_project(session, caller, project_id)
        rows = session.scalars(
            select(KeyRow)
            .where(KeyRow.project_id == project_id, KeyRow.id > after)
            .order_by(KeyRow.id)
            .limit(limit + 1)
        ).all()
        shown = rows[:limit]
        more = len(rows) > limit
        return Page(
            data=tuple(map(_key_view, shown)),
            has_more=more,
            next_cursor=shown[-1].id if more else None,
        )


@router.delete("/{project_id}/keys/{key_id}", status_code=204, dependencies=ADMIN)
def delete_key(services: ServicesDep, project_id: str, key_id: str) -> None:
    """Make a key invalid at once."""
    with services.store.write() as session:
        row = session.get(KeyRow, key_id)
        if row is None or row.project_id != project_id:
            raise NotFoundError(f"project {project_id!r} has no key {key_id!r}")
        session.delete(row)


def _project_view(session: Session, row: ProjectRow) -> ProjectView:
    return ProjectView(
        id=row.id,
        created_at=moment(row.created_at),
        quotas=quotas_of(row),
        use=use_of(session, row.id),
    )


def _key_view(row: KeyRow) -> KeyView:
    return KeyView(
        id=row.id, project_id=row.project_id, name=row.name, created_at=moment(row.created_at)
    )
