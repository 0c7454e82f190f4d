"""The decode loop and every method in it, against the golden vectors and their contracts."""

import copy
from typing import Any

import pytest
import tools
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from test_adapter import noisy

from marsbench.decoding import acceptance
from marsbench.decoding.acceptance import confidence, confidence_needed, leading_run
from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Generation, Meter, Request
from marsbench.decoding.sampling import choose
from marsbench.errors import UserError
from marsbench.forward.adapter import Adapted
from marsbench.line import renamed
from marsbench.methods import METHODS, Options, build_method
from marsbench.methods.mars_verified import _likeliest
from marsbench.methods.medusa import tree_paths
from marsbench.training.medusa import MedusaHeads

Models = dict[str, hf.PreTrainedModel]

EOS, PAD, MASK = 2, 0, 3


def run(
    model: hf.PreTrainedModel, method: str, prompts: list[list[int]], *, batch_size: int = 8, limit: int = 96,
    threshold: float | None = None, temperature: float = 0.0, meter: Meter | None = None, **options: Any,
) -> list[Generation]:  # fmt: skip
    """Decode prompts with a method of the registry; prompt i samples with seed i."""
    drawn = {"threshold": threshold, "temperature": temperature}
    requests = [Request(prompt, limit, seed=row, **drawn) for row, prompt in enumerate(prompts)]
    chosen = build_method(method, Options(**{"mask_id": MASK, **options}))
    size = 1 if METHODS[method].one_row else batch_size
    return decode(model, chosen, requests, eos_id=EOS, pad_id=PAD, batch_size=size, meter=meter)


def companions(models: Models, hidden_size: int) -> dict[str, Any]:
    """A draft model and Medusa heads for a target; both guess badly, so that mistakes show."""
    torch.manual_seed(1)
    heads = MedusaHeads(hidden_size)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return {"draft": models["draft"], "heads": heads}


SAMPLERS = {
    "sliding_window": ("mars", "mars-no-cache"),
    "sliding_window_cached": ("mars", "mars-no-cache"),
    "block_cached": ("mars-block-cache",),
    "greedy_ar": ("ar",),
}
SAMPLER_OF = ["sliding_window"] * 19 + ["sliding_window_cached"] * 2 + ["block_cached"] * 24 + ["greedy_ar"] * 2


@pytest.mark.parametrize(
    ("index", "method"), [(index, method) for index, name in enumerate(SAMPLER_OF) for method in SAMPLERS[name]]
)
@pytest.mark.parametrize("batch_size", [1, 7])
def test_golden_decodings(
    index: int, method: str, batch_size: int, golden: dict[str, Any], golden_models: Models
) -> None:
    """Guards against any token or forward count that differs from the authors' samplers, alone or in a ragged batch."""
    recorded = golden["decoding"][index]
    assert recorded["sampler"] == SAMPLER_OF[index]
    generations = run(
        golden_models[recorded.get("checkpoint", "mars")], method, golden["prompts"][: 24 if batch_size > 1 else 3],
        batch_size=batch_size, limit=golden["max_new_tokens"], threshold=recorded.get("threshold"),
        **renamed({name: recorded[name] for name in ("block_size", "metric", "cache_block") if name in recorded}),
    )  # fmt: skip
    for generation, row in zip(generations, recorded["rows"][: len(generations)], strict=True):
        assert generation.tokens == row["tokens"]
        assert generation.forwards == row.get("forwards", generation.forwards)


@pytest.mark.parametrize("index", [index for index, name in enumerate(SAMPLER_OF) if name == "block_cached"])
def test_the_block_cache_spends_no_more_forwards_than_the_authors(
    index: int, golden: dict[str, Any], golden_models: Models
) -> None:
    """Guards against an extra forward for tokens that the next block's first forward can carry."""
    recorded = golden["decoding"][index]
    generations = run(
        golden_models["mars"], "mars-block-cache", golden["prompts"], limit=golden["max_new_tokens"],
        threshold=recorded["threshold"], cache_block=recorded["cache_block"],
    )  # fmt: skip
    size = recorded["batch_size"]
    longest = [max(g.forwards for g in generations[first : first + size]) for first in range(0, 24, size)]
    assert all(ours <= theirs for ours, theirs in zip(longest, recorded["forwards_per_batch"], strict=True))


