"""What an answer may look like: grammars, compiled once, and where each answer is in its own."""

from __future__ import annotations

import json
from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from radixkv.errors import GrammarError
from radixkv.request import GrammarSpec

__all__ = ["Grammar", "GrammarState", "build_grammar"]

# Between two tokens of JSON: a space, or a line break and the next line's indentation. Without a
# bound a small model may go on with white space for ever.
JSON_WHITESPACE = r"( |\n[ \t]{0,40})"
# Rules of a grammar: the time of a mask can grow with the square of their number.
MAX_RULES = 500
# A state of the lexer takes 1 to 2 kB.
MAX_LEXER_STATES = 50_000
MAX_MESSAGE_CHARS = 300


class Grammar:
    """A compiled grammar. Shared by all requests that ask for it; never changes.

    Attributes:
        start_mask: `[vocab_size]` bool, the tokens that an answer may begin with.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Own a matcher that has consumed nothing.

        Raises:
            GrammarError: no answer satisfies the grammar, or finding its first tokens takes more
                than the library's limits allow.
        """
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._matcher = matcher
        self.start_mask = _compute_mask(matcher, vocab_size)
        if not self.start_mask.any():
            raise GrammarError("no token of the model can begin an answer")

    def start(
        self,
        *,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
    ) -> GrammarState:
        """Return the state of an answer that is still empty; the arguments are the request's.

        Cost: O(1); the matcher is copied when the first token comes.
        """
        return GrammarState(
            self,
            self._matcher,
            stops=frozenset(stop_token_ids),
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
        )


class GrammarState:
    """Where one answer is in its grammar. Owned by a branch, and forked with it.

    An end token is allowed only where the answer satisfies the grammar, and so is a stop token that
    the grammar itself has no place for. Where `min_tokens` or `ignore_eos` forbid to end and the
    grammar has nothing else to offer, the grammar wins: no answer is ever longer than it allows.

    Attributes:
        is_complete: nothing can follow; the answer satisfies the grammar.
    """

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher,
        *,
        stops: frozenset[int],
        min_tokens: int,
        ignore_eos: bool,
    ) -> None:
        self.is_complete = False
        self._grammar = grammar
        self._matcher = matcher
        self._is_shared = True  # the matcher is others' too, and is copied before it moves
        self._stops = stops
        self._min_tokens = min_tokens
        self._ignore_eos = ignore_eos
        self._mask: np.ndarray | None = grammar.start_mask

    def fork(self) -> GrammarState:
        """Return the state of a branch with the same past.

        Cost: O(1); the matcher is copied by whoever gets a token first.
        """
        fork = GrammarState(
            self._grammar,
            self._matcher,
            stops=self._stops,
            min_tokens=self._min_tokens,
            ignore_eos=self._ignore_eos,
        )
        fork.is_complete = self.is_complete
        fork._mask = self._mask
        self._is_shared = True
        return fork

    @property
    def has_mask(self) -> bool:
        """Whether the mask of this state is known already."""
        return self._mask is not None

    def compute_mask(self) -> np.ndarray:
        """Return the tokens that the grammar allows next, `[vocab_size]` bool, not to be changed.

        May run in another thread while nobody else uses the state. If the library gives up, all
        tokens are allowed here, and `accept` raises.

        Cost: tens of microseconds once per token, without the interpreter lock; then O(1).
        """
        if self._mask is None:
            try:
                self._mask = _compute_mask(self._matcher, self._grammar.vocab_size)
            except GrammarError:
                self._mask = np.ones(self._grammar.vocab_size, dtype=np.bool_)
        return self._mask

    def allowed(self, num_output_tokens: int) -> np.ndarray:
        """Return the tokens that may be chosen next, `[vocab_size]` bool, not to be changed.

        Args:
            num_output_tokens: the answer's so far.
        """
        mask = self.compute_mask()
        if num_output_tokens < self._min_tokens:
            without = _without(mask, self._grammar.eos_token_ids | self._stops)
        else:
            if self._stops and self._matcher.is_accepting():
                mask = mask.copy()
                mask[list(self._stops)] = True
            if not self._ignore_eos:
                return mask
            without = _without(mask, self._grammar.eos_token_ids)
        return without if without.any() else mask

    def accept(self, token_id: int) -> None:
        """Move on by a chosen token.

        Raises:
            GrammarError: the grammar does not allow it, or the library has given up. The answer
                can't go on.
        """
        if self._is_shared:
            self._matcher = self._matcher.deep_copy()
            self._is_shared = False
        matcher = self._matcher
        self._mask = None
        if matcher.is_error():
            raise GrammarError(_message_of(matcher))
        if (
            token_id in self._stops
            and matcher.is_accepting()
            and not matcher.validate_tokens([token_id])
        ):
            return  # it ends the answer, and the grammar knows nothing of it
        if not matcher.consume_token(token_id):
            raise GrammarError(_message_of(matcher))
        self.is_complete = matcher.is_stopped()


