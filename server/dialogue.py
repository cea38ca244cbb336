"""One answer to a conversation, whichever API asked: from messages to text, calls and usage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from radixkv.request import Namespace, RequestOutput, SamplingParams
from radixkv.server.errors import ApiError
from radixkv.server.generation import Answer, Generation
from radixkv.server.guards import use_of
from radixkv.server.history import ChatPrompt, encode_chat
from radixkv.server.messages import TemplateMessage, template_messages
from radixkv.server.protocol import FunctionCall, Message, ToolCall
from radixkv.server.state import REQUEST_ID, STATE, ServerState
from radixkv.server.streaming import run_to_end
from radixkv.server.structured import compile_grammar
from radixkv.server.tool_parsers import CallStart, TextPart, ToolEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixkv.server.tools import ToolPlan

__all__ = ["AnswerReader", "Dialogue"]


@dataclass(slots=True)
class Call:
    """One call of an answer."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class AnswerReader:
    """Reads one choice: what of it is content, and what are calls.

    Attributes:
        answer: the choice as the engine gives it.
        text: its content; all of it when there are no tools.
        calls: its calls so far.
    """

    def __init__(self, answer: Answer, plan: ToolPlan) -> None:
        self.answer = answer
        self.text: list[str] = []
        self.calls: list[Call] = []
        self._parser = plan.parser()

    def read(self, output: RequestOutput) -> list[ToolEvent]:
        """Return what an increment of the choice tells."""
        events: list[ToolEvent]
        if self._parser is None:
            events = [TextPart(output.text)] if output.text else []
        else:
            events = self._parser.push(output.text) if output.text else []
            if output.finish_reason is not None:
                events += self._parser.finish()
        for event in events:
            if isinstance(event, TextPart):
                self.text.append(event.text)
            elif isinstance(event, CallStart):
                self.calls.append(Call(event.id, event.name))
            else:
                self.calls[event.index].arguments.append(event.text)
        return events

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's reason: "tool_calls" for an answer that ended by itself and has calls."""
        reason = self.answer.finish_reason
        return "tool_calls" if reason == "stop" and self.calls else reason

    def content(self) -> str:
        """Return the content."""
        return "".join(self.text)

    def message(self) -> Message:
        """Return the choice as a client sends it back."""
        calls = [
            ToolCall(
                id=call.id,
                function=FunctionCall(name=call.name, arguments="".join(call.arguments)),
            )
            for call in self.calls
        ]
        return Message(role="assistant", content=self.content(), tool_calls=calls or None)


class Dialogue:
    """A conversation being answered; iterate it once, and always `close()` it.

    Iteration yields (choice, increment, what it tells). Each choice that ends by itself is
    remembered, so that its exact ids are used when it comes back as history.
    """

    def __init__(
        self, state: ServerState, generation: Generation, prompt: ChatPrompt, plan: ToolPlan,
        params: SamplingParams,
    ) -> None:  # fmt: skip
        self.generation = generation
        self.prompt = prompt
        self.readers = [AnswerReader(answer, plan) for answer in generation.answers]
        self._state = state
        self._params = params

    @classmethod
    async def begin(
        cls,
        request: web.Request,
        messages: Sequence[Message],
        plan: ToolPlan,
        params: SamplingParams,
        namespace: Namespace,
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        param: str = "messages",
    ) -> Dialogue:
        """Render, encode and submit a conversation.

        Args:
            request: that asks for it.
            messages: as chat completions have them.
            plan: the tools.
            params: without what the plan adds.
            namespace: of the cache.
            add_generation_prompt: False begins no answer after the last message.
            continue_final: the answer goes on in the last message.
            param: the field that the messages came from, for refusals.

        Raises:
            ApiError: the request is refused; nothing runs.
        """
        state = request.app[STATE]
        params = plan.apply(params, state.engine)
        prompt = await encode_chat(
            state.prompts,
            state.history,
            namespace,
            template_messages(messages, supports_tools=state.prompts.supports_tools, field=param),
            plan.tools,
            add_generation_prompt=add_generation_prompt,
            continue_final=continue_final,
        )
        grammar = await compile_grammar(state.engine, params)
        state.lifecycle.check_accepting()
        generation = Generation.submit(
            state.engine,
            [prompt.ids],
            params,
            namespace=namespace,
            metrics=state.metrics,
            grammar=grammar,
            param=param,
            use=use_of(request),
        )
        state.request_ids.remember(generation.id, 1, request[REQUEST_ID])
        state.history.report(generation.id, prompt.report)
        return cls(state, generation, prompt, plan, params)

    @property
    def answers(self) -> list[Answer]:
        """The choices as the engine gives them."""
        return self.generation.answers

    async def run(self, request: web.Request) -> None:
        """Read every choice to its end, as long as the client is there.

        Raises:
            ApiError: the generation failed or took too long.
            ClientGoneError: the client hung up.
        """
        await run_to_end(request, self._state.config, self)

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        self.generation.close()

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput, list[ToolEvent]]]:
        async for index, output in self.generation:
            reader = self.readers[index]
            events = reader.read(output)
            if output.finish_reason is not None:
                self._remember(reader)
            yield index, output, events

    def _remember(self, reader: AnswerReader) -> None:
        state = self._state
        message: TemplateMessage
        try:
            (message,) = template_messages(
                [reader.message()], supports_tools=state.prompts.supports_tools
            )
        except ApiError:  # arguments so deep that no template could write them
            return
        state.history.remember(
            state.engine,
            state.prompts,
            self.prompt,
            message,
            reader.answer,
            skip_special_tokens=self._params.skip_special_tokens,
        )
