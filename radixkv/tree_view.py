"""`radixkv tree`: a running server's cached tree in the terminal."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from rich.markup import escape
from rich.tree import Tree

from radixkv.errors import RadixKVError

__all__ = ["fetch_tree", "render_tree"]

TIMEOUT_S = 30.0
MAX_TEXT = 60


def fetch_tree(
    url: str,
    *,
    depth: int = 4,
    breadth: int = 10,
    namespace: str | None = None,
    api_key: str | None = None,
) -> dict[str, Any]:
    """Return the answer of a server's `/admin/cache/tree`.

    Raises:
        RadixKVError: the server can't be reached, or refuses; the message is for the user.
    """
    query = {"depth": str(depth), "breadth": str(breadth)}
    if namespace is not None:
        query["namespace"] = namespace
    address = f"{url.rstrip('/')}/admin/cache/tree?{urllib.parse.urlencode(query)}"
    if not address.startswith(("http://", "https://")):
        raise RadixKVError(f"--url must begin with http:// or https://, got {url!r}")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            report: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise RadixKVError(f"{url} answers {error.code}: {_reason(error)}") from None
    except (OSError, ValueError) as error:
        raise RadixKVError(f"{url} can't be read: {error}") from None
    return report


def render_tree(report: dict[str, Any]) -> Tree:
    """Return a tree report (see `radixkv.cache.inspection`) for `rich` to print."""
    blocks, nodes = report["blocks"], report["nodes"]
    top = Tree(
        f"[bold]{blocks:,} blocks[/bold] of {report['block_size']} tokens in {nodes:,} nodes",
        guide_style="dim",
    )
    stack: list[tuple[Tree, dict[str, Any]]] = []
    for entry in report["namespaces"]:
        name = entry["namespace"]
        shown = name if isinstance(name, str) else "/".join(name) or "default"
        branch = top.add(f"[bold cyan]{escape(shown)}[/bold cyan]  {entry['blocks']:,} blocks")
        stack.append((branch, entry))
    _note_elided(top, report["elided_namespaces"], "namespaces")
    while stack:
        branch, entry = stack.pop()
        stack.extend((branch.add(_label(child)), child) for child in entry["children"])
        _note_elided(branch, entry["elided_children"], "more")
    return top


def _label(node: dict[str, Any]) -> str:
    text = node["text"] if "text" in node else " ".join(map(str, node["token_ids"]))
    text = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
    facts = [f"{node['tokens']:,} tokens", f"{node['hits']:,} hits", _age(node["age_s"])]
    if node["locks"]:
        facts.append(f"[yellow]{node['locks']} locks[/yellow]")
    if node["pins"]:
        facts.append(f"[magenta]{node['pins']} pins[/magenta]")
    if node["sessions"]:
        facts.append(f"[cyan]{', '.join(name[:12] for name in node['sessions'][:3])}[/cyan]")
    if node["kind"] == "tail":
        facts.append("tail")
    # repr shows line breaks and control characters as escapes, so that no text moves the cursor.
    # Numbers first, so that it is the text that a narrow terminal cuts.
    return f"{' · '.join(facts)}  [green]{escape(repr(text))}[/green]"


def _note_elided(branch: Tree, count: int, what: str) -> None:
    if count:
        branch.add(f"[dim]… {count:,} {what}[/dim]")


def _age(seconds: float) -> str:
    for limit, unit in ((60.0, "s"), (60.0, "min"), (24.0, "h")):
        if seconds < limit:
            return f"{seconds:.0f} {unit} ago"
        seconds /= limit
    return f"{seconds:.0f} days ago"


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        message: str = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)
    return message
