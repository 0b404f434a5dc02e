"""The same checkpoint in transformers' glm5_next, with every expert dequantised: what our logits are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Glm5NextTextConfig
from transformers.models.glm5_next import modeling_glm5_next as glm

from models.tiny.recipe.exl3_state import head_weight, text_state
from services.gpu_worker.checkpoint import Checkpoint


class Oracle:
    """transformers' text model and head in fp32.

    Args:
        checkpoint: an opened checkpoint.
        text_config: its text_config.
        affine_experts: MUL1 experts as docs/arithmetic.md defines their weights, without the fp16 rounding that a GPU's decoder adds.
    """

    def __init__(self, checkpoint: Checkpoint, text_config: dict[str, Any], *, affine_experts: bool = False) -> None:
        torch.set_num_threads(1)
        config = Glm5NextTextConfig(**text_config)
        config._attn_implementation = "eager"
        self.model = glm.Glm5NextTextModel(config).float().eval()
        # After the activation, as the checkpoint's own runtime clamps; the stock forwards clamp before.
        for module in self.model.modules():
            if isinstance(module, glm.Glm5NextTextMLP):
                module.forward = _clamp_after.__get__(module)  # type: ignore[method-assign]
            if isinstance(module, glm.Glm5NextTextExperts):
                module._apply_gate = _gate_after.__get__(module)  # type: ignore[method-assign]
                module.config = config
        self.head = head_weight(checkpoint).T
        missing, unexpected = self.model.load_state_dict(text_state(checkpoint, affine=affine_experts), strict=False)
        assert not unexpected, unexpected
        assert not missing, missing
        self.model.set_experts_implementation("eager")

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """fp32 [tokens, vocab] of one full forward pass."""
        hidden = self.model(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
        return np.asarray((hidden @ self.head).numpy(), np.float32)


def _clamp_after(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate = torch.nn.functional.silu(self.gate_proj(x)).clamp(max=self.swiglu_limit)
    return self.down_proj(gate * self.up_proj(x).clamp(-self.swiglu_limit, self.swiglu_limit))


def _gate_after(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).clamp(max=self.swiglu_limit) * up.clamp(-self.swiglu_limit, self.swiglu_limit)
