"""The command `radixkv chat`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from radixkv.errors import RadixKVError

__all__ = ["chat"]


def chat(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="RADIXKV_API_KEY", help="The server's key.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Fail unless it serves this model.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of new sessions.")] = None,
    session: Annotated[str | None, typer.Option(help="Go on with this session.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of every answer.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of every answer, at most.")] = None,
) -> None:
    """Talk to a running server; it shows what each answer took. Reads lines of a pipe, too."""
    # Imported late, for the commands that don't need it.
    from radixkv.chat import Chat, ChatSettings
    from radixkv.chat_client import ChatClient, ServerGoneError
    from radixkv.chat_input import MessageReader, history_file
    from radixkv.chat_view import ChatView

    settings = ChatSettings(
        model=model,
        system=system,
        session=session,
        temperature=temperature,
        max_tokens=max_tokens,
    )
    try:
        client = ChatClient(url, api_key)
        reader = MessageReader(history=history_file())
        code = Chat(client, reader, ChatView(), settings).run()
    except RadixKVError as error:
        hint = "; start one with: radixkv serve" if isinstance(error, ServerGoneError) else ""
        print(f"radixkv: error: {error}{hint}", file=sys.stderr)
        raise typer.Exit(2) from None
    raise typer.Exit(code)
