"""The shared-memory tests use the fixtures of the tier tests."""

from tests.tier.conftest import made, shm_dir

__all__ = ["made", "shm_dir"]
