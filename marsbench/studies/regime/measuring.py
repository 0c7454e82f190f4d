"""What the page has beside its lines: the loss of base and AR SFT on text that none has met."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from marsbench.keys import versions
from marsbench.line import TrainedStage
from marsbench.rows.kinds import Row, TextLossRow
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run, kept
from marsbench.training.checkpoints import Loaded
from marsbench.training.data import Collator, taught
from marsbench.training.objectives import IGNORED
from marsbench.world import difficulty

TEXTS = 4000
_SEED = 700_000  # of a stream that no training draws from
_TEXTS_AT_ONCE = 64


def text_losses(run: Run) -> list[Row]:
    return [_text_loss(run, stage) for stage in ("base", "ar_sft")]


def _text_loss(run: Run, stage: str) -> TextLossRow:
    assert run.scale.world is not None, "the world's text is asked of the world's models"
    loaded = Checkpoints(run).load(TrainedStage(stage, None))
    how = {"kind": TextLossRow.kind, "texts": TEXTS, "difficulty": run.scale.world.difficulty}
    content = {**how, "weights": loaded.weights, "versions": versions("training", "world")}
    title = f"{stage}, loss on held-out text"
    return kept(run, TextLossRow, content, title, partial(_measured, run, stage, loaded, title))


def _measured(run: Run, stage: str, loaded: Loaded, title: str) -> dict[str, Any]:
    assert run.scale.world is not None, "see above"
    with run.reporter.bar(title) as bar:
        nats, tokens = list[float](), list[int]()
        for batch_nats, batch_tokens in _likelihoods(loaded, run.scale.world.difficulty):
            nats += [round(value, 4) for value in batch_nats.tolist()]
            tokens += batch_tokens.tolist()
            bar.update(len(nats), TEXTS)
    run.reporter.say(f"{title}: {sum(nats) / sum(tokens):.4f} nats per token")
    return {"stage": stage, "nats": nats, "tokens": tokens, "checkpoint": loaded.weights}


@torch.no_grad()
def _likelihoods(loaded: Loaded, level: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Nats [N] and tokens [N] of what follows the problems of the texts, batch by batch."""
    texts = taught("solved_text", loaded.tokenizer, TEXTS, _SEED, difficulty(level))
    collate = Collator(loaded.tokenizer.pad_token_id, loaded.tokenizer.eos_token_id)
    for first in range(0, TEXTS, _TEXTS_AT_ONCE):
        batch = collate(texts[first : first + _TEXTS_AT_ONCE])
        labels = batch["labels"][:, 1:].to(loaded.model.device)
        logits = loaded.model(batch["input_ids"].to(loaded.model.device), use_cache=False).logits[:, :-1].float()
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        yield nll.sum(1), (labels != IGNORED).sum(1)
