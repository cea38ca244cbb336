"""Step times of a live server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from radixkv.errors import ConfigError
from radixkv.simulate.step_time import MeasuredStepTime

__all__ = ["Calibration", "calibrate"]

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a server reports of itself.

    Attributes:
        step_time: as it has learned it.
        block_size: tokens.
        kv_bytes: of all its blocks.
        bytes_per_token: of KV.
        max_batch_tokens: tokens that its steps compute at most; None if it doesn't tell.
        max_seqs: answers that it runs at once at most; None as above.
    """

    step_time: MeasuredStepTime
    block_size: int
    kv_bytes: int
    bytes_per_token: int
    max_batch_tokens: int | None = None
    max_seqs: int | None = None


def calibrate(url: str, api_key: str | None = None) -> Calibration:
    """Ask a RadixKV server's `/admin/cache`.

    Raises:
        ConfigError: it can't be reached, refuses, or hasn't run enough steps yet to know.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--calibrate must begin with http:// or https://, got {url!r}")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/admin/cache", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return parse_report(json.load(response), url)
    except urllib.error.HTTPError as error:
        error.close()
        raise ConfigError(f"--calibrate: {url} answers {error.code}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--calibrate: {url} can't be read: {error}") from None


def parse_report(report: Any, url: str) -> Calibration:
    """Return what the body of `/admin/cache` says.

    Raises:
        ConfigError: it isn't one, or lacks step times.
    """
    try:
        cost = report["scheduling"]["step_cost_s"]
        block_size = int(report["block_size"])
        kv_bytes = int(report["blocks"]["total"]["bytes"])
        bytes_per_token = int(report["bytes_per_block"]) // block_size
        if cost is not None:
            names = ("step", "token", "attended_pair", "sample")
            # The coefficients are those of usual steps; what rare long ones add is in the ratio.
            ratio = float(report["scheduling"].get("step_cost_mean_ratio", 1.0))
            step_time = MeasuredStepTime(*(ratio * float(cost[name]) for name in names))
            limits = report["scheduling"].get("limits", {})
            return Calibration(
                step_time,
                block_size,
                kv_bytes,
                bytes_per_token,
                limits.get("max_num_batched_tokens"),
                limits.get("max_num_seqs"),
            )
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(f"--calibrate: {url} is not a RadixKV server's report") from None
    raise ConfigError(
        f"--calibrate: {url} has not run enough steps yet; send it some traffic first"
    )
