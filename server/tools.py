"""The tools of a request: which may be called, and how the answer must look if one has to be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from radixkv.errors import RequestRejectedError
from radixkv.request import GrammarSpec, SamplingParams
from radixkv.server.errors import ApiError, api_error_from
from radixkv.server.tool_parsers import ToolFamily, ToolParser

if TYPE_CHECKING:
    from radixkv.engine import AsyncEngine

__all__ = ["ToolChoice", "ToolPlan", "named_choice", "plan_tools"]

ToolChoice = Literal["none", "auto", "required"]

# Of one answer that has to call; a model that doesn't know when to stop would go on for ever.
MAX_FORCED_CALLS = 16
# What a schema says to people, which would only make grammars larger.
ANNOTATIONS = frozenset(
    {"$comment", "$schema", "default", "deprecated", "description", "examples", "title"}
)
SCHEMA_MAPS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
PLAIN_VALUES = frozenset({"const", "enum", "required"})
# As chat templates write JSON, so that a call is rendered later just as it was generated.
JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
# Keywords that may allow properties beside those in `properties`.
OPEN_KEYWORDS = frozenset(
    {"$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties"}
)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request's answers may do with its tools.

    Attributes:
        family: the syntax of calls.
        tools: in the template's form; None if there are none.
        choice: "none" reads no calls in the answer, "required" allows nothing else.
        allowed: the functions that may be called, where not all may.
        parallel: whether an answer may have several calls.
    """

    family: ToolFamily
    tools: list[dict[str, Any]] | None = None
    choice: ToolChoice = "auto"
    allowed: frozenset[str] | None = None
    parallel: bool = True

    @property
    def active(self) -> bool:
        """Whether an answer may have calls."""
        return bool(self.tools) and self.choice != "none"

    def parser(self) -> ToolParser | None:
        """Return what finds calls in one answer; None if it may have none."""
        if not self.active:
            return None
        names = self.allowed or [tool["function"]["name"] for tool in self.tools or ()]
        return ToolParser(
            self.family,
            names,
            max_calls=None if self.parallel else 1,
            only_named=self.allowed is not None,
        )

    def apply(self, params: SamplingParams, engine: AsyncEngine) -> SamplingParams:
        """Return `params` under which the engine's answers follow the plan.

        Raises:
            ApiError: 400, the plan can't be combined with the request's own grammar, or the tools
                are too large for one.
        """
        if not self.active:
            return params
        if any(_special_id(engine, marker) is not None for marker in self.family.begins):
            params = replace(params, skip_special_tokens=False)
        own = params.grammar
        try:
            return self._constrained(params, own, engine)
        except RecursionError:
            raise _refuse("tools", "tools: a schema is nested too deeply") from None

    def _constrained(
        self, params: SamplingParams, own: GrammarSpec | None, engine: AsyncEngine
    ) -> SamplingParams:
        if self.choice == "auto":
            if own is None or own.kind != "json_schema":
                return params
            # An answer that is no call must be what was asked for.
            return replace(params, grammar=self._spec(engine, answer=own.text))
        if own is not None and own.kind != "json_schema":
            raise _refuse("tool_choice", f"tool_choice can't be combined with {own.param}")
        return replace(params, grammar=self._spec(engine))

    def _spec(self, engine: AsyncEngine, answer: str | None = None) -> GrammarSpec:
        """Return the grammar of calls, or of calls and of an answer with a JSON schema."""
        family = self.family
        rules, names = [], []
        for i, tool in enumerate(self.tools or ()):
            function = tool["function"]
            if self.allowed is None or function["name"] in self.allowed:
                names.append(f"tool_{i}")
                rules += _call_rules(engine, family, function, i)
        begin, end = (_marker(engine, marks) for marks in (family.begins, family.ends))
        one, line_break = f"({' | '.join(names)})", _text("\n")
        between = _text(", " if family.array else family.separator) if family.separator else ""
        if family.ends:
            one = f"{begin} {line_break} {one} {line_break} {end}"
        elif family.name_end is not None:
            one = f"{begin} {one}"
        calls = f"one ({between} one)~0..{MAX_FORCED_CALLS - 1}" if self.parallel else "one"
        if family.array:
            calls = f"{begin} {_text('[')} {calls} {_text(']')}"
        lines = [f"calls: {calls}", f"one: {one}", *rules]
        if answer is None:
            lines.insert(0, "start: calls")
        else:
            schema = _styled(json.loads(answer))
            lines[:0] = ["start: calls | answer", f"answer: %json {_dump(schema)}"]
        try:
            return GrammarSpec("tools", "\n".join(lines) + "\n", "tools")
        except RequestRejectedError as error:
            raise api_error_from(error) from error


def plan_tools(
    family: ToolFamily,
    tools: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    parallel: bool | None,
) -> ToolPlan:
    """Return the plan of a request.

    Args:
        family: the model's.
        tools: as `template_tools` returns them.
        choice: OpenAI's `tool_choice` of chat completions.
        parallel: OpenAI's `parallel_tool_calls`.

    Raises:
        ApiError: 400; `param` names the field.
    """
    allowed = None
    names = _check_tools(tools or ())
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed_choice(choice)
    elif isinstance(choice, dict):
        allowed = frozenset({named_choice(choice)})
        choice, parallel = "required", False
    if choice not in (None, "none", "auto", "required"):
        raise _refuse(
            "tool_choice",
            "tool_choice must be 'none', 'auto', 'required' or a function, "
            f"got {str(choice)[:64]!r}",
        )
    if choice == "required" and not names:
        raise _refuse("tool_choice", "tool_choice wants a call, but there are no tools")
    for name in sorted(allowed or ()):
        if name not in names:
            raise _refuse("tool_choice", f"tool_choice names {name[:64]!r}, which is not in tools")
    return ToolPlan(family, tools, choice or "auto", allowed, parallel is not False)  # type: ignore[arg-type]


