// Usage, spend, budgets and keys of tenants, and rollouts.
"use strict";

const USAGE_COLUMNS = {
  num_requests: "Requests", num_prompt_tokens: "Prompt tokens", num_cached_tokens: "cached", num_output_tokens: "Output tokens", cost: "Spend",
};

function usageQuery(more = {}) {
  const given = {by: value("usage-by"), first_day: value("usage-from"), last_day: value("usage-to"), ...more};
  return `usage?${new URLSearchParams(Object.entries(given).filter(([, text]) => text))}`;
}

async function showUsage() {
  const groups = value("usage-by").split(",");
  const {data} = await ask(usageQuery());
  const place = document.getElementById("usage-table");
  document.getElementById("budgets-title").hidden = true;
  document.getElementById("budgets").replaceChildren();
  if (!data.length) return place.replaceChildren(element("p", {class: "note"}, "Nothing was used in this time."));
  const sums = Object.keys(USAGE_COLUMNS).map((name) => (name === "cost" ? sumOfDecimals(data.map((row) => row.cost)) : data.reduce((sum, row) => sum + row[name], 0)));
  place.replaceChildren(cards("Usage", [...groups, ...Object.values(USAGE_COLUMNS)], [
    ...data.map((row) => [
      ...groups.map((group) => (group === "tenant" ? element("button", {class: "link", onclick: () => attempt(() => showBudgets(row.tenant))}, row.tenant) : row[group])),
      ...Object.keys(USAGE_COLUMNS).map((name) => shown(row[name])),
    ]),
    ["all", ...groups.slice(1).map(() => ""), ...sums.map(shown)],
  ]));
}

// Exact, as the service's own sums are: spend is a decimal with nine places.
function sumOfDecimals(texts) {
  const nanos = texts.reduce((sum, text) => {
    const [whole, part = ""] = text.split(".");
    return sum + BigInt(whole + part.padEnd(9, "0"));
  }, 0n).toString().padStart(10, "0");
  return `${nanos.slice(0, -9)}.${nanos.slice(-9)}`.replace(/\.?0+$/, "");
}

async function showBudgets(tenant) {
  const {budgets} = await ask(usageQuery({tenant}));
  const title = document.getElementById("budgets-title");
  title.hidden = false;
  title.textContent = `Budgets of ${tenant}`;
  document.getElementById("budgets").replaceChildren(budgets.length
    ? cards("Budgets", ["Account", "Period", "Unit", "Limit", "Spent", "Left"], budgets.map((one) => [one.account, one.period, one.unit, shown(one.limit), shown(one.spent), shown(one.remaining)]))
    : element("p", {class: "note"}, "It has no hard budget."));
}

async function saveCsv() {
  const response = await send("GET", usageQuery({format: "csv"}));
  const link = element("a", {href: URL.createObjectURL(await response.blob()), download: "usage.csv"});
  link.click();
  URL.revokeObjectURL(link.href);
}

async function showKeys() {
  const keys = [];
  let token = "";
  do {  // a page has a hundred
    const page = await ask(`keys?page_token=${encodeURIComponent(token)}`);
    keys.push(...page.keys);
    token = page.next_page_token;
  } while (token && keys.length < 1000);
  document.getElementById("key-list").replaceChildren(cards("Keys", ["Key", "Name", "Project", "Scopes", "Last used", "Expires", "Do"], keys.map((key) => {
    const name = key.name || key.prefix || key.id;
    return [
      `${key.prefix}…`, key.name || "–", key.project, key.scopes.join(", "), when(key.last_used_at), when(key.expires_at), element("span", {},
        element("button", {class: "quiet", "aria-label": `Rotate ${name}`, onclick: () => confirmDo(`Rotate ${name}?`,
          "A new key takes its place. The old one is accepted for another hour.", "Rotate", async () => showSecret(await ask(`keys/${key.id}/rotate`, "POST", {grace_seconds: 3600})))}, "Rotate"),
        element("button", {class: "quiet", "aria-label": `Revoke ${name}`, onclick: () => confirmDo(`Revoke ${name}?`,
          "Requests with it are refused from now on. That cannot be undone.", "Revoke", async () => { await ask(`keys/${key.id}/revoke`, "POST", {}); await showKeys(); })}, "Revoke")),
    ];
  })));
}

async function showSecret({key, secret}) {
  openDialog(`The key ${key.name || key.prefix}`, [
    element("p", {}, "It is shown this once, and stored nowhere in clear."), element("p", {class: "secret", id: "secret", tabindex: "0"}, secret),
  ], "Copy", () => navigator.clipboard.writeText(secret), () => document.getElementById("dialog-body").replaceChildren());
  await showKeys();
}

async function showRollouts() {
  const {data} = await ask("rollouts");
  document.getElementById("rollout-list").replaceChildren(data.length
    ? cards("Rollouts", ["New version", "Over", "Phase", "Share", "Step", "Do"], data.map((one) => [
      one.new, one.old, `${one.phase}${one.reason ? `: ${one.reason}` : ""}`, `${shown(one.share)} %`, one.step ? `${one.step} of ${one.num_steps}` : "–",
      element("button", {class: "quiet", "aria-label": `Roll ${one.new} back`, onclick: () => confirmDo(`Roll ${one.new} back?`,
        `All sessions get ${one.old} again.`, "Roll back", async () => { await ask("rollouts/rollback", "POST", {name: one.new}); await showRollouts(); })}, "Roll back"),
    ]))
    : element("p", {class: "note"}, "No model is being rolled out from this machine (`kvloom models rollout` starts one)."));
}

document.getElementById("usage-form").addEventListener("submit", (event) => { event.preventDefault(); attempt(showUsage); });
document.getElementById("usage-csv").addEventListener("click", () => attempt(saveCsv));
document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const scopes = [...document.getElementById("key-scopes").selectedOptions].map((option) => option.value);
  attempt(async () => showSecret(await ask("keys", "POST", {project: value("key-project"), name: value("key-name"), scopes})));
});
