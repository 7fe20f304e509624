"use strict";
// The chat page. Model output is shown by markdown.js, which sanitises it.

const $ = (id) => document.getElementById(id);
const page = {
  model: $("model"), notice: $("notice"), scroller: $("scroller"), conversation: $("conversation"),
  welcome: $("welcome"), composer: $("composer"), prompt: $("prompt"), send: $("send"), stop: $("stop"),
  newChat: $("new-chat"), announcer: $("announcer"), keyForm: $("key-form"), key: $("key"),
  settings: $("settings"), settingsButton: $("settings-button"), system: $("system"), temperature: $("temperature"),
  editNote: $("edit-note"), stopEditing: $("stop-editing"),
};
const STORE = "kvloom.conversation";
const SETTINGS_STORE = "kvloom.settings";
const KEY_STORE = "kvloom.api-key";  // forgotten with the tab
const POLL_MS = 2000;

let messages = [];     // what the model is sent: {role, content}
let running = null;    // AbortController of the answer that streams
let edited = null;     // the turn that the next message replaces, with all that follow

// --- the API key, if the server asks for one ------------------------------------------------------------------------

let apiKey = "";

function fetchWithKey(url, options = {}) {
  const headers = apiKey ? { ...options.headers, Authorization: `Bearer ${apiKey}` } : options.headers;
  return fetch(url, { ...options, headers });
}

function askForKey(reason) {
  showNotice(reason);
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
  let problem = "The server cannot be reached.";
  try {
    const response = await fetchWithKey("v1/models");
    if (response.status === 401) {
      askForKey(apiKey ? "The server does not accept this API key." : "This server asks for an API key.");
      return;
    }
    if (response.ok) models = (await response.json()).data;
    else problem = (await errorOf(response)).message;
    if (response.status === 403) {
      // Another try with the same key would be refused as well.
      askForKey(`This key may not chat: ${problem}`);
      return;
    }
  } catch { /* said below */ }
  if (models === null) {
    showNotice(`${problem} Trying again…`);
  } else {
    showModels(models);
    const ready = models.some((model) => model.num_ready_shards > 0);
    showNotice(ready ? "" : "No model is ready yet: waiting for a shard…");
    globalThis.conversations?.start();
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
  turn.index = messages.length; // of its message, once that is stored
  showText(turn, text);
  const actions = turn.querySelector(".actions");
  actions.append(copyButton(() => turn.source, "Copy"));
  if (role === "user") actions.append(actionButton("Edit", () => edit(turn)));
  else actions.append(Object.assign(actionButton("Regenerate", () => regenerate(turn)), { className: "small regenerate" }));
  page.conversation.append(turn);
  page.welcome.hidden = true;
  return turn;
}

function showText(turn, text) {
  turn.source = text;
  const box = turn.querySelector(".text");
  if (turn.classList.contains("assistant")) showMarkdown(box, text);
  else box.textContent = text;
  turn.querySelector(".actions").hidden = text === "";
}

function actionButton(label, act) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "small", textContent: label });
  button.addEventListener("click", () => { if (!running) act(); });
  return button;
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
  let error = null;
  try {
    await stream(requestBody(), abort.signal, (chunk) => takeChunk(chunk, seen, turn));
  } catch (failure) {
    if (failure.name !== "AbortError") error = failure.asOpenAI ?? { message: "The connection to the server was lost." };
  }
  if (running === abort) finishAnswer(turn, seen, error, abort.signal.aborted);
}

function requestBody() {
  return {
    model: page.model.value, messages: [...systemMessages(), ...messages], ...sampling(),
    stream: true, stream_options: { include_usage: true },
  };
}

function finishAnswer(turn, seen, error, stopped) {
  keepAtEnd(() => {
    turn.classList.remove("running");
    turn.removeAttribute("aria-busy");
    showText(turn, seen.text);
    showFacts(turn, factsOf(seen, stopped));
    if (error) showError(turn, error);
  });
  if (seen.text && !error) {
    turn.index = messages.length;
    messages.push({ role: "assistant", content: seen.text });
  }
  save();
  setRunning(null);
  page.announcer.textContent = error ? "" : stopped ? "Answer stopped." : `Answer: ${seen.text}`;
}

function takeChunk(chunk, seen, turn) {
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? "";
  if (text) {
    seen.lastAt = performance.now();
    seen.firstAt ||= seen.lastAt;
    seen.text += text;
    showSoon(seen, turn);
  }
  seen.reason = choice?.finish_reason ?? seen.reason;
  seen.usage = chunk.usage ?? seen.usage;
  seen.details = chunk.kvloom ?? seen.details;
}

