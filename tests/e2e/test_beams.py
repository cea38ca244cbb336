"""Beam search of the default model gives the beams and scores of plain transformers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from radixkv.engine import Engine, RequestOutput, SamplingParams
from radixkv.model.loader import LoadedModel

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

SCORE_TOLERANCE = 1e-4
# A negative length penalty makes scores of hundreds, of which float32 keeps seven digits.
RELATIVE_TOLERANCE = 1e-6
EarlyStopping = bool | Literal["never"]
# (prompt, a text whose token ends an answer beside the model's own, beams, answers, length penalty,
# early stopping, tokens)
CASES: list[tuple[str, str | None, int, int, float, EarlyStopping, int]] = [
    ("The capital of France is", ".", 4, 4, 1.0, False, 20),
    ("The capital of France is", ".", 4, 2, 1.0, True, 20),
    ("Q: What is 17 + 25?\nA:", "\n", 3, 3, 2.0, "never", 16),
    ("Once upon a time, in a village by the sea,", ",", 5, 3, -1.0, False, 16),
    ("def fibonacci(n):\n    ", None, 4, 4, 1.0, False, 24),
]


@pytest.fixture(scope="module")
def reference(default_model_dir: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    yield model
    del model
    gc.collect()


def expected(
    model: Any, prompt: list[int], ends: list[int], params: SamplingParams
) -> list[tuple[list[int], float]]:
    """The answers of transformers, each up to its end token, and their scores."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=params.max_tokens,
        do_sample=False,
        num_beams=params.best_of,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    for sequence in output.sequences[:, len(prompt) :].tolist():
        at = next((i for i, t in enumerate(sequence) if t in ends), len(sequence) - 1)
        answers.append(sequence[: at + 1])
    return list(zip(answers, output.sequences_scores.tolist(), strict=True))


def search(engine: Engine, prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    engine.add_request("beams", prompt, params)
    outputs = []
    while engine.has_work:
        outputs += [o.output for o in engine.step()]
        engine.cache.check_integrity()
    assert engine.cache.num_referenced_blocks == 0
    return sorted(outputs, key=lambda o: o.index)


@pytest.mark.parametrize("case", CASES)
def test_beams_are_those_of_transformers(
    reference: Any, default_model: LoadedModel, engine: Engine, case: tuple[Any, ...]
) -> None:
    text, end, beams, n, length_penalty, early_stopping, max_tokens = case
    tokenizer = default_model.tokenizer
    extra = () if end is None else tuple(tokenizer.encode(end))
    assert len(extra) < 2
    params = SamplingParams(
        use_beam_search=True,
        n=n,
        best_of=beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_tokens=max_tokens,
        stop_token_ids=extra,
    )
    prompt = tokenizer.encode(text)
    ends = sorted({*tokenizer.eos_token_ids, *extra})
    wanted = expected(reference, prompt, ends, params)
    outputs = search(engine, prompt, params)
    assert [list(o.token_ids) for o in outputs] == [ids for ids, _ in wanted]
    scores = [o.score for o in outputs]
    assert scores == pytest.approx(
        [score for _, score in wanted], abs=SCORE_TOLERANCE, rel=RELATIVE_TOLERANCE
    )
    # Some of the cases end inside, at an end token; the others at the length.
    inside = [bool(o.token_ids) and o.token_ids[-1] in ends for o in outputs]
    assert [o.finish_reason == "stop" for o in outputs] == inside
