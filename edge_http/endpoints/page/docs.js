// Shows /openapi.json: the endpoints, their fields, and a form that sends a request to this server.
"use strict";

const MAX_DEPTH = 6;  // of nested fields
const MAX_SHOWN_CHARS = 200_000;  // of a response

let api;

main().catch((error) => {
  document.getElementById("notice").textContent = `The description of the API cannot be shown: ${error.message}`;
});

async function main() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  api = await response.json();
  document.getElementById("version").textContent = api.info.version;
  document.getElementById("about").append(...prose(api.info.description));
  const contents = document.getElementById("contents");
  const operations = document.getElementById("operations");
  for (const tag of api.tags) {
    const list = element("ul");
    for (const [path, methods] of Object.entries(api.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        if (!operation.tags.includes(tag.name)) continue;
        const link = element("a", {href: `#${operation.operationId}`}, methodBadge(method), element("span", {}, ...breakable(path)));
        list.append(element("li", {}, link));
        operations.append(operationArticle(path, method, operation));
      }
    }
    contents.append(element("h2", {}, tag.name), list);
  }
  document.getElementById("notice").hidden = true;
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

// A text whose `marked` parts are code.
function prose(text) {
  return text.split("`").map((part, number) => (number % 2 ? element("code", {}, part) : part));
}

// A path that a line may end in behind its slashes, and not within a word.
function breakable(path) {
  return path.split("/").flatMap((part, number) => (number > 1 ? ["/", element("wbr"), part] : [number ? `/${part}` : part]));
}

function methodBadge(method) {
  return element("span", {class: `method ${method}`}, method.toUpperCase());
}

function operationArticle(path, method, operation) {
  const id = operation.operationId;
  const article = element("article", {class: "operation", id, "aria-labelledby": `${id}-title`},
    element("h2", {id: `${id}-title`}, operation.summary),
    element("p", {class: "address"}, methodBadge(method), element("span", {class: "path"}, ...breakable(path))),
    operation.description ? element("p", {}, ...prose(operation.description)) : null,
    operation.security.length === 0 ? element("p", {class: "note"}, "Needs no API key.") : null);
  const parameters = (operation.parameters ?? []).map(resolved);
  if (parameters.length) article.append(foldable("Parameters", () => [parametersTable(parameters)]));
  const body = operation.requestBody?.content["application/json"];
  if (body) article.append(foldable("Body", () => fields(body.schema), {open: true}));
  article.append(foldable("Responses", () => responses(operation)),
    foldable("Try it", () => [tryForm(path, method, parameters, body)]));
  return article;
}

// A part that makes its content when it is first opened: all fields of all endpoints are 44,000 elements.
function foldable(title, content, options = {}) {
  const details = element("details", options, element("summary", {}, element("strong", {}, title)));
  details.addEventListener("toggle", () => details.append(...content()), {once: true});
  return details;
}

function resolved(schema) {
  if (!schema.$ref) return schema;
  return schema.$ref.slice(2).split("/").reduce((found, key) => found[key], api);
}

// -- fields --

function row(name, required, type, description) {
  const mark = required ? element("span", {class: "required"}, " required") : null;
  return element("tr", {}, element("td", {}, element("code", {}, name), mark),
    element("td", {}, element("code", {}, type)), element("td", {}, ...prose(description ?? "")));
}

function parametersTable(parameters) {
  const rows = parameters.map((p) => row(p.name, p.required, `${p.in}: ${typeOf(p.schema)}`, p.description));
  return table("Parameters", ["Name", "Type", "Meaning"], rows);
}

function fields(schema, depth = 0) {
  const object = resolved(schema);
  const properties = Object.entries(object.properties ?? {});
  if (!properties.length) return [element("p", {class: "note"}, typeOf(schema))];
  const rows = properties.map(([name, field]) =>
    row(name, (object.required ?? []).includes(name), typeOf(field), field.description));
  const nested = depth >= MAX_DEPTH ? [] : properties.flatMap(([name, field]) =>
    objectsIn(field).map((part) => foldable(`${name}: ${part.title ?? "object"}`, () => fields(part, depth + 1))));
  return [object.description ? element("p", {class: "note"}, ...prose(object.description)) : null,
    table(object.title ?? "Fields", ["Field", "Type", "Meaning"], rows), ...nested].filter(Boolean);
}

function objectsIn(schema) {
  const object = resolved(schema);
  if (object.properties) return [object];
  return [...(object.anyOf ?? []), ...(object.items ? [object.items] : [])].flatMap(objectsIn);
}

