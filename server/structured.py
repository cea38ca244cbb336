"""The fields that say what an answer must look like: `response_format`, and vLLM's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from radixkv.errors import RequestRejectedError
from radixkv.request import GrammarSpec, SamplingParams
from radixkv.server.errors import ApiError, api_error_from
from radixkv.server.protocol import SamplingFields

if TYPE_CHECKING:
    from radixkv.engine import AsyncEngine
    from radixkv.engine.grammar import Grammar

__all__ = ["compile_grammar", "structured_spec"]

ANY_OBJECT = {"type": "object"}
FORMATS = ("text", "json_object", "json_schema")
# Of `structured_outputs`; guided_* are the older names of the first four.
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


def structured_spec(body: SamplingFields) -> GrammarSpec | None:
    """Return what the answer must look like, None if anything will do.

    Raises:
        ApiError: 400; `param` names the field.
    """
    specs = [_from_response_format(body.response_format)]
    specs += [_constraint(f"guided_{k}", k, getattr(body, f"guided_{k}")) for k in CONSTRAINTS[:4]]
    specs += _from_structured_outputs(body.structured_outputs)
    given = [spec for spec in specs if spec is not None]
    if len(given) > 1:
        first, second = given[0].param, given[1].param
        raise _refuse(second, f"{second} can't be combined with {first}")
    return given[0] if given else None


async def compile_grammar(engine: AsyncEngine, params: SamplingParams) -> Grammar | None:
    """Return the compiled grammar of a request that has one.

    Raises:
        ApiError: 400 if it can't be compiled; `param` names the field.
    """
    if params.grammar is None:
        return None
    try:
        return await engine.compile_grammar(params.grammar)
    except RequestRejectedError as error:
        raise api_error_from(error) from error


def _from_response_format(given: dict[str, Any] | None) -> GrammarSpec | None:
    if given is None:
        return None
    field, kind = "response_format", given.get("type")
    if kind not in FORMATS:
        shown = repr(kind)[:64]
        raise _refuse(field, f"{field}.type must be one of {', '.join(FORMATS)}, got {shown}")
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema_spec(field, ANY_OBJECT)
    wrapper = given.get("json_schema")
    if not isinstance(wrapper, dict) or wrapper.get("schema") is None:
        raise _refuse(field, f"{field}.json_schema must be an object that has a schema")
    if not isinstance(wrapper.get("name", ""), str):
        raise _refuse(field, f"{field}.json_schema.name must be a text")
    # Not strict would mean that the schema is a hint; it is held to all the same.
    if not isinstance(wrapper.get("strict"), bool | None):
        raise _refuse(field, f"{field}.json_schema.strict must be true or false")
    schema = wrapper["schema"]
    if not isinstance(schema, dict | bool):
        raise _refuse(field, f"{field}.json_schema.schema must be an object")
    return _schema_spec(field, schema)


def _from_structured_outputs(given: Any) -> list[GrammarSpec | None]:
    if given is None:
        return []
    field = "structured_outputs"
    if not isinstance(given, dict):
        raise _refuse(field, f"{field} must be an object")
    for name, value in given.items():
        if name not in CONSTRAINTS and value not in (None, False):
            raise _refuse(field, f"{field}: {name[:64]!r} is not supported")
    return [_constraint(f"{field}.{name}", name, given.get(name)) for name in CONSTRAINTS]


def _constraint(field: str, name: str, value: Any) -> GrammarSpec | None:
    if value is None:
        return None
    if name == "json_object":
        if not isinstance(value, bool):
            raise _refuse(field, f"{field} must be true or false")
        return _schema_spec(field, ANY_OBJECT) if value else None
    if name == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise _refuse(field, f"{field} is not valid JSON") from None
        if not isinstance(value, dict | bool):
            raise _refuse(field, f"{field} must be a JSON schema")
        return _schema_spec(field, value)
    if name == "choice":
        if not isinstance(value, list):
            raise _refuse(field, f"{field} must be a list of texts")
        return _spec("choice", json.dumps(value), field)
    if not isinstance(value, str):
        raise _refuse(field, f"{field} must be a text")
    return _spec("regex" if name == "regex" else "grammar", value, field)


def _schema_spec(field: str, schema: dict[str, Any] | bool) -> GrammarSpec:
    try:
        # Characters as they are: escaped ones would count several times.
        text = json.dumps(schema, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise _refuse(field, f"{field}: the schema is nested too deeply") from None
    return _spec("json_schema", text, field)


def _spec(
    kind: Literal["json_schema", "regex", "choice", "grammar"], text: str, field: str
) -> GrammarSpec:
    try:
        return GrammarSpec(kind, text, field)
    except RequestRejectedError as error:
        raise api_error_from(error) from error


def _refuse(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
