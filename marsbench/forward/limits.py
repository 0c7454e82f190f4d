"""What a model can read: the tokens that it has an embedding for, and how many of them at a time."""

from typing import Any

from marsbench.errors import UserError, integer


def vocabulary_of(model: Any) -> int:
    """Rows of a model's embedding: an adapter around it has no `num_embeddings`, a quantised one packs its weight."""
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0])


def context_length(model: Any) -> int:
    """The longest sequence that the model's positions allow, with one set of rotary factors: `longrope` has two."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}  # a model may have some for each kind of layer
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict) and part.get("rope_type") == "longrope"]
    borders = [int(part["original_max_position_embeddings"]) for part in parts]
    return min([int(getattr(config, "max_position_embeddings", 1 << 30)), *borders])


def room_for_prompt(model: Any, max_new_tokens: int) -> int:
    """Tokens that a model's context leaves for a prompt; `UserError` where it leaves none."""
    room = context_length(model) - max_new_tokens
    if room < 1:
        what = f"answers of {max_new_tokens:,} tokens leave no room for a prompt in the model's context of"
        raise UserError(f"{what} {room + max_new_tokens:,}", fix="give a smaller limit of new tokens, or another model")
    return room


def check_ids(model: Any, **ids: int | None) -> None:
    """Refuse ids that a model has no embedding for, each called as its argument is; None is none at all."""
    for name, token in ids.items():
        if token is not None:
            token_id(token, f"{name} id", vocabulary_of(model), where=type(model).__name__)


def check_mask_id(model: Any, method: Any) -> None:
    mask_id, draft = getattr(method, "mask_id", -1), getattr(method, "draft", None)
    if mask_id != -1:  # which stands for no masks
        for reader in (model, *([] if draft is None else [draft])):
            check_ids(reader, mask=mask_id)


def token_id(value: Any, name: str, vocabulary: int, *, where: str = "", fix: str = "give another id") -> int:
    if 0 <= (number := integer(value, name, where=where)) < vocabulary:
        return number
    raise UserError(f"{name} {number} lies outside the vocabulary of {vocabulary}", where=where, fix=fix)
