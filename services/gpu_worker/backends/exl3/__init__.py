"""The backend of a machine with an NVIDIA GPU: stock exllamav3 with its routed experts in host memory.

    loader.py     from a checkpoint to a running backend
    resolve.py    what the settings come to
    plan.py       what a model takes of host memory and VRAM, and whether there is as much
    backend.py    streams, prefill, decode
    pages.py      which cache pages belong to which stream
    joined.py     a prompt's last chunk and its tail in one pass
    pass_lock.py  for what has to happen between two passes
    first_uses.py which passes are the first of their shape, and go layer by layer
    records.py    the arena's records, pinned, and device views of them
    experts.py    slots in VRAM: what moves bytes and writes addresses
    expert_tensors.py  the tensors over a record, where it lies now
    slots.py      slots whose end is lent to long prefills
    lending.py    whether any are, and what a prefill takes
    between_steps.py  admissions of decode without the pager
    staging.py    a prefill's missing records, a layer ahead
    placement.py  which record is in which slot, and which should be
    on_demand.py  the pager, which copies misses within the step
    copy_way.py   by the copy engine, or by a gather
    fast.py       decode steps on the integer kernels, shared with cpu_expert
    fast_setup.py from the settings to it
    first_launches.py  of the integer kernels, and what they take
    heat_file.py  how hot experts are, kept over restarts
    start_times.py  seconds of a start's stages

resolve.py, plan.py and placement.py do without torch.
"""
