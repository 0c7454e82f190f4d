"""Medusa heads: small residual blocks on a frozen model, each guessing one token further ahead (arXiv 2401.10774).

Head k reads the hidden state that the model's own LM head reads at position t, and guesses token t + 2 + k. The LM head
that turns its output into logits is the model's own, frozen like the rest ("Medusa-1").
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from marsbench.training.objectives import IGNORED

HEADS = 3
_FILE = "medusa_heads.safetensors"
_DECAY = 0.8  # weight of a head's loss relative to that of the head before it


class MedusaHeads(nn.Module):
    """Residual blocks h + SiLU(W h + b), starting out as the identity."""

    def __init__(self, hidden_size: int, heads: int = HEADS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(heads))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def __len__(self) -> int:
        return len(self.blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] as every head sees them: [..., heads, H]."""
        return torch.stack([hidden + F.silu(block(hidden)) for block in self.blocks], dim=-2)

    def save(self, folder: Path) -> None:
        save_file(self.state_dict(), folder / _FILE)

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype, device: str | torch.device) -> "MedusaHeads | None":
        if not (folder / _FILE).is_file():
            return None
        weights = load_file(folder / _FILE)
        heads = cls(weights["blocks.0.weight"].shape[0], len(weights) // 2)
        heads.load_state_dict(weights)
        return heads.to(device, dtype).eval()


def medusa_loss(heads: nn.Module, input_ids: Tensor, labels: Tensor, *, backbone: PreTrainedModel) -> Tensor:
    """Cross-entropy of every head above a frozen `backbone` at every label that it can guess, head k times 0.8^k."""
    with torch.no_grad():
        hidden = backbone.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state  # type: ignore[no-untyped-call]
    states = heads(hidden)
    total = torch.zeros((), device=input_ids.device)
    for head in range(states.shape[2]):
        ahead = head + 2
        # A head speaks where the model itself has a response token to predict, and the token it names is one too.
        both = (labels[:, 1:-1] != IGNORED)[:, : -head or None] & (labels[:, ahead:] != IGNORED)
        row, column = both.nonzero(as_tuple=True)
        logits = backbone.get_output_embeddings()(states[row, column, head])  # type: ignore[no-untyped-call]
        total = total + _DECAY**head * F.cross_entropy(logits.float(), labels[row, column + ahead])
    return total