def named_choice(choice: dict[str, Any]) -> str:
    """Return the function that a `tool_choice` object names.

    Raises:
        ApiError: 400, it names none.
    """
    name = _function_name(choice)
    if name is None:
        raise _refuse(
            "tool_choice",
            'tool_choice, as an object, must be {"type": "function", "function": {"name": …}}',
        )
    return name


def _allowed_choice(choice: dict[str, Any]) -> tuple[str, frozenset[str]]:
    """Return the mode and the functions of a `tool_choice` of type "allowed_tools".

    Raises:
        ApiError: 400, it is malformed, or allows none.
    """
    given = choice.get("allowed_tools")
    given = given if isinstance(given, dict) else {}
    mode, tools = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required"):
        raise _refuse(
            "tool_choice.allowed_tools.mode",
            "tool_choice.allowed_tools.mode must be 'auto' or 'required'",
        )
    names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else []
    if not names or None in names:
        raise _refuse(
            "tool_choice.allowed_tools.tools",
            "tool_choice.allowed_tools.tools must be a list of functions, and not empty",
        )
    return mode, frozenset(name for name in names if name is not None)


def _function_name(value: Any) -> str | None:
    """Return the name in `{"type": "function", "function": {"name": …}}`; None if it is no such."""
    if not isinstance(value, dict) or value.get("type") != "function":
        return None
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _check_tools(tools: Sequence[dict[str, Any]]) -> set[str]:
    """Return the names of checked tools."""
    names: set[str] = set()
    for i, tool in enumerate(tools):
        function = tool["function"]
        if function["name"] in names:
            raise _refuse(f"tools[{i}].function.name", f"tools[{i}] has the name of another tool")
        names.add(function["name"])
        if not isinstance(function.get("parameters"), dict | None):
            where = f"tools[{i}].function.parameters"
            raise _refuse(where, f"{where} must be a JSON schema")
    return names


def _call_rules(
    engine: AsyncEngine, family: ToolFamily, function: dict[str, Any], index: int
) -> list[str]:
    """Return the rules of the calls of one function."""
    name, key = function["name"], family.arguments_key
    arguments = _arguments_schema(function.get("parameters"))
    if family.bare:
        # Where an answer in JSON may stand in the place of a call, both must be made of the same
        # terminals: the longest wins, and one that holds the braces would leave the other no start.
        call = {
            "type": "object",
            "properties": {"name": {"const": name}, key: _moved(arguments, f"#/properties/{key}")},
            "required": ["name", key],
            "additionalProperties": False,
        }
        return [f"tool_{index}: %json {_dump(_styled(call))}"]
    rule = f"arguments_{index}: %json {_dump(_styled(arguments))}"
    if family.name_end is not None:
        name_end = _marker(engine, (family.name_end,))
        return [f"tool_{index}: {_text(name)} {name_end} arguments_{index}", rule]
    head = _text(f'{{"name": {_dump(name)}, "{key}": ')
    return [f"tool_{index}: {head} arguments_{index} {_text('}')}", rule]


def _moved(schema: Any, place: str) -> Any:
    """Return a schema for use at `place` in a larger one, its references moved along."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key in SCHEMA_MAPS and isinstance(value, dict):
            moved[key] = {name: _moved(inner, place) for name, inner in value.items()}
        else:
            moved[key] = value if key in PLAIN_VALUES else _moved(value, place)
    return moved


def _arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a call's arguments: an object, without properties nobody declared."""
    schema: dict[str, Any] = _slim(parameters or {})
    schema.setdefault("type", "object")
    if not OPEN_KEYWORDS & schema.keys():
        schema["additionalProperties"] = False
    return schema


def _styled(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict):
        schema = {} if schema else {"not": {}}
    return {**schema, "x-guidance": JSON_STYLE}


def _slim(schema: Any) -> Any:
    """Return a schema without what only people read."""
    if isinstance(schema, list):
        return [_slim(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    slim: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMA_MAPS and isinstance(value, dict):
            slim[key] = {name: _slim(inner) for name, inner in value.items()}
        elif key in PLAIN_VALUES:
            slim[key] = value
        elif key not in ANNOTATIONS:
            slim[key] = _slim(value)
    return slim


def _marker(engine: AsyncEngine, markers: Sequence[str]) -> str:
    """Return the family's first marker as a grammar has it: a token of its own, or text."""
    if not markers:
        return ""
    token_id = _special_id(engine, markers[0])
    return _text(markers[0]) if token_id is None else f"<[{token_id}]>"


def _special_id(engine: AsyncEngine, marker: str) -> int | None:
    tokenizer = engine.tokenizer
    ids = tokenizer.encode(marker, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_token_ids else None


def _text(text: str) -> str:
    """Return a text in the grammar's notation, whose strings are JSON's."""
    return json.dumps(text, ensure_ascii=False)


def _dump(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise _refuse("tools", "tools: a schema is nested too deeply") from None


def _refuse(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
