from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.simulate.calibration import calibrate

REPORT: dict[str, Any] = {
    "block_size": 16,
    "bytes_per_block": 368_640,
    "blocks": {"total": {"blocks": 100, "bytes": 36_864_000}},
    "scheduling": {
        "step_cost_s": {"step": 0.01, "token": 1e-4, "attended_pair": 1e-7, "sample": 2e-4}
    },
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_known = self.path == "/admin/cache"
        key = self.server.key  # type: ignore[attr-defined]
        is_allowed = not key or self.headers["Authorization"] == f"Bearer {key}"
        self.send_response(200 if is_known and is_allowed else 401)
        self.end_headers()
        self.wfile.write(self.server.body)  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    httpd: Any = HTTPServer(("127.0.0.1", 0), Handler)
    httpd.body, httpd.key = json.dumps(REPORT).encode(), ""
    httpd.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield httpd
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_calibrate_takes_the_coefficients_and_the_memory(server: Any) -> None:
    result = calibrate(server.url)
    assert result.step_time.seconds(10, 100, 0, 2) == pytest.approx(0.01 + 1e-3 + 1e-5 + 4e-4)
    assert (result.block_size, result.kv_bytes) == (16, 36_864_000)
    assert result.bytes_per_token == 23_040


def test_calibrate_sends_the_key(server: Any) -> None:
    server.key = "secret"
    assert calibrate(server.url + "/", "secret").block_size == 16
    with pytest.raises(ConfigError, match="answers 401"):
        calibrate(server.url)


def test_a_server_that_knows_nothing_yet_is_refused(server: Any) -> None:
    server.body = json.dumps({**REPORT, "scheduling": {"step_cost_s": None}}).encode()
    with pytest.raises(ConfigError, match="not run enough steps"):
        calibrate(server.url)


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"scheduling": {"step_cost_s": {}}}'])
def test_a_report_of_something_else_is_refused(server: Any, body: bytes) -> None:
    server.body = body
    with pytest.raises(ConfigError, match="not a RadixKV server"):
        calibrate(server.url)


def test_what_is_no_url_or_cannot_be_reached_is_refused() -> None:
    with pytest.raises(ConfigError, match="must begin with http"):
        calibrate("localhost:8000")
    with pytest.raises(ConfigError, match="can't be read"):
        calibrate("http://127.0.0.1:1")


def test_calibrate_takes_the_limits_of_a_step_where_they_are_told(server: Any) -> None:
    assert calibrate(server.url).max_batch_tokens is None
    limits = {"max_num_batched_tokens": 256, "max_num_seqs": 64}
    scheduling = {**REPORT["scheduling"], "limits": limits}
    server.body = json.dumps({**REPORT, "scheduling": scheduling}).encode()
    result = calibrate(server.url)
    assert (result.max_batch_tokens, result.max_seqs) == (256, 64)


def test_calibrate_takes_the_mean_of_steps_where_it_is_told(server: Any) -> None:
    usual = calibrate(server.url).step_time.seconds(10, 100, 0, 2)
    scheduling = {**REPORT["scheduling"], "step_cost_mean_ratio": 1.5}
    server.body = json.dumps({**REPORT, "scheduling": scheduling}).encode()
    mean = calibrate(server.url).step_time.seconds(10, 100, 0, 2)
    assert mean == pytest.approx(1.5 * usual)
