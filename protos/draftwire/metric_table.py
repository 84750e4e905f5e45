"""Every metric of both services: names, labels, all values a label can have, and what is counted.

The one table: the exporter refuses what is not in it, `compose/METRICS.md` is written from it, and
tests hold both against a live scrape. Data only; does not know where the numbers come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
OTHER = "other"

# The values of each label. Whatever else turns up is counted as "other" where that is listed and
# is an error of ours where it is not: no label can grow without bound.
LABELS: dict[str, tuple[str, ...]] = {
    "position": tuple(str(n) for n in range(63)),
    "temperature": ("0", "to_0.5", "to_1", "above_1"),
    "offset": ("0-31", "32-127", "128-511", "512-2047", "2048+"),
    "part": ("argmax", "rank_tree", "branches", "ngram", "sampled", OTHER),
    "reason": (
        *("fixed", "predicted", "load", "survival", "request", "max_tokens", "context"),
        *("off", "no_drafter", "no_model", "probe", "not_worth", "empty", OTHER),
    ),
    "phase": ("draft_wait", "plan", "target", "acceptance", "commit", "stream"),
    "decision": ("plans", "probes", "asked", "stopped", "held", "passed"),
    "stage": ("take_in", "extend", "draft", "answer"),
    "outcome": (
        *("eos", "stop_token", "stop_string", "max_tokens", "context", "deadline", "shutdown"),
        *("cancelled", "failed"),
    ),
    "refusal": (
        *("invalid_field", "prompt_too_long", "queue_full", "deadline_too_short"),
        *("draining", OTHER),
    ),
    "pages": ("free", "used"),
    "rows": ("free", "used"),
    "lane_state": ("connecting", "ready", "draining", "lost", "refused"),
    "fault": ("out_of_sync", "unknown_session", "no_room", "bad_tensor", "internal", OTHER),
    "result": ("predicted", "no_input"),
    "carrier": ("inline", "shared_memory", "cuda_ipc"),
    "method": (
        *("Verifier/Generate", "Verifier/GetInfo", "Drafter/Draft", "Drafter/GetInfo"),
        *("Health/Check", "Health/Watch", OTHER),
    ),
    "code": (
        *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND"),
        *("ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"),
        *("ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"),
        "UNAUTHENTICATED",
    ),
    "gpu": tuple(str(n) for n in range(16)),
    "memory": ("used", "total"),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. `labels` maps the label as scraped to its entry in LABELS; `sparse` ones appear with
    their first value, all others are there as 0 from the start.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    services: tuple[str, ...] = ("verifier",)
    sparse: bool = False
    gpu: bool = False

    @property
    def label_names(self) -> tuple[str, ...]:
        """Labels as scraped."""
        return tuple(name for name, _ in self.labels)

    def allowed(self, label: str) -> tuple[str, ...]:
        """All values of a label."""
        return LABELS[dict(self.labels)[label]]


def _row(
    kind: Kind,
    services: tuple[str, ...],
    name: str,
    help: str,
    *labels: str,
    sparse: bool = False,
    gpu: bool = False,
) -> Metric:
    """A label "state:lane_state" is scraped as `state` and has the values of `lane_state`."""
    pairs = []
    for label in labels:
        shown, _, values = label.partition(":")
        pairs.append((shown, values or shown))
    return Metric(f"draftwire_{name}", kind, help, tuple(pairs), services, sparse, gpu)


def _verifier(kind: Kind, name: str, help: str, *labels: str, sparse: bool = False) -> Metric:
    return _row(kind, ("verifier",), name, help, *labels, sparse=sparse)


def _drafter(kind: Kind, name: str, help: str, *labels: str) -> Metric:
    return _row(kind, ("drafter",), f"drafter_{name}", help, *labels)


def _both(kind: Kind, name: str, help: str, *labels: str, gpu: bool = False) -> Metric:
    return _row(
        kind, ("verifier", "drafter"), name, help, *labels, sparse=bool(labels) or gpu, gpu=gpu
    )


_SPECULATION = (
    # vLLM's four, with our prefix; mean acceptance length = 1 + accepted / drafts.
    _verifier("counter", "spec_decode_num_drafts_total", "Rounds with a proposal."),
    _verifier(
        "counter", "spec_decode_num_draft_tokens_total", "Drafted tokens that were verified."
    ),
    _verifier("counter", "spec_decode_num_accepted_tokens_total", "Drafted tokens kept."),
    _verifier(
        *("counter", "spec_decode_num_accepted_tokens_per_pos_total"),
        "Drafted tokens kept, by depth in the block; 0 is the first drafted position.",
        *("position",),
        sparse=True,
    ),
    _verifier(
        *("counter", "spec_decode_num_drafted_per_pos_total"),
        "Rounds that offered a token at this depth: what accepted_per_pos is a share of.",
        *("position",),
        sparse=True,
    ),
    _verifier(
        *("counter", "spec_decode_num_discarded_tokens_total"),
        "Drafted tokens the target chose after the answer had ended.",
    ),
    _verifier(
        *("counter", "spec_decode_drafts_by_request_total"),
        "Rounds with a proposal, by the request's temperature and how far the answer had come.",
        *("temperature", "offset"),
    ),
    _verifier(
        *("counter", "spec_decode_accepted_by_request_total"),
        "Drafted tokens kept, by temperature and offset.",
        *("temperature", "offset"),
    ),
    _verifier(
        *("counter", "spec_decode_draft_tokens_by_part_total"),
        "Drafted tokens verified, by the part that drafted them.",
        *("part",),
    ),
    _verifier(
        *("counter", "spec_decode_accepted_tokens_by_part_total"),
        "Drafted tokens kept, by the part that drafted them.",
        *("part",),
    ),
    _verifier(
        *("histogram", "verifier_block_size"),
        "Block size of each round, anchor included (1: plain), by why it was that.",
        *("reason",),
    ),
    _verifier(
        *("counter", "verifier_fallback_rounds_total"),
        "Rounds that went plain although the request speculates, by why: no_drafter is a fault of "
        "the pool (none there, late, a fault), the others are decisions.",
        *("reason",),
    ),
)

_STEPS = (
    _verifier("counter", "verifier_steps_total", "Steps of the target."),
    _verifier(
        *("counter", "verifier_policy_decisions_total"),
        "What the length policy did. plans: decided whom to ask; probes: tried drafts where they "
        "did not pay; asked, stopped: sessions that began or ceased to be drafted for; held: "
        "sessions that sat a step out for their proposal; passed: proposals not waited for.",
        *("decision",),
    ),
    _verifier("histogram", "verifier_step_rows", "Rows of a step: anchors, drafts, prompt pieces."),
    _verifier("histogram", "verifier_step_sessions", "Sessions in a step."),
    _verifier(
        *("histogram", "verifier_round_seconds"),
        "Where a round's time goes. draft_wait: one wait for proposals; plan: who is in the step "
        "with what; target: the forward; "
        "acceptance: drawing and walking; commit: text, pages, telling drafters; stream: from the "
        "engine's hand-over until the message is with gRPC.",
        *("phase",),
    ),
    _verifier("counter", "verifier_generated_tokens_total", "Tokens committed to answers."),
    _verifier("counter", "verifier_prompt_tokens_total", "Prompt tokens of admitted requests."),
    _verifier(
        *("counter", "verifier_cached_prompt_tokens_total"),
        "Prompt tokens found in the prefix cache, of requests that finished.",
    ),
    _verifier("counter", "verifier_preemptions_total", "Sessions that lost their pages to others."),
    _verifier(
        *("counter", "verifier_nonfinite_rows_total"), "Rows of logits with NaN or infinity."
    ),
    _verifier("counter", "verifier_failed_steps_total", "Steps that broke; their requests failed."),
    _verifier("gauge", "verifier_moving", "0 while there is work and no step for --stall-s."),
    _verifier(
        *("gauge", "verifier_seconds_since_step"),
        "Seconds since the last step while there is work, else 0.",
    ),
)

_REQUESTS = (
    _verifier("gauge", "verifier_requests_running", "Requests in the running batch."),
    _verifier("gauge", "verifier_requests_waiting", "Requests admitted and queued."),
    _verifier(
        "gauge", "verifier_oldest_waiting_seconds", "Age of the oldest queued request, 0 if none."
    ),
    _verifier("counter", "verifier_requests_total", "Admitted requests that ended.", "outcome"),
    _verifier("counter", "verifier_requests_refused_total", "Requests refused.", "reason:refusal"),
    _verifier("histogram", "verifier_queue_seconds", "Arrival to first step."),
    _verifier("histogram", "verifier_time_to_first_token_seconds", "Arrival to first token sent."),
    _verifier(
        *("histogram", "verifier_time_per_token_seconds"),
        "First token to last, over the tokens after the first.",
    ),
    _verifier("histogram", "verifier_request_seconds", "Arrival to the end, whatever it was."),
    _verifier("gauge", "verifier_kv_pages", "KV pages by state.", "state:pages"),
)

_LANES = (
    _verifier("gauge", "verifier_lanes", "Known drafter addresses by state.", "state:lane_state"),
    _verifier("gauge", "verifier_drafters_configured", "Drafter targets in --drafters."),
    _verifier("gauge", "verifier_lanes_behind", "Lanes that are not waited for at present."),
    _verifier("gauge", "verifier_lane_sessions", "Sessions open on lanes."),
    _verifier("counter", "verifier_lane_losses_total", "Lanes lost after they were ready."),
    _verifier("histogram", "verifier_lane_round_trip_seconds", "A step's message to its answer."),
    _verifier("counter", "verifier_sessions_reopened_total", "Sessions opened again on a lane."),
    _verifier(
        "counter",
        "verifier_stale_proposals_total",
        "Proposals for an older base or epoch; dropped.",
    ),
    _verifier("counter", "verifier_malformed_proposals_total", "Proposals that are no tree."),
    _verifier("counter", "verifier_late_proposals_total", "Proposals given up waiting for."),
    _verifier(
        "counter", "verifier_session_faults_total", "Faults that drafters reported.", "kind:fault"
    ),
)

_DRAFTER = (
    _drafter("counter", "steps_total", "Steps of the drafting loop."),
    _drafter(
        *("histogram", "step_seconds"),
        "Where a step's time goes. take_in: outcomes, opens, ends; extend: keys and values of new "
        "features; draft: blocks and trees; answer: results handed to the lanes.",
        *("stage",),
    ),
    _drafter("histogram", "step_sessions", "Sessions drafted for in a step."),
    _drafter("histogram", "service_seconds", "Taking a lane's message to answering it."),
    _drafter("counter", "model_seconds_total", "Seconds in the draft model."),
    _drafter("counter", "proposals_total", "Proposals made."),
    _drafter("counter", "empty_proposals_total", "Proposals without a token."),
    _drafter("counter", "nodes_total", "Tokens drafted, by part.", "part"),
    _drafter("histogram", "block_size", "Block size of each proposal, by why.", "reason"),
    _drafter("counter", "predictions_total", "Sessions that wanted a block size.", "result"),
    _drafter("counter", "predictor_seconds_total", "Seconds in the block size predictor."),
    _drafter("counter", "rounds_total", "Rounds whose proposal was verified."),
    _drafter("counter", "accepted_tokens_total", "Drafted tokens that verifiers kept."),
    _drafter("counter", "feature_rows_total", "Rows of context features taken in."),
    _drafter("counter", "sessions_opened_total", "Sessions opened."),
    _drafter("counter", "sessions_evicted_total", "Idle sessions that lost their rows."),
    _drafter("counter", "stale_messages_total", "Messages older than their session; dropped."),
    _drafter("counter", "session_faults_total", "Sessions given up, by why.", "kind:fault"),
    _drafter("counter", "nonfinite_drafts_total", "Drafts with NaN or infinity."),
    _drafter("gauge", "lanes", "Open lanes."),
    _drafter("gauge", "sessions", "Open sessions."),
    _drafter("gauge", "sessions_limit", "Sessions that can be open, --max-sessions."),
    _drafter("gauge", "cache_rows", "Feature rows by state.", "state:rows"),
    _drafter("gauge", "moving", "0 while one step lasts longer than --stall-s."),
)

_SHARED = (
    _both("counter", "carrier_bytes_total", "Tensor bytes sent or taken, by carrier.", "carrier"),
    _both("counter", "rpc_started_total", "Calls begun.", "method"),
    _both("counter", "rpc_handled_total", "Calls ended, by status.", "method", "code"),
    _both("histogram", "rpc_seconds", "How long calls lasted.", "method"),
    _both("gauge", "rpc_open", "Calls open now.", "method"),
    _both("gauge", "serving", "1 while health is SERVING."),
    _both(
        "gauge", "gpu_utilization_ratio", "Share of time with a kernel running.", "gpu", gpu=True
    ),
    _both("gauge", "gpu_memory_bytes", "Device memory.", "gpu", "state:memory", gpu=True),
    _both("gauge", "gpu_power_watts", "Power drawn.", "gpu", gpu=True),
    _both("counter", "gpu_energy_joules_total", "Energy since the driver loaded.", "gpu", gpu=True),
)


def _process(kind: Kind, name: str, help: str) -> Metric:
    return Metric(f"process_{name}", kind, help, (), ("verifier", "drafter"))


# Made by prometheus-client's own collector; Linux only.
PROCESS = (
    _process("gauge", "virtual_memory_bytes", "Virtual memory."),
    _process("gauge", "resident_memory_bytes", "Resident memory."),
    _process("gauge", "start_time_seconds", "Start, seconds since 1970."),
    _process("counter", "cpu_seconds_total", "Processor time, user and system."),
    _process("gauge", "open_fds", "Open file descriptors."),
    _process("gauge", "max_fds", "Most file descriptors."),
)
OWN = (*_SPECULATION, *_STEPS, *_REQUESTS, *_LANES, *_DRAFTER, *_SHARED)
TABLE: dict[str, Metric] = {metric.name: metric for metric in (*OWN, *PROCESS)}


def of_service(service: str) -> list[Metric]:
    """Rows of "verifier" or "drafter"."""
    return [metric for metric in TABLE.values() if service in metric.services]
