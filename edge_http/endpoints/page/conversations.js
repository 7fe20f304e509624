"use strict";
// Stored conversations, where an orchestrator runs (without one this script is empty): the page stores what is said, and
// lists, opens, names and deletes what is stored.

globalThis.conversations = (() => {
  const ID_STORE = "kvloom.conversation-id";
  const MAX_NEW_ITEMS = 20;
  const own = "kvloom/v1/conversations";
  const panel = document.createElement("section");
  const list = document.createElement("ul");
  const more = textButton("More", "quiet", () => load(more.after));
  const button = textButton("Chats", "quiet", toggle);

  let current = { id: "", known: [] };  // its id, and its messages as far as they are stored; null: to be looked up
  let work = Promise.resolve();         // one change after the other

  panel.id = "chats";
  panel.hidden = true;
  panel.setAttribute("aria-label", "Chats");
  panel.append(list, more);
  button.id = "chats-button";
  button.hidden = true;
  button.setAttribute("aria-controls", panel.id);
  button.setAttribute("aria-expanded", "false");
  page.settingsButton.before(button);
  page.settings.before(panel);

  function textButton(text, className, act) {
    const made = Object.assign(document.createElement("button"), { type: "button", className, textContent: text });
    made.addEventListener("click", act);
    return made;
  }

  async function call(path, method = "GET", body = undefined) {
    const headers = body && { "Content-Type": "application/json" };
    const response = await fetchWithKey(path, { method, headers, body: body && JSON.stringify(body) });
    if (!response.ok) throw await errorOf(response);
    return response.json();
  }

  function attempt(action) {
    work = work.then(action).catch((error) => showNotice(`Chats: ${error.message}`));
    return work;
  }

  function start() {
    button.hidden = false;
  }

  function restore() {
    try {
      const id = sessionStorage.getItem(ID_STORE) ?? "";
      current = { id, known: id ? null : [] };
    } catch { /* storage is off: what follows is stored as a conversation of its own */ }
  }

  function use(next) {
    current = next;
    try {
      sessionStorage.setItem(ID_STORE, next.id);
    } catch { /* storage is off */ }
  }

  // What was edited or generated again is another conversation, which takes the place of the one before.
  async function storeMessages() {
    const said = [...messages];
    if (running || said.at(-1)?.role !== "assistant") return;
    let next = current;
    next.known ??= await storedMessages(next.id);
    const isLonger = next.known.every(({ content }, number) => said[number]?.content === content);
    const before = isLonger ? "" : next.id;
    if (before || !next.id) {
      const made = { id: (await call("v1/conversations", "POST", {})).id, known: [] };
      if (current === next) use(made);  // and no other chat was begun or opened meanwhile
      next = made;
    }
    while (next.known.length < said.length) {
      const part = said.slice(next.known.length, next.known.length + MAX_NEW_ITEMS);
      const items = part.map((message) => ({ type: "message", ...message }));
      await call(`v1/conversations/${next.id}/items`, "POST", { items });
      next.known.push(...part);
    }
    if (before) await call(`${own}/${before}`, "DELETE");
  }

  async function load(after = "") {
    await attempt(async () => {
      const found = await call(`${own}?limit=20${after && `&after=${after}`}`);
      const rows = found.data.map(row);
      if (!after) list.replaceChildren(...rows);
      else list.append(...rows);
      if (!list.children.length) list.append(Object.assign(document.createElement("li"), { textContent: "Nothing is stored yet." }));
      more.after = found.last_id;
      more.hidden = !found.has_more;
    });
  }

  function row(one) {
    const line = document.createElement("li");
    const title = one.title || "Untitled";
    const open = textButton(title, "example", () => attempt(() => show(one.id)));
    const buttons = [
      textButton("Rename", "small", () => rename(one.id, title)),
      textButton("Delete", "small", () => attempt(() => remove(one.id)).then(() => load())),
    ];
    for (const each of buttons) each.setAttribute("aria-label", `${each.textContent} ${title}`);
    if (one.id === current.id) open.setAttribute("aria-current", "true");
    line.append(open, ...buttons);
    return line;
  }

  async function storedMessages(id) {
    const said = [];
    for (let after = "", found = { has_more: true }; found.has_more; after = `&after=${found.last_id}`) {
      found = await call(`v1/conversations/${id}/items?order=asc&limit=100${after}`);
      for (const { type, role, content } of found.data) {
        const text = type === "message" && ["user", "assistant"].includes(role) ? content.map((part) => part.text ?? "").join("") : "";
        if (text) said.push({ role, content: text });
      }
    }
    return said;
  }

  async function show(id) {
    const said = await storedMessages(id);
    startNewChat();
    showMessages(said);
    use({ id, known: [...said] });
    save();
    toggle();
  }

  function rename(id, title) {
    const given = prompt("Title", title)?.trim();
    if (given) attempt(() => call(`${own}/${id}`, "POST", { title: given.slice(0, 512) })).then(() => load());
  }

  async function remove(id) {
    await call(`${own}/${id}`, "DELETE");
    if (id === current.id) startNewChat();
  }

  function toggle() {
    panel.hidden = !panel.hidden;
    button.setAttribute("aria-expanded", String(!panel.hidden));
    if (!panel.hidden) load();
  }

  return { start, restore, onSaved: () => attempt(storeMessages), onNewChat: () => use({ id: "", known: [] }) };
})();
