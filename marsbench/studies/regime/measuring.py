"""What the page has beside its lines: the loss of base and AR SFT on text that none has met."""

from functools import partial
from typing import Any

import torch

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
    assert run.scale.world is not None, "the world's text is asked of the world's models"
    level, rows = run.scale.world.difficulty, list[Row]()
    for stage in ("base", "ar_sft"):
        loaded = Checkpoints(run).load(TrainedStage(stage, None))
        content = {
            "kind": TextLossRow.kind, "texts": TEXTS, "difficulty": level, "weights": loaded.weights,
            "versions": versions("training", "world"),
        }  # fmt: skip
        title = f"{stage}, loss on held-out text"
        rows.append(kept(run, TextLossRow, content, title, partial(_measured, run, stage, loaded, title, level)))
    return rows


@torch.no_grad()
def _measured(run: Run, stage: str, loaded: Loaded, title: str, level: str) -> dict[str, Any]:
    """Nats and tokens of what follows the problem of each text."""
    nats, tokens = list[float](), list[int]()
    texts = taught("solved_text", loaded.tokenizer, TEXTS, _SEED, difficulty(level))
    collate = Collator(loaded.tokenizer.pad_token_id, loaded.tokenizer.eos_token_id)
    with run.reporter.bar(title) as bar:
        for first in range(0, TEXTS, _TEXTS_AT_ONCE):
            batch = collate(texts[first : first + _TEXTS_AT_ONCE])
            labels = batch["labels"][:, 1:].to(loaded.model.device)
            logits = loaded.model(batch["input_ids"].to(loaded.model.device), use_cache=False).logits[:, :-1].float()
            of_tokens = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
            )
            nats += [round(value, 4) for value in of_tokens.sum(1).tolist()]
            tokens += (labels != IGNORED).sum(1).tolist()
            bar.update(len(nats), TEXTS)
    run.reporter.say(f"{title}: {sum(nats) / sum(tokens):.4f} nats per token")
    return {"stage": stage, "nats": nats, "tokens": tokens, "checkpoint": loaded.weights}
