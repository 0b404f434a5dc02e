"""Fetches a checkpoint from a model hub when its folder has none: `ensure` is what the worker calls before it reads the folder.

What was fetched is written down (`record`), so that an interrupted download goes on where it was, and that a folder which lost a file or
holds another revision is refused before anything is loaded from it. config.json, by which a folder counts as a checkpoint, comes last.
"""

from services.gpu_worker.download.fetch import ensure

__all__ = ["ensure"]
