// Makes elements, for the reference page and the admin page.
"use strict";

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function table(label, head, rows) {
  return element("div", {class: "scroll", tabindex: "0", role: "group", "aria-label": label}, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", {scope: "col"}, text)))),
    element("tbody", {}, ...rows)));
}
