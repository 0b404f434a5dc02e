"""One script of arrivals, run on any exllamav3 model: what both sides of the exactness comparison do.

exllamav3's own generator schedules the script, so batch composition and chunks of every step are the same on both sides as long as the
tokens are, and the tokens are the greedy ones of the logits that are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Arrival:
    """A request of the script."""

    step: int  # arrives before this iteration
    prompt: int  # tokens
    new: int  # tokens to generate


@dataclass(frozen=True)
class Script:
    name: str
    streams: int
    arrivals: tuple[Arrival, ...]


def _together(*lengths: int, new: int = 6) -> tuple[Arrival, ...]:
    return tuple(Arrival(0, length, new) for length in lengths)


SCRIPTS = (
    Script("lengths 1-24, 8 streams", 8, _together(*range(1, 25))),
    Script("255-257, 511-513", 6, _together(255, 256, 257, 511, 512, 513)),
    Script("1000 and 4096", 2, _together(1000, 4096)),
    Script("one stream, 700", 1, _together(700, new=24)),
    Script(
        "staggered, 8 streams",
        8,
        tuple(Arrival(step, prompt, 16) for step, prompt in ((0, 17), (1, 300), (2, 1000), (3, 5), (5, 64), (8, 700), (9, 33), (13, 9))),
    ),
)


def run(
    exl3: Any, model: Any, cache: Any, tokenizer: Any, script: Script, chunk: int, between: Callable[[int], None] | None = None
) -> list[torch.Tensor]:
    """Logits of every sampled token, in the order in which they came: CPU tensors.

    Args:
        exl3: the imported package.
        between: called with the iteration's number before each iteration.
    """
    from exllamav3.generator.sampler import ArgmaxSampler

    generator = exl3.Generator(model, cache, tokenizer, max_batch_size=script.streams, max_chunk_size=chunk)
    pending = list(enumerate(script.arrivals))
    out: list[torch.Tensor] = []
    step = 0
    while pending or generator.num_remaining_jobs():
        while pending and pending[0][1].step <= step:
            index, arrival = pending.pop(0)
            random = torch.Generator().manual_seed(1000 * index + arrival.prompt)
            ids = torch.randint(10, 2000, (1, arrival.prompt), generator=random)
            job = exl3.Job(
                input_ids=ids, max_new_tokens=arrival.new, min_new_tokens=arrival.new, sampler=ArgmaxSampler(), return_logits=True
            )
            generator.enqueue(job)
        if between is not None:
            between(step)
        for result in generator.iterate():
            if result["stage"] == "error":
                raise RuntimeError(f"{script.name}: {result}")
            if "logits" in result:
                # Text that is held back (half a character) arrives later, several tokens in one result.
                out += list(result["logits"].detach().cpu()[0].split(1))
        step += 1
    return out


def compare(want: list[torch.Tensor], got: list[torch.Tensor]) -> dict[str, Any]:
    """Whether two runs have the same bits; where not, how far apart they are."""
    equal = len(want) == len(got) and all(same_bits(a, b) for a, b in zip(want, got, strict=True))
    result: dict[str, Any] = {"equal": equal, "steps": len(want)}
    if not equal:
        pairs = list(zip(want, got, strict=False))
        differing = [i for i, (a, b) in enumerate(pairs) if not same_bits(a, b)]
        result |= {"steps_seen": len(got), "steps_differing": len(differing)}
        if differing:
            a, b = pairs[differing[0]]
            result |= {"first": differing[0], "first_max_abs": float((a.float() - b.float()).abs().max()) if a.shape == b.shape else None}
    return result


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal type, shape and bytes; a NaN equals itself."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