function typeOf(schema) {
  if (schema.$ref) return resolved(schema).title ?? schema.$ref.split("/").at(-1);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.type === "array") return schema.items ? `list of ${typeOf(schema.items)}` : "list";
  if (Array.isArray(schema.type)) return schema.type.join(" | ");
  return schema.type ?? "any JSON";
}

function responses(operation) {
  return Object.entries(operation.responses).flatMap(([status, response]) => {
    const line = element("h3", {}, status === "default" ? "Other errors" : `${status}: ${response.description}`);
    if (status !== "default" && Number(status) >= 400 && Number(status) !== 503) return [line];
    return [line, ...Object.entries(response.content ?? {}).flatMap(([type, content]) => {
      const event = content.schema.properties?.data?.anyOf?.[0].contentSchema;
      const schema = event ?? content.schema;
      const title = event ? `${type}: the data of each event` : type;
      return [foldable(title, () => fields(schema))];
    })];
  });
}

// -- trying --

function tryForm(path, method, parameters, body) {
  const inputs = parameters.map((parameter) => {
    const input = element("input", {type: "text", autocomplete: "off", required: parameter.in === "path"});
    if (parameter.name === "stream" && parameter.in === "query") input.value = "true";
    return {parameter, input};
  });
  const labels = inputs.filter(({parameter}) => parameter.in !== "header" || parameter.required)
    .map(({parameter, input}) => element("label", {}, element("span", {}, `${parameter.name} (${parameter.in})`), input));
  const headers = inputs.filter(({parameter}) => parameter.in === "header" && !parameter.required)
    .map(({parameter, input}) => element("label", {}, element("span", {}, parameter.name), input));
  const text = element("textarea", {spellcheck: "false"});
  const examples = Object.values(body?.examples ?? {});
  const show = (number) => { text.value = JSON.stringify(examples[number]?.value ?? {}, null, 2); };
  if (body) show(0);
  const picker = element("select", {onchange: (event) => show(Number(event.target.value))},
    ...examples.map((example, number) => element("option", {value: String(number)}, example.summary)));
  const send = element("button", {type: "submit"}, "Send");
  const stop = element("button", {type: "button", class: "quiet", disabled: true}, "Stop");
  const output = element("pre", {tabindex: "0", role: "log", "aria-label": "Response", hidden: true});
  const form = element("form", {class: "try", autocomplete: "off"}, ...labels,
    headers.length ? foldable("Headers", () => headers) : null,
    examples.length > 1 ? element("label", {}, element("span", {}, "Example"), picker) : null,
    body ? element("label", {}, element("span", {}, "Body (JSON)"), text) : null,
    element("div", {class: "buttons"}, send, stop), output);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const controller = new AbortController();
    stop.onclick = () => controller.abort();
    send.disabled = true;
    stop.disabled = output.hidden = false;
    output.textContent = "…";
    try {
      await request(path, method, inputs, body ? text.value : undefined, output, controller.signal);
    } catch (error) {
      output.append(`\n${error.name === "AbortError" ? "Stopped." : error.message}`);
    }
    send.disabled = false;
    stop.disabled = true;
  });
  return form;
}

async function request(path, method, inputs, body, output, signal) {
  const headers = {};
  const query = new URLSearchParams();
  for (const {parameter, input} of inputs) {
    if (!input.value) continue;
    if (parameter.in === "path") path = path.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
    else if (parameter.in === "query") query.set(parameter.name, input.value);
    else headers[parameter.name] = input.value;
  }
  const key = document.getElementById("key").value;
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const place = path.slice(1);  // below the page's own folder, also behind a prefix
  const url = query.size ? `${place}?${query}` : place;
  const response = await fetch(url, {method: method.toUpperCase(), headers, body, signal});
  const names = [...response.headers].filter(([name]) => name !== "date" && name !== "connection");
  const head = [`HTTP ${response.status}`, ...names.map(([name, value]) => `${name}: ${value}`)].join("\n");
  output.textContent = `${head}\n\n`;
  const isJson = (response.headers.get("content-type") ?? "").includes("json");
  if (isJson) {
    const raw = await response.text();
    let shown = raw;
    try { shown = JSON.stringify(JSON.parse(raw), null, 2); } catch { /* shown as it came */ }
    output.append(shown.slice(0, MAX_SHOWN_CHARS));
    return;
  }
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let numShown = 0;
  for (let part = await reader?.read(); part && !part.done; part = await reader.read()) {
    numShown += part.value.length;
    if (numShown <= MAX_SHOWN_CHARS) output.append(part.value);
    output.scrollTop = output.scrollHeight;
  }
}
