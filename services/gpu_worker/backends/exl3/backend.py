"""`Backend` on a GPU: stock exllamav3's forward pass over its own cache; this file gives it streams, chunks and batches.

The passes are those that exllamav3's own generator makes (same rows, same block tables, same states), so logits have its bits.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.backends.arena_check import ArenaCheck, count_in
from services.gpu_worker.backends.base import BackendInfo, BackendLostError, Logits, Snapshot, Stream, VerifyReport, prefill_apart
from services.gpu_worker.backends.exl3 import joined
from services.gpu_worker.backends.exl3.experts import DECODE_ROWS, ExpertStore
from services.gpu_worker.backends.exl3.first_uses import FirstUses
from services.gpu_worker.backends.exl3.heat_file import HeatKeeper
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS, PagesExhausted, PageTable, pages_for
from services.gpu_worker.backends.exl3.pass_lock import PassLock
from services.gpu_worker.backends.exl3.records import PinnedRecords
from services.gpu_worker.backends.exl3.start_times import StartTimes
from services.gpu_worker.patches import decode_blocks
from services.gpu_worker.patches.replace import Replacements

F = TypeVar("F", bound=Callable[..., Any])


def _on_device(method: F) -> F:
    """Runs a method in torch's inference mode: exllamav3's caches are inference tensors, which nothing else may write.

    A device error becomes BackendLostError: after it every later call fails too.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch.inference_mode():
                return method(*args, **kwargs)
        except torch.AcceleratorError as error:
            raise BackendLostError(f"the GPU failed: {error}") from error

    return cast("F", run)


SCORED_ROWS = 256  # logits of so many positions at once: at a real vocabulary 256 rows are 160 MB
REPAIR_WAIT_S = 300.0  # for the end of a pass; the watchdog ends a worker much sooner
_TABLE_STEP = 16  # pages; block tables come in few widths, as exllamav3's generator makes them


