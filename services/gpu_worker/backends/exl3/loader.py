"""From a checkpoint to a running backend: the arena is filled and pinned, exllamav3 loads the rest, slots take what VRAM is left."""

from __future__ import annotations

import contextlib
import importlib
import logging
import pathlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.python._layout import ABI_VERSION
from kernels.python.arena import Arena
from kernels.python.expert import ExpertShape, kernel_info
from kernels.python.pager import PagerPolicy
from services.common.errors import ConfigError
from services.gpu_worker.backends import arena_check, cpu, cpu_arena
from services.gpu_worker.backends.base import BackendInfo
from services.gpu_worker.backends.exl3 import copy_way, fast_setup, heat_file, joined, lending
from services.gpu_worker.backends.exl3 import plan as plans
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import DECODE_ROWS, ExpertOptions, ExpertStore
from services.gpu_worker.backends.exl3.heat_file import HeatKeeper
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.backends.exl3.records import PinnedRecords
from services.gpu_worker.backends.exl3.resolve import (
    resolve_chunk,
    resolve_context,
    resolve_copy,
    resolve_hints,
    resolve_mode,
    runs_in_step,
)
from services.gpu_worker.backends.exl3.slots import ElasticSlots
from services.gpu_worker.backends.exl3.start_times import StartTimes
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.patches import (
    decode_blocks,
    dispatch,
    early_router,
    expert_load,
    pointer_tables,
    pool_words,
    triton_tuners,
    upstream,
)
from services.gpu_worker.patches.replace import Replacements
from services.gpu_worker.settings import GpuWorkerSettings

log = logging.getLogger(__name__)

Note = Callable[[float, str], None]
DEVICE = 0  # of those that CUDA_VISIBLE_DEVICES leaves
KERNEL_REASONS = {
    "exact": "exact: the decode and prefill kernels are exllamav3's own",
    "fast": "fast: decode steps run where their experts are, with the same bits everywhere; prefill is exllamav3's own",
}


@dataclass
class Loaded:
    """A patched model before it has slots."""

    model: Any
    cache: Any
    layers: list[expert_load.MoeLayer]
    records: PinnedRecords
    table: torch.Tensor
    replacements: Replacements


