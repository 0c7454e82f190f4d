"""What a stage starts from: tokenizer and weights, and its data in the order to train in."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from marsbench.errors import UserError
from marsbench.forward.limits import vocabulary_of
from marsbench.progress import Say
from marsbench.training import checkpoints, data
from marsbench.training.chat_data import read_chat_data
from marsbench.training.data import TrainingData, TrainingSequence
from marsbench.training.learners import LEARNERS
from marsbench.training.stages import Recipe
from marsbench.training.tokenizer import build_tokenizer, prepare_for_chat
from marsbench.world import difficulty


def weights_of(recipe: Recipe, parent: Path | None) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, str | None]:
    """Tokenizer and weights: the parent's, the pretrained base's, or new ones; and the hash of the first two."""
    if parent is not None:
        loaded = checkpoints.load(parent)
        return loaded.tokenizer, loaded.model.train(), loaded.weights
    if recipe.pretrained is not None:
        return _from_base(recipe.pretrained.base, grows=LEARNERS[recipe.objective].saves_model)
    assert recipe.model is not None and recipe.vocabulary_size is not None, "random weights are the world's"
    tokenizer = build_tokenizer(recipe.vocabulary_size, level=difficulty(recipe.difficulty))
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen2Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **special, **recipe.model)
    return tokenizer, Qwen2ForCausalLM(config), None


def _from_base(base: str, *, grows: bool) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, str]:
    """A pretrained checkpoint made ready for chat and masks; embeddings grow only if no row is left for the mask."""
    loaded = checkpoints.load(base)
    tokenizer, model = loaded.tokenizer, loaded.model.train()
    prepare_for_chat(tokenizer)
    if len(tokenizer) > vocabulary_of(model):
        if not grows:
            what = "this base has no row left for the mask's embedding, and an adapter leaves the base as it is"
            raise UserError(what, where=base, fix="choose another base, or train stage mars")
        model.resize_token_embeddings(len(tokenizer))
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return tokenizer, model, loaded.weights


def data_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, say: Say) -> TrainingData:
    """The stage's data in training order, a whole number of batches."""
    budget, pretrained, noisy = recipe.budget, recipe.pretrained, recipe.block_size is not None
    sequences: Sequence[TrainingSequence]
    if pretrained is not None:
        chat = read_chat_data(pretrained.chat_data, tokenizer, pretrained.max_length)
        sequences, tokens, labelled = chat.sequences, chat.lengths, chat.labelled
        say(f"{pretrained.chat_data}: {len(sequences):,} conversations to learn, {chat.dropped:,} left out")
        steps = budget.total_steps(len(sequences), recipe.passes)
    else:
        steps = budget.total_steps(0, recipe.passes)
        count = budget.sequences or steps * budget.batch_size // recipe.passes
        texts: data.Teaching = "plain_text" if recipe.plain_text else "conversations"
        what: data.Teaching = "instruct_data" if recipe.instruct_base else texts
        sequences = data.taught(what, tokenizer, count, recipe.seed, difficulty(recipe.difficulty))
        tokens, labelled = data.lengths(sequences)
    sizes = [a + b for a, b in zip(tokens, labelled, strict=True)] if noisy else tokens
    if pretrained is None and budget.sequences is None:  # the world makes as many as each pass meets once
        drawn = list(range(len(sequences))) * recipe.passes
    else:  # the last batch of the last pass is filled up with the beginning of one more
        drawn = data.shuffled_passes(len(sequences), steps * budget.batch_size, recipe.seed)
    order = data.in_batches(drawn, sizes, budget.batch_size, seed=recipe.seed)
    weights = data.timestep_weights(len(order), recipe.seed) if recipe.variant.weighs_by_timestep else None
    return TrainingData(sequences, order, sum(tokens[index] for index in order), weights)
