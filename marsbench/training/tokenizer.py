"""Tokenizers: the world's own, and what a pretrained model's needs before it can be trained on chat data.

The world's is a byte-level BPE trained on the world's plain text, with a chat template in the Qwen style.
"""

from functools import cache
from itertools import islice

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from marsbench import world
from marsbench.errors import UserError

PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SYSTEM = "You are a helpful assistant."  # Qwen's template begins with such a turn where the user gives none
CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(
    vocabulary_size: int, *, texts: int | None = None, level: world.Difficulty = world.USUAL
) -> PreTrainedTokenizerFast:
    """Train the tokenizer: at most `vocabulary_size` entries, digits one by one; always the same, to the byte.

    It learns from 20 `texts` an entry, but from no more than 20,000.
    """
    trained = _trained(vocabulary_size, texts or min(20_000, 20 * vocabulary_size), level)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(trained), pad_token=PAD, eos_token=END, mask_token=MASK,
        additional_special_tokens=[START], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@cache
def _trained(vocabulary_size: int, texts: int, level: world.Difficulty) -> str:
    """The tokenizer's core as JSON: a base and its draft model have the same one."""
    core = Tokenizer(models.BPE())
    # Qwen2's own way to split text: `AutoTokenizer` gives every Qwen2 checkpoint a tokenizer that splits like this.
    core.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer, core.decoder = pre_tokenizers.Sequence([split, in_bytes]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size, special_tokens=[PAD, START, END, MASK], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    around = f"system\n{SYSTEM}\nuser\nassistant\n" * 1000  # what the template adds
    core.train_from_iterator([*islice(world.corpus(0, level), texts), around], trainer)
    return str(core.to_str())


def prepare_for_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer `<|mask|>`, and as EOS the token that ends a turn; `UserError` where none does."""
    where = str(tokenizer.name_or_path)
    if tokenizer.chat_template is None:
        raise UserError("the tokenizer has no chat template", where=where, fix="choose a model made for chats")
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    ending = tokenizer(text[text.rindex("!") + 1 :].lstrip(), add_special_tokens=False).input_ids
    if not ending or not tokenizer.added_tokens_decoder.get(ending[0], ""):
        raise UserError("no chat turn ends with a special token", where=where, fix="choose a chat model")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ending[0])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK})
