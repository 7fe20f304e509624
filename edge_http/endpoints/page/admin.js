// The admin page: signs in, follows the fleet by events, and shows its parts.
"use strict";

const KEY_STORE = "kvloom.admin-key";  // forgotten with the tab
const AGAIN_MS = 2000;

const $ = (id) => document.getElementById(id);
let apiKey = sessionStorage.getItem(KEY_STORE) ?? "";
let rights = null;
let latest = null;     // the last overview
let following = null;  // aborts the stream of events

// --- requests ---------------------------------------------------------------------------------------------------

async function send(method, path, body) {
  const headers = {...(apiKey && {Authorization: `Bearer ${apiKey}`}), ...(body && {"Content-Type": "application/json"})};
  const response = await fetch(`admin/v1/${path}`, {method, headers, body: body && JSON.stringify(body), signal: path.includes("/events") ? following.signal : undefined});
  if (response.ok) return response;
  const problem = await response.json().then((found) => found.error.message, () => `HTTP ${response.status}`);
  throw Object.assign(new Error(problem), {status: response.status});
}

async function ask(path, method = "GET", body = undefined) {
  return (await send(method, path, body)).json();
}

// Does it, and shows what went wrong.
async function attempt(action) {
  $("notice").hidden = true;
  try {
    await action();
  } catch (error) {
    if (error.status === 401) return askForKey("The server does not accept this key.");
    $("notice").textContent = error.message;
    $("notice").hidden = false;
  }
}

// --- signing in -------------------------------------------------------------------------------------------------

async function start() {
  try {
    rights = await ask("access");
  } catch (error) {
    if (error.status === 401) return askForKey(apiKey ? "The server does not accept this key." : "This server asks for an API key.");
    return askForKey(error.message);
  }
  sessionStorage.setItem(KEY_STORE, apiKey);
  $("login").hidden = true;
  $("tabs").hidden = false;
  $("sign-out").hidden = !apiKey;
  $("who").textContent = rights.is_operator ? "" : rights.organisation;
  for (const tab of document.querySelectorAll("#tabs a")) {
    const name = tab.hash.slice(1);
    tab.hidden = (["usage", "keys"].includes(name) && !rights.has_tenants) || (["fleet", "rollouts"].includes(name) && !rights.is_operator);
  }
  if (!$("key-project").value && rights.organisation) $("key-project").value = `${rights.organisation}/`;
  showPart();
  follow();
}

function askForKey(why) {
  following?.abort();
  apiKey = "";
  for (const part of document.querySelectorAll("main > section")) part.hidden = true;
  $("tabs").hidden = $("sign-out").hidden = true;
  $("login-why").textContent = why;
  $("login").hidden = false;
  $("login-key").focus();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = $("login-key").value.trim();
  $("login-key").value = "";
  start();
});
$("sign-out").addEventListener("click", () => {
  sessionStorage.removeItem(KEY_STORE);
  latest = null;
  askForKey("You are signed out.");
});

// --- parts ------------------------------------------------------------------------------------------------------

const LOADERS = {usage: showUsage, keys: showKeys, rollouts: showRollouts};

function showPart() {
  if (rights === null || !$("login").hidden) return;
  const tabs = [...document.querySelectorAll("#tabs a")].filter((tab) => !tab.hidden);
  const shown = tabs.find((tab) => tab.hash === location.hash) ?? tabs[0];
  for (const tab of tabs) tab.toggleAttribute("aria-current", tab === shown);
  shown.setAttribute("aria-current", "page");
  for (const part of document.querySelectorAll("main > section")) part.hidden = `#${part.id}` !== shown.hash;
  $("notice").hidden = true;
  const load = LOADERS[shown.hash.slice(1)];
  if (load) attempt(load);
  if (latest) show(latest);
  fitCharts();
}

addEventListener("hashchange", showPart);

function show(overview) {
  latest = overview;
  if (!$("fleet").hidden) showFleet(overview);
  if (!$("requests").hidden && !$("dialog").open) showRequests(overview);
}

function showFleet({shards, routers}) {
  const sum = (name, of = shards) => of.reduce((total, one) => total + (one[name] ?? 0), 0);
  const blocks = sum("num_blocks");
  const figures = {
    "Shards ready": `${shards.filter(isReady).length} of ${shards.length}`, "Requests live": shown(sum("num_live_requests", routers)),
    "Waiting": shown(sum("num_waiting") + sum("num_queued_requests", routers)), "Output tokens/s": shown(sum("output_tokens_per_second")),
    "KV in use": percent(blocks ? 1 - sum("num_available_blocks") / blocks : 0), "Prompt tokens cached": percent(ratio(sum("num_cached_tokens"), sum("num_prompt_tokens"))),
  };
  $("figures").replaceChildren(...Object.entries(figures).map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))));
  const columns = ["Shard", "State", "Model", "KV in use", "Running", "Waiting", "Tokens/s", "Cached", "Step", "Adapters", "Do"];
  keepFocus($("shards"), () => $("shards").replaceChildren(cards("Shards", columns, shards.map((one) => {
    const usage = one.num_blocks ? 1 - one.num_available_blocks / one.num_blocks : 0;
    return [
      one.shard_id, element("span", {class: isReady(one) ? "good" : "warn"}, stateOf(one)), one.model_version ? `${one.model}@${one.model_version}` : one.model,
      element("span", {}, element("meter", {min: 0, max: 1, low: 0.8, high: 0.95, optimum: 0, value: usage, "aria-label": `KV of ${one.shard_id}`}), percent(usage)),
      `${one.num_running} of ${one.max_batch}`, one.num_waiting, shown(one.output_tokens_per_second), percent(ratio(one.num_cached_tokens, one.num_prompt_tokens)),
      milliseconds(one.decode_step_seconds || null), one.adapters.join(", ") || "–",
      element("button", {class: "quiet", id: `drain-${one.shard_id}`, "aria-label": `${one.draining ? "Undrain" : "Drain"} ${one.shard_id}`, onclick: () => drain(one)}, one.draining ? "Undrain" : "Drain"),
    ];
  }))));
  $("routers").replaceChildren(cards("Routers", ["Router", "State", "Requests", "Queued"], routers.map((one) => [
    one.router_id, element("span", {class: one.draining ? "warn" : "good"}, one.draining ? "draining" : "ready"), one.num_live_requests, one.num_queued_requests,
  ])));
}

