"use strict";
// The chat page. Model output is only ever put into text nodes.

const $ = (id) => document.getElementById(id);
const page = {
  model: $("model"), notice: $("notice"), scroller: $("scroller"), conversation: $("conversation"),
  welcome: $("welcome"), composer: $("composer"), prompt: $("prompt"), send: $("send"), stop: $("stop"),
  newChat: $("new-chat"), announcer: $("announcer"), keyForm: $("key-form"), key: $("key"),
};
const STORE = "kvloom.conversation";
const KEY_STORE = "kvloom.api-key";  // forgotten with the tab
const POLL_MS = 2000;
const RESUME_PAUSES_MS = [0, 500, 1000, 2000, 4000, 8000];  // within the server's grace period

let messages = [];     // what the model is sent: {role, content}
let running = null;    // AbortController of the answer that streams

// --- the API key, if the server asks for one ------------------------------------------------------------------------

let apiKey = "";

function fetchWithKey(url, options = {}) {
  const headers = apiKey ? { ...options.headers, Authorization: `Bearer ${apiKey}` } : options.headers;
  return fetch(url, { ...options, headers });
}

function askForKey() {
  showNotice(apiKey ? "The server does not accept this API key." : "This server asks for an API key.");
  page.keyForm.hidden = false;
  page.key.focus();
}

function restoreKey() {
  try {
    apiKey = sessionStorage.getItem(KEY_STORE) ?? "";
  } catch { /* storage is off: the key is asked for again */ }
}

function useKey(key) {
  apiKey = key;
  page.key.value = "";
  page.keyForm.hidden = true;
  try {
    sessionStorage.setItem(KEY_STORE, key);
  } catch { /* storage is off: the key lives on the page only */ }
  loadModels();
}

// --- models -----------------------------------------------------------------------------------------------------

async function loadModels() {
  let models = null;
  try {
    const response = await fetchWithKey("/v1/models");
    if (response.status === 401) {
      askForKey();
      return;
    }
    models = response.ok ? (await response.json()).data : null;
  } catch { /* said below */ }
  if (models === null) {
    showNotice("The server cannot be reached. Trying again…");
  } else {
    showModels(models);
    const ready = models.some((model) => model.num_ready_shards > 0);
    showNotice(ready ? "" : "No model is ready yet: waiting for a shard…");
    if (ready) return;
  }
  setTimeout(loadModels, POLL_MS);
}

function showModels(models) {
  const picked = page.model.disabled ? null : page.model.value;
  page.model.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  if (models.some((model) => model.id === picked)) page.model.value = picked;
  page.model.disabled = models.length === 0;
}

function showNotice(text) {
  if (page.notice.textContent !== text) page.notice.textContent = text;
  page.notice.hidden = text === "";
}

// --- the conversation on the page -------------------------------------------------------------------------------

function addTurn(role, text) {
  const turn = $("turn-template").content.cloneNode(true).firstElementChild;
  turn.classList.add(role);
  turn.querySelector(".who").textContent = role === "user" ? "You" : page.model.value;
  showText(turn, text);
  page.conversation.append(turn);
  page.welcome.hidden = true;
  return turn;
}

