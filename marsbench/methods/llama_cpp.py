"""llama.cpp as a reference point from outside: the fastest plain decoding on many a CPU, of the same weights.

The weights that our loop decodes are written as a GGUF file, in their own type or quantised, and read by llama.cpp's
Python package. Tokens go in and come out; of the tokenizer nothing is written.
"""

import atexit
from collections.abc import Sequence
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
# Our modules -> the tensors of a GGUF file: of a layer, and of the whole model.
_OF_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
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
        """One request: its new tokens, one for each forward as far as anybody can see."""
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
    """Write the weights of a Llama or Qwen2 model as llama.cpp reads them; norms and biases stay in fp32.

    Raises:
        UserError: a model of another kind, or one whose weights cannot be quantised in blocks.
    """
    import gguf

    config = model.config
    kind = config.model_type
    if kind not in _KINDS or model.dtype not in _TYPES:
        fix = "race it with a Llama or Qwen2 model"
        raise UserError(f"llama.cpp is not given a model of the kind {kind} in {model.dtype}", fix=fix)
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
        for name, weight in _renamed(model, turned=kind == "llama"):
            form = wanted if weight.dim() == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(weight.float().numpy(), form), raw_dtype=form)
    except gguf.quants.QuantError as error:
        raise UserError(f"the weights cannot be quantised: {error}", fix="leave them as they are") from error
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(model: Any, *, turned: bool) -> list[tuple[str, Tensor]]:
    """A model's tensors by the names that llama.cpp knows, on the CPU.

    With `turned`, queries and keys lie as llama.cpp's Llama rotates them: pairs beside each other, not halves.
    """
    config, fields = model.config, []
    for name, weight in model.state_dict().items():
        module, _, part = name.rpartition(".")
        if module == "lm_head" and config.tie_word_embeddings:
            continue
        if module.startswith("model.layers."):
            number, _, module = module.removeprefix("model.layers.").partition(".")
            called = f"blk.{number}.{_OF_LAYER[module]}"
            if turned and module in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
                halves = weight.view(heads, 2, len(weight) // heads // 2, -1)
                weight = halves.transpose(1, 2).reshape(weight.shape)
        else:
            called = _WHOLE[module]
        fields.append((f"{called}.{part}", weight.detach().cpu()))
    return fields
