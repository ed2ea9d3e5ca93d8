"""Traces of a real AgentScope agent, as OTLP JSON and as the database of AgentScope Studio."""

from __future__ import annotations

import gzip
import json
import sqlite3
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

# The columns of the entity SpanTable of AgentScope Studio 1.x, as TypeORM creates them in SQLite.
STUDIO_SCHEMA = """
CREATE TABLE "span_table" (
  "id" varchar PRIMARY KEY NOT NULL, "traceId" varchar NOT NULL, "spanId" varchar NOT NULL, "traceState" varchar,
  "parentSpanId" varchar, "flags" integer, "name" varchar NOT NULL, "kind" integer NOT NULL,
  "startTimeUnixNano" varchar NOT NULL, "endTimeUnixNano" varchar NOT NULL, "attributes" json NOT NULL,
  "droppedAttributesCount" integer, "events" json, "droppedEventsCount" integer, "links" json,
  "droppedLinksCount" integer, "status" json NOT NULL, "resource" json NOT NULL, "scope" json NOT NULL,
  "statusCode" integer, "serviceName" varchar, "operationName" varchar, "instrumentationName" varchar,
  "instrumentationVersion" varchar, "model" varchar, "inputTokens" integer, "outputTokens" integer,
  "totalTokens" integer, "runId" varchar, "latencyNs" float NOT NULL)
"""


@pytest.fixture(scope="session")
def otlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of OTLP JSON with the spans that AgentScope's own tracing has sent."""
    requests: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        agent = Path(__file__).with_name("agentscope_agent.py")
        address = f"http://127.0.0.1:{server.server_port}/v1/traces"
        subprocess.run([sys.executable, str(agent), address], check=True, capture_output=True, timeout=300)
        server.shutdown()
    path = tmp_path_factory.mktemp("otlp") / "spans.jsonl"
    path.write_text("".join(json.dumps(_otlp_json(request)) + "\n" for request in requests))
    return path


def _otlp_json(request: bytes) -> dict[str, Any]:
    """Return the OTLP JSON of a request: protobuf's JSON with ids in hex."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    document: dict[str, Any] = MessageToDict(ExportTraceServiceRequest.FromString(request), use_integers_for_enums=True)
    for span in spans_of(document):
        for name in {"traceId", "spanId", "parentSpanId"} & span.keys():
            span[name] = b64decode(span[name]).hex()
    return document


def spans_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in document["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            yield from scope["spans"]


def studio_database(otlp: Path, path: Path, *, nested: bool) -> Path:
    """Store spans as Studio does: JSON in texts is parsed, and older releases nest attributes by their dots."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(STUDIO_SCHEMA)
        for line in otlp.read_text().splitlines():
            for span in spans_of(json.loads(line)):
                attributes: dict[str, Any] = {}
                for item in span["attributes"]:
                    (value,) = item["value"].values()
                    with suppress(ValueError):
                        value = json.loads(value) if isinstance(value, str) else value
                    *folders, last = item["key"].split(".") if nested else [item["key"]]
                    place = attributes
                    for folder in folders:
                        place = place.setdefault(folder, {})
                    place[last] = value
                row = {
                    "id": span["spanId"],
                    "traceId": span["traceId"],
                    "spanId": span["spanId"],
                    "parentSpanId": span.get("parentSpanId"),
                    "name": span["name"],
                    "kind": 1,
                    "startTimeUnixNano": span["startTimeUnixNano"],
                    "endTimeUnixNano": span["endTimeUnixNano"],
                    "attributes": json.dumps(attributes),
                    "events": "[]",
                    "status": "{}",
                    "resource": "{}",
                    "scope": "{}",
                    "latencyNs": 1.0,
                }
                names, marks = ", ".join(f'"{name}"' for name in row), ", ".join("?" * len(row))
                database.execute(f"INSERT INTO span_table ({names}) VALUES ({marks})", list(row.values()))
    return path
