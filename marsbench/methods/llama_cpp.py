"""llama.cpp as a reference point from outside: the fastest plain decoding on many a CPU, of the same weights.

The weights are written as a GGUF file, in their own type or quantised, and read by llama.cpp's Python package. Tokens
go in and come out; of the tokenizer nothing is written.
"""

import atexit
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from marsbench.decoding.engine import OutsideMethod
from marsbench.decoding.generation import Meter, Request
from marsbench.errors import UserError
from marsbench.methods import check_installed

Quantised = Literal["none", "q8_0", "q4_1"]
_Weights = list[tuple[int, int]]  # where each lies, and how often it was written to
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_KINDS = ("llama", "qwen2")  # architectures, as both transformers and llama.cpp call them
# model -> (how it is quantised, tokens drafted, of the longest match) -> where its weights were, and llama.cpp's own
_READ: WeakKeyDictionary[Any, dict[tuple[str, int, int], tuple[_Weights, Any]]] = WeakKeyDictionary()
# Before its library goes.
atexit.register(lambda: [reader.close() for known in _READ.values() for _, reader in known.values()])


@dataclass(frozen=True)
class LlamaCpp(OutsideMethod):
    """llama.cpp's own greedy loop, one sequence at a time, with as many threads as torch has."""

    name = "llama-cpp"
    one_row = True

    quantised: Quantised = "none"

    def continue_batch(
        self, model: Any, requests: Sequence[Request], eos_ids: list[int], pad_id: int, meter: Meter | None = None
    ) -> list[tuple[list[int], list[int]]]:
        (request,) = requests
        ids: list[int] = []
        reader = _read(model, self.quantised, *(getattr(self, name, 0) for name in ("draft_length", "ngram")))
        reader.reset()  # else it keeps what this prompt has in common with the one before
        for token in reader.generate(list(request.prompt_ids), temp=0.0):
            ids.append(int(token))
            if meter is not None:
                meter.tick()
            if len(ids) == request.max_new_tokens or (token in eos_ids and not request.ignore_eos):
                break
        return [(ids, [1] * len(ids))]


@dataclass(frozen=True)
class LlamaCppLookup(LlamaCpp):
    """llama.cpp with its own prompt lookup, as its Python package has it."""

    name = "llama-cpp-lookup"

    draft_length: int = 4
    ngram: int = 3


def _read(model: Any, quantised: Quantised, draft_length: int, ngram: int) -> Any:
    """A model as llama.cpp reads it; it is written and read once, as long as its weights stay what they are."""
    known = _READ.setdefault(model, {})
    wanted = quantised, draft_length, ngram
    weights = [(parameter.data_ptr(), parameter._version) for parameter in model.parameters()]
    if wanted not in known or known[wanted][0] != weights:
        check_installed(LlamaCpp.name)
        from llama_cpp import GGML_TYPE_F16, GGML_TYPE_F32, Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        drafts = LlamaPromptLookupDecoding(ngram, draft_length) if draft_length else None
        threads, cache = torch.get_num_threads(), GGML_TYPE_F32 if model.dtype is torch.float32 else GGML_TYPE_F16
        with TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            write_gguf(model, file, quantised)
            reader = Llama(
                str(file), n_ctx=model.config.max_position_embeddings, n_threads=threads, n_threads_batch=threads,
                type_k=cache, type_v=cache, draft_model=drafts, logits_all=drafts is not None, use_mmap=False,
                verbose=False,
            )  # fmt: skip
        known[wanted] = weights, reader
    return known[wanted][1]


def write_gguf(model: Any, file: Path, quantised: Quantised = "none") -> None:
    """Write a Llama or Qwen2 model as llama.cpp reads it; `UserError` for others, or weights of no whole blocks."""
    import gguf

    config = model.config
    kind = config.model_type
    if kind not in _KINDS or model.dtype not in _TYPES:
        raise UserError(f"llama.cpp cannot load a {kind} model in {model.dtype}", fix="race Llama or Qwen2")
    writer: Any = gguf.GGUFWriter(file, kind)
    rotary = model.get_decoder().rotary_emb
    size = rotary.inv_freq.numel() * 2  # of a head
    for name, said in {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "key_length": size, "value_length": size, "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": float(1 / rotary.inv_freq[1].double() ** (size // 2)), "rope_dimension_count": size,
        "vocab_size": config.vocab_size, "tokenizer_model": "no_vocab",
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(said)
    wanted = gguf.GGMLQuantizationType[_TYPES[model.dtype] if quantised == "none" else quantised.upper()]
    try:
        for name, weight in _renamed(model):
            form = wanted if weight.dim() == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(weight.float().numpy(), form), raw_dtype=form)
    except gguf.quants.QuantError as error:
        raise UserError(f"the weights cannot be quantised: {error}", fix="leave them as they are") from error
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors by llama.cpp's names, on the CPU; a Llama's queries and keys as pairs beside each other, not halves."""
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    turned = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        heads = turned.get(name.split(".")[-2]) if config.model_type == "llama" else None
        if heads is not None:
            halves = weight.view(heads, 2, len(weight) // heads // 2, -1)
            weight = halves.transpose(1, 2).reshape(weight.shape)
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            yield str(names.get_name(name, (".weight", ".bias"))), weight.detach().cpu()
