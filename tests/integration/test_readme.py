"""The README's Python, run as written except for the address and the namespace."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ragserve.client import Client

REPO = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (REPO / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def namespaces(server: Any) -> None:
    with Client(server.url) as client:
        files = [REPO / "examples/corpus/files" / name for name in ("iceland.md", "denmark.html")]
        jobs = [
            client.ingest_texts(
                [{"name": "oslo.txt", "title": "Oslo", "text": "Oslo is the capital of Norway."}],
                namespace="readme-notes",
            ),
            client.ingest_files(files, namespace="readme-demo"),
        ]
        for job in jobs:
            client.wait(job, timeout_s=240)


@pytest.mark.parametrize(("number", "says"), [(0, "Oslo"), (1, "Denmark")], ids=["openai", "program"])
def test_readme_python(server: Any, namespaces: None, number: int, says: str) -> None:
    code = BLOCKS[number].replace("http://localhost:30000", server.url)
    code = code.replace("ragserve/notes", "ragserve/readme-notes").replace(
        'namespace="demo"', 'namespace="readme-demo"'
    )
    with redirect_stdout(StringIO()) as output:  # in this process, which has imported SGLang
        names: dict[str, Any] = {"__name__": "__main__"}
        try:
            exec(compile(code, "README.md", "exec"), names)
        finally:  # connections that the end of a program would close
            for name in names.keys() & {"client", "rag"}:
                names[name].close()
    assert output.getvalue().startswith(says), output.getvalue()


def test_readme_curl_bodies_are_accepted(server: Any, namespaces: None) -> None:
    """Send the bodies of the README's curl calls to the routes that it names."""
    text = (REPO / "README.md").read_text(encoding="utf-8")
    calls = re.findall(r"curl -sN? localhost:30000(/rag/\w+) [^']*'[^']*' -d '(\{.*?\})'", text, re.DOTALL)
    assert [route for route, _ in calls] == ["/rag/ingest", "/rag/query"]
    for route, body in calls:
        response = server.client.post(
            route,
            content=body.replace('"notes"', '"readme-notes"'),
            headers={"content-type": "application/json"},
        )
        assert response.status_code in {200, 202}, response.text
        assert ("event: done" in response.text) == ('"stream": true' in body)
