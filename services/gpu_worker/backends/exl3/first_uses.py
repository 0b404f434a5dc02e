"""Which passes are the first of their shape.

exllamav3 compiles, tunes and captures for a shape in the first passes that have it, and waits for the device inside the driver meanwhile.
In a decode step the device may be waiting for the pager, whose own calls can need what such a wait holds: then nobody would ever go on. So
the first passes of a shape run layer by layer. A warm-up takes nothing off that: it runs few shapes, some of them once.
"""

from __future__ import annotations

from collections import Counter

# The first pass compiles, the second one captures, further ones replay. What comes with every so many tokens (a pool of keys is full with
# 16) comes within these, also where streams join and leave meanwhile.
CAREFUL = 32
SHORT = 1024  # contexts of fewer tokens run the same


class FirstUses:
    """Counts passes by shape."""

    def __init__(self) -> None:
        self._passes: Counter[tuple[bool, int, int, int, int]] = Counter()

    def is_first(self, streams: int, tokens: int, length: int, width: int, *, prompt: bool) -> bool:
        """True for the first CAREFUL passes of a shape.

        Args:
            streams: of the pass.
            tokens: of each stream.
            length: of the longest context, without these tokens. What runs changes where a context with them outgrows a power of two:
                attention becomes sparse there.
            width: columns of the block table, in steps as block tables come: splits are made of it.
            prompt: the pass is a piece of one. A decode step of one token runs other code around the same kernels, with memory of its own.
        """
        shape = (prompt, streams, tokens, max(length + tokens - 1, SHORT - 1).bit_length(), width)
        if self._passes[shape] >= CAREFUL:
            return False
        self._passes[shape] += 1
        return True
