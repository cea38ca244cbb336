"""What an answer must look like, as vLLM's `StructuredOutputsParams` says it."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.errors import RequestRejectedError
from radixkv.request import GrammarSpec

__all__ = ["StructuredOutputsParams"]

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """One constraint. Validated on construction.

    Attributes:
        json: a JSON schema, as a mapping or as JSON text.
        regex: an expression that the whole answer matches.
        choice: the answers to choose from.
        grammar: in Lark's notation or, with "::=", in GBNF.
        json_object: the answer is any JSON object.

    Raises:
        RequestRejectedError: it is malformed, or there isn't exactly one.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        self.spec()

    def spec(self) -> GrammarSpec:
        """Return it as the engine takes it."""
        specs = []
        if self.json is not None:
            specs.append(_schema(self.json))
        if self.json_object:
            specs.append(_schema(ANY_OBJECT, "json_object"))
        if self.regex is not None:
            specs.append(GrammarSpec("regex", self.regex, "regex"))
        if self.choice is not None:
            specs.append(GrammarSpec("choice", json_module.dumps(list(self.choice)), "choice"))
        if self.grammar is not None:
            specs.append(GrammarSpec("grammar", self.grammar, "grammar"))
        if len(specs) != 1:
            raise RequestRejectedError(
                f"structured outputs must have exactly one constraint, got {len(specs)}",
                param="structured_outputs",
            )
        return specs[0]


def _schema(schema: str | Mapping[str, Any], param: str = "json") -> GrammarSpec:
    try:
        value = json_module.loads(schema) if isinstance(schema, str) else dict(schema)
        # Characters as they are: escaped ones would count several times.
        text = json_module.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestRejectedError(f"{param} is not a JSON schema: {error}", param=param) from None
    return GrammarSpec("json_schema", text, param)
