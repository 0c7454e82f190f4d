"""The cost of a step of the loop: this code against another checkout of the project, in turn.

`python .ci/bench_steps.py DIR` races the code of another checkout, DIR. It counts the processor's time on one thread,
so that other processes matter little, and takes about ten minutes.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAPS = 7
SHAPES: dict[str, dict[str, int]] = {
    "mini": {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "heads": 4,
             "kv": 2, "steps": 60},
    "135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "heads": 9,
             "kv": 3, "steps": 12},
}  # fmt: skip
CASES = [("ar", 1), ("ar", 16), ("mars", 1), ("mars", 16), ("mars-verified", 4), ("jacobi", 4)]


def _times(shape: str, kind: str) -> dict[str, float]:
    """Milliseconds of a step by case, with the package on the path; run in a process of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from marsbench.compiled.graphs import Graphs
    from marsbench.decoding.engine import Batch
    from marsbench.decoding.generation import Request
    from marsbench.methods import Options, build_method

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = dict(SHAPES[shape])
    steps, heads, kv = sizes.pop("steps"), sizes.pop("heads"), sizes.pop("kv")
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=2048)
    ).eval()
    times: dict[str, float] = {}
    for name, rows in CASES:
        method: Any = build_method(name, Options(mask_id=3))
        make = Batch if kind == "eager" else Graphs().batch
        spent = []
        for lap in range(4):
            batch = make(model, method, eos_id=-1, pad_id=0, on_finished=lambda *_: None)
            threshold = 0.5 if name.startswith("mars") else None
            batch.join({row: Request([4 + row] * 64, 1000, threshold) for row in range(rows)})
            for _ in range(3):
                batch.step()
            began = time.process_time()
            for _ in range(steps):
                batch.step()
            spent += [(time.process_time() - began) / steps * 1e3] if lap else []
        times[f"{name} x {rows}"] = min(spent)
    return times


def race(other: Path, shape: str, kind: str) -> None:
    """Print the median milliseconds of both, case by case."""
    laps: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    places = {"old": other, "new": ROOT}
    for lap in range(LAPS):
        for name in sorted(places, reverse=bool(lap % 2)):
            done = subprocess.run(
                [sys.executable, __file__, shape, kind], capture_output=True, text=True, check=True, cwd=places[name],
                env={**os.environ, "PYTHONPATH": str(places[name]), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            laps[name].append(json.loads(done.stdout.splitlines()[-1]))
    for case in laps["old"][0]:
        old, new = (sorted(lap[case] for lap in laps[name]) for name in ("old", "new"))
        print(f"{shape}, {kind}, {case}: {median(old):.3f} -> {median(new):.3f} ms ({median(new) / median(old):.3f}); "
              f"old {old[0]:.3f} to {old[-1]:.3f}, new {new[0]:.3f} to {new[-1]:.3f}")  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) == 3:  # one of the two processes that `race` starts
        print(json.dumps(_times(*sys.argv[1:])))
    elif len(sys.argv) != 2 or not Path(sys.argv[1], "marsbench").is_dir():
        sys.exit(__doc__)
    else:
        for shape in SHAPES:
            for kind in ("eager", "compiled"):
                race(Path(sys.argv[1]).resolve(), shape, kind)