// Text between ``` fences becomes a code block, all else stays as it is.
function showText(turn, text) {
  const pieces = text.split(/^```/m);
  const nodes = pieces.map((piece, i) => {
    // Blank lines next to a block are its margin's business.
    if (i % 2 === 0) return document.createTextNode(trimLines(piece, i > 0, i < pieces.length - 1));
    const block = document.createElement("pre");
    block.tabIndex = 0; // can be scrolled by keyboard
    block.textContent = piece.replace(/^[^\n]*\n/, "").replace(/\n$/, "");
    return block;
  });
  turn.querySelector(".text").replaceChildren(...nodes);
}

function trimLines(text, atStart, atEnd) {
  const started = atStart ? text.replace(/^\n+/, "") : text;
  return atEnd ? started.replace(/\n+$/, "") : started;
}

function showFacts(turn, facts) {
  const line = turn.querySelector(".facts");
  line.replaceChildren(...facts.map((fact) => Object.assign(document.createElement("span"), { textContent: fact })));
  line.hidden = facts.length === 0;
}

function showError(turn, error) {
  const box = $("error-template").content.cloneNode(true).firstElementChild;
  box.querySelector(".error-message").textContent = error.message;
  const named = [error.code, error.param && `parameter ${error.param}`].filter(Boolean).join(", ");
  box.querySelector(".error-code").textContent = named;
  box.querySelector(".error-code").hidden = named === "";
  box.querySelector(".retry").addEventListener("click", () => {
    if (running) return;
    turn.remove();
    page.prompt.focus();
    answer();
  });
  turn.querySelector(".text").after(box);
}

function keepAtEnd(change) {
  const { scroller } = page;
  const atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
  change();
  if (atEnd) scroller.scrollTop = scroller.scrollHeight;
}

// --- one answer -------------------------------------------------------------------------------------------------

async function answer() {
  const abort = new AbortController();
  setRunning(abort);
  document.querySelectorAll(".error .retry").forEach((button) => button.remove());
  const turn = addTurn("assistant", "");
  turn.classList.add("running");
  turn.setAttribute("aria-busy", "true");
  page.scroller.scrollTop = page.scroller.scrollHeight;
  const seen = { text: "", startedAt: performance.now(), firstAt: 0, lastAt: 0, usage: null, details: null, reason: "" };
  const textNode = document.createTextNode("");
  turn.querySelector(".text").replaceChildren(textNode);
  let error = null;
  try {
    await stream(abort.signal, (chunk) => keepAtEnd(() => takeChunk(chunk, seen, textNode)));
  } catch (failure) {
    if (failure.name !== "AbortError") error = failure.asOpenAI ?? { message: "The connection to the server was lost." };
  }
  if (running === abort) finishAnswer(turn, seen, error, abort.signal.aborted);
}

function finishAnswer(turn, seen, error, stopped) {
  keepAtEnd(() => {
    turn.classList.remove("running");
    turn.removeAttribute("aria-busy");
    showText(turn, seen.text);
    showFacts(turn, factsOf(seen, stopped));
    if (error) showError(turn, error);
  });
  if (seen.text && !error) messages.push({ role: "assistant", content: seen.text });
  save();
  setRunning(null);
  page.announcer.textContent = error ? "" : stopped ? "Answer stopped." : `Answer: ${seen.text}`;
}

function takeChunk(chunk, seen, textNode) {
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? "";
  if (text) {
    seen.lastAt = performance.now();
    seen.firstAt ||= seen.lastAt;
    seen.text += text;
    textNode.data = seen.text;
  }
  seen.reason = choice?.finish_reason ?? seen.reason;
  seen.usage = chunk.usage ?? seen.usage;
  seen.details = chunk.kvloom ?? seen.details;
}

function factsOf(seen, stopped) {
  const facts = [];
  if (seen.firstAt) facts.push(`TTFT ${Math.round(seen.firstAt - seen.startedAt)} ms`);
  if (seen.usage) {
    const count = seen.usage.completion_tokens;
    const seconds = (seen.lastAt - seen.firstAt) / 1000;
    if (count > 1 && seconds > 0) facts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    facts.push(`${count} tokens`);
  }
  if (seen.details) {
    facts.push(`on ${seen.details.shard_id}`);
    const prompt = seen.usage ? ` of ${seen.usage.prompt_tokens} prompt tokens` : " prompt tokens";
    facts.push(`${seen.details.num_cached_tokens}${prompt} cached`);
  }
  if (seen.reason === "length") facts.push("cut off at the token limit");
  if (seen.reason === "content_filter") facts.push("halted by the safety policy");
  if (stopped) facts.push("stopped");
  return facts;
}

async function stream(signal, onChunk) {
  let response = await fetchWithKey("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", "x-kvloom-details": "true", "x-kvloom-resume": "on" },
    body: JSON.stringify({
      model: page.model.value, messages, stream: true, stream_options: { include_usage: true },
    }),
  });
  if (!response.ok) throw await errorOf(response);
  const url = `/v1/chat/completions/${response.headers.get("x-kvloom-response-id")}`;
  const isResumable = response.headers.has("x-kvloom-resume");
  // Without this, the server would continue generation for a client that has left for good.
  const cancel = () => { if (isResumable) fetchWithKey(`${url}/cancel`, { method: "POST", keepalive: true }).catch(() => {}); };
  const position = { event: 0 };
  addEventListener("pagehide", cancel);
  try {
    for (let losses = 0; ;) {
      const before = position.event;
      try {
        response ??= await fetchWithKey(`${url}?stream=true&starting_after=${position.event}`, { signal });
        if (!response.ok) throw await errorOf(response);
        if (await readEvents(response, position, onChunk)) return;
      } catch (failure) {
        if (signal.aborted) cancel();
        if (signal.aborted || failure.asOpenAI) throw failure;
      }
      if (position.event > before) losses = 0;
      if (!isResumable || losses === RESUME_PAUSES_MS.length) throw new Error("the stream broke off");
      response = null;
      await pause(RESUME_PAUSES_MS[losses++], signal);
    }
  } finally {
    removeEventListener("pagehide", cancel);
  }
}

// Returns whether the answer is complete; false when the connection ended before.
async function readEvents(response, position, onChunk) {
  if (response.status === 204) return true;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return false;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const lines = event.split("\n");
      const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return true;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw Object.assign(new Error(), { asOpenAI: chunk.error });
      onChunk(chunk);
      position.event = Number(lines.find((line) => line.startsWith("id: "))?.slice(4) ?? position.event);
    }
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}

async function errorOf(response) {
  let error = { message: `The server answered with status ${response.status}.` };
  try {
    error = (await response.json()).error ?? error;
  } catch { /* not JSON: the status explains the error */ }
  return Object.assign(new Error(error.message), { asOpenAI: error });
}

// --- what the user does -----------------------------------------------------------------------------------------

function setRunning(abort) {
  running = abort;
  page.send.hidden = abort !== null;
  page.stop.hidden = abort === null;
}

function ask(text) {
  if (!text || running || page.model.disabled) return;
  // A question without an answer would break the order of turns: the new one takes its place.
  if (messages.at(-1)?.role === "user") messages.pop();
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  save();
  page.announcer.textContent = "Answering…";
  answer();
}

function fitPrompt() {
  page.prompt.style.height = "auto";
  page.prompt.style.height = `${page.prompt.scrollHeight + 2}px`;
}

function startNewChat() {
  const abort = running;
  setRunning(null); // first, so that the aborted answer leaves the page alone
  abort?.abort();
  messages = [];
  save();
  page.conversation.replaceChildren();
  page.welcome.hidden = false;
  page.announcer.textContent = "New chat.";
  page.prompt.focus();
}

function save() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(messages));
  } catch { /* storage is off or full: the conversation lives on the page only */ }
}

function restore() {
  try {
    messages = JSON.parse(sessionStorage.getItem(STORE)) ?? [];
  } catch {
    messages = [];
  }
  for (const message of messages) addTurn(message.role, message.content);
  page.scroller.scrollTop = page.scroller.scrollHeight;
}

page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = page.prompt.value.trim();
  if (!text || running || page.model.disabled) return;
  page.prompt.value = "";
  fitPrompt();
  ask(text);
});
page.keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(page.key.value.trim());
});
page.prompt.addEventListener("input", fitPrompt);
page.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    page.composer.requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
page.stop.addEventListener("click", () => {
  running?.abort();
  page.prompt.focus();
});
page.newChat.addEventListener("click", startNewChat);
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => ask(example.textContent));
}

page.prompt.focus();
restoreKey();
loadModels().then(restore);