// At most once for each picture of the screen: tokens may come faster.
function showSoon(seen, turn) {
  if (seen.isDue) return;
  seen.isDue = true;
  requestAnimationFrame(() => {
    seen.isDue = false;
    if (turn.classList.contains("running")) keepAtEnd(() => showText(turn, seen.text));
  });
}

function factsOf(seen, stopped) {
  const facts = [];
  if (seen.firstAt) facts.push(`TTFT ${Math.round(seen.firstAt - seen.startedAt)} ms`);
  if (seen.usage) {
    const count = seen.usage.completion_tokens;
    const seconds = (seen.lastAt - seen.firstAt) / 1000;
    if (count > 1 && seconds > 0) facts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    facts.push(count === 1 ? "1 token" : `${count} tokens`);
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

// --- what the user does -----------------------------------------------------------------------------------------

function setRunning(abort) {
  running = abort;
  page.send.hidden = abort !== null;
  page.stop.hidden = abort === null;
}

function ask(text) {
  if (!text || running || page.model.disabled) return;
  if (edited) removeFrom(edited);
  // A question without an answer would break the order of turns: the new one takes its place.
  if (messages.at(-1)?.role === "user") messages.pop();
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  save();
  page.announcer.textContent = "Answering…";
  answer();
}

function edit(turn) {
  edited = turn;
  turn.classList.add("edited");
  page.editNote.hidden = false;
  page.prompt.value = turn.source;
  fitPrompt();
  page.prompt.focus();
}

function stopEditing() {
  edited?.classList.remove("edited");
  edited = null;
  page.editNote.hidden = true;
  page.prompt.value = "";
  fitPrompt();
}

// Without this turn and all that follow it.
function removeFrom(turn) {
  messages.length = Math.min(messages.length, turn.index);
  while (turn.nextElementSibling) turn.nextElementSibling.remove();
  turn.remove();
  edited = null;
  page.editNote.hidden = true;
}

function regenerate(turn) {
  if (edited) stopEditing();
  removeFrom(turn);
  page.prompt.focus();
  answer();
}

// --- settings ---------------------------------------------------------------------------------------------------

function systemMessages() {
  const content = page.system.value.trim();
  return content ? [{ role: "system", content }] : [];
}

function sampling() {
  return page.temperature.value === "" ? {} : { temperature: page.temperature.valueAsNumber };
}

function toggleSettings() {
  page.settings.hidden = !page.settings.hidden;
  page.settingsButton.setAttribute("aria-expanded", String(!page.settings.hidden));
  if (!page.settings.hidden) page.system.focus();
}

function saveSettings() {
  try {
    sessionStorage.setItem(SETTINGS_STORE, JSON.stringify([page.system.value, page.temperature.value]));
  } catch { /* storage is off: the settings live on the page only */ }
}

function restoreSettings() {
  try {
    [page.system.value, page.temperature.value] = JSON.parse(sessionStorage.getItem(SETTINGS_STORE)) ?? ["", ""];
  } catch { /* the model's own */ }
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
  globalThis.conversations?.onNewChat();
  save();
  stopEditing();
  page.conversation.replaceChildren();
  page.welcome.hidden = false;
  page.announcer.textContent = "New chat.";
  page.prompt.focus();
}

function save() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(messages));
  } catch { /* storage is off or full: the conversation lives on the page only */ }
  globalThis.conversations?.onSaved();
}

function restore() {
  let stored = [];
  try {
    stored = JSON.parse(sessionStorage.getItem(STORE)) ?? [];
  } catch { /* storage is off */ }
  showMessages(stored);
  globalThis.conversations?.restore();
}

function showMessages(stored) {
  messages = [];
  for (const message of stored) {
    addTurn(message.role, message.content);
    messages.push(message);
  }
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
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if (edited) stopEditing();
});
page.stop.addEventListener("click", () => {
  running?.abort();
  page.prompt.focus();
});
page.newChat.addEventListener("click", startNewChat);
page.stopEditing.addEventListener("click", () => {
  stopEditing();
  page.prompt.focus();
});
page.settingsButton.addEventListener("click", toggleSettings);
page.system.addEventListener("change", saveSettings);
page.temperature.addEventListener("change", saveSettings);
page.settings.addEventListener("submit", (event) => {
  event.preventDefault();
  toggleSettings();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => ask(example.textContent));
}

page.prompt.focus();
restoreKey();
restoreSettings();
loadModels().then(restore);
