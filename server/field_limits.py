"""How large the fields of requests may be, as types, so that the API's schema tells it, too."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

__all__ = [
    "MAX_CALLS",
    "MAX_MESSAGES",
    "MAX_PARTS",
    "BestOf",
    "CachePriority",
    "FrequencyPenalty",
    "LengthPenalty",
    "LogitBias",
    "Logprobs",
    "MaxTokens",
    "Metadata",
    "MinP",
    "MinTokens",
    "Name",
    "Number",
    "Objects",
    "PinTtl",
    "Priority",
    "RepetitionPenalty",
    "Seed",
    "Stop",
    "StopTexts",
    "StopTokenIds",
    "Strings",
    "Temperature",
    "Timeout",
    "Tools",
    "TopK",
    "TopP",
]

Number = int | float

MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
MAX_CALLS = 256
# Beyond it, not every whole number has a double of its own.
MAX_WHOLE = 2**53

# Bounds are set for either kind of number, as they can't be for both at once. A whole number over 0
# would be told to be at least 1 where a half will do: where it is 0, `SamplingParams` says so.
Temperature = Annotated[int, Meta(ge=0, le=2)] | Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[int, Meta(ge=0, le=1)] | Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_WHOLE)] | Annotated[float, Meta(ge=-1, le=MAX_WHOLE)]
MinP = Annotated[int, Meta(ge=0, le=1)] | Annotated[float, Meta(ge=0, le=1)]
Seed = (
    Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    | Annotated[float, Meta(ge=-(2**63), le=2**63 - 1)]
)
RepetitionPenalty = Annotated[int, Meta(ge=0, le=10)] | Annotated[float, Meta(gt=0, le=10)]
FrequencyPenalty = Annotated[int, Meta(ge=-2, le=2)] | Annotated[float, Meta(ge=-2, le=2)]
LengthPenalty = Annotated[int, Meta(ge=-10, le=10)] | Annotated[float, Meta(ge=-10, le=10)]
MaxTokens = Annotated[int, Meta(ge=1, le=MAX_WHOLE)] | Annotated[float, Meta(ge=1, le=MAX_WHOLE)]
MinTokens = Annotated[int, Meta(ge=0, le=MAX_WHOLE)] | Annotated[float, Meta(ge=0, le=MAX_WHOLE)]
Logprobs = Annotated[int, Meta(ge=0, le=20)] | Annotated[float, Meta(ge=0, le=20)]
BestOf = Annotated[int, Meta(ge=1, le=16)] | Annotated[float, Meta(ge=1, le=16)]
Priority = (
    Annotated[int, Meta(ge=-(10**9), le=10**9)] | Annotated[float, Meta(ge=-(10**9), le=10**9)]
)
Timeout = Annotated[int, Meta(ge=0, le=86_400)] | Annotated[float, Meta(gt=0, le=86_400)]
CachePriority = Annotated[int, Meta(ge=0, le=1_000)] | Annotated[float, Meta(ge=0, le=1_000)]
PinTtl = Annotated[int, Meta(ge=0, le=604_800)] | Annotated[float, Meta(gt=0, le=604_800)]

Name = Annotated[str, Meta(max_length=256)]
StopText = Annotated[str, Meta(max_length=1_024)]
StopTexts = Annotated[list[StopText], Meta(max_length=64)]
Stop = StopText | StopTexts
StopTokenIds = Annotated[list[int], Meta(max_length=1_024)]
# The biases themselves are judged with the vocabulary at hand.
LogitBias = Annotated[dict[str, float], Meta(max_length=4_096)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
Strings = Annotated[list[Name], Meta(max_length=64)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=512)]
Objects = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
