"""Converting what was fetched into a checkpoint folder that plain transformers loads, with a mask token.

The tokenizer of a GGUF file is put together from the file's own tokens and merges. `<|mask|>` takes the place of a
special token that no text has, so that no embedding grows.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from marsbench.errors import UserError

MASK = "<|mask|>"
_CONTROL = 3  # the type of a token that stands for no text
# How a GGUF file calls the way that text is cut before merging -> that way. SmolLM's cuts off every digit first, which
# transformers' own conversion forgets.
_CUTS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
}
_IDS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
_IDS |= {"pad_token": "padding_token_id"}


def check_gguf_can_be_read() -> None:
    """Refuse to go on without the package that reads GGUF files."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(
            "the package gguf is missing, which reads the weights", fix="pip install 'marsbench[real]'"
        ) from error


def from_gguf(file: Path, target: Path, mask_over: str) -> None:
    """Write a GGUF file's model and tokenizer as a checkpoint folder, in fp32: its values are not exact in 16 bits.

    Raises:
        UserError: the file is broken, or of a kind that is not known here.
    """
    try:
        tokenizer = _tokenizer(file, mask_over)
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except UserError:
        raise
    except Exception as error:  # the readers raise a dozen kinds for a broken file
        raise UserError(
            f"the weights cannot be read: {str(error).splitlines()[0]}", where=file.name, fix="fetch them again"
        ) from error
    # Without what says that the weights were quantised: they are no longer, and could not be saved.
    described = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    plain = type(model)(type(model.config).from_dict(described))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def with_mask(source: Path, target: Path, mask_over: str) -> None:
    """Copy a checkpoint folder, with `<|mask|>` in the place of another special token."""
    target.mkdir(parents=True)
    for file in [*source.glob("*.safetensors"), *source.glob("*config.json")]:
        shutil.copyfile(file, target / file.name)
    tokenizer = AutoTokenizer.from_pretrained(source, config=AutoConfig.from_pretrained(source))
    core = _renamed(tokenizer.backend_tokenizer, mask_over)
    named = {name: str(getattr(tokenizer, name)) for name in _IDS if getattr(tokenizer, name) is not None}
    _fast(core, named, tokenizer.chat_template).save_pretrained(target)


def _tokenizer(file: Path, mask_over: str) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file describes."""
    import gguf

    fields = gguf.GGUFReader(file).fields

    def said(name: str) -> Any:
        field = fields.get(f"tokenizer.{name}")
        return None if field is None else field.contents()

    cut = said("ggml.pre")
    if said("ggml.model") != "gpt2" or cut not in _CUTS:
        raise UserError(
            f"a tokenizer of the kind {said('ggml.model')}, {cut} is not known here",
            where=file.name,
            fix="take a checkpoint folder, or a model of `marsbench fetch --help`",
        )
    tokens = said("ggml.tokens")
    core = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in said("ggml.merges")],
        )
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(_CUTS[cut])
    core.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, said("ggml.token_type"), strict=True) if kind == _CONTROL]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    ids = {name: said(f"ggml.{field}") for name, field in _IDS.items()}
    named = {name: tokens[number] for name, number in ids.items() if number is not None}
    return _fast(_renamed(core, mask_over), named, said("chat_template"))


def _renamed(core: Tokenizer, old: str) -> Tokenizer:
    """The same tokenizer with `<|mask|>` in the place of the special token `old`."""
    described = json.loads(core.to_str())
    special = [token for token in described["added_tokens"] if token["content"] == old]
    if not special or not special[0]["special"]:
        raise UserError(f"the tokenizer has no special token {old}", fix="choose another checkpoint")
    special[0]["content"] = MASK
    vocabulary = described["model"]["vocab"]
    if old in vocabulary:
        vocabulary[MASK] = vocabulary.pop(old)
    return Tokenizer.from_str(json.dumps(described))


def _fast(core: Tokenizer, named: dict[str, str], chat_template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, mask_token=MASK, clean_up_tokenization_spaces=False, **named
    )
    tokenizer.chat_template = chat_template
    return tokenizer
