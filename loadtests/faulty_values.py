"""Values that no field may have, as text, since some of them are no JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping

__all__ = [
    "BAD_BLOCKS",
    "BAD_INPUTS",
    "BAD_MESSAGES",
    "BAD_PROMPTS",
    "BODIES",
    "CHATTED",
    "COMPILED",
    "HUGE",
    "NUMBERS",
    "OPENAI_NUMBERS",
    "RAW",
    "SAMPLED",
    "SURROGATE",
    "TOOLS",
    "TYPES",
    "USER",
]

USER = {"role": "user", "content": "x"}
HUGE = "1" + "0" * 400
SURROGATE = '"\\ud800"'
DEEP = "[" * 2000 + "]" * 2000
DEEPER = "[" * 100_000

NUMBERS: Mapping[str, tuple[str, ...]] = {
    "temperature": ("NaN", "Infinity", "-Infinity", "1e999", "-1", "2.1", '"0.5"', "true", "[1]",
                    "{}", HUGE, "-0.1"),
    "top_p": ("0", "1.1", "NaN", '"1"', "-1", HUGE),
    "top_k": ("-2", "1.5", '"1"', HUGE, "1e300"),
    "min_p": ("2", "-0.1", "NaN"),
    "seed": ("18446744073709551616", "-9223372036854775809", "0.5", '"7"', HUGE),
    "repetition_penalty": ("0", "-1", "11", "NaN"),
    "min_tokens": ("-1", "1.5", '"1"'),
    "priority": ("1e10", "0.5", '"high"'),
    "timeout": ("0", "-1", "1e6", "NaN", '"5"'),
    "cache_priority": ("-1", "1001", "0.5"),
}  # fmt: skip
OPENAI_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "presence_penalty": ("10", "-2.1", "NaN", '"0"'),
    "frequency_penalty": ("10", "-2.1", "Infinity", "null]"),
    "cache_pin_ttl": ("0", "-1", "1e9", "NaN"),
    "stop_token_ids": ("[-1]", "[99999999]", "[1.5]", '"x"', f"[{HUGE}]",
                       json.dumps([1] * 1025)),
    "logit_bias": ('{"99999999":1}', '{"-1":1}', '{"x":1}', '{"5":1000}', '{"5":NaN}',
                   '{"5":"1"}', "[]", '{" 5":1}', '{"5":null}',
                   json.dumps({str(i): 1 for i in range(4097)})),
    "stop": ('""', '[""]', "[1]", "3", json.dumps(["s"] * 1000), json.dumps("x" * 2000),
             json.dumps(["x" * 2000])),
}  # fmt: skip
SAMPLED: Mapping[str, tuple[str, ...]] = {
    "n": ("0", "-1", "1000", "17", "1.5", '"1"', HUGE),
    "best_of": ("0", "17"),
    "beam_width": ("2", "0"),
    "length_penalty": ("1", "99"),
    "early_stopping": ("true", '"sometimes"'),
    "max_tokens": ("0", "-1", "1.5", '"9"', HUGE),
    "stream": ('"yes"', "1", "[]"),
    "stream_options": ("3", '{"include_usage":3}', '{"include_usage":true}'),
    "prompt_logprobs": ("1",),
    "response_format": ('{"type":"xml"}', "{}", '{"type":"json_schema"}', "[]", '"json"',
                        '{"type":"json_schema","json_schema":{"schema":3}}',
                        '{"type":"json_schema","json_schema":{"name":3,"schema":{}}}'),
    "structured_outputs": ("3", '{"json":3}', '{"choice":[]}', '{"choice":[""]}', '{"regex":3}',
                           '{"nothing":1}', '{"json":"{"}'),
    "guided_json": ("3", '"{"'),
    "guided_regex": ("3", '""'),
    "guided_choice": ("3", "[]", "[1]"),
    "guided_grammar": ("3", '""'),
}  # fmt: skip
COMPILED: Mapping[str, tuple[str, ...]] = {
    "response_format": ('{"type":"json_schema","json_schema":{"schema":{"type":"nothing"}}}',
                        '{"type":"json_schema","json_schema":{"schema":{"$ref":"#/nowhere"}}}'),
    "guided_regex": ('"("', '"a{9"', '"(?=a)"'),
    "guided_grammar": ('"start: nothing"', '"start: /(/"'),
}  # fmt: skip
TOOLS = ("[{}]", '[{"type":"function"}]', '[{"type":"function","function":{}}]', '"x"', "[3]",
         '{"a":1}', '[{"type":"web_search"}]',
         '[{"type":"function","function":{"name":"f","parameters":3}}]',
         '[{"type":"function","function":{"name":""}}]')  # fmt: skip
CHATTED: Mapping[str, tuple[str, ...]] = {
    "max_completion_tokens": ("0", "-1", '"9"'),
    "top_logprobs": ("21", "-1", "5", "1.5"),
    "logprobs": ("3", '"yes"'),
    "tool_choice": ('"sometimes"', '"required"', "3", '{"type":"function"}',
                    '{"type":"function","function":{"name":"nothing"}}'),
    "functions": ('[{"name":"f"}]',),
    "audio": ('{"voice":"x"}',),
    "modalities": ('["audio"]', "3", "[1]"),
}  # fmt: skip
BAD_MESSAGES = (
    ("messages", "[]"), ("messages", '"x"'), ("messages", "{}"), ("messages", "[3]"),
    ("messages[0].role", "[{}]"), ("messages[0].role", '[{"role":"banana","content":"x"}]'),
    ("messages[0].content", '[{"role":"user"}]'),
    ("messages[0].content", '[{"role":"user","content":3}]'),
    ("messages[0].content", '[{"role":"user","content":[3]}]'),
    ("messages[0].content[0].type",
     '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]'),
    ("messages[0].content[0].text", '[{"role":"user","content":[{"type":"text"}]}]'),
    ("messages[0].content[0].type", '[{"role":"user","content":[{"text":"x"}]}]'),
    ("messages[0].tool_calls",
     '[{"role":"user","content":"x","tool_calls":[{"function":{"name":"f"}}]}]'),
    ("messages[0].tool_calls", '[{"role":"assistant","tool_calls":[{}]}]'),
    ("messages[0].tool_calls", '[{"role":"assistant","tool_calls":3}]'),
    ("messages[0].name", json.dumps([{**USER, "name": "x" * 300}])),
    ("messages", json.dumps([USER] * 10_001)),
)  # fmt: skip
BAD_PROMPTS = ('""', "[]", "null", "{}", "3", "[-1]", "[99999999]", "[1.5]", "[[]]", '["a",1]',
               '[1,"a"]', '[[1],"a"]', "[null]", "[[1],[-1]]", f"[{HUGE}]", '["",""]', "[true]",
               json.dumps([[1]] * 129))  # fmt: skip
BAD_BLOCKS = (
    '[{"role":"user","content":[{"type":"image"}]}]', '[{"role":"user","content":3}]', "[]", "[3]",
    '"x"', '[{"role":"tool","content":"x"}]', '[{"role":"user","content":[{"type":"text"}]}]',
    '[{"role":"user","content":[{"type":"tool_result"}]}]',
    '[{"role":"assistant","content":[{"type":"tool_use","id":"a"}]}]',
    '[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":3}]}]',
    '[{"role":"user","content":[{"type":"text","text":"x","cache_control":{"type":"x"}}]}]',
    '[{"role":"user","content":[{"type":"document"}]}]', '[{"content":"x"}]', '[{"role":"user"}]',
)  # fmt: skip
BAD_INPUTS = ("[]", "3", "[3]", "[{}]", '[{"type":"nothing"}]', '[{"type":"function_call"}]',
              '[{"type":"function_call_output","output":"x"}]',
              '[{"role":"banana","content":"x"}]', '[{"role":"user","content":3}]',
              '[{"role":"user","content":[{"type":"input_image"}]}]')  # fmt: skip
# For every route that reads a body, whatever its fields.
BODIES: tuple[tuple[str, bytes], ...] = (
    ("syntax", b'{"model":"m", x}'), ("syntax", b"{"), ("syntax", b"nul"), ("syntax", b'{"a":1}}'),
    ("syntax", b"'a'"), ("syntax", b'{"a":01}'), ("syntax", b'{"a":1,}'), ("syntax", b"\x00"),
    ("not an object", b"[]"), ("not an object", b"null"), ("not an object", b"3"),
    ("not an object", b'"x"'), ("not an object", b"true"),
    ("not text", b'{"a":"\xff"}'), ("not text", b"\xff\xfe{\x00}\x00"),
    ("not text", b'{"model":"\xed\xa0\x80"}'), ("half a character", b'{"model":"\\ud800"}'),
    ("nesting", DEEPER.encode()), ("nesting", b'{"model":' + DEEPER.encode()),
    ("nesting", b'{"x":' + DEEP.encode() + b"}"),
    ("nesting", b'{"x":' + b'{"a":' * 200 + b"1" + b"}" * 201),
    ("names twice", b'{"model":"a","model":"b"}'), ("names twice", b'{"x":{"a":1,"a":2}}'),
    ("not a number", b'{"x":NaN}'), ("not a number", b'{"x":-Infinity}'),
)  # fmt: skip
TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
         "application/json; charset=utf-16", "application/octet-stream", "json")  # fmt: skip
RAW = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"G\x00T / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
)  # fmt: skip
