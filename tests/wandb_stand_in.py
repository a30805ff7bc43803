"""A server in the place of Weights & Biases', which answers what its client asks for a run
(GraphQL), and keeps what it sends (JSON lines with an offset in a file). What a real server does
beyond that is not tested by it."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "someone"
HISTORY, SUMMARY = "wandb-history.jsonl", "wandb-summary.json"


@dataclass
class ServerRun:
    """What was sent of a run: its description, and lines of its files; `exit_code` once it has
    ended."""

    name: str
    described: dict[str, Any] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.files.get(HISTORY, [])]

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.files.get(SUMMARY, ["{}"])[-1])
        return found


class StandIn:
    """The runs on the server by their ids, and the ids of those that were deleted there; `down`: it
    refuses."""

    def __init__(self) -> None:
        self.runs: dict[str, ServerRun] = {}
        self.deleted: set[str] = set()
        self.url = ""
        self.down = False

    def delete(self, run_id: str) -> None:
        del self.runs[run_id]
        self.deleted.add(run_id)

    def answer(self, path: str, sent: bytes) -> tuple[int, dict[str, Any]]:
        """Status and content of the answer to a request."""
        if self.down:
            return 403, {"errors": [{"message": "not today"}]}
        if path == "/graphql":
            query = json.loads(sent)
            given = query.get("variables") or {}
            if query["operationName"] == "UpsertBucket" and given["name"] in self.deleted:
                return 410, {
                    "errors": [
                        {"message": "run was previously created and deleted; try a new run name"}
                    ]
                }
            ask = getattr(self, f"_{query['operationName']}", None)
            return 200, {"data": ask(given) if ask else {}}
        if path.endswith("/file_stream"):
            self._keep(self.runs[path.split("/")[-2]], json.loads(sent))
        return 200, {}

    def _keep(self, run: ServerRun, sent: dict[str, Any]) -> None:
        for name, part in (sent.get("files") or {}).items():
            lines = run.files.setdefault(name, [])
            lines[part["offset"] : part["offset"] + len(part["content"])] = part["content"]
        if sent.get("complete"):
            run.exit_code = sent["exitcode"]

    def _UpsertBucket(self, given: dict[str, Any]) -> dict[str, Any]:  # noqa: N802  the client's name
        run = self.runs.setdefault(given["name"], ServerRun(given["name"]))
        run.described |= {key: value for key, value in given.items() if value is not None}
        bucket = {"id": run.name, "name": run.name, "displayName": run.described.get("displayName")}
        project = {"name": run.described.get("project"), "entity": {"name": ENTITY}}
        return {"upsertBucket": {"bucket": {**bucket, "project": project}, "inserted": True}}

    def _RunResumeStatus(self, given: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        run = self.runs.get(given["name"])
        if run is None:
            return {"model": None}
        counts = {"historyLineCount": len(run.history), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": json.dumps(run.files.get(HISTORY, [])[-1:]), "eventsTail": "[]"}
        known = {"summaryMetrics": json.dumps(run.summary), "config": run.described.get("config")}
        bucket = {
            "id": run.name,
            "name": run.name,
            **counts,
            **tails,
            **known,
            "wandbConfig": '{"t": 1}',
        }
        return {
            "model": {
                "id": "x",
                "name": given["project"],
                "entity": {"id": "x", "name": ENTITY},
                "bucket": bucket,
            }
        }

    def _CreateRunFiles(self, given: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        files = [
            {"name": name, "uploadUrl": f"{self.url}/storage/{given['run']}/{name}"}
            for name in given["files"]
        ]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}


@contextmanager
def serving() -> Iterator[StandIn]:
    """A stand-in that listens at `url` on this machine."""
    one, lock = StandIn(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                sent = gzip.decompress(sent)
            with lock:
                status, content = one.answer(self.path, sent)
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    one.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield one
    finally:
        server.shutdown()
        server.server_close()
