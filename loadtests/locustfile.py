"""Agents for Locust: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000`.

With `--headless --users 20 --run-time 2m --html report.html --slo ttft_p95=2s` it runs without the
web page, and the exit status is 1 if a service level is missed. docs/load.md has everything.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import flask
import gevent
from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner
from rich.console import Console

from loadtests.agents import KINDS, AgentOptions, parse_mix, recordings
from loadtests.agents_shapes import SHAPES
from loadtests.locust_report import (
    add_section,
    figures,
    figures_table,
    html_section,
    status_line,
)
from loadtests.locust_stats import LoadStats
from loadtests.locust_users import (
    AgentShape,
    ChatAgent,
    DocumentAgent,
    ForkAgent,
    SamplerAgent,
    SessionAgent,
    ToolAgent,
)
from loadtests.slo import Slo, Verdict, check_slos, slo_table

# Locust finds users and shapes by their names here.
__all__ = [
    "AgentShape",
    "ChatAgent",
    "DocumentAgent",
    "ForkAgent",
    "SamplerAgent",
    "SessionAgent",
    "ToolAgent",
]

STATUS_S = 10.0
PLAIN_WIDTH = 160  # of tables that go to a file
log = logging.getLogger("loadtests")


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_options(parser: LocustArgumentParser) -> None:
    """Add what agents need to Locust's options and to its web page."""
    add = parser.add_argument
    mix = ",".join(f"{name}={kind.weight}" for name, kind in KINDS.items())
    add(
        "--mix",
        default=mix,
        include_in_web_ui=False,
        help="Kinds of agents by weight; those not named stay away.",
    )
    add("--load-shape", choices=SHAPES, default="steady", help="Agents over time.")
    add("--model", default="", help="The model's name. Default: the first that the server lists.")
    add("--api-key", default=None, env_var="RADIXKV_API_KEY", include_in_web_ui=False)
    add("--slo", action="append", default=[], include_in_web_ui=False, help="Repeatable.")
    add("--figures", default=None, include_in_web_ui=False, help="Write all figures there: JSON.")
    add("--silence-limit", type=float, default=600.0, help="Seconds a server may be silent.")
    add("--seed", default="0", help="Of what agents say.")
    for option in fields(AgentOptions):
        name = f"--{option.name.removesuffix('_s').replace('_', '-')}"
        default: Any = option.default
        add(name, dest=option.name, type=type(default), default=default)


@events.init.add_listener  # type: ignore[untyped-decorator]
def prepare(environment: Environment, **_: Any) -> None:
    """Check the options, weigh the kinds, and connect everything that counts and reports."""
    options = environment.parsed_options
    stats = environment.agents = LoadStats()
    is_worker = isinstance(environment.runner, WorkerRunner)
    try:
        slos = [Slo.parse(text) for text in options.slo or []]
        weights = parse_mix(options.mix)
        if "tools" in weights and not isinstance(environment.runner, MasterRunner):
            recordings()
    except ValueError as error:
        sys.exit(f"error: {error}")
    except FileNotFoundError as error:
        sys.exit(f"error: {error.filename} is missing: set RADIXKV_DATA, or --mix without tools")
    for user_class in environment.user_classes:
        user_class.weight = weights.get(user_class.kind, 0)
    environment.user_classes = [c for c in environment.user_classes if c.weight]

    def verdicts() -> list[Verdict]:
        return check_slos(slos, stats.figure)

    environment.events.test_start.add_listener(lambda **_: stats.clear())
    if is_worker:
        environment.events.report_to_master.add_listener(
            lambda client_id, data: data.update(agents=stats.drain())
        )
        return
    environment.events.worker_report.add_listener(
        lambda client_id, data: stats.merge(data["agents"], environment.runner.user_count)
    )
    environment.events.quitting.add_listener(lambda **_: _finish(environment, verdicts()))
    if environment.web_ui is not None:
        _extend_web(environment.web_ui.app, lambda: html_section(stats, verdicts()))
    else:
        gevent.spawn(_tell, environment)


def _finish(environment: Environment, verdicts: Sequence[Verdict]) -> None:
    """Print the figures, complete the report, and set the exit status."""
    options, stats = environment.parsed_options, environment.agents
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(figures_table(stats))
    if verdicts:
        console.print(slo_table(verdicts))
        environment.process_exit_code = 0 if all(v.is_met for v in verdicts) else 1
    elif not stats.kinds:
        log.error("no request has ended")
        environment.process_exit_code = 1
    if options.html_file and Path(options.html_file).exists():
        path = Path(options.html_file)
        section = html_section(stats, verdicts)
        path.write_text(add_section(path.read_text(encoding="utf-8"), section), encoding="utf-8")
    if options.figures:
        summary = {
            "seconds": stats.seconds,
            "all": figures(stats.total(), stats.seconds),
            "kinds": {kind: figures(t, stats.seconds) for kind, t in stats.kinds.items()},
            "slos": [{"slo": v.slo.text, "value": v.value, "met": v.is_met} for v in verdicts],
        }
        Path(options.figures).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _tell(environment: Environment) -> None:
    """Say every now and then how it goes."""
    while True:
        gevent.sleep(STATUS_S)
        if environment.agents.kinds:
            log.info(status_line(environment.agents, environment.runner.user_count))


def _extend_web(app: flask.Flask, section: Any) -> None:
    """Add a page `/agents`, and the same section to the report that the web page offers."""

    def agents() -> str:
        head = '<meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>Agents</title>'
        return f"<!DOCTYPE html><html><head>{head}</head><body>{section()}</body></html>"

    def complete(response: flask.Response) -> flask.Response:
        if flask.request.path == "/stats/report" and response.status_code == 200:
            response.direct_passthrough = False
            response.set_data(add_section(response.get_data(as_text=True), section()))
        return response

    app.add_url_rule("/agents", view_func=agents)
    app.after_request(complete)
