// The requests that run or have ended, and what made one slow.
"use strict";

const SLOW_SECONDS = 1;
const SAFETY_ERRORS = ["content_filtered"];
const PART_NAMES = {
  queue: "queue of the router", engine_queue: "queue of the shard", prefill: "prefill", waiting_and_prefill: "queue and prefill",
  withheld: "withheld (safety)", moved: "preempted or moved", decoding: "decoding", network: "network",
};

const FILTERS = {
  all: () => true,
  running: (one) => one.state !== "ended",
  slow: (one) => (one.outcome.ttft_seconds ?? one.outcome.e2e_latency_seconds) >= SLOW_SECONDS,
  failed: (one) => one.outcome.error_reason !== "" && !isOfSafety(one),
  safety: isOfSafety,
  moved: (one) => one.outcome.num_preemptions + one.outcome.num_migrations + one.outcome.num_failovers > 0,
};

function isOfSafety(one) {
  return one.outcome.end === "halted" || SAFETY_ERRORS.includes(one.outcome.error_reason);
}

function showRequests(overview) {
  const wanted = FILTERS[document.getElementById("filter").value];
  const rows = [...overview.running, ...overview.ended].filter(wanted);
  const place = document.getElementById("request-list");
  if (!rows.length) return place.replaceChildren(element("p", {class: "note"}, "None of the latest requests."));
  keepFocus(place, () => place.replaceChildren(cards("Requests", ["Request", "State", "Tenant", "Model", "Shard", "First token", "In all", "Tokens"],
    rows.map((one) => {
      const {outcome} = one;
      const ended = outcome.error_reason ? `${outcome.end}: ${outcome.error_reason}` : outcome.end;
      const state = one.state === "ended" ? ended : one.state;
      const kind = outcome.error_reason ? "bad" : one.state === "ended" ? "" : "good";
      return [
        element("button", {class: "link", id: `request-${one.request_id}`, onclick: () => explain(one.request_id)}, shorter(one.request_id)),
        element("span", {class: kind}, state), one.tenant || "–", one.model, outcome.shard_id || "–",
        milliseconds(outcome.ttft_seconds), milliseconds(outcome.e2e_latency_seconds),
        `${outcome.num_prompt_tokens} → ${outcome.num_output_tokens}`,
      ];
    }))));
}

function shorter(id) {
  return id.length > 24 ? `${id.slice(0, 12)}…${id.slice(-6)}` : id;
}

async function explain(id) {
  const {explanation, time} = await ask(`requests/${encodeURIComponent(id)}`);
  const body = [];
  if (time === null) {
    body.push(element("p", {}, "It still runs."));
  } else {
    const total = time.parts.reduce((sum, part) => sum + part.seconds, 0);
    body.push(element("p", {id: "why"}, time.why), element("ul", {class: "parts"}, ...time.parts.map((part) => element("li", {},
      element("span", {}, PART_NAMES[part.name] ?? part.name), element("span", {}, milliseconds(part.seconds)),
      element("meter", {min: 0, max: total || 1, value: part.seconds, "aria-label": `${part.name}, share of the time`})))));
  }
  const {outcome} = explanation;
  const facts = [
    `class ${explanation.priority_class}`, explanation.tenant && `tenant ${explanation.tenant}`,
    outcome && `${outcome.end}${outcome.error_reason ? ` (${outcome.error_reason})` : ""} on ${outcome.shard_id || "no shard"}`,
    outcome && `${outcome.num_cached_tokens} of ${outcome.num_prompt_tokens} prompt tokens cached`,
    outcome?.limits && `limits: ${outcome.limits}`, explanation.brownout && `brownout ${explanation.brownout}`,
  ];
  body.push(element("p", {class: "note"}, facts.filter(Boolean).join(" · ")));
  for (const {attempt_id: attempt, plan} of explanation.decisions) {
    const terms = [...new Set(plan.shards.flatMap((shard) => Object.keys(shard.cost_terms)))].sort();
    body.push(element("h3", {}, attempt ? `Placement ${attempt}: ${plan.picked_shard_id}` : `Its prompt, for another shard: ${plan.picked_shard_id}`),
      cards("Shards as they were", ["Shard", "Cached", "Running", "Waiting", "First token", ...terms, "Cost", "Note"], plan.shards.map((shard) => {
        if (shard.filtered_reason) return [shard.shard_id, ...Array(5 + terms.length).fill("–"), shard.filtered_reason];
        return [
          shard.shard_id, `${shard.num_overlap_tokens} of ${plan.num_prompt_tokens}`, shard.num_running, shard.num_waiting,
          milliseconds(shard.predicted_ttft_seconds), ...terms.map((name) => shown(shard.cost_terms[name])), shown(shard.cost_seconds),
          shard.shard_id === plan.picked_shard_id ? "picked" : "",
        ];
      })));
  }
  openDialog(explanation.request_id, body);
}

document.getElementById("filter").addEventListener("change", () => latest && showRequests(latest));
document.getElementById("find").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(() => explain(document.getElementById("find-id").value.trim()));
});
