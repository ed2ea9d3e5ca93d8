"""Responses of the API."""

from __future__ import annotations

from fastapi import Response

from astuner.run_record.files import dump_json
from astuner.run_record.jsonable import to_jsonable


def json_response(value: object, status: int = 200) -> Response:
    """Return a response with a value as JSON."""
    try:
        data = dump_json(value)
    except (TypeError, ValueError, RecursionError):
        # The record holds values that JSON cannot represent, such as NaN or a date of a YAML file.
        data = dump_json(to_jsonable(value, lambda text: text))
    return Response(data, status, media_type="application/json")