def build_grammar(
    spec: GrammarSpec, tokenizer: LLTokenizer, vocab_size: int, eos_token_ids: frozenset[int]
) -> Grammar:
    """Compile a grammar.

    It recurses as deeply as the grammar is nested: with the largest specs that there can be, some
    64 MiB of stack.

    Args:
        spec: what the client asks for.
        tokenizer: of the model, in the library's form.
        vocab_size: columns of the model's logits.
        eos_token_ids: the model's end tokens.

    Raises:
        GrammarError: it is malformed or too complex, uses what is not supported, or can't be
            satisfied; the message is safe to show.

    Cost: milliseconds to some hundred; most of it without the interpreter lock.
    """
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    try:
        matcher = LLMatcher(tokenizer, _source(spec), limits=limits, log_level=0)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_shorten(str(error))) from error
    if matcher.is_error():
        raise GrammarError(_message_of(matcher))
    return Grammar(matcher, vocab_size, eos_token_ids)


def _source(spec: GrammarSpec) -> str:
    """Return the grammar in the library's notation.

    Raises:
        GrammarError: it is malformed or has too many rules.
    """
    if spec.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            spec.text, defaults={"whitespace_pattern": JSON_WHITESPACE}
        )
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        # Lark's strings are JSON's, and one terminal is faster than a rule with alternatives.
        texts = " | ".join(json.dumps(choice) for choice in json.loads(spec.text))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}\n")
    text = spec.text
    if spec.kind == "tools":
        return LLMatcher.grammar_from_lark(text)
    if "::=" in text:
        try:
            text = gbnf_to_lark(text)
        except RecursionError:
            raise GrammarError("the grammar is nested too deeply") from None
        except Exception as error:
            # The converter raises types of its own and those of whatever it trips over.
            raise GrammarError(_shorten(str(error))) from error
    if text.count(":") > MAX_RULES:
        raise GrammarError(f"the grammar must have at most {MAX_RULES} rules")
    return LLMatcher.grammar_from_lark(text)


def _compute_mask(matcher: LLMatcher, vocab_size: int) -> np.ndarray:
    try:
        words = matcher.compute_bitmask()
    except ValueError as error:
        raise GrammarError(_shorten(str(error))) from error
    if matcher.is_error():
        raise GrammarError(_message_of(matcher))
    bits = np.unpackbits(np.frombuffer(words, dtype=np.uint8), bitorder="little")
    return bits[:vocab_size].view(np.bool_)


def _without(mask: np.ndarray, token_ids: frozenset[int]) -> np.ndarray:
    mask = mask.copy()
    mask[list(token_ids)] = False
    return mask


def _message_of(matcher: LLMatcher) -> str:
    if matcher.stop_reason() in ("NoExtension", "NoExtensionBias"):
        return "no answer satisfies it"
    return _shorten(matcher.get_error())


def _shorten(message: str) -> str:
    """Return a message of the library on one line, without the excerpt of the grammar it shows."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "…"