def load(settings: GpuWorkerSettings, checkpoint: Checkpoint, note: Note, device_reason: str) -> Exl3Backend:
    """Loads a checkpoint on the GPU.

    Args:
        settings: the worker's settings.
        checkpoint: opened.
        note: called with a fraction 0..1 and what is being loaded.
        device_reason: why the GPU was chosen.

    Raises:
        CheckpointError: names tensor and file.
        ConfigError: a setting, exllamav3 or the machine does not fit.
    """
    upstream.check()
    resolve_mode(settings.mode, "")  # before anything slow
    cpu.check_heat_file(settings.heat_file)
    triton_tuners.check(settings.triton_pin)
    chunk = resolve_chunk(settings)
    max_context = resolve_context(settings.context_tokens, settings.cache_tokens, checkpoint.config)
    note(0.0, "checking the experts")
    times = StartTimes()
    times.begin("checks")
    shapes = cpu_arena.expert_shapes(checkpoint)
    mode, mode_reason = resolve_mode(settings.mode, fast_setup.problem(shapes, settings.mode))
    in_step = runs_in_step(settings)
    hints = resolve_hints(settings.ec_hints, mode, brings=mode == "fast" or in_step)
    copy = resolve_copy(settings.ec_copy, brings=mode == "fast" or in_step)
    copy_way.check(copy)
    check_machine(settings, checkpoint, shapes)
    import_beside()  # not before: the plan counts the host memory that it takes as still to come
    times.begin("arena")
    arena, arena_reason = cpu.open_arena(settings, checkpoint, shapes, lambda f, what: note(0.05 + 0.55 * f, what))
    note(0.6, "pinning the experts and loading the rest of the model")
    times.begin("model")
    loaded = load_model(checkpoint, arena, shapes, cache_tokens=settings.cache_tokens, max_streams=settings.max_streams, chunk=chunk)
    pins = TritonPins(settings.triton_pin, torch.cuda.get_device_name(DEVICE))
    if settings.warm_up:
        note(0.85, "warming up")
        times.begin("warm_up")
        warm_up_staged(loaded, checkpoint.config.num_experts_per_tok, chunk, settings.max_streams)
        pins.save()
    times.begin("slots")
    reserve, most = (int(size * (1 << 30)) for size in (settings.ec_reserve_gb, settings.ec_elastic_gb))
    lends = lending.pays(settings.ec_max_slots, free_bytes(), reserve, most, loaded.records.stride, loaded.records.num_records)
    if lends:
        torch.cuda.empty_cache()  # slots take what prefills leave, and lend it to them
    slots, slots_reason = resolve_slots(settings.ec_max_slots, free_bytes(), reserve, loaded.records.stride, loaded.records.num_records)
    options = ExpertOptions(
        PlacementOptions(admit_after=settings.ec_admit_after),
        on_demand=in_step,
        pager=PagerPolicy(admit_after=settings.ec_admit_after, hint_records=0 if slots == loaded.records.num_records else hints),
        copy=copy,
        fast=fast_setup.make(settings, arena, checkpoint.config.num_experts_per_tok) if mode == "fast" else None,
    )
    elastic = lending.make(slots, loaded.records.stride, DEVICE, most=most, reserve=reserve) if lends else None
    store = make_store(loaded, slots, checkpoint.config.num_experts_per_tok, options, elastic=elastic)
    if elastic is not None and settings.warm_up:
        note(0.95, "measuring what prefills take")
        times.begin("prefill_need")
        elastic.need = lending.measure(loaded.model, loaded.cache, chunk, max_context, store.begin_prefill)
    elif elastic is not None:
        elastic.need = lending.guess(most, reserve, chunk)
    times.begin("fill_slots")
    heat = keep_heat(settings.heat_file, checkpoint.hash, store, slots, loaded.records.num_records)
    log.info("slots = %d of %d experts (%s)", slots, loaded.records.num_records, slots_reason)
    info = BackendInfo(
        vocab_size=checkpoint.config.vocab_size,
        max_context=max_context,
        max_streams=settings.max_streams,
        device="cuda",
        device_reason=f"{device_reason}; {torch.cuda.get_device_name(DEVICE)}",
        mode=mode,
        mode_reason=mode_reason,
        kernel_variant=f"{upstream.PACKAGE} {upstream.VERSION}" + (", decode on integer kernels" if mode == "fast" else ""),
        kernel_reason=KERNEL_REASONS[mode],
        arithmetic_version=kernel_info().arithmetic_version if mode == "fast" else 0,
        abi_version=ABI_VERSION,
        arena=arena_reason,
        chunk_size=chunk,
        page_tokens=PAGE_TOKENS,
        snapshot_bytes=plans.state_bytes(checkpoint.config, 1),
        joined_tail_from=joined_tail_from(loaded.model),
    )
    log.info("%s", plans.kept_states(info.snapshot_bytes, settings.prefix_cache_mb))
    backend = Exl3Backend(loaded.model, loaded.cache, store, loaded.records, loaded.replacements, info, heat, settings.step_streams)
    check_kept_records(backend, arena, checkpoint, shapes)
    times.end()
    backend.start_times = times
    return backend


def check_kept_records(backend: Exl3Backend, arena: Arena, checkpoint: Checkpoint, shapes: list[ExpertShape]) -> None:
    """Starts the check of records that an earlier worker left; what this one filled it has read itself."""
    if arena.reattached:
        backend.check = arena_check.of_checkpoint(arena, checkpoint, shapes, backend.repair)
        backend.check.start()


def check_machine(settings: GpuWorkerSettings, checkpoint: Checkpoint, shapes: list[ExpertShape]) -> None:
    """Prints the plan of memory, and refuses what does not fit before anything slow begins.

    Raises:
        ConfigError: VRAM, host memory or shared memory are short.
    """
    need = plans.need_of(checkpoint, shapes, settings)
    machine = plans.read_machine(settings, *torch.cuda.mem_get_info(DEVICE))
    for line in plans.lines(need, machine):
        log.info("%s", line)
    plans.refuse(need, machine, forced=settings.force_vram)
    if told := plans.memlock_warning(need, machine):
        log.warning("%s", told)


