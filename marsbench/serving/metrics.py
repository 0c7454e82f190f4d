"""What a monitoring system reads: vLLM's names where it has one, so that its dashboards work, and a few of our own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from marsbench.serving.messages import State

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The numbers of one server."""

    def __init__(self, model: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.slots, self._last = 1, State()  # slots of the KV cache
        labels = {"model_name": model}

        def gauge(name: str, words: str) -> Gauge:
            return Gauge(name, words, ["model_name"], registry=self.registry).labels(**labels)

        def counter(name: str, words: str) -> Counter:
            return Counter(name, words, ["model_name"], registry=self.registry).labels(**labels)

        def histogram(name: str, words: str) -> Histogram:
            found = Histogram(name, words, ["model_name"], registry=self.registry, buckets=_SECONDS)
            return found.labels(**labels)

        self.running = gauge("vllm:num_requests_running", "Requests in the batch.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests admitted and not in the batch yet.")
        self.cache = gauge("vllm:kv_cache_usage_perc", "Part of the KV cache that is reserved, from 0 to 1.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.per_token = histogram("vllm:inter_token_latency_seconds", "Between tokens; those of one forward share it.")
        self.queued = histogram("vllm:request_queue_time_seconds", "From a request's arrival to its prompt's forward.")
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.")
        self.drafts = counter("vllm:spec_decode_num_drafts", "Windows with masks.")
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Masks in those windows.")
        self.accepted = counter("vllm:spec_decode_num_accepted_tokens", "Tokens beyond the first of a forward.")
        self._ended = Counter(
            "vllm:request_success", "Requests by what ended them.", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self.rejected = counter("marsbench:requests_rejected", "Requests turned away because the queue was full.")
        self.cancelled = counter("marsbench:requests_cancelled", "Requests whose client went away.")
        self.restarts = counter("marsbench:engine_restarts", "Times that the engine process had to be started again.")
        self.forwards = counter("marsbench:forwards", "Forward passes of the model.")
        self.threshold = gauge("marsbench:tau", "Mean threshold of the running requests that decode by mars.")
        self.window = gauge("marsbench:window", "Mean window of the running requests.")
        self.per_forward = gauge("marsbench:tokens_per_forward", "Tokens that a row's forward settles, lately.")
        self._model = model

    def ended(self, reason: str) -> None:
        """A request has come to its end."""
        self._ended.labels(model_name=self._model, finished_reason=reason).inc()

    def take(self, state: State) -> None:
        """What the engine says after a forward; it counts from its own start. Most gauges wait for who looks."""
        last = self._last if state.forwards >= self._last.forwards else State()
        self.forwards.inc(state.forwards - last.forwards)
        if state.threshold is not None:  # else it stays what it was
            self.threshold.set(state.threshold)
        rows, settled = state.rows - last.rows, state.settled - last.settled
        if guesses := state.guesses - last.guesses:
            self.drafts.inc(rows)
            self.draft_tokens.inc(guesses)
            self.accepted.inc(max(0, settled - rows))
        if rows:
            self.per_forward.set(settled / rows)
        self._last = state

    def lost(self) -> None:
        """The engine is gone, and all that it held."""
        self._last = State()
        self.restarts.inc()

    def page(self) -> bytes:
        """The exposition format."""
        self._set_gauges()
        return generate_latest(self.registry)

    def _set_gauges(self) -> None:
        state = self._last
        self.running.set(state.running)
        self.waiting.set(state.waiting)
        self.cache.set(state.slots / self.slots)
        self.window.set(state.window)
