"""The Python side of `/v1/projects`: for whoever has the admin key.

with OffbeatClient(api_key=admin_key) as client:
    Projects(client).create("team-a")
    print(Projects(client).create_key("team-a", "alice").secret)
"""

from collections.abc import Iterator, Mapping
from urllib.parse import quote

from pydantic import JsonValue

from offbeat.client import RETRY_S, OffbeatClient
from offbeat.contracts.projects import KeyView, NewKey, ProjectView, Quotas
from offbeat.contracts.runs import Page
from offbeat.pages import PAGE_ITEMS, all_pages


class Projects:
    """Projects, their quotas and keys, over a client's connection."""

    def __init__(self, client: OffbeatClient, *, retry_for_s: float = RETRY_S) -> None:
        self._client = client
        self._retry_for_s = retry_for_s

    def create(self, project_id: str, quotas: Quotas | None = None) -> ProjectView:
        """Make a project, with the default quotas where none are given. Repeating it is safe."""
        given = (quotas or Quotas()).model_dump(exclude_unset=True)
        return self._send("POST", "", {"id": project_id, "quotas": given})

    def all(self) -> Iterator[ProjectView]:
        """Every project, by id."""
        return all_pages(lambda after: Page[ProjectView].model_validate_json(self._list("", after)))

    def show(self, project_id: str) -> ProjectView:
        """A project, its quotas, and what it uses."""
        return self._send("GET", _path(project_id))

    def change(self, project_id: str, quotas: Quotas) -> ProjectView:
        """Set the quotas that were set in `quotas`; the others stay."""
        return self._send("PATCH", _path(project_id), quotas.model_dump(exclude_unset=True))

    def create_key(self, project_id: str, name: str) -> NewKey:
        """Make a key. Nobody can read its secret again. Never repeated by itself: a lost answer
        leaves a key that `delete_key` takes away."""
        path = f"/v1/projects{_path(project_id)}/keys"
        response = self._client.call("POST", path, json={"name": name})
        return NewKey.model_validate_json(response.content)

    def keys(self, project_id: str) -> Iterator[KeyView]:
        """The project's keys, without their secrets."""
        path = f"{_path(project_id)}/keys"
        return all_pages(lambda after: Page[KeyView].model_validate_json(self._list(path, after)))

    def delete_key(self, project_id: str, key_id: str) -> None:
        """Make a key invalid at once."""
        path = f"/v1/projects{_path(project_id)}/keys{_path(key_id)}"
        self._client.call("DELETE", path, retry_for_s=self._retry_for_s)

    def _send(
        self, method: str, path: str, body: Mapping[str, JsonValue] | None = None
    ) -> ProjectView:
        response = self._client.call(
            method, f"/v1/projects{path}", json=body, retry_for_s=self._retry_for_s
        )
        return ProjectView.model_validate_json(response.content)

    def _list(self, path: str, after: str | None) -> bytes:
        query = {"limit": PAGE_ITEMS, **({"after": after} if after else {})}
        return self._client.call(
            "GET", f"/v1/projects{path}", params=query, retry_for_s=self._retry_for_s
        ).content


def _path(part: str) -> str:
    return f"/{quote(part, safe='')}"