function isReady(shard) {
  return shard.health === "healthy" && !shard.draining && !shard.withdrawn && !shard.asleep;
}

function stateOf(shard) {
  if (shard.asleep) return "asleep";
  if (shard.withdrawn) return "withdrawn";
  if (shard.draining) return shard.num_running + shard.num_waiting ? "draining" : "drained";
  return shard.health === "healthy" ? "ready" : shard.health;
}

function drain(shard) {
  const set = async (draining) => { await ask("shards/drain", "POST", {shard_id: shard.shard_id, draining}); };
  if (shard.draining) return attempt(() => set(false));
  const isLast = !latest.shards.some((other) => other.shard_id !== shard.shard_id && other.model === shard.model && isReady(other));
  confirmDo(`Drain ${shard.shard_id}?`, isLast
    ? `It is the only ready shard of ${shard.model}: requests for this model are refused until it is undrained.`
    : "It gets no new requests; what runs there ends there.", "Drain", () => set(true));
}

// --- events -----------------------------------------------------------------------------------------------------

async function follow() {
  following?.abort();
  const own = following = new AbortController();
  while (!own.signal.aborted) {
    try {
      const after = samples.at(-1)?.at_seconds ?? 0;
      const response = await send("GET", `overview/events?samples_after=${after}`);
      let rest = "";
      for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
        const events = (rest + text).split("\n\n");
        rest = events.pop();
        for (const event of events) onEvent(event);
      }
    } catch (error) {
      if (own.signal.aborted) return;
      if (error.status === 401) return askForKey("The server does not accept this key any more.");
      $("live").textContent = "not connected";
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

function onEvent(event) {
  const data = JSON.parse(event.slice(event.indexOf("data: ") + 6));
  if (event.startsWith("event: error")) {
    $("live").textContent = data.message;
    return;
  }
  if (rights.is_operator) addSamples(data.samples, data.ttft_bounds);
  show(data);
  const at = new Date(1000 * data.at_seconds).toLocaleTimeString();
  if ($("live").textContent !== `live, ${at}`) $("live").textContent = `live, ${at}`;
}

// Pages that nobody looks at ask for nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) following?.abort();
  else if (rights !== null && $("login").hidden) follow();
});

// --- shown ------------------------------------------------------------------------------------------------------

function cards(label, head, rows) {
  const shownRows = rows.map((cells) => element("tr", {}, ...cells.map((cell, number) => {
    const isNumber = typeof cell === "number" || (typeof cell === "string" && /^[\d.,  ]+( (ms|s|%))?$/.test(cell));
    return element("td", {"data-name": head[number], class: isNumber && "number"}, typeof cell === "number" ? String(cell) : cell);
  })));
  const found = table(label, head, shownRows);
  found.classList.add("cards");
  for (const [number, th] of found.querySelectorAll("th").entries()) th.classList.toggle("number", shownRows.some((row) => row.cells[number].className === "number"));
  return found;
}

// Replaces what is in `place`, and keeps the focus on the control with the same id.
function keepFocus(place, replace) {
  const id = place.contains(document.activeElement) ? document.activeElement.id : "";
  replace();
  if (id) $(id)?.focus();
}

function value(id) {
  return $(id).value.trim();
}

function shown(number) {
  if (number === null || number === undefined || number === "") return "–";
  if (typeof number === "string") return number;
  return number.toLocaleString("en", {maximumFractionDigits: Math.abs(number) < 10 ? 2 : 0});
}

function percent(share) {
  return share === null ? "–" : `${shown(Math.round(1000 * share) / 10)} %`;
}

function ratio(part, whole) {
  return whole ? part / whole : null;
}

function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds >= 10 ? `${shown(seconds)} s` : `${shown(1000 * seconds)} ms`;
}

function when(seconds) {
  return seconds ? new Date(1000 * seconds).toLocaleString() : "–";
}

// --- the dialog -------------------------------------------------------------------------------------------------

function openDialog(title, body, action = "", onDo = null, onClose = null) {
  const dialog = $("dialog");
  $("dialog-title").textContent = title;
  $("dialog-body").replaceChildren(...body);
  $("dialog-do").hidden = !action;
  $("dialog-do").textContent = action;
  $("dialog-do").onclick = onDo;
  dialog.onclose = onClose;
  if (!dialog.open) dialog.showModal();
}

function confirmDo(title, text, action, onDo) {
  openDialog(title, [element("p", {}, text)], action, () => { $("dialog").close(); attempt(onDo); });
}

$("dialog-close").addEventListener("click", () => $("dialog").close());

start();
