"""A GGUF file of SmolLM2's layout with random weights and a part of its vocabulary: a few hundred kilobytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).resolve().parent / "data" / "smollm2"
HIDDEN, LAYERS, HEADS, KEY_HEADS, INNER = 64, 2, 2, 1, 96


def write_gguf(file: Path) -> Path:
    """Write it: matrices in Q4_1, embeddings in Q8_0, tied, EOS and padding the same token, as in the real one."""
    import gguf

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = _vocabulary(writer)
    size = HIDDEN // HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (KEY_HEADS * size, HIDDEN), "attn_v": (KEY_HEADS * size, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    shapes |= {"ffn_down": (HIDDEN, INNER)}

    def add(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
        values = random.normal(0, 0.3, shape).astype(np.float32) if len(shape) == 2 else np.ones(shape, np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    kinds = gguf.GGMLQuantizationType
    add("token_embd.weight", (tokens, HIDDEN), kinds.Q8_0)
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}.weight", shape, kinds.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", (HIDDEN,), kinds.F32)
    add("output_norm.weight", (HIDDEN,), kinds.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _vocabulary(w: Any) -> int:
    """Write the tokenizer; returns how many tokens it has."""
    vocabulary = json.loads((DATA / "vocabulary.json").read_text(encoding="utf-8"))
    merged = ["".join(merge.split(" ")) for merge in vocabulary["merges"]]
    tokens = [*vocabulary["control"], *vocabulary["bytes"], *merged]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(tokens)
    w.add_token_types([3] * len(vocabulary["control"]) + [1] * (len(tokens) - len(vocabulary["control"])))
    w.add_token_merges(vocabulary["merges"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_pad_token_id(2)
    w.add_add_bos_token(False)
    w.add_add_space_prefix(False)
    w.add_chat_template(vocabulary["chat_template"])
    return len(tokens)