def load_model(
    checkpoint: Checkpoint, arena: Arena, shapes: list[ExpertShape], *, cache_tokens: int, max_streams: int, chunk: int
) -> Loaded:
    """exllamav3's model with its routed experts in the arena, read in place: correct, slow, without slots.

    The text model alone is loaded: no vision tower, no prediction head.
    """
    torch.cuda.set_device(DEVICE)
    records = PinnedRecords(arena, shapes, DEVICE, extension)
    replacements = Replacements()
    try:
        model, cache, layers, table = load_around(
            records, checkpoint, replacements, cache_tokens=cache_tokens, max_streams=max_streams, chunk=chunk
        )
    except BaseException:
        replacements.undo()
        records.close()
        raise
    return Loaded(model, cache, layers, records, table, replacements)


def extension() -> Any:
    """exllamav3's compiled module."""
    from exllamav3.ext import exllamav3_ext

    return exllamav3_ext


def import_beside() -> None:
    """Begins to import exllamav3, which loads its extension, while another thread opens and pins the arena.

    Not its Triton kernels: importing them sets Triton's allocator on some GPUs, in the context of the thread that does it.
    """

    def run() -> None:
        # Who imports it next waits for this, or fails as this did.
        with contextlib.suppress(Exception):
            importlib.import_module(upstream.PACKAGE)

    threading.Thread(target=run, name="import", daemon=True).start()


def load_around(
    records: PinnedRecords, checkpoint: Checkpoint, replacements: Replacements, *, cache_tokens: int, max_streams: int, chunk: int
) -> tuple[Any, Any, list[expert_load.MoeLayer], torch.Tensor]:
    """Everything but the experts, around pinned records: model, cache, layers with experts, and the tables of their addresses."""
    from exllamav3 import Cache, Config, Model
    from exllamav3.modules import block_sparse_mlp, mla_attn
    from exllamav3.modules.quant.exl3 import LinearEXL3

    arena = records.arena
    config = Config.from_directory(str(checkpoint.path))
    model = Model.from_config(config)
    layers = expert_load.find_moe_layers(model, block_sparse_mlp.BlockSparseMLP)
    if (len(layers), layers[0].num_experts) != (arena.num_layers, arena.experts_per_layer):
        raise ConfigError(
            f"{checkpoint.path}: exllamav3 finds {len(layers)} x {layers[0].num_experts} experts, config.json has "
            f"{arena.num_layers} x {arena.experts_per_layer}",
            param="GLM53_MODEL_DIR",
        )
    cache = Cache(model, max_num_tokens=cache_tokens, max_batch_size=max_streams)
    table = torch.zeros((len(layers), len(pointer_tables.ROWS), arena.experts_per_layer), dtype=torch.int64, device=f"cuda:{DEVICE}")
    expert_load.install(replacements, layers, LinearEXL3, records.view, records.marker)
    with Replacements() as while_loading:
        pointer_tables.install(while_loading, block_sparse_mlp, expert_load.places(layers), table)
        model.load(device=f"cuda:{DEVICE}", max_chunk_size=chunk, progressbar=False)
    config.stc.close()
    pointer_tables.share_reconstruct_scales(
        layers, lambda mlp: torch.empty((1, mlp.multi_up.in_features), dtype=torch.float16, device=f"cuda:{DEVICE}")
    )
    patch_blocks(replacements, model, extension(), block_sparse_mlp.BlockSparseMLP)
    pool_words.install(replacements, mla_attn)
    return model, cache, layers, table


def patch_blocks(replacements: Replacements, model: Any, ext: Any, moe_class: type) -> None:
    """Decode steps with less of the host's work; blocks of another kind stay as they are."""
    patched, reasons = decode_blocks.install(replacements, model, ext, moe_class)
    log.info("decode blocks = %d patched", patched)
    for reason in reasons:
        log.warning("decode is launched as exllamav3 does it: %s", reason)