class GpuStream:
    """One stream: its pages and its recurrent state."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.pages: list[int] = []
        self.length = 0


class KeptState:
    """A stream at a page's end: its pages stay in the cache, its recurrent state lies in host memory.

    Args:
        table: whose pages they are.
        pages: full ones.
        state: what exllamav3 copied of the recurrent state, or None where the model has none.
    """

    def __init__(self, table: PageTable, pages: list[int], state: dict[Any, Any] | None) -> None:
        table.keep(pages)
        self._table = table
        self.pages, self.state = pages, state

    @property
    def length(self) -> int:
        """Tokens that it holds."""
        return len(self.pages) * PAGE_TOKENS

    @property
    def num_bytes(self) -> int:
        """Host memory of the recurrent state."""
        return int(self.state["checkpoint_size"]) if self.state is not None else 0

    @property
    def holds_memory(self) -> bool:
        """True while nobody else holds its last page."""
        return self._table.only_kept(self.pages[-1])

    def release(self) -> None:
        """Lets go of pages and state."""
        self._table.let_go(self.pages)
        self.pages, self.state = [], None


class Exl3Backend:
    """Serves a loaded model.

    Args:
        model: exllamav3's, loaded and patched.
        cache: its cache.
        experts: the routed experts.
        records: pinned.
        replacements: undoes the patches.
        info: the facts.
        heat: keeps the experts' heat over restarts, or None.
        step_streams: most streams in one pass of decode; 0 for all of them.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        experts: ExpertStore,
        records: PinnedRecords,
        replacements: Replacements,
        info: BackendInfo,
        heat: HeatKeeper | None = None,
        step_streams: int = 0,
    ) -> None:
        self.info = info
        self.experts = experts
        self._model, self._cache = model, cache
        self._records, self._replacements = records, replacements
        self._heat = heat
        self._step_streams = step_streams or info.max_streams
        self._pages = PageTable(cache.max_num_tokens // PAGE_TOKENS)
        self._recurrent = bool(model.get_recurrent_layers())
        self._open: dict[int, GpuStream] = {}
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._logits = torch.empty((info.max_streams, info.vocab_size), dtype=torch.float32, pin_memory=True)
        self._passes = PassLock()
        self._first_uses = FirstUses()
        self._unwanted: Callable[[], bool] = lambda: False
        self.check: ArenaCheck | None = None  # of a re-attached arena
        self.start_times: StartTimes | None = None
        self._staging: dict[tuple[str, int], tuple[torch.Tensor, NDArray[Any]]] = {}

    def break_off_when(self, unwanted: Callable[[], bool]) -> None:
        """Prefill passes ask before the experts of each layer. What they have launched the device still computes, ahead of what is next."""
        self._unwanted = unwanted

    @property
    def progress(self) -> int:
        """Layers with experts that were launched."""
        return self.experts.progress

    @property
    def streams_free(self) -> int:
        """Streams that can be opened."""
        return self.info.max_streams - len(self._open)

    @property
    def memory_tokens(self) -> tuple[int, int]:
        """(tokens held, tokens reserved)."""
        streams = list(self._open.values())
        return sum(s.length for s in streams), sum(len(s.pages) for s in streams) * PAGE_TOKENS

    def fits(self, num_tokens: int) -> bool:
        """True when a stream is free, and pages for all its tokens are held by no stream."""
        return self.streams_free > 0 and pages_for(num_tokens) <= self._pages.num_spare

    @_on_device
    def open_stream(self, snapshot: Snapshot | None = None) -> GpuStream:
        """Opens an empty stream, or one that continues a kept state: it reads the state's pages and adds its own."""
        if self.streams_free <= 0:
            raise RuntimeError(f"all {self.info.max_streams} streams are open")
        kept = cast("KeptState | None", snapshot)
        stream = GpuStream(self._new_state(kept) if self._recurrent else None)
        if kept is not None:
            stream.pages, stream.length = self._pages.share(kept.pages), kept.length
        self._open[id(stream)] = stream
        return stream

    def extend(self, stream: Stream, num_tokens: int) -> bool:
        """Takes pages until they hold so many tokens; False when too few are free."""
        try:
            self._pages.grow(cast("GpuStream", stream).pages, num_tokens)
        except PagesExhausted:
            return False
        return True

    def _new_state(self, kept: KeptState | None) -> Any:
        return self._cache.get_new_state() if kept is None else self._cache.new_from_stashed(kept.state, kept.length)

    @_on_device
    def snapshot(self, stream: Stream) -> KeptState | None:
        """The state at a page's end; None elsewhere, where its last page would still be written to. Waits for the device."""
        mine = cast("GpuStream", stream)
        if not mine.length or mine.length % PAGE_TOKENS:
            return None
        return KeptState(self._pages, mine.pages[: pages_for(mine.length)], mine.state.stash() if mine.state is not None else None)

    @_on_device
    def close_stream(self, stream: Stream) -> None:
        """Gives pages and state back."""
        gone = self._open.pop(id(stream))
        self._pages.release(gone.pages)
        if gone.state is not None:
            gone.state.free()

    @_on_device
    def prefill(self, stream: Stream, token_ids: Sequence[int], *, all_logits: bool) -> Logits:
        """Appends a chunk of prompt."""
        mine = cast("GpuStream", stream)
        with self._pass_of_whole_records(), self.experts.breaking_off(self._unwanted):
            if all_logits:
                pieces = [token_ids[i : i + SCORED_ROWS] for i in range(0, len(token_ids), SCORED_ROWS)]
                return np.concatenate([self._chunk(mine, piece, len(piece)) for piece in pieces])
            return self._chunk(mine, token_ids, 1)

    def prefill_joined(
        self, stream: Stream, token_ids: Sequence[int], tail: Sequence[int], *, keep: bool
    ) -> tuple[Logits, Snapshot | None]:
        """Appends a chunk of prompt and the tail behind it in one pass."""
        if not 0 < self.info.joined_tail_from <= len(tail):
            return prefill_apart(self, stream, token_ids, tail, keep=keep)
        return self._joined(cast("GpuStream", stream), token_ids, tail, keep=keep)

    @_on_device
    def _joined(self, stream: GpuStream, token_ids: Sequence[int], tail: Sequence[int], *, keep: bool) -> tuple[Logits, KeptState | None]:
        middle = stream.length + len(token_ids)
        if middle % PAGE_TOKENS:
            raise ValueError(f"a chunk that a tail is joined to ends at {middle}, not where a page of {PAGE_TOKENS} tokens does")
        with self._pass_of_whole_records(), self.experts.breaking_off(self._unwanted):
            self._pages.grow(stream.pages, middle + len(tail))
            parts = self._part(stream, stream.length, token_ids), self._part(stream, middle, tail)
            at_page_end = joined.StateAtPageEnd(stream.state, self._cache, middle) if keep else None
            # Both parts' activations are there at once.
            self.experts.begin_prefill(len(token_ids) + len(tail))
            after = at_page_end.copy if at_page_end is not None else lambda _module, _instance: None
            logits = joined.run(self._model, *parts, self.experts.part_follows, after)
            stream.length = middle + len(tail)
            result: Logits = logits[0, -1:, : self.info.vocab_size].float().cpu().numpy()
            self.experts.between_passes()
        if at_page_end is None:
            return result, None
        return result, KeptState(self._pages, stream.pages[: pages_for(middle)], at_page_end.stashed)

    def _part(self, stream: GpuStream, start: int, token_ids: Sequence[int], rows: int = 1) -> joined.Part:
        """What exllamav3 is given for a prefill pass over tokens that the stream holds from `start` on; its logits end `rows` rows."""
        # Without the pages that are only reserved: a pass looks the same, whatever its stream has in reserve.
        pages = stream.pages[: pages_for(start + len(token_ids))]
        params = {
            "attn_mode": "flash_attn",
            "block_table": torch.tensor([pages], dtype=torch.int32),
            "cache": self._cache,
            "cache_seqlens": torch.tensor([start], dtype=torch.int32),
            "recurrent_states": [stream.state] if stream.state is not None else None,
            "indexed_embeddings": [],
            "last_tokens_only": rows,
        }
        return joined.Part(torch.tensor([list(token_ids)], dtype=torch.int64), params)

    @contextlib.contextmanager
    def _pass_of_whole_records(self) -> Iterator[None]:
        """No record is repaired meanwhile, and none is known to be damaged for good."""
        with self._passes.in_pass():
            if self.check is not None:
                self.check.refuse_lost()
            yield

    def repair(self, layer: int, expert: int, data: NDArray[np.uint8]) -> None:
        """Replaces a record between two passes, in the arena and wherever it was copied to. Called from the check's thread.

        Args:
            layer: the arena's.
            data: uint8 [record_bytes], the record's true bytes.

        Raises:
            KernelError: the arena refuses.
            OSError: the device failed, or a pass does not end.
        """
        with self._passes.between_passes(REPAIR_WAIT_S):
            try:
                with torch.inference_mode():
                    self.experts.repair(layer, expert, data)
            except torch.AcceleratorError as error:
                raise OSError(f"the GPU failed: {error}") from error

    def _chunk(self, stream: GpuStream, token_ids: Sequence[int], rows: int) -> Logits:
        self._pages.grow(stream.pages, stream.length + len(token_ids))
        part = self._part(stream, stream.length, token_ids, rows)
        if len(token_ids) > 1:
            self.experts.begin_prefill(len(token_ids))
        if len(token_ids) <= DECODE_ROWS:
            self._go_carefully(1, len(token_ids), stream.length, len(part.params["block_table"][0]), prompt=True)
        logits = self._model.forward(part.ids, part.params)
        stream.length += len(token_ids)
        result: Logits = logits[0, -rows:, : self.info.vocab_size].float().cpu().numpy()
        self.experts.between_passes()
        return result

    @_on_device
    def decode(self, streams: Sequence[Stream], token_ids: Sequence[int]) -> Logits:
        """Appends one token to each stream, `step_streams` of them in one pass."""
        batch = cast("Sequence[GpuStream]", streams)
        for stream in batch:
            self._pages.grow(stream.pages, stream.length + 1)
        size = self._step_streams
        with self._pass_of_whole_records():
            passes = [self._pass(batch[i : i + size], token_ids[i : i + size]) for i in range(0, len(batch), size)]
        if self._heat is not None:
            self._heat.tick(time.monotonic())
        return passes[0] if len(passes) == 1 else np.concatenate(passes)

    def _pass(self, batch: Sequence[GpuStream], token_ids: Sequence[int]) -> Logits:
        rows = len(batch)
        used = [stream.pages[: pages_for(stream.length + 1)] for stream in batch]
        width = -(-max(map(len, used)) // _TABLE_STEP) * _TABLE_STEP
        ids, id_values = self._pinned("ids", (rows, 1), torch.int64)
        lengths, length_values = self._pinned("lengths", (rows,), torch.int32)
        table, table_values = self._pinned("table", (rows, width), torch.int32)
        # Written through numpy: an element of a tensor takes microseconds, while the device has nothing to do.
        id_values[:, 0] = token_ids
        length_values[:] = [stream.length for stream in batch]
        table_values[:] = 0
        for row, pages in enumerate(used):
            table_values[row, : len(pages)] = pages
        params = {
            "attn_mode": "flash_attn",
            "block_table": table,
            "cache": self._cache,
            "cache_seqlens": lengths,
            "recurrent_states": [stream.state for stream in batch] if self._recurrent else None,
            "indexed_embeddings": [],
            "positions": None,
            "recurrent_history": False,
            "pinned_staging": True,
        }
        if rows <= decode_blocks.MAX_ROWS:
            params[decode_blocks.DECODE] = rows
        if rows <= DECODE_ROWS:
            self._go_carefully(rows, 1, max(stream.length for stream in batch), width, prompt=False)
        else:
            # The experts are computed as a prefill's. Not announced it could be taken for a further part of a pass that broke off.
            self.experts.begin_prefill(rows)
        logits = self._model.forward(ids, params)
        for stream in batch:
            stream.length += 1
        out = self._logits[:rows]
        out.copy_(logits[:, -1, : self.info.vocab_size].float(), non_blocking=True)
        # The step's one wait: for the compute stream alone, copies of experts go on.
        torch.cuda.current_stream(self._device).synchronize()
        result: Logits = out.numpy().copy()
        self.experts.between_passes()
        return result

    def _go_carefully(self, streams: int, tokens: int, length: int, width: int, *, prompt: bool) -> None:
        """The first passes of a shape, which is as `FirstUses` has it, run layer by layer."""
        self.experts.layer_by_layer(self._first_uses.is_first(streams, tokens, length, -(-width // _TABLE_STEP), prompt=prompt))

    def _pinned(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, NDArray[Any]]:
        """A pinned buffer that is used again, and the same memory for the host to write; the step before has been waited for."""
        key = (name, shape[1] if len(shape) > 1 else 0)
        if key not in self._staging:
            made = torch.zeros((self.info.max_streams, *shape[1:]), dtype=dtype, pin_memory=True)
            self._staging[key] = made, made.numpy()
        tensor, values = self._staging[key]
        return tensor[: shape[0]], values[: shape[0]]

    def check_idle(self) -> None:
        """Raises RuntimeError when streams or pages are held although no stream should be open."""
        if self._open:
            raise RuntimeError(f"{len(self._open)} streams are open although no request runs: their memory leaked")
        if self._pages.num_spare != self._pages.num_pages:
            raise RuntimeError(f"{self._pages.num_pages - self._pages.num_spare} cache pages are taken although no stream is open")

    def stats(self) -> dict[str, Any]:
        """Counters of the experts, the cache's pages, the check of a re-attached arena, and how long the start took."""
        pages = self._pages
        return {
            **count_in(self.experts.stats(), self.check),
            "cache_pages": pages.num_pages,
            "cache_pages_free": pages.num_free,
            "cache_pages_kept": pages.num_kept,
            **({"start_s": self.start_times.stats()} if self.start_times is not None else {}),
        }

    def verify(self) -> VerifyReport:
        """Re-reads every record and slot."""
        return self.experts.verify()

    def close(self) -> None:
        """Takes the patches out and gives memory back; the arena stays for the next worker."""
        if self.check is not None:
            self.check.close()
        if self._heat is not None:
            self._heat.close()
        torch.cuda.synchronize(self._device)
        # Before the hooks go: nothing may point at slots, and no thread write them, when their memory is given back.
        self.experts.close()
        self._replacements.undo()
        self._model.unload()
        self._records.close()
        self._records.arena.close()
