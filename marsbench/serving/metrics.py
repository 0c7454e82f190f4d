"""What a monitoring system reads: vLLM's names where it has one, so that its dashboards work, and a few of our own."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from marsbench.serving.messages import Report

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
    "vllm:spec_decode_num_drafts": "Windows with drafts: the masks of mars, or those that mars-verified checks.",
    "vllm:spec_decode_num_draft_tokens": "Drafts in those windows.",
    "vllm:spec_decode_num_accepted_tokens": "Drafts that became tokens.",
    "marsbench:requests_rejected": "Requests turned away because the queue was full.",
    "marsbench:requests_cancelled": "Requests whose client went away.",
    "marsbench:engine_restarts": "Times that the engine process had to be started again.",
    "marsbench:forwards": "Forward passes of the model.",
}
_TIMES = {
    "vllm:time_to_first_token_seconds": "From a request's arrival to its first token.",
    "vllm:inter_token_latency_seconds": "Between tokens; those that come together share it.",
    "vllm:request_queue_time_seconds": "From a request's arrival to its prompt's forward.",
    "vllm:e2e_request_latency_seconds": "From a request's arrival to its end.",
}
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.slots = 1  # of the KV cache

        def made(kind: Any, told: dict[str, str], **more: Any) -> dict[str, Any]:
            more |= {"labelnames": ["model_name"], "registry": self.registry}
            return {name: kind(name, words, **more).labels(model) for name, words in told.items()}

        self._gauges, self.counters = made(Gauge, _GAUGES), made(Counter, _COUNTERS)
        self.times = made(Histogram, _TIMES, buckets=_SECONDS)

        def by(label: str, name: str, words: str) -> Counter:
            return Counter(name, words, ["model_name", label], registry=self.registry)

        self._model, self.ended = model, by("finished_reason", "vllm:request_success", "Requests by what ended them.")
        self._by_place = by("position", "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that counted.")

    def take(self, report: Report) -> None:
        state, counted = report.state, report.counted
        for name in self.counters.keys() & counted.keys():
            self.counters[name].inc(counted[name])
        for place, count in report.accepted.items():
            self._by_place.labels(self._model, place).inc(count)
        self._gauges["vllm:num_requests_running"].set(state.running)
        self._gauges["vllm:num_requests_waiting"].set(state.waiting)
        self._gauges["vllm:kv_cache_usage_perc"].set(state.slots / self.slots)
        self._gauges["marsbench:window"].set(state.window)
        if state.threshold is not None:
            self._gauges["marsbench:tau"].set(state.threshold)
        if rows := counted["rows moved"]:
            self._gauges["marsbench:tokens_per_forward"].set(counted["settled"] / rows)