def make_store(
    loaded: Loaded,
    num_slots: int,
    top_k: int,
    options: ExpertOptions | None = None,
    into: Replacements | None = None,
    elastic: ElasticSlots | None = None,
) -> ExpertStore:
    """Slots for a loaded model, and the hooks into its layers.

    Args:
        into: takes the hooks' undo; None: the model's own, for good.
        elastic: the slots, where their end is lent to long prefills.
    """
    try:
        store = ExpertStore(loaded.records, loaded.table, loaded.layers, num_slots, top_k, options, elastic)
    except (ValueError, OSError) as error:
        raise ConfigError(f"the expert store does not start: {error}", param="GLM53_MODE") from error
    replacements = loaded.replacements if into is None else into
    dispatch.install(replacements, loaded.layers, store)
    if store.options.pager.hint_records:
        guess_early(replacements, loaded, store)
    return store


def guess_early(replacements: Replacements, loaded: Loaded, store: ExpertStore) -> None:
    """Decode steps guess what the next layer picks; a layer of another kind is guessed by nobody."""
    routers, reasons = early_router.install(replacements, loaded.model, extension(), loaded.layers)
    store.hint_from(routers.guess)
    log.info("early router = %d of %d layers guessed", len(routers.after), len(loaded.layers))
    for reason in reasons:
        log.warning("what a layer picks is not guessed: %s", reason)


def joined_tail_from(model: Any) -> int:
    """From how many tokens on a prompt's tail is computed in one pass with the chunk before it; 0 for never.

    Fewer rows are computed by the kernels of decode, and bring what they pick as a decode step does, which staged tables are not for.
    """
    from exllamav3.modules.gated_delta_net import GDNState

    problem = joined.why_not(model, GDNState)
    if problem:
        log.info("a prompt's tail is a pass of its own: %s", problem)
    return 0 if problem else DECODE_ROWS + 1


class TritonPins:
    """Triton's choices from a file, before the first kernel runs: the setting's own, else those that are shipped for this GPU.

    Args:
        name: GLM53_TRITON_PIN, empty for none; gets what is chosen where neither file has a choice.
        gpu: whose choices they are.
        folder: of the shipped files.
    """

    def __init__(self, name: str, gpu: str, folder: pathlib.Path = triton_tuners.SHIPPED) -> None:
        self._own, self._gpu = pathlib.Path(name) if name else None, gpu
        # Late: triton comes with torch's GPU builds alone.
        from triton.runtime.autotuner import Autotuner

        # exllamav3 imports them with the first pass, which is too late to pin them.
        importlib.import_module(upstream.TUNED)
        self._tuners = triton_tuners.find(Autotuner)
        self._pinned = 0
        problems: list[str] = []
        for path in (self._own, triton_tuners.shipped(gpu, folder)):
            if path is None:
                continue
            self._pinned, why = triton_tuners.load(path, self._tuners, gpu)
            if self._pinned:
                log.info("%d choices of Triton's kernels are pinned by %s%s", self._pinned, path, "".join(f"; {each}" for each in problems))
                return
            problems.append(why)
        log.warning("there is no pin for %s, so Triton's kernels are tuned anew: %s", gpu, "; ".join(problems))

    def save(self) -> None:
        """Writes the choices if the warm-up made new ones and a file is named for them."""
        if self._own is None or sum(len(tuner.cache) for tuner in self._tuners.values()) == self._pinned:
            return
        try:
            triton_tuners.save(self._own, self._tuners, self._gpu)
        except OSError as error:
            log.warning("Triton's choices cannot be saved to %s: %s", self._own, error.strerror)


