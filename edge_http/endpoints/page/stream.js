"use strict";
// One streamed answer of the API: its chunks, also when the connection is lost on the way.

const RESUME_PAUSES_MS = [0, 500, 1000, 2000, 4000, 8000];  // within the server's grace period

async function stream(body, signal, onChunk) {
  let response = await fetchWithKey("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", "x-kvloom-details": "true", "x-kvloom-resume": "on" },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw await errorOf(response);
  const url = `v1/chat/completions/${response.headers.get("x-kvloom-response-id")}`;
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
