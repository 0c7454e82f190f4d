"""The world's tokenizer: a byte-level BPE trained on its own plain text, with a chat template in the Qwen style."""

from __future__ import annotations

from itertools import islice

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from marsbench import world

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


def build_tokenizer(vocabulary_size: int, *, texts: int = 20_000, seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the tokenizer: at most `vocabulary_size` entries, digits one by one, `<|mask|>` included.

    The same arguments give the same tokenizer, to the byte.
    """
    core = Tokenizer(models.BPE())
    # Qwen2's own way to split text: `AutoTokenizer` gives every Qwen2 checkpoint a tokenizer that splits like this.
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PAD, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(
        [*islice(world.corpus(seed), texts), f"system\n{SYSTEM}\nuser\nassistant\n" * 1000], trainer
    )
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
