"""An MCP server with a counter: `python mcp_server.py` speaks over stdio, `python mcp_server.py PORT` over HTTP."""

import os
import sys

from mcp.server.fastmcp import FastMCP

server = FastMCP("counter", port=int(sys.argv[1]) if len(sys.argv) > 1 else 0, log_level="ERROR")
state = {"count": 0, "target": 0}


@server.tool()
def start(target: int, seed: int) -> str:
    """Start a task."""
    state.update(count=0, target=target)
    return f"target {target}, seed {seed}"


@server.tool()
def press(times: int = 1) -> str:
    """Press the button."""
    state["count"] += times
    return f"count {state['count']}"


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise RuntimeError("the button is stuck")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def score(answer: str) -> float:
    """Score the count and the answer."""
    return 0.5 * (state["count"] == state["target"]) + 0.5 * (answer == str(state["target"]))


@server.tool()
def pid() -> int:
    """Return the id of the server's process."""
    return os.getpid()


@server.tool()
def word() -> str:
    """Return no number."""
    return "high"


if __name__ == "__main__":
    server.run("streamable-http" if len(sys.argv) > 1 else "stdio")
