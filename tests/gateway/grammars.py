"""What a model that prefers tokens at random writes under the grammars that the gateway makes."""

from __future__ import annotations

import numpy as np

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gpu_worker.grammar import Constraint, GrammarCompiler, GrammarSource
from services.gpu_worker.request import SamplingParams
from services.gpu_worker.sampling import Sampler
from tests.gateway.language import IDS, TOKENIZER_JSON, encode, piece

VOCAB = 2560
EOS = frozenset(IDS[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>"))
_COMPILER = GrammarCompiler(TOKENIZER_JSON.decode(), VOCAB, sorted(EOS))


def constraint(grammar: pb.Grammar) -> Constraint:
    """The grammar as the worker follows it."""
    kind = grammar.WhichOneof("kind")
    assert kind is not None
    text = "" if kind == "any_json_object" else getattr(grammar, kind)
    source = GrammarSource(kind, text, grammar.after_token_id or None, frozenset(grammar.not_before_token_ids))
    return Constraint(_COMPILER.compile(source), EOS)


def write(grammar: pb.Grammar, seed: int, limit: int = 300) -> list[tuple[int, bytes]] | None:
    """Tokens of an output under the grammar, end tokens left out; None when the noise did not end in time."""
    made, noise = constraint(grammar), np.random.default_rng(seed)
    # Noise alone would never close a string: closing tokens are made likely.
    likely = [IDS["</arg_value>"], IDS["</tool_call>"], *encode('"}]'), *EOS]
    if grammar.after_token_id:
        made.observe(grammar.after_token_id)
    sampler = Sampler(SamplingParams(seed=seed), (1,), EOS, VOCAB, constraint=made)
    out: list[tuple[int, bytes]] = []
    for _ in range(limit):
        logits = (2 * noise.standard_normal(VOCAB)).astype(np.float32)
        logits[likely] += 6.0
        token = sampler.choose(logits)
        if token in EOS:
            return out
        out.append((token, piece(token)))
        if made.complete:
            return out
    return None


def accepts(grammar: pb.Grammar, text: str, *, whole: bool = True) -> bool:
    """True when a text, in which control tokens count as such, follows the grammar (to an end of it)."""
    made = constraint(grammar)
    if grammar.after_token_id:
        made.observe(grammar.after_token_id)
    for token in encode(text):
        allowed = made.allowed(VOCAB)
        if allowed is None or not allowed[token]:
            return False
        made.observe(token)
    allowed = made.allowed(VOCAB)
    return not whole or made.complete or (allowed is not None and bool(allowed[list(EOS)].any()))
