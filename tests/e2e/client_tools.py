"""Two tools that clients' agents call, in every API's form, and a record of their calls."""

from __future__ import annotations

from typing import Any, Literal

from jsonschema import Draft202012Validator
from pydantic import BaseModel

MODEL = "SmolLM2-135M-Instruct"
ASK = "How warm is it in Lima, and what is 2 + 3?"
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Lima", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {k: {"type": "integer", "minimum": 0, "maximum": 99} for k in "ab"},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
FUNCTIONS: list[Any] = [
    {"name": name, "description": f"Call it to {name}.", "parameters": schema}
    for name, schema in SCHEMAS.items()
]
CHAT_TOOLS: list[Any] = [{"type": "function", "function": f} for f in FUNCTIONS]
RESPONSES_TOOLS: list[Any] = [{"type": "function", "strict": True, **f} for f in FUNCTIONS]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
    for f in FUNCTIONS
]


class Report(BaseModel):
    """What a report says."""

    city: Literal["Lima", "Paris"]
    sunny: bool


class Tools:
    """Runs the tools; `called` has the names in order."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def run(self, name: str, arguments: Any) -> str:
        """Return a tool's answer to arguments that are valid against its schema."""
        Draft202012Validator(SCHEMAS[name]).validate(arguments)
        self.called.append(name)
        if name == "add":
            return str(arguments["a"] + arguments["b"])
        return f"It is 21 degrees in {arguments['city']}."
