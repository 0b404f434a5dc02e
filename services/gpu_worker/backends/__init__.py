"""Backends: what computes logits. `base.Backend` is all that the engine knows."""