@contextlib.contextmanager
def staging_slots(loaded: Loaded, top_k: int, free: int) -> Iterator[bool]:
    """Inside, prefills stage their experts, in slots that are gone afterwards; False where there are none.

    The real slots take what the warm-up leaves, so there are none yet. Without any, its prefills would read every expert in place, once
    for each tile of rows.

    Args:
        top_k: picks of a token.
        free: bytes of VRAM; half of them at most are taken.
    """
    count = min(2 * loaded.records.num_experts, free // 2 // loaded.records.stride)
    elastic = None
    if count >= 2:
        try:
            # Not torch's memory, which would keep it: what is free afterwards says how many slots there will be.
            elastic = lending.make(count, loaded.records.stride, DEVICE, most=0, reserve=0)
        except ConfigError as error:
            log.warning("the warm-up reads experts in place: %s", error)
    if elastic is None:
        yield False
        return
    with Replacements() as into:
        store = make_store(loaded, count, top_k, ExpertOptions(admit=False), into, elastic)
        try:
            yield True
        finally:
            # Before the hooks go: nothing may point at slots when their memory is given back.
            store.close()


def warm_up_staged(loaded: Loaded, top_k: int, chunk: int, max_streams: int) -> None:
    """`warm_up` with `staging_slots`; where a pass does not fit beside them, without.

    Raises:
        ConfigError: a pass failed without them; names it.
    """
    staged = False
    try:
        with staging_slots(loaded, top_k, free_bytes()) as staged:
            warm_up(loaded, chunk, max_streams)
    except ConfigError as error:
        if not staged:
            raise
        log.warning("the warm-up is done again without slots to stage in: %s", error)
        torch.cuda.empty_cache()
        warm_up(loaded, chunk, max_streams)


def warm_up(loaded: Loaded, chunk: int, max_streams: int) -> None:
    """Compiles and tunes what the first requests would wait for.

    Raises:
        ConfigError: a pass failed; names it.
    """
    failed = loaded.model.warmup(cache=loaded.cache, max_chunk_size=chunk, max_batch_size=max_streams)
    torch.cuda.synchronize(DEVICE)
    if failed:
        raise ConfigError(f"exllamav3's warm-up failed at: {', '.join(failed)}. Is there enough VRAM?", param="GLM53_CHUNK_SIZE")


def free_bytes() -> int:
    """VRAM that nobody has taken."""
    return int(torch.cuda.mem_get_info(DEVICE)[0])


def resolve_slots(asked: int, free: int, reserve: int, stride: int, num_records: int) -> tuple[int, str]:
    """How many records VRAM gets places for, and why.

    Args:
        asked: GLM53_EC_MAX_SLOTS, 0 for as many as fit.
        free: bytes of VRAM.
        reserve: bytes of it that stay free.
        stride: bytes of a slot.
        num_records: experts of the model.

    Raises:
        ConfigError: not a single one fits.
    """
    fits = max(0, (free - reserve) // stride)
    if fits < 1:
        raise ConfigError(
            f"{free >> 20} MiB of VRAM are free after loading and {reserve >> 20} MiB are kept in reserve: not one expert of "
            f"{stride / (1 << 20):.1f} MiB fits. Lower GLM53_CACHE_TOKENS, GLM53_CHUNK_SIZE or GLM53_EC_RESERVE_GB",
            param="GLM53_EC_RESERVE_GB",
        )
    slots = min(fits, num_records, asked or num_records)
    if slots == num_records:
        return slots, "every expert fits"
    if slots == asked:
        return slots, "GLM53_EC_MAX_SLOTS"
    return slots, f"{free >> 20} MiB free, {reserve >> 20} MiB reserve"


def keep_heat(name: str, checkpoint_hash: bytes, store: ExpertStore, num_slots: int, num_records: int) -> HeatKeeper | None:
    """Fills the slots: with what was hot before, or with the same share of every layer, which the first steps' picks replace."""
    heat = None
    if name:
        heat, why = heat_file.load(pathlib.Path(name), checkpoint_hash, num_records)
        if heat is None:
            log.warning("the cache starts cold: %s", why)
    if heat is not None:
        store.start_with(*heat)
    else:
        store.place(spread(num_slots, num_records))
    return HeatKeeper(pathlib.Path(name), checkpoint_hash, store.read_heat, log.warning) if name else None


def spread(num_slots: int, num_records: int) -> list[int]:
    """Records for all slots, the same share of every layer."""
    return [slot * num_records // num_slots for slot in range(num_slots)]
