"""Small reversible changes to a stock exllamav3, each with a name, a guard and an undo.

    guard.py          version and source fingerprints: what was read is what is patched, or nothing is
    replace.py        replaces attributes and puts the old ones back
    upstream.py       the functions of exllamav3 1.5.1 that the patches rely on, with their fingerprints
    expert_load.py    routed experts are views of the arena's records instead of tensors read into VRAM
    pointer_tables.py every table of expert addresses of the model is a part of one tensor
    dispatch.py       calls before and after a layer's routed experts run, and before a kernel that reads tensors instead of tables

No module here imports exllamav3: the patches get its objects handed in, so their logic is tested without a GPU.
"""