def test_a_cycle_of_two_forwards_drafts_and_verifies(golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against masks forwarded behind drafts, drafts that are not verified, a token that waits for a forward."""
    for prompt in golden["prompts"][:8]:
        meter = Meter()
        (generation,) = run(golden_models["mars"], "uno", [prompt], limit=41, meter=meter)
        first, second = generation.accepted[::2], generation.accepted[1::2]
        assert {*first} == {1} and max(second) > 1
        assert sum(generation.accepted) == len(generation.tokens) + (generation.finish == "eos")
        assert meter.positions <= 4 * meter.forwards, "W positions a forward, fewer only at the end"
        assert meter.positions >= 4 * (meter.forwards - 2)


@pytest.fixture(scope="module")
def random_models() -> Models:
    """Untrained models: their outputs end early, late or never, and vary without a pattern."""
    models: Models = {
        "qwen2": tools.qwen2(),
        "llama": tools.llama(None),
        "qwen3": hf.Qwen3ForCausalLM(hf.Qwen3Config(**tools.SIZES, head_dim=8)).eval(),
        "draft": tools.qwen2(None, num_hidden_layers=1),
    }
    adapted: Any = Adapted(models["qwen2"], noisy(models["qwen2"], 1.0))
    return models | {"adapted": adapted}


PROMPTS = st.lists(st.lists(st.integers(4, 23), min_size=1, max_size=14), min_size=1, max_size=6)
CHOICES: dict[str, Any] = {
    "window": st.integers(1, 6), "cache_block": st.integers(1, 7), "layout": st.sampled_from(["groups", "linear"]),
    "draft_length": st.integers(1, 5), "draft_method": st.sampled_from(["ar", "mars"]),
    "draft_threshold": st.sampled_from([0.0, 0.3]), "tree_width": st.integers(1, 4),
    "metric": st.sampled_from(["probability", "margin"]), "groups": st.sampled_from([None, 1, 2]),
    "shifted": st.booleans(),
}  # fmt: skip
OPTIONS = st.fixed_dictionaries(CHOICES).map(lambda own: own if own["layout"] == "groups" else own | {"groups": None})


@pytest.mark.parametrize("method", [name for name, info in METHODS.items() if not info.package])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=PROMPTS,
    limit=st.integers(1, 17),
    threshold=st.sampled_from([None, 0.0, 0.2, 0.5, 0.9]),
    temperature=st.sampled_from([0.0, 0.0, 1.3]),
    options=OPTIONS,
    family=st.sampled_from(["qwen2", "llama", "qwen3", "adapted"]),
)
def test_every_method_keeps_the_contract(
    method: str, prompts: list[list[int]], limit: int, threshold: float | None, temperature: float,
    options: dict[str, Any], family: str, random_models: Models,
) -> None:  # fmt: skip
    """Guards against lost, double or late tokens, rows that disturb each other, limits overrun and lossy drafts."""
    info, model = METHODS[method], random_models[family]
    prompts = prompts[:3] if info.own_loop else prompts  # loops of other libraries are slow
    choices: dict[str, Any] = {
        "limit": limit,
        "threshold": threshold if info.takes_threshold else None,
        "temperature": 0.0 if info.own_loop else temperature,
    }
    extra = options | companions(random_models, 32)
    together = run(model, method, prompts, batch_size=len(prompts), **choices, **extra)
    if not info.one_row:
        assert run(model, method, prompts, batch_size=max(1, len(prompts) // 2), **choices, **extra) == together
    for generation in together:
        ended = generation.finish == "eos"
        assert generation.emitted == len(generation.tokens) + ended <= limit
        assert ended or generation.emitted == limit
        assert EOS not in generation.tokens
        assert sum(generation.accepted) == generation.emitted
        assert generation.forwards >= 1
        if info.takes_threshold and not info.lossless and threshold is None and method != "mars-speculative":
            assert max(generation.accepted) <= 1
    if temperature == 0.0 and not info.one_row:
        alone = [run(model, method, [prompt], **choices, **extra)[0] for prompt in prompts]
        assert alone == together
    if info.lossless or (method == "mars-speculative" and threshold is None):
        ar = run(model, "ar", prompts, limit=limit, temperature=choices["temperature"])
        assert [g.tokens for g in together] == [g.tokens for g in ar]


@pytest.mark.parametrize("method", ["ar", "mars", "hf-generate"])
def test_a_stop_sequence_ends_the_output(method: str, golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against a sequence that is missed where it began in an earlier forward, or ends another row."""
    model, prompts = golden_models["mars"], golden["prompts"][:6]
    threshold = 0.3 if METHODS[method].takes_threshold else None
    plain = [generation.tokens for generation in run(model, method, prompts, limit=24, threshold=threshold)]
    chosen = build_method(method, Options(mask_id=MASK))
    for stop in (plain[0][start : start + 2] for start in (0, 3, 8)):
        requests = [Request(prompt, 24, threshold, stop=[[PAD], stop]) for prompt in prompts]
        for tokens, row in zip(plain, decode(model, chosen, requests, eos_id=EOS, pad_id=PAD), strict=True):
            ends = [at for at in range(2, len(tokens) + 1) if tokens[at - 2 : at] == stop]
            assert row.tokens == tokens[: min(ends, default=24)] and (row.finish == "stop") == bool(ends)


@pytest.mark.parametrize("method", [name for name, info in METHODS.items() if not info.own_loop])
def test_half_precision_runs(method: str, golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against tensors of another type mixed in: a checkpoint in bfloat16, confidences in fp32."""
    models = {name: copy.deepcopy(model).bfloat16() for name, model in golden_models.items()}
    extra = companions({"draft": models["ar"]}, 64)
    extra["heads"].bfloat16()
    threshold = 0.9 if METHODS[method].takes_threshold else None
    for generation in run(models["mars"], method, golden["prompts"][:4], limit=12, threshold=threshold, **extra):
        assert sum(generation.accepted) == generation.emitted <= 12


@settings(max_examples=25, deadline=None)
@given(
    prompts=PROMPTS,
    window=st.integers(1, 6),
    threshold=st.sampled_from([None, 0.0, 0.3, 0.8]),
    appended_masks=st.sampled_from([None, 5, 15]),
)
def test_mars_without_cache_equals_mars(
    prompts: list[list[int]], window: int, threshold: float | None, appended_masks: int | None, random_models: Models
) -> None:
    """Guards against stale cache entries, masks that a later step can see, and masks behind the window that count."""
    options: dict[str, Any] = {"limit": 15, "threshold": threshold, "window": window}
    model = random_models["qwen2"]
    without = run(model, "mars-no-cache", prompts, **options, appended_masks=appended_masks)
    assert run(model, "mars", prompts, **options) == without


@pytest.mark.parametrize("method", ["mars", "mars-no-cache", "mars-block-cache"])
def test_one_token_mode_equals_ar(method: str, golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against masks that change candidate 0, which must be the AR prediction."""
    prompts, model = golden["prompts"], golden_models["mars"]
    assert run(model, method, prompts) == run(model, "ar", prompts)
    # A threshold that only the first candidate passes takes the path with masks, and gives the same tokens.
    assert [g.tokens for g in run(model, method, prompts, threshold=0.0, metric="entropy")] == [
        g.tokens for g in run(model, "ar", prompts)
    ]


@torch.inference_mode()
@pytest.mark.parametrize(("layout", "rows", "readings"), [("groups", 1, 1), ("linear", 1, 1), ("groups", 8, 2)])
def test_a_forward_of_few_entries_reads_the_lm_head_once(
    layout: str, rows: int, readings: int, random_models: Models
) -> None:
    """Guards against drafts and masks read one after the other: a large LM head costs as much for 1 as for 9."""
    model, calls = random_models["llama"], []
    handle = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    method = build_method("mars-verified", Options(mask_id=MASK, window=3, layout=layout))
    batch = Batch(model, method, eos_id=[], pad_id=PAD, on_finished=lambda *_: None)
    batch.join({row: Request([5, 6, 7], 20, ignore_eos=True) for row in range(rows)})
    calls.clear()
    for _ in range(3):
        batch.step()
    handle.remove()
    assert len(calls) == 3 * readings


def test_the_groups_that_stand_are_where_drafts_likeliest_end() -> None:
    """Guards against groups behind drafts that are sure, and a chance that ignores the drafts before."""
    sure = torch.tensor([[0.9, 0.5, 0.9], [0.1, 0.9, 0.9], [0.99, 0.99, 0.99], [0.5, 0.2, 0.9]])
    # Ends behind drafts 0 to 3: .1 .45 .045 .405; .9 .01 .009 .081; .01 .0099 .0098 .97; one draft: .5 .5 0 0.
    bits = _likeliest(sure, torch.tensor([3, 3, 3, 1]), 2)
    assert bits.tolist() == [0b1010, 0b1001, 0b1001, 0b0011]
    assert _likeliest(sure, torch.tensor([3, 3, 3, 3]), 9).tolist() == [0b1111] * 4


@pytest.mark.parametrize("batch_size", [1, 8])
def test_fewer_groups_cost_fewer_positions(batch_size: int, golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against groups that are left out but still computed, or left out where the drafts end."""
    model, costs = golden_models["mars"], {}
    for groups in (None, 4, 2, 1):
        meter = Meter()
        answers = run(model, "mars-verified", golden["prompts"][:8], batch_size=batch_size, meter=meter, groups=groups)
        assert [g.tokens for g in answers] == [g.tokens for g in run(model, "ar", golden["prompts"][:8])]
        costs[groups] = sum(g.forwards for g in answers), meter.positions
    assert costs[None] == costs[4]
    assert costs[4][0] < costs[2][0] < costs[1][0], "forwards"
    each = [positions / forwards for forwards, positions in costs.values()]
    assert each[1] > each[2] > each[3]


@pytest.mark.parametrize("shifted", [False, True])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=st.lists(st.integers(4, 23), min_size=1, max_size=11), limit=st.integers(1, 13), block=st.integers(2, 5))
def test_block_diffusion_by_whole_forwards(
    shifted: bool, prompt: list[int], limit: int, block: int, random_models: Models
) -> None:
    """Guards against a token that is read from a wrong place, or from a cache other than a full forward's."""
    model, end = random_models["qwen2"], len(prompt) + limit
    tokens: list[int | None] = [*prompt, *[None] * limit]
    while None in tokens:
        start = tokens.index(None) // block * block
        shown = torch.tensor([[MASK if slot is None else slot for slot in (tokens + [None] * block)[: start + block]]])
        of = torch.arange(start + block) // block
        hidden = torch.zeros(1, 1, len(of), len(of)).masked_fill(of > of.unsqueeze(1), -torch.inf)
        with torch.no_grad():
            logits = model(input_ids=shown, attention_mask=hidden).logits[0]
        places = [place for place in range(start, min(start + block, end)) if tokens[place] is None]
        likeliest = {place: logits[place - shifted].softmax(0).max(0) for place in places}
        best = max(places, key=lambda place: float(likeliest[place].values))
        tokens[best] = int(likeliest[best].indices)
    expected = tokens[len(prompt) :]
    (generation,) = run(model, "block-diffusion", [prompt], limit=limit, window=block, shifted=shifted)
    assert generation.tokens == expected[: expected.index(EOS) if EOS in expected else limit]


@torch.inference_mode()
@pytest.mark.parametrize("width", [1, 3])
def test_medusa_accepts_what_the_heads_name(width: int, golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against heads read at the wrong place and against a tree whose branches are mixed up."""
    model, heads = golden_models["ar"], MedusaHeads(64)
    torch.manual_seed(3)
    for block in heads.blocks:
        torch.nn.init.normal_(block.weight, std=0.2)
    paths = tree_paths(len(heads), width)
    prompts = golden["prompts"][:6]
    for prompt, generation in zip(prompts, run(model, "medusa", prompts, heads=heads, tree_width=width), strict=True):
        text = generation.tokens + [EOS] * (generation.finish == "eos")
        known, accepted, tree = 0, [], list[tuple[int, ...]]()
        while known < len(text):
            ahead = [len(path) for path in tree if list(path) == text[known : known + len(path)]]
            right = max(ahead, default=0)
            hidden = model.model(input_ids=torch.tensor([prompt + text[: known + right]])).last_hidden_state[0, -1]
            best = model.lm_head(heads(hidden)).topk(width).indices.tolist()
            tree = [tuple(best[depth][rank] for depth, rank in enumerate(path)) for path in paths]
            accepted.append(min(right + 1, len(text) - known))
            known += right + 1
        assert generation.accepted == accepted


def test_a_perfect_draft_is_always_accepted(golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against a draft cache that falls behind the target: here the model drafts for itself."""
    model = golden_models["mars"]
    for name in ("speculative", "hf-assisted"):
        for generation in run(model, name, golden["prompts"][:6], draft=model, draft_length=3):
            assert set(generation.accepted[:-1]) <= {4}


def test_rows_may_carry_different_options(golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against one row's limit, threshold or temperature applied to the whole batch."""
    model, method = golden_models["mars"], build_method("mars", Options(mask_id=MASK))
    prompts = golden["prompts"]
    requests = [
        Request(prompts[0], 96, None),
        Request(prompts[1], 3, 0.9),
        Request(prompts[2], 11, 0.5, temperature=0.7, seed=5),
        Request(prompts[3], 96, 0.7),
    ]
    together = decode(model, method, requests, eos_id=EOS, pad_id=PAD)
    alone = [decode(model, method, [request], eos_id=EOS, pad_id=PAD)[0] for request in requests]
    assert together == alone


def test_the_cache_holds_live_tokens_and_the_meter_counts(golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against a cache sized by limits, windows or finished rows, and positions miscounted."""
    model, prompts = golden_models["mars"], [golden["prompts"][0]] * 4
    held = {}
    for limit in (40, 180):
        meter = Meter()
        run(model, "mars-verified", prompts, limit=limit, meter=meter)
        held[limit] = meter.cache_bytes
    assert held[40] == held[180]  # all rows end after 31 tokens
    config, heads = model.config, model.config.num_key_value_heads
    per_slot = 4 * 2 * config.num_hidden_layers * heads * (config.hidden_size // config.num_attention_heads)
    assert held[40] <= 4 * (len(prompts[0]) + 31 + 16 + 63) * per_slot
    meter = Meter()
    prompts = [golden["prompts"][0]] * 2
    first, second = run(golden_models["mars"], "ar", prompts, meter=meter)
    assert first == second
    assert (meter.prompt_forwards, meter.prompt_positions) == (1, 2 * len(prompts[0]))
    assert (meter.forwards, meter.positions) == (first.forwards - 1, 2 * (first.forwards - 1))


def test_neighbouring_positions_draw_independently() -> None:
    """Guards against noise that repeats from one position to the next."""
    logits = torch.zeros(3000, 2, 2)
    position = torch.tensor([[7, 8]]).expand(3000, -1)
    drawn = choose(logits, position, torch.ones(3000), torch.arange(3000))
    counts = (2 * drawn[:, 0] + drawn[:, 1]).bincount(minlength=4)
    assert chisquare(counts).pvalue > 0.001


def test_confidence_and_runs_by_hand() -> None:
    """Guards against a metric on the wrong scale or in the model's dtype, and tokens right of a rejected one."""
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    assert confidence(logits, "probability").item() == pytest.approx(0.5)
    assert confidence(logits, "margin").item() == pytest.approx(0.2)
    assert -confidence(logits, "entropy").item() == pytest.approx(1.0297, abs=1e-4)
    assert confidence(logits.bfloat16(), "probability").dtype == torch.float32
    passes = torch.tensor([[False, True, False, True], [True, False, True, True]])
    assert leading_run(passes).tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_of_exponentials_decides_as_a_softmax_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a GPU that accepts other tokens: there, sums replace a softmax that would take too long."""
    torch.manual_seed(0)
    logits = (torch.randn(4, 5, 3000) * 4).to(dtype)
    logits[0, 0, 7] = 300.0
    plain = confidence(logits, "probability")
    monkeypatch.setattr(acceptance, "_by_sums", lambda logits: True)
    by_sums = confidence(logits, "probability")
    assert by_sums.dtype == torch.float32 and torch.allclose(by_sums, plain, rtol=1e-5)
    for tau in (0.3, 0.5, 0.7, 0.95):
        assert torch.equal(by_sums >= tau, plain >= tau)


INF, NAN = float("inf"), float("nan")
THRESHOLDS = [(1.5, "probability"), (-0.1, "margin"), (-1.0, "entropy"), (0.5, "hope"), (NAN, "probability")]
THRESHOLDS += [(INF, metric) for metric in ("entropy", "probability", "margin")]
OPTIONS_OUT_OF_RANGE: list[dict[str, Any]] = [
    {"window": 0}, {"cache_block": 0}, {"draft_length": 0}, {"tree_width": 0}, {"layout": "spiral"},
    {"draft_method": "hope"}, {"metric": "hope"},
]  # fmt: skip
REQUESTS = [
    (Request([]), "empty"), (Request([4, 99]), "vocabulary"), (Request([-1]), "vocabulary"),
    (Request([4], 0), "max_new_tokens"), (Request([4] * 100, 60), "context"),
    (Request([4], 5, temperature=-1.0), "temperature"), (Request([4], top_p=0.0), "top_p"),
    (Request([4], top_p=1.5), "top_p"), (Request([4], min_p=-0.1), "min_p"), (Request([4], stop=[[]]), "stop sequence"),
]  # fmt: skip


def test_what_is_out_of_range_is_refused(random_models: Models) -> None:
    """Guards against thresholds that accept all or nothing, empty windows or batches, errors from inside the loop."""
    for threshold, metric in THRESHOLDS:
        with pytest.raises(UserError):
            confidence_needed(threshold, metric)  # type: ignore[arg-type]
    for wrong in OPTIONS_OUT_OF_RANGE:
        with pytest.raises(UserError):
            build_method("mars", Options(**{"mask_id": MASK, **wrong})).confidence_needed(0.5)
    with pytest.raises(UserError, match="unknown method"):
        build_method("magic", Options())
    model, ar = random_models["qwen2"], build_method("ar", Options())
    for request, message in REQUESTS:
        with pytest.raises(UserError, match=message):
            decode(model, ar, [request], eos_id=EOS, pad_id=PAD)
    for bound, message in {"batch_size": "batch size 0", "prefill_positions": "prefill positions 0"}.items():
        with pytest.raises(UserError, match=message):
            decode(model, ar, [Request([5])], eos_id=EOS, pad_id=PAD, **{bound: 0})


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_cannot_run_say_why(method: str, random_models: Models) -> None:
    """Guards against masks made of token -1, missing heads, and a threshold that is silently ignored."""
    info = METHODS[method]
    if info.needs:
        with pytest.raises(UserError, match=f"{method}' needs"):
            build_method(method, Options())
    able = build_method(method, Options(mask_id=MASK, **companions(random_models, 32)))
    if not info.takes_threshold:
        with pytest.raises(UserError, match="no threshold"):
            able.confidence_needed(0.5)
    if info.one_row:
        with pytest.raises(UserError, match="one sequence at a time"):
            decode(random_models["qwen2"], able, [Request([4], 8)], eos_id=EOS, pad_id=PAD, batch_size=2)
