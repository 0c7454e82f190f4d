"""The objectives as a training meets them: what each of them trains, by which loss, and how it is saved."""

from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from marsbench.training.adapter_files import write_adapter, write_head
from marsbench.training.gated import GatedAdapter, HeadToTrain, cast_once, gated_loss
from marsbench.training.medusa import MedusaHeads, medusa_loss
from marsbench.training.objectives import ar_loss, block_diffusion_loss, mars_loss
from marsbench.training.stages import Objective, Recipe

_HEAD = "draft_head"  # of a model in training


class Learner:
    """AR: the model itself learns the next token, and the `Trainer` saves it. Subclasses say what they do otherwise."""

    freezes_model: ClassVar[bool] = False  # something small is trained beside the model, which stays as it is
    saves_model: ClassVar[bool] = True  # the checkpoint holds the model; else the model lies elsewhere
    is_mean_over_rows: ClassVar[bool] = True  # of the loss: a batch may go through in pieces

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        self.model = model
        self.trained: nn.Module = model
        self._recipe = recipe
        self._blocks: dict[str, Any] = {"block_size": recipe.block_size, "mask_token_id": tokenizer.mask_token_id}

    def loss(self, trained: nn.Module, **batch: Any) -> Tensor:
        """The loss of a batch: `input_ids`, `labels`, and `weight` where the data has it; `trained` may be wrapped."""
        return ar_loss(trained, **batch)

    def in_bf16(self) -> None:
        """Every forward pass will be in bf16, by autocast."""

    def end(self) -> None:
        """Tidy up before the `Trainer` saves."""

    def save(self, folder: Path, base: str) -> None:
        """Write what the `Trainer` does not; `base` is where the model lies, as seen from the checkpoint."""


class _Mars(Learner):
    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        super().__init__(recipe, tokenizer, model)
        self._of_head = HeadToTrain(model, recipe.head)
        if recipe.head != "none":
            model.add_module(_HEAD, self._of_head)

    def loss(self, trained: nn.Module, **batch: Any) -> Tensor:
        chosen = self._recipe.variant
        return mars_loss(
            trained, **batch, **self._blocks, ar_weight=self._recipe.ar_weight, alignment=chosen.alignment,
            blocks_from=chosen.blocks_from, head=self._of_head.head,
        ).total  # fmt: skip

    def end(self) -> None:
        if hasattr(self.model, _HEAD):
            delattr(self.model, _HEAD)

    def save(self, folder: Path, base: str) -> None:
        if (head := self._of_head.head) is not None:
            write_head(head, folder)


class _BlockDiffusion(Learner):
    def loss(self, trained: nn.Module, **batch: Any) -> Tensor:
        return block_diffusion_loss(trained, **batch, **self._blocks, shifted=self._recipe.variant.alignment == "paper")


class _Medusa(Learner):
    freezes_model = True
    is_mean_over_rows = False

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        super().__init__(recipe, tokenizer, model.requires_grad_(False))
        self.trained = self._heads = MedusaHeads(model.config.hidden_size)

    def loss(self, trained: nn.Module, **batch: Any) -> Tensor:
        return medusa_loss(trained, **batch, backbone=self.model)

    def save(self, folder: Path, base: str) -> None:
        self.model.save_pretrained(folder)
        self._heads.save(folder)


class _Gated(Learner):
    freezes_model = True
    saves_model = False

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        super().__init__(recipe, tokenizer, model.requires_grad_(False))
        assert recipe.rank is not None, "its stages have one"
        self.trained = self._adapter = GatedAdapter(model, recipe.rank, recipe.head, recipe.strength)

    def loss(self, trained: nn.Module, **batch: Any) -> Tensor:
        return gated_loss(trained, **batch, model=self.model, **self._blocks)

    def in_bf16(self) -> None:
        cast_once(self.model)

    def save(self, folder: Path, base: str) -> None:
        write_adapter(self._adapter.adapter, self.model, folder, base)


LEARNERS: dict[Objective, type[Learner]] = {"ar": Learner, "mars": _Mars, "block_diffusion": _BlockDiffusion}
LEARNERS |= {"medusa": _Medusa, "gated": _Gated}
