"""What a monitoring system reads: vLLM's names where it has one, so that its dashboards work, and a few of our own."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from marsbench.serving.messages import Report, State

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAUGES = {
    "vllm:num_requests_running": "Requests in the batch.",
    "vllm:num_requests_waiting": "Requests admitted and not in the batch yet.",
    "vllm:kv_cache_usage_perc": "Part of the KV cache that is reserved, from 0 to 1.",
    "marsbench:tau": "Mean threshold of the running requests that decode by mars.",
    "marsbench:window": "Mean window of the running requests.",
    "marsbench:tokens_per_forward": "Tokens that a row's forward settles, lately.",
}
_COUNTERS = {
    "vllm:prompt_tokens": "Tokens of prompts.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:spec_decode_num_drafts": "Windows with masks.",
    "vllm:spec_decode_num_draft_tokens": "Masks in those windows.",
    "vllm:spec_decode_num_accepted_tokens": "Tokens beyond the first of a forward.",
    "marsbench:requests_rejected": "Requests turned away because the queue was full.",
    "marsbench:requests_cancelled": "Requests whose client went away.",
    "marsbench:engine_restarts": "Times that the engine process had to be started again.",
    "marsbench:forwards": "Forward passes of the model.",
}
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    def __init__(self, model: str) -> None:
        self._model, self._state = model, State()
        self.slots = 1  # of the KV cache
        self._tau, self._per_forward = 0.0, 0.0
        self.counted, self.ended = Counter[str](), Counter[str]()  # by name; requests by what ended them
        self._by_place = Counter[int]()  # drafts that counted, by their place behind a forward's first token
        self._times = list[Histogram]()
        self.first_token = self._time(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self.per_token = self._time(
            "vllm:inter_token_latency_seconds", "Between tokens; those that come together share it."
        )
        self.queued = self._time("vllm:request_queue_time_seconds", "From a request's arrival to its prompt's forward.")
        self.whole = self._time("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.")

    def _time(self, name: str, words: str) -> Histogram:
        self._times.append(Histogram(name, words, ["model_name"], buckets=_SECONDS, registry=None))
        return self._times[-1].labels(self._model)

    def take(self, report: Report) -> None:
        self._state = report.state
        self.counted.update(report.counted)
        self._by_place.update(report.accepted)
        if rows := report.counted["rows moved"]:
            self._per_forward = report.counted["settled"] / rows
        self._tau = self._tau if report.state.threshold is None else report.state.threshold

    def lost(self) -> None:
        self._state = State()
        self.counted["marsbench:engine_restarts"] += 1

    def page(self) -> bytes:
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        state, own = self._state, [self._model]
        now = (state.running, state.waiting, state.slots / self.slots, self._tau, state.window, self._per_forward)
        for (name, words), value in zip(_GAUGES.items(), now, strict=True):
            gauge = GaugeMetricFamily(name, words, labels=["model_name"])
            gauge.add_metric(own, value)
            yield gauge
        for name, words in _COUNTERS.items():
            counter = CounterMetricFamily(name, words, labels=["model_name"])
            counter.add_metric(own, self.counted[name])
            yield counter
        for name, words, label, counts in (
            ("vllm:request_success", "Requests by what ended them.", "finished_reason", self.ended),
            ("vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that counted.", "position", self._by_place),
        ):
            counter = CounterMetricFamily(name, words, labels=["model_name", label])
            for value_of_label, count in counts.items():
                counter.add_metric([self._model, str(value_of_label)], count)
            yield counter
        for times in self._times:
            yield from times.collect()
